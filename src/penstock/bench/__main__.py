"""`python -m penstock.bench`: Penstock and transformers on the same weights, taking turns."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from penstock.bench.bars import check_bars
from penstock.bench.benchmark import run_benchmark
from penstock.bench.memory import can_measure_growth
from penstock.bench.options import parse_options
from penstock.bench.plot import can_plot, draw
from penstock.bench.random_model import random_hybrid
from penstock.bench.report import render
from penstock.bench.results import Results, Settings
from penstock.bench.suites import SuiteName
from penstock.bench.workload import random_tokens, text_tokens
from penstock.errors import ContextLengthError, PenstockError, SettingError
from penstock.models.config import ModelConfig
from penstock.models.hub import resolve_model
from penstock.models.opened import open_model, open_weights


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 where --check found a bar that is missed, 2 where nothing could be measured."""
    try:
        return _run(parse_options(arguments))
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

    subject = _random_subject() if options.suite is SuiteName.HYBRID else _text_subject(options.model)
    longest, context = max(*options.lengths, *options.memory_lengths), subject.config.max_position
    if longest + options.decode_tokens + 1 > context:
        raise ContextLengthError(
            f"{longest} tokens and {options.decode_tokens + 1} generated after them do not fit into the "
            f"model's context of {context} tokens: give shorter --lengths or fewer --decode-tokens"
        )
    settings = Settings(
        suite=options.suite,
        model=subject.description,
        dtype=options.dtype,
        chunk=options.chunk,
        lengths=tuple(sorted(set(options.lengths))),
        memory_lengths=tuple(sorted(set(options.memory_lengths))),
        repeats=options.repeats,
        decode_tokens=options.decode_tokens,
        memory_repeats=options.memory_repeats,
        full=options.full,
        with_timings=not options.only_memory,
        with_memory=with_memory,
    )
    results = run_benchmark(subject.path, subject.prompt(longest), settings, _say)
    print(f"\n{render(results)}\n")
    _write(results, options.output)
    _plot(results, options)
    missed = [bar for bar in check_bars(results) if not bar.is_met]
    return 1 if options.check and missed else 0


@dataclass(frozen=True)
class _Subject:
    """A model, and the prompt of any length that it is to read."""

    path: Path
    description: str
    config: ModelConfig
    prompt: Callable[[int], Sequence[int]]


def _text_subject(model: str) -> _Subject:
    path = resolve_model(model)
    opened = open_model(path)
    with contextlib.closing(opened.source) as source:
        return _Subject(path, source.describe(), source.config, partial(text_tokens, opened.tokenizer))


def _random_subject() -> _Subject:
    path = random_hybrid(_say)
    with contextlib.closing(open_weights(path)) as source:
        config = source.config
        return _Subject(path, source.describe(), config, partial(random_tokens, config.vocab_size))


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


if __name__ == "__main__":
    sys.exit(main())
