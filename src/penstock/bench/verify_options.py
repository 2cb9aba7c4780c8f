"""The options of `penstock verify`."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from penstock.bench.options import add_device, count
from penstock.bench.verify_laws import DEFAULT_CHUNKS, TOLERANCES
from penstock.models.hub import DEFAULT_MODEL

DEFAULT_TOKENS = 600
_TOLERANCES = "; ".join(f"{value:g} in {name}" for name, value in TOLERANCES.items())


def parse_verify_options(arguments: Sequence[str]) -> argparse.Namespace:
    return _parser().parse_args(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock verify",
        description="Run one prompt in many ways (whole, in chunks of several sizes, token by token, beside other "
        "requests, with overlapping chunks) and compare what they leave behind: logits, keys and values, recurrent "
        "states, greedy tokens. Where the machine was found to give the same bits, they must be the same bit for "
        "bit; elsewhere, within a tolerance.",
        epilog="Exit status: 0 all laws hold; 1 a law is broken; 2 it could not be run; 130 interrupted. "
        "`penstock verify --memory` compares the memory model with measurements instead: see --memory --help.",
    )
    add = parser.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        help="smollm2, a folder, a GGUF file or a Hugging Face name (%(default)s)",
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a text to read, as it is")
    prompt.add_argument(
        "--tokens",
        type=count,
        metavar="N",
        help=f"so many tokens of a text that every Python has ({DEFAULT_TOKENS})",
    )
    add(
        "--chunks",
        type=_counts,
        default=DEFAULT_CHUNKS,
        metavar="N,N",
        help="chunk sizes; 1 is token by token, as chunks and as decodes "
        f"({','.join(map(str, DEFAULT_CHUNKS))}). Two random schedules are run in any case",
    )
    add("--overlap", type=_count_or_none, metavar="N", help="tokens that chunks have in common; 0: none (64)")
    add("--max-tokens", type=count, default=16, metavar="N", help="generated after the prompt (%(default)s)")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="(%(default)s)")
    add("--reference", choices=("transformers",), help="compare with it, too, in float32")
    add(
        "--tolerance",
        type=_positive,
        metavar="X",
        help="the largest difference in parts of the largest value, where the same bits are not promised "
        f"({_TOLERANCES})",
    )
    add(
        "--strict",
        action="store_true",
        help="requests run side by side as in `penstock serve --strict`: generated tokens keep their bits, too",
    )
    add_device(parser)
    add("--threads", type=count, help="threads that torch computes with (torch's own choice)")
    add("--json", type=Path, metavar="FILE", help="everything that was found")
    add("--plot", type=Path, metavar="FILE", help="a picture of the differences by token (needs matplotlib)")
    return parser


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({count(part) for part in text.split(",")}))


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else count(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
