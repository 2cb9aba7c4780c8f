"""`python -m penstock.bench`: Penstock and transformers on the same weights, taking turns."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.bench.bars import check_bars
from penstock.bench.benchmark import run_benchmark
from penstock.bench.memory import can_measure_growth
from penstock.bench.plot import can_plot, draw
from penstock.bench.report import render
from penstock.bench.results import Results, Settings
from penstock.bench.workload import (
    DEFAULT_DECODE_TOKENS,
    DEFAULT_LENGTHS,
    DEFAULT_MEMORY_REPEATS,
    text_tokens,
)
from penstock.errors import ContextLengthError, PenstockError, SettingError
from penstock.models.hub import DEFAULT_MODEL, resolve_model
from penstock.models.opened import open_model
from penstock.plan.config import DEFAULT_CHUNK_SIZE

DEFAULT_OUTPUT = Path("bench-results/prefill.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 where --check found a bar that is missed, 2 where nothing could be measured."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: nothing was written", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.plot is not None and not can_plot():
        raise SettingError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    _require_writable(options.output)
    with_memory = not options.skip_memory
    if with_memory and not can_measure_growth():
        if options.only_memory:
            raise SettingError("--only-memory needs Linux's /proc/self/status and /proc/self/clear_refs")
        _say("memory growth is not measured: it needs Linux's /proc/self/status and /proc/self/clear_refs")
        with_memory = False

    path = resolve_model(options.model)
    opened = open_model(path)
    try:
        description, context = opened.source.describe(), opened.source.config.max_position
    finally:
        opened.source.close()
    longest = max(options.lengths)
    if longest + options.decode_tokens + 1 > context:
        raise ContextLengthError(
            f"{longest} tokens and {options.decode_tokens + 1} generated after them do not fit into the "
            f"model's context of {context} tokens: give shorter --lengths or fewer --decode-tokens"
        )
    settings = Settings(
        model=description,
        dtype=options.dtype,
        chunk=options.chunk,
        lengths=tuple(sorted(set(options.lengths))),
        repeats=options.repeats,
        decode_tokens=options.decode_tokens,
        memory_repeats=options.memory_repeats,
        full=options.full,
        with_timings=not options.only_memory,
        with_memory=with_memory,
    )
    results = run_benchmark(path, text_tokens(opened.tokenizer, longest), settings, _say)
    print(f"\n{render(results)}\n")
    _write(results, options.output)
    _plot(results, options)
    missed = [bar for bar in check_bars(results) if not bar.is_met]
    return 1 if options.check and missed else 0


def _require_writable(path: Path) -> None:
    """Better to know now than after the measurements."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            f"--output {path}: {error.strerror or error}; give a file in a folder of yours"
        ) from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise SettingError(f"--output {path} cannot be written: give a file in a folder of yours")


def _write(results: Results, path: Path) -> None:
    bars = [bar.to_dict() for bar in check_bars(results)]
    path.write_text(json.dumps({**results.to_dict(), "bars": bars}, indent=2) + "\n")
    print(f"results: {path}")


def _plot(results: Results, options: argparse.Namespace) -> None:
    path = options.plot or options.output.with_suffix(".png")
    if can_plot():
        draw(results, path)
        print(f"plot:    {path}")
    else:
        print("plot:    none, matplotlib is not installed")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.bench",
        description="Time to first token, decoding and memory of Penstock and of transformers, on the same "
        "weights and the same text, taking turns in one process. Takes about ten minutes on two cores.",
    )
    add = parser.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        help="smollm2, a folder, a GGUF file or a Hugging Face name (%(default)s)",
    )
    add(
        "--lengths",
        type=_counts,
        default=DEFAULT_LENGTHS,
        metavar="N,N",
        help="prompt tokens (512,2048,8000)",
    )
    add("--chunk", type=_count, default=DEFAULT_CHUNK_SIZE, help="tokens per chunk (%(default)s)")
    add("--repeats", type=_count, help="rounds at every length (5, and 3 for long prompts)")
    add("--decode-tokens", type=_count, default=DEFAULT_DECODE_TOKENS, help="after the first (%(default)s)")
    add("--memory-repeats", type=_count, default=DEFAULT_MEMORY_REPEATS, help="for Penstock (%(default)s)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(%(default)s)")
    add("--threads", type=_count, help="threads that torch computes with (torch's own choice)")
    add("--full", action="store_true", help="every system and every round at long prompts too")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--skip-memory", action="store_true", help="timings only")
    which.add_argument("--only-memory", action="store_true", help="memory growth only")
    add("--check", action="store_true", help="exit with 1 where a bar is missed")
    add("--output", type=Path, default=DEFAULT_OUTPUT, help="the results as JSON (%(default)s)")
    add("--plot", type=Path, help="a picture of them (beside the JSON, where matplotlib is installed)")
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
