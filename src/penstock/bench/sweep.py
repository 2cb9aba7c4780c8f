"""Chunk sizes against prompt lengths, from settings to results."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from penstock.bench.memory import Job, growth_in_fresh_process
from penstock.bench.sweep_llama import describe_llama
from penstock.bench.sweep_results import CellMemory, SweepResults, SweepSettings, Timed
from penstock.bench.sweep_systems import load_sweep_systems
from penstock.bench.sweep_workload import Cell, Configuration, configurations
from penstock.bench.systems import System, SystemName
from penstock.bench.timing import Turn, time_pass
from penstock.measure.growth import WARM_UP_TOKENS
from penstock.measure.machine import this_machine
from penstock.measure.prompts import shuffled_rounds

Say = Callable[[str], None]

# Of these, a fresh process that is given a name, a chunk and a file can measure the memory.
_MEASURED = (
    SystemName.PENSTOCK,
    SystemName.PENSTOCK_WHOLE,
    SystemName.TRANSFORMERS,
    SystemName.TRANSFORMERS_CHUNKED,
)


def run_sweep(path: Path, prompt: Sequence[int], settings: SweepSettings, say: Say) -> SweepResults:
    """Measure what the settings ask for. `path` is a model folder or GGUF file, `prompt` at least as long as the
    longest length. `say` is told what goes on."""
    started = time.perf_counter()
    machine = this_machine()
    wanted = configurations(settings.chunks, settings.baselines)
    most_tokens = max(settings.lengths) + settings.decode_tokens
    systems = load_sweep_systems(wanted, path, settings.dtype, most_tokens)
    cells = [Cell(configuration, length) for configuration in wanted for length in settings.lengths]
    timings = time_cells(cells, systems, prompt, settings, say)
    del systems  # room for the processes to come
    memory = _measure_memory(path, cells, prompt, settings, say) if settings.with_memory else []
    llama_cpp = describe_llama() if "llama.cpp" in settings.baselines else None
    duration_s = time.perf_counter() - started
    return SweepResults(machine, settings, tuple(timings), tuple(memory), duration_s, llama_cpp)


def time_cells(
    cells: Sequence[Cell],
    systems: Mapping[Configuration, System],
    prompt: Sequence[int],
    settings: SweepSettings,
    say: Say,
) -> list[Timed]:
    """All turns, in the order they ran: first a warm-up that is not counted, then every cell once in every round."""
    turns = {name: Turn(system, settings.decode_tokens, 1) for name, system in systems.items()}
    shortest = min(settings.lengths)
    say(f"warming up {len(turns)} configurations with {shortest:,} tokens")
    warm_up_s = {name: time_pass(turn, prompt[:shortest], 0).first_token_s for name, turn in turns.items()}
    expected_s = settings.repeats * sum(
        warm_up_s[cell.configuration] * cell.prompt_tokens / shortest for cell in cells
    )
    say(f"{settings.repeats} rounds of {len(cells)} turns: {expected_s / 60:.1f} minutes or more")
    timings: list[Timed] = []
    for index, order in enumerate(shuffled_rounds(cells, settings.repeats, settings.seed)):
        for cell in order:
            done = time_pass(turns[cell.configuration], prompt[: cell.prompt_tokens], index)
            timings.append(Timed(cell, len(timings), done))
        say(f"round {index + 1} of {settings.repeats} is done")
    return timings


def _measure_memory(
    path: Path, cells: Sequence[Cell], prompt: Sequence[int], settings: SweepSettings, say: Say
) -> list[CellMemory]:
    found: list[CellMemory] = []
    for cell in cells:
        configuration = cell.configuration
        if configuration.system not in _MEASURED:
            continue
        job = Job(
            model=str(path),
            system=configuration.system,
            dtype=settings.dtype,
            chunk=configuration.chunk,
            num_threads=torch.get_num_threads(),
            prompt=tuple(prompt[: cell.prompt_tokens]),
        )
        if not found:
            # What is measured once per machine and kept is then there for all processes alike.
            growth_in_fresh_process(replace(job, prompt=job.prompt[:WARM_UP_TOKENS]))
        found.append(CellMemory(cell, growth_in_fresh_process(job)))
        say(
            f"memory: {configuration.label}, {cell.prompt_tokens:,} tokens: "
            f"{found[-1].growth.growth_bytes / 2**20:.1f} MiB"
        )
    return found
