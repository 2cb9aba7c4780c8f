"""The options of `python -m penstock.bench cache`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from penstock.bench.cache_workload import CACHE, DEFAULT_REPEATS, QUICK_REPEATS, QUICK_TOKENS, CacheWorkload
from penstock.bench.options import add_device, add_outputs, count
from penstock.models.hub import DEFAULT_MODEL

_OUTPUT = Path("bench-results") / f"{CACHE}.json"
_USUAL = CacheWorkload()


def parse_cache_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of which none is left open, but for `plot`: None is beside the JSON, where a picture can be drawn.
    `workload` has the numbers."""
    options = _parser().parse_args(arguments)
    usual_tokens = QUICK_TOKENS if options.quick else _USUAL.prompt_tokens
    options.workload = CacheWorkload(options.prompt_tokens or usual_tokens, options.chunk)
    options.repeats = options.repeats or (QUICK_REPEATS if options.quick else DEFAULT_REPEATS)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m penstock.bench {CACHE}",
        description="No prompt is read twice: time to the first token of a prompt that nothing is known of, of one "
        "that is written to disk meanwhile, of one that is in memory, of one that a new process finds on disk, and "
        "of one that goes on after a kill. All take turns, on a new prompt every round, and all answers must be the "
        "same. A figure whose repeats lie too far apart is not given: its cell reads 'noisy', and the exit "
        "status is 3. Takes about six minutes on two cores, and a gigabyte of the system's temporary folder.",
    )
    add = parser.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        help="smollm2, a folder, a GGUF file or a Hugging Face name (%(default)s)",
    )
    add("--prompt-tokens", type=count, metavar="N", help=f"tokens of a prompt ({_USUAL.prompt_tokens})")
    add("--chunk", type=count, default=_USUAL.chunk, metavar="N", help="tokens per chunk (%(default)s)")
    add("--repeats", type=count, metavar="N", help=f"rounds ({DEFAULT_REPEATS})")
    add(
        "--quick",
        action="store_true",
        help=f"prompts of {QUICK_TOKENS} tokens and {QUICK_REPEATS} rounds, where nothing else is given; "
        "bars on speed are for longer ones",
    )
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(%(default)s)")
    add_device(parser)
    add("--threads", type=count, metavar="N", help="threads that torch computes with (torch's own choice)")
    add("--check", action="store_true", help="exit with 1 where a bar is missed")
    add_outputs(parser, _OUTPUT, "results as JSON")
    return parser
