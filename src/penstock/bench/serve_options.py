"""The options of `python -m penstock.bench serve`."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from penstock.bench.options import add_device, count
from penstock.bench.serve_workload import Workload
from penstock.bench.suites import SERVE
from penstock.models.hub import DEFAULT_MODEL

# By the option's name: the field of the workload, and what it means.
_WORKLOAD = {
    "streams": ("streams", "streams that decode when the long prompt arrives"),
    "stream-prompt": ("stream_prompt", "prompt tokens of a stream"),
    "stream-tokens": ("stream_tokens", "tokens that a stream generates"),
    "long-prompt": ("long_prompt", "tokens of the long prompt"),
    "long-tokens": ("long_tokens", "tokens generated after it"),
    "serve-chunk": ("stall_chunk", "tokens per chunk of the long prompt"),
    "requests": ("requests", "requests that come at once, and one after the other"),
    "request-prompt": ("request_prompt", "prompt tokens of each"),
    "request-tokens": ("request_tokens", "tokens that each generates"),
    "chunk": ("chunk", "tokens per chunk of their prompts"),
}


def parse_serve_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of which none is left open; `workload` has the numbers."""
    options = _parser().parse_args(arguments)
    options.workload = Workload(**{field.name: getattr(options, field.name) for field in fields(Workload)})
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m penstock.bench {SERVE}",
        description="Many users at once. First, streams decode and a long prompt arrives: how long do they "
        "wait for their next token, by scheduling policy? Then many requests, at once and one after the "
        "other: how much sooner are all done? Takes about eight minutes on two cores.",
    )
    add = parser.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        help="smollm2, a folder, a GGUF file or a Hugging Face name (%(default)s)",
    )
    for option, (name, meaning) in _WORKLOAD.items():
        default = getattr(Workload, name)
        add(
            f"--{option}",
            dest=name,
            type=count,
            default=default,
            metavar="N",
            help=f"{meaning} (%(default)s)",
        )
    add("--repeats", type=count, metavar="N", help="rounds (3; 1 for what has no bar)")
    add("--full", action="store_true", help="as many rounds for what has no bar")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(%(default)s)")
    add_device(parser)
    add(
        "--threads",
        type=count,
        metavar="N",
        help="threads that torch computes with (torch's own choice)",
    )
    add("--check", action="store_true", help="exit with 1 where a bar is missed")
    add("--output", type=Path, default=Path("bench-results") / f"{SERVE}.json", help="as JSON (%(default)s)")
    add("--plot", type=Path, help="a picture (beside the JSON, where matplotlib is installed)")
    return parser
