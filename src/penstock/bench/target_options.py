"""The options of `python -m penstock.bench targets`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from penstock.bench.options import add_device, add_outputs, count, counts
from penstock.bench.target_workload import DEFAULT_REPEATS, TARGETS, TargetWorkload
from penstock.models.hub import DEFAULT_MODEL

_OUTPUT = Path("bench-results") / f"{TARGETS}.json"
_USUAL = TargetWorkload()


def parse_target_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of which none is left open, but for `plot`: None is beside the JSON, where a picture can be drawn.
    `workload` has the numbers."""
    options = _parser().parse_args(arguments)
    options.workload = TargetWorkload(
        targets_ms=tuple(sorted(set(options.targets))),
        fixed=tuple(sorted(set(options.fixed))),
        streams=options.streams,
        stream_prompt=options.stream_prompt,
        prompt_tokens=options.prompt,
        lone_lengths=() if options.skip_lone else tuple(sorted(set(options.lone_lengths))),
        lone_chunks=tuple(sorted(set(options.lone_chunks))),
    )
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m penstock.bench {TARGETS}",
        description="Automatic chunks against fixed ones. First, streams decode and a long prompt arrives: how many "
        "of the gaps between their tokens keep a latency target, and when does the prompt's first token come, beside "
        "that of the best fixed chunk that keeps the same target? Then prompts that come alone: how soon is the "
        "first token, compared with the best fixed chunk? All take turns. Takes about twelve minutes on two cores.",
    )
    add = parser.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        help="smollm2, a folder, a GGUF file or a Hugging Face name (%(default)s)",
    )
    for option, values, meaning in (
        ("--targets", _USUAL.targets_ms, "latency targets, ms from one token to the next"),
        ("--fixed", _USUAL.fixed, "fixed chunks to compare with, tokens"),
        ("--lone-lengths", _USUAL.lone_lengths, "tokens of the prompts that come alone"),
        ("--lone-chunks", _USUAL.lone_chunks, "fixed chunks to compare with there"),
    ):
        add(
            option,
            type=counts,
            default=values,
            metavar="N,N",
            help=f"{meaning} ({','.join(map(str, values))})",
        )
    add("--skip-lone", action="store_true", help="no prompts that come alone")
    for option, value, meaning in (
        ("--streams", _USUAL.streams, "streams that decode when the long prompt arrives"),
        ("--stream-prompt", _USUAL.stream_prompt, "prompt tokens of a stream"),
        ("--prompt", _USUAL.prompt_tokens, "tokens of the long prompt"),
    ):
        add(option, type=count, default=value, metavar="N", help=f"{meaning} (%(default)s)")
    add(
        "--repeats",
        type=count,
        default=DEFAULT_REPEATS,
        metavar="N",
        help="rounds; what is not near the best takes part in the first alone (%(default)s)",
    )
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(%(default)s)")
    add_device(parser)
    add("--threads", type=count, metavar="N", help="threads that torch computes with (torch's own choice)")
    add("--check", action="store_true", help="exit with 1 where a bar is missed")
    add_outputs(parser, _OUTPUT, "results as JSON")
    return parser
