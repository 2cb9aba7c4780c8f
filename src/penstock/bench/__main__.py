"""`python -m penstock.bench`: Penstock and transformers on the same weights, taking turns; or, many users at once."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from penstock.bench import (
    cache_bars,
    cache_plot,
    cache_report,
    gpu_plot,
    gpu_report,
    peers_bars,
    peers_plot,
    peers_report,
    serve_bars,
    serve_plot,
    serve_report,
    sweep_plot,
    sweep_report,
    target_bars,
    target_plot,
    target_report,
)
from penstock.bench.bars import check_bars
from penstock.bench.benchmark import run_benchmark
from penstock.bench.cache_benchmark import run_cache_benchmark
from penstock.bench.cache_options import parse_cache_options
from penstock.bench.cache_results import CacheSettings
from penstock.bench.cache_workload import CACHE
from penstock.bench.decode_profile import (
    DECODE,
    LEAST_SHARE,
    parse_decode_options,
    profile_decodes,
    render_profile,
)
from penstock.bench.gpu_benchmark import run_sections
from penstock.bench.gpu_device import require_gpu, this_card
from penstock.bench.gpu_job import GpuJob
from penstock.bench.gpu_options import parse_gpu_options
from penstock.bench.gpu_results import GpuResults, Ledger, read_results
from penstock.bench.gpu_targets import judge
from penstock.bench.gpu_workload import GPU, PLAN
from penstock.bench.options import parse_options
from penstock.bench.peers_benchmark import run_peers_benchmark
from penstock.bench.peers_options import left_out, parse_peers_options
from penstock.bench.peers_results import PeerSettings
from penstock.bench.peers_workers import find_pythons
from penstock.bench.peers_workload import PEERS
from penstock.bench.plot import can_plot, draw
from penstock.bench.random_model import random_hybrid
from penstock.bench.report import render
from penstock.bench.results import Results, Settings
from penstock.bench.serve_benchmark import run_serve_benchmark
from penstock.bench.serve_options import parse_serve_options
from penstock.bench.serve_results import ServeSettings, to_json
from penstock.bench.start import START, measure_start, parse_start_options, render_start
from penstock.bench.suites import SERVE, SWEEP, SuiteName
from penstock.bench.sweep import run_sweep
from penstock.bench.sweep_llama import check_llama
from penstock.bench.sweep_options import parse_sweep_options
from penstock.bench.sweep_results import SweepSettings
from penstock.bench.sweep_workload import AUTO
from penstock.bench.target_benchmark import run_target_benchmark
from penstock.bench.target_options import parse_target_options
from penstock.bench.target_results import TargetSettings
from penstock.bench.target_workload import TARGETS
from penstock.engine.llm import LLM
from penstock.errors import ContextLengthError, PenstockError, SettingError
from penstock.kernels.device import chosen_device
from penstock.measure.growth import can_measure_growth
from penstock.measure.machine import this_machine
from penstock.measure.prompts import random_tokens, text_tokens
from penstock.models.hub import resolve_model
from penstock.models.opened import open_model, open_weights
from penstock.plan.model import ModelConfig
from penstock.plan.settings import DEVICE_VARIABLE

NOISY_STATUS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 where --check found a bar that is missed or answers differ that must not, 2 where nothing
    could be measured, 3 where a sweep, or a run of the cache, was too noisy for some of its figures."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == [SERVE]:
            return _run_serve(parse_serve_options(arguments[1:]))
        if arguments[:1] == [SWEEP]:
            return _run_sweep(parse_sweep_options(arguments[1:]))
        if arguments[:1] == [TARGETS]:
            return _run_targets(parse_target_options(arguments[1:]))
        if arguments[:1] == [CACHE]:
            return _run_cache(parse_cache_options(arguments[1:]))
        if arguments[:1] == [PEERS]:
            return _run_peers(parse_peers_options(arguments[1:]))
        if arguments[:1] == [DECODE]:
            return _run_decode(parse_decode_options(arguments[1:]))
        if arguments[:1] == [START]:
            return _run_start(parse_start_options(arguments[1:]))
        if arguments[:1] == [GPU]:
            return _run_gpu(parse_gpu_options(arguments[1:]))
        return _run(parse_options(arguments))
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: nothing was written", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    _prepare(options)
    with_memory = not options.skip_memory
    if with_memory and not can_measure_growth():
        if options.only_memory:
            raise SettingError("--only-memory needs Linux's /proc/self/status and /proc/self/clear_refs")
        _say("memory growth is not measured: it needs Linux's /proc/self/status and /proc/self/clear_refs")
        with_memory = False

    subject = _random_subject() if options.suite is SuiteName.HYBRID else _text_subject(options.model)
    longest = max(*options.lengths, *options.memory_lengths)
    _require_room(subject, longest, options.decode_tokens + 1)
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
    _plot(lambda path: draw(results, path), options)
    missed = [bar for bar in check_bars(results) if not bar.is_met]
    return 1 if options.check and missed else 0


def _run_serve(options: argparse.Namespace) -> int:
    """Answers that differ where they must not are an error, whether bars are checked or not."""
    _prepare(options)
    llm = LLM(options.model, dtype=options.dtype, chunk=options.workload.chunk)
    with contextlib.closing(open_weights(resolve_model(options.model))) as source:
        description = source.describe()
    settings = ServeSettings(description, options.dtype, options.workload, options.repeats, options.full)
    results = run_serve_benchmark(llm, settings, _say)
    print(f"\n{serve_report.render(results)}\n")
    bars = [bar.to_dict() for bar in serve_bars.check_bars(results)]
    options.output.write_text(to_json({**results.to_dict(), "bars": bars}))
    print(f"results: {options.output}")
    _plot(lambda path: serve_plot.draw(results, path), options)
    wrong = [bar for bar in serve_bars.check_answers(results) if not bar.is_met]
    for bar in wrong:
        _say(f"error: {bar.name}: {bar.value:.3f}, where it must be {bar.limit:g}")
    missed = [bar for bar in serve_bars.check_speed(results) if not bar.is_met]
    return 1 if wrong or (options.check and missed) else 0


def _run_sweep(options: argparse.Namespace) -> int:
    """A figure that is noisy is not printed, and is an error."""
    _prepare(options)
    with_memory = options.memory and can_measure_growth()
    if options.memory and not with_memory:
        _say("memory growth is not measured: it needs Linux's /proc/self/status and /proc/self/clear_refs")
    if "llama.cpp" in options.baselines:
        check_llama(resolve_model(options.model))
    subject = _text_subject(options.model)
    _require_room(subject, max(options.lengths), options.decode_tokens)
    settings = SweepSettings(
        model=subject.description,
        dtype=options.dtype,
        chunks=options.chunks,
        lengths=options.lengths,
        baselines=options.baselines,
        repeats=options.repeats,
        decode_tokens=options.decode_tokens,
        max_spread=options.max_spread,
        seed=options.seed,
        with_memory=with_memory,
    )
    results = run_sweep(subject.path, subject.prompt(max(options.lengths)), settings, _say)
    print(f"\n{sweep_report.render(results)}\n")
    options.output.write_text(to_json(results.to_dict()))
    print(f"results: {options.output}")
    _plot(lambda path: sweep_plot.draw(results, path), options)
    return NOISY_STATUS if results.noisy else 0


def _run_targets(options: argparse.Namespace) -> int:
    _prepare(options)
    llm = LLM(options.model, dtype=options.dtype, chunk=AUTO)
    with contextlib.closing(open_weights(resolve_model(options.model))) as source:
        description = source.describe()
    settings = TargetSettings(description, options.dtype, options.workload, options.repeats)
    results = run_target_benchmark(llm, settings, _say)
    print(f"\n{target_report.render(results)}\n")
    bars = target_bars.check_bars(results)
    options.output.write_text(to_json({**results.to_dict(), "bars": [bar.to_dict() for bar in bars]}))
    print(f"results: {options.output}")
    _plot(lambda path: target_plot.draw(results, path), options)
    return 1 if options.check and not all(bar.is_met for bar in bars) else 0


def _run_decode(options: argparse.Namespace) -> int:
    _require_writable(options.output)
    subject = _text_subject(options.model)
    longest = max(options.pasts) + 1
    _require_room(subject, longest, 0)
    llm = LLM(options.model, device=options.device, threads=options.threads)
    machine = this_machine()
    profile = profile_decodes(llm, subject.prompt(longest), options.pasts, options.steps)
    print(f"\n{render_profile(profile)}\n")
    steps = [step.to_dict() for step in profile]
    options.output.write_text(
        to_json({"model": subject.description, "machine": asdict(machine), "steps": steps})
    )
    print(f"results: {options.output}")
    return 1 if options.check and min(step.share for step in profile) < LEAST_SHARE else 0


def _run_start(options: argparse.Namespace) -> int:
    _require_writable(options.output)
    results = measure_start(resolve_model(options.model), options.repeats, _say)
    print(f"\n{render_start(results)}\n")
    options.output.write_text(to_json(results.to_dict()))
    print(f"results: {options.output}")
    return 1 if options.check and not results.is_met else 0


def _run_gpu(options: argparse.Namespace) -> int:
    """Bits that differ are an error, whether bars are checked or not; a bar that could not be measured is not met."""
    if options.plot_from:
        results = read_results(options.plot_from)
        sections = results.sections
    else:
        device, sections = require_gpu(), options.sections
        _require_writable(options.output)
        results = GpuResults(this_machine(), this_card(device), options.repeats)
        job = GpuJob(
            PLAN,
            device,
            Ledger(results, options.output, _say),
            options.repeats,
            with_peer=not options.no_peer,
            peer_limit=options.peer_limit,
        )
        try:
            run_sections(job, sections)
        except KeyboardInterrupt:
            _say(f"stopped: what was measured is in {options.output}")
            return 130
    judged = judge(results, sections)
    print(f"\n{gpu_report.render(results)}\n")
    if not options.plot_from:
        targets = [each.to_dict() for each in judged]
        options.output.write_text(to_json({**results.to_dict(), "targets": targets}))
        print(f"results: {options.output}")
    if gpu_plot.can_draw(results):
        _plot(lambda path: gpu_plot.draw(results, path), options)
    is_wrong = not all(fact.holds for fact in results.facts)
    return 1 if is_wrong or (options.check and not all(each.is_met for each in judged)) else 0


def _run_cache(options: argparse.Namespace) -> int:
    """Answers that differ from those of a cold run are an error, and so is noise, whether bars are checked or not."""
    _prepare(options)
    with contextlib.closing(open_weights(resolve_model(options.model))) as source:
        description = source.describe()
    settings = CacheSettings(description, options.dtype, options.workload, options.repeats)
    results = run_cache_benchmark(options.model, settings, _say)
    print(f"\n{cache_report.render(results)}\n")
    bars = [bar.to_dict() for bar in cache_bars.check_bars(results)]
    options.output.write_text(to_json({**results.to_dict(), "bars": bars}))
    print(f"results: {options.output}")
    _plot(lambda path: cache_plot.draw(results, path), options)
    wrong = [bar for bar in cache_bars.check_answers(results) if not bar.is_met]
    for bar in wrong:
        _say(f"error: {bar.name}: {bar.value:.3f}, where it must be {bar.limit:g}")
    missed = [bar for bar in cache_bars.check_speed(results) if not bar.is_met]
    if wrong or (options.check and missed):
        return 1
    return NOISY_STATUS if cache_bars.noisy(results) else 0


def _run_peers(options: argparse.Namespace) -> int:
    """A bar that could not be measured is not met."""
    _prepare(options)
    subject, workload = _text_subject(options.model), options.workload
    longest = max(workload.lengths)
    _require_room(subject, longest, workload.decode_tokens + 1)
    pythons = find_pythons(options.peers_folder)
    absent = left_out(options.peers, list(pythons), subject.path)
    for system, why in absent.items():
        _say(f"{system.label} is left out: {why}")
    settings = PeerSettings(
        subject.description, options.dtype, torch.get_num_threads(), workload, options.weights
    )
    results = run_peers_benchmark(subject.path, subject.prompt(longest), settings, pythons, absent, _say)
    print(f"\n{peers_report.render(results)}\n")
    bars = peers_bars.check_bars(results)
    options.output.write_text(to_json({**results.to_dict(), "bars": [bar.to_dict() for bar in bars]}))
    print(f"results: {options.output}")
    _plot(lambda path: peers_plot.draw(results, path), options)
    return 1 if options.check and not all(bar.is_met for bar in bars) else 0


def _prepare(options: argparse.Namespace) -> None:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if "device" in options and options.device is not None:
        chosen_device(options.device)
        os.environ[DEVICE_VARIABLE] = options.device  # for processes that measure, too
    if options.plot is not None and not can_plot():
        raise SettingError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    _require_writable(options.output)


@dataclass(frozen=True)
class _Subject:
    """A model, and the prompt of any length that it is to read."""

    path: Path
    description: str
    config: ModelConfig
    prompt: Callable[[int], Sequence[int]]


def _require_room(subject: _Subject, longest: int, num_generated: int) -> None:
    context = subject.config.max_position
    if longest + num_generated > context:
        raise ContextLengthError(
            f"{longest} tokens and {num_generated} generated after them do not fit into the "
            f"model's context of {context} tokens: give shorter --lengths or fewer --decode-tokens"
        )


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


def _plot(draw_to: Callable[[Path], None], options: argparse.Namespace) -> None:
    path = options.plot or options.output.with_suffix(".png")
    if can_plot():
        draw_to(path)
        print(f"plot:    {path}")
    else:
        print("plot:    none, matplotlib is not installed")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
