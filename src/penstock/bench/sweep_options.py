"""The options of `python -m penstock.bench sweep`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from penstock.bench.options import add_device, add_outputs, count, counts
from penstock.bench.spread import MIN_VALUES, NOISY_SHARE
from penstock.bench.suites import SWEEP
from penstock.bench.sweep_workload import (
    AUTO,
    BASELINES,
    DEFAULT_CHUNKS,
    DEFAULT_DECODE_TOKENS,
    DEFAULT_LENGTHS,
    DEFAULT_REPEATS,
    ChunkChoice,
)
from penstock.errors import SettingError
from penstock.models.hub import DEFAULT_MODEL

_OUTPUT = Path("bench-results") / f"{SWEEP}.json"


def parse_sweep_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of which none is left open, but for `plot`: None is beside the JSON, where a picture can be drawn."""
    options = _parser().parse_args(arguments)
    options.chunks = tuple(dict.fromkeys(options.chunks))
    options.lengths = tuple(sorted(set(options.lengths)))
    options.baselines = tuple(dict.fromkeys(options.baseline))
    if options.repeats < MIN_VALUES:
        raise SettingError(
            f"--repeats {options.repeats} is not accepted: give {MIN_VALUES} or more, fewer have no spread to judge"
        )
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m penstock.bench {SWEEP}",
        description="Chunk sizes against prompt lengths: time to first token, tokens per second, total time and, if "
        "asked for, memory. All configurations take turns, in another order each round. A figure whose repeats lie "
        "too far apart is not given: its cell reads 'noisy', and the exit status is 3.",
    )
    add = parser.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        help="smollm2, a folder, a GGUF file or a Hugging Face name (%(default)s)",
    )
    add(
        "--chunks",
        type=_chunks,
        default=DEFAULT_CHUNKS,
        metavar="N,N",
        help=f"chunk sizes; 0: the whole prompt, auto: Penstock's own choice ({_listed(DEFAULT_CHUNKS)})",
    )
    add(
        "--lengths",
        type=counts,
        default=DEFAULT_LENGTHS,
        metavar="N,N",
        help=f"prompt tokens ({_listed(DEFAULT_LENGTHS)})",
    )
    add("--repeats", type=count, default=DEFAULT_REPEATS, metavar="N", help="rounds (%(default)s)")
    add(
        "--baseline",
        action="append",
        choices=BASELINES,
        default=[],
        help="another system on the same weights in the same run; may be given twice",
    )
    add("--memory", action="store_true", help="peak memory too, each in a fresh process")
    add(
        "--decode-tokens",
        type=count,
        default=DEFAULT_DECODE_TOKENS,
        metavar="N",
        help="generated in all, for the total time (%(default)s)",
    )
    add(
        "--max-spread",
        type=_share,
        default=NOISY_SHARE,
        metavar="X",
        help="quartiles further apart than this share of the median are noise (%(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the order of turns (%(default)s)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(%(default)s)")
    add_device(parser)
    add(
        "--threads",
        type=count,
        metavar="N",
        help="threads that each system computes with (torch's own choice)",
    )
    add_outputs(parser, _OUTPUT, "results with all raw times")
    return parser


def _chunks(text: str) -> tuple[ChunkChoice, ...]:
    return tuple(AUTO if part == AUTO else 0 if part == "0" else count(part) for part in text.split(","))


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1")
    return value


def _listed(values: Sequence[object]) -> str:
    return ",".join(map(str, values))
