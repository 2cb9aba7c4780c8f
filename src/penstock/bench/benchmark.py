"""From settings to results."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from penstock.bench.memory import Growth, Job, growth_in_fresh_process
from penstock.bench.results import Results, Settings
from penstock.bench.suites import SUITES
from penstock.bench.systems import System, SystemName, load_systems
from penstock.bench.timing import Pass, Turn, take_turns, time_pass
from penstock.bench.workload import DECODING, SLOW, Case, estimate_s, plan_memory, plan_timings
from penstock.measure.growth import WARM_UP_TOKENS
from penstock.measure.machine import this_machine
from penstock.models.opened import open_weights
from penstock.plan.model import ModelConfig

Say = Callable[[str], None]

_WARM_UP_PROMPT = 512
_SLOW_WARM_UP_PROMPT = 32
_WARM_UP_DECODES = 4


def run_benchmark(path: Path, prompt: Sequence[int], settings: Settings, say: Say) -> Results:
    """Measure what the settings ask for. `path` is a model folder or GGUF file, `prompt` at least as long as
    the longest length. `say` is told what goes on."""
    started = time.perf_counter()
    machine = this_machine()
    suite = SUITES[settings.suite]
    timings, memory = [], []
    if settings.with_timings:
        timings = plan_timings(suite, settings.lengths, settings.repeats, full=settings.full)
    if settings.with_memory:
        memory = plan_memory(suite, settings.memory_lengths, settings.memory_repeats)

    passes: list[Pass] = []
    if timings:
        systems, config = _load(path, timings, settings)
        warm_up = _warm_up(systems, prompt, settings)
        expected_s = estimate_s(config, warm_up, timings, memory, settings.decode_tokens)
        say(f"loaded and warmed up; the rest takes about {_minutes(expected_s)}")
        for case in timings:
            passes += _time(case, systems, prompt, settings, say)
        del systems  # room for the processes to come
    growths = _measure_memory(path, memory, prompt, settings, say)
    return Results(machine, settings, tuple(passes), tuple(growths), time.perf_counter() - started)


def _load(
    path: Path, cases: Sequence[Case], settings: Settings
) -> tuple[dict[SystemName, System], ModelConfig]:
    wanted = {name for case in cases for name in case.rounds}
    source = open_weights(path)
    try:
        names = [name for name in SystemName if name in wanted]
        return load_systems(names, source, getattr(torch, settings.dtype), settings.chunk), source.config
    finally:
        source.close()


def _warm_up(
    systems: dict[SystemName, System], prompt: Sequence[int], settings: Settings
) -> dict[SystemName, Pass]:
    def once(system: System) -> Pass:
        length = min(_SLOW_WARM_UP_PROMPT if system.name in SLOW else _WARM_UP_PROMPT, *settings.lengths)
        num_tokens = 1 + _WARM_UP_DECODES if system.name in DECODING else 1
        return time_pass(Turn(system, num_tokens, 1), prompt[:length], 0)

    for system in systems.values():
        once(system)
    return {name: once(system) for name, system in systems.items()}


def _time(
    case: Case, systems: dict[SystemName, System], prompt: Sequence[int], settings: Settings, say: Say
) -> list[Pass]:
    turns = [
        Turn(systems[name], 1 + (settings.decode_tokens if name in DECODING else 0), num_rounds)
        for name, num_rounds in case.rounds.items()
    ]

    def tell(done: Pass) -> None:
        decoding = "" if done.decode_s is None else f", then {done.decode_tokens_per_s:.1f} tokens/s"
        say(
            f"{case.prompt_tokens:,} tokens, round {done.round_index + 1} of {case.rounds[done.system]}: "
            f"{done.system.label(settings.chunk)}: {done.first_token_s:.2f} s{decoding}"
        )

    return take_turns(turns, prompt[: case.prompt_tokens], tell)


def _measure_memory(
    path: Path, cases: Sequence[Case], prompt: Sequence[int], settings: Settings, say: Say
) -> list[Growth]:
    growths: list[Growth] = []
    for case in cases:
        for name, num_rounds in case.rounds.items():
            job = Job(
                model=str(path),
                system=name,
                dtype=settings.dtype,
                chunk=settings.chunk,
                num_threads=torch.get_num_threads(),
                prompt=tuple(prompt[: case.prompt_tokens]),
            )
            if not growths:
                # What is measured once per machine and kept is then there for all processes alike.
                growth_in_fresh_process(replace(job, prompt=job.prompt[:WARM_UP_TOKENS]))
            for index in range(num_rounds):
                growths.append(growth_in_fresh_process(job))
                say(
                    f"{case.prompt_tokens:,} tokens, memory {index + 1} of {num_rounds}: "
                    f"{name.label(settings.chunk)}: {growths[-1].growth_bytes / 2**20:.1f} MiB"
                )
    return growths


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
