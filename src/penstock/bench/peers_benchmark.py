"""Penstock and its peers on one machine, from settings to results."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.peers_pick import Picker
from penstock.bench.peers_process import PeerError
from penstock.bench.peers_results import Choice, PeerResults, PeerSettings, Sample
from penstock.bench.peers_workers import Subject, Workers
from penstock.bench.peers_workload import (
    PEER_ENGINES,
    Candidate,
    EngineName,
    PeerSystem,
    PeerWorkload,
    Quantity,
    llama_candidates,
    penstock_candidate,
    vllm_candidates,
)
from penstock.measure.machine import this_machine
from penstock.measure.prompts import shuffled_rounds

Say = Callable[[str], None]


@dataclass(frozen=True)
class PeerTurn:
    """What a system does once in every round."""

    system: PeerSystem
    prompt_tokens: int
    candidate: Candidate
    num_tokens: int
    quantities: tuple[Quantity, ...]


def run_peers_benchmark(
    path: Path,
    prompt: Sequence[int],
    settings: PeerSettings,
    pythons: Mapping[EngineName, Path],
    left_out: Mapping[PeerSystem, str],
    say: Say,
) -> PeerResults:
    """Measure all systems but those left out. `prompt` is as long as the longest length; `pythons` has an interpreter
    for each engine that takes part. `say` is told what goes on."""
    started, machine = time.perf_counter(), this_machine()
    subject = Subject(path, settings.dtype, settings.num_threads, settings.workload.most_tokens)
    absent = dict(left_out)
    # Where processes that were given up still write, it is not an error that the folder cannot be emptied.
    with (
        tempfile.TemporaryDirectory(prefix="penstock-peers-", ignore_cleanup_errors=True) as folder,
        Workers(subject, pythons, Path(folder)) as workers,
    ):
        picker = Picker(workers, prompt, settings.workload, say)
        choices = _choose_all(picker, settings, absent, say)
        samples = take_turns(workers, prompt, plan_turns(choices, settings.workload), settings.workload, say)
        about, weights = (
            {engine.value: text for engine, text in told.items()} for told in (workers.about, workers.weights)
        )
    return PeerResults(
        machine=machine,
        settings=settings,
        about=about,
        left_out={system.value: why for system, why in absent.items()},
        trials=tuple(picker.trials),
        choices=tuple(choices),
        samples=tuple(samples),
        duration_s=time.perf_counter() - started,
        weights=weights,
    )


def _choose_all(
    picker: Picker, settings: PeerSettings, absent: dict[PeerSystem, str], say: Say
) -> list[Choice]:
    """Peers that fail are left out, and it is said why; Penstock and transformers must not."""
    chosen: dict[PeerSystem, list[Choice]] = {}
    for system in [each for each in PeerSystem if each not in absent]:
        if system.engine not in PEER_ENGINES:
            candidate = (
                Candidate.of(EngineName.TRANSFORMERS)
                if system is PeerSystem.TRANSFORMERS
                else penstock_candidate(system, settings.weights)
            )
            chosen[system] = fixed(system, candidate, settings.workload)
            continue
        try:
            if system is PeerSystem.LLAMA_FILE:
                chosen[system] = picker.pick(system, llama_candidates(None))
            elif system is PeerSystem.VLLM:
                chosen[system] = picker.pick(system, vllm_candidates())
            elif PeerSystem.LLAMA_FILE in chosen:
                chosen[system] = picker.pick_format(chosen[PeerSystem.LLAMA_FILE])
            else:
                absent[system] = absent[PeerSystem.LLAMA_FILE]
        except PeerError as error:
            absent[system] = str(error)
            say(f"{system.label} is left out: {error}")
    return [choice for choices in chosen.values() for choice in choices]


def fixed(system: PeerSystem, candidate: Candidate, workload: PeerWorkload) -> list[Choice]:
    """Of a system that has nothing to choose from."""
    return [
        Choice(
            system,
            length,
            candidate,
            candidate if system.decodes and length in workload.decode_lengths else None,
        )
        for length in workload.lengths
    ]


def plan_turns(choices: Sequence[Choice], workload: PeerWorkload) -> list[PeerTurn]:
    """One turn for a choice, or two, where other settings are best for decoding."""
    turns = []
    for choice in choices:
        system, length = choice.system, choice.prompt_tokens
        num_tokens = workload.decode_tokens + 1
        if choice.decode is None:
            turns.append(PeerTurn(system, length, choice.prefill, 1, ("prefill",)))
        elif choice.decode == choice.prefill:
            turns.append(PeerTurn(system, length, choice.prefill, num_tokens, ("prefill", "decode")))
        else:
            turns.append(PeerTurn(system, length, choice.prefill, 1, ("prefill",)))
            turns.append(PeerTurn(system, length, choice.decode, num_tokens, ("decode",)))
    return turns


def take_turns(
    workers: Workers, prompt: Sequence[int], turns: Sequence[PeerTurn], workload: PeerWorkload, say: Say
) -> list[Sample]:
    """All turns, in the order they ran, after a warm-up of every process that is not counted."""
    processes = list(dict.fromkeys(turn.candidate for turn in turns))
    shortest = min(workload.lengths)
    say(f"warming up {len(processes)} processes with {shortest:,} tokens")
    for candidate in processes:
        workers.generate(candidate, prompt[:shortest], 2)
    samples: list[Sample] = []
    for index, order in enumerate(shuffled_rounds(turns, workload.repeats, workload.seed)):
        for turn in order:
            answered = workers.generate(turn.candidate, prompt[: turn.prompt_tokens], turn.num_tokens)
            sample = Sample(
                len(samples),
                index,
                turn.system,
                turn.prompt_tokens,
                turn.candidate,
                turn.quantities,
                answered,
            )
            samples.append(sample)
            say(f"round {index + 1} of {workload.repeats}, {_told(sample)}")
    return samples


def _told(sample: Sample) -> str:
    parts = [
        f"{quantity} {speed:,.1f}"
        for quantity in sample.quantities
        if (speed := sample.speed(quantity)) is not None
    ]
    return f"{sample.system.label}, {sample.prompt_tokens:,} tokens: {', '.join(parts)} tokens/s"
