"""From settings to results of latency targets: targets and fixed chunks take turns on one model."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.bench.sweep_systems import AutoSystem
from penstock.bench.systems import PenstockSystem, System, SystemName
from penstock.bench.target_results import ArrivalRun, LoneRun, TargetResults, TargetSettings, share_within
from penstock.bench.target_runs import run_arrival, serving, with_target
from penstock.bench.target_workload import Sizing, TargetPrompts, make_prompts
from penstock.bench.timing import Turn, time_pass
from penstock.engine.llm import LLM
from penstock.engine.profile import load_profile
from penstock.measure.machine import this_machine

Say = Callable[[str], None]

_WARM_UP_TOKENS = 128
# Of a chunk's gaps, the share that keep a target where others may have missed it by chance.
_NEARLY = 0.85


def run_target_benchmark(llm: LLM, settings: TargetSettings, say: Say) -> TargetResults:
    """Measure what the settings ask for, on a model whose chunks are automatic. `say` is told what goes on."""
    started = time.perf_counter()
    settings.workload.require_context(llm.context_length)
    settings.workload.require_grid(llm.chunk.grid)
    prompts = make_prompts(llm.tokenizer, settings.workload)
    results = TargetResults(this_machine(), settings, load_profile(llm) is not None, (), (), 0.0)
    results = _run_arrivals(llm, results, prompts, say)
    results = _run_lone(llm, results, prompts, say)
    return replace(results, duration_s=time.perf_counter() - started)


def contenders(results: TargetResults) -> list[Sizing]:
    """Those worth another round: for each target within reach its automatic size, the best fixed one, and the next
    larger one if it nearly keeps it. Those that are compared follow each other."""
    fixed = [each.fixed for each in results.sizings if each.fixed is not None]
    found: list[Sizing] = []
    for verdict in results.verdicts:
        if verdict.is_reachable:
            found.append(Sizing(target_ms=verdict.target_ms))
            best = 0 if verdict.best_fixed is None else verdict.best_fixed
            larger = [Sizing(fixed=size) for size in fixed if size > best][:1]
            found += [Sizing(fixed=best)] if best else []
            found += [each for each in larger if results.share(each, verdict.target_ms) >= _NEARLY]
    return list(dict.fromkeys(found))


def lone_contenders(results: TargetResults, prompt_tokens: int) -> list[int | None]:
    """Those worth another round: the automatic size, and the two fixed ones with the soonest first token so far."""
    fixed = [chunk for chunk in results.lone_chunks(prompt_tokens) if chunk is not None]
    fixed.sort(key=lambda chunk: min(results.lone_seconds(chunk, prompt_tokens).values()))
    return [None, *fixed[:2]]


def _run_arrivals(llm: LLM, results: TargetResults, prompts: TargetPrompts, say: Say) -> TargetResults:
    """First all, then the contenders; every round begins with another one."""
    workload, repeats = results.settings.workload, results.settings.repeats
    # Fixed chunks need no step times, but their service records them: not into what an automatic size knows.
    subjects = {sizing: with_target(llm, sizing.target_ms) for sizing in workload.sizings}
    for index in range(repeats):
        order = contenders(results) if index else workload.sizings
        shift = index % max(len(order), 1)
        for sizing in [*order[shift:], *order[:shift]]:
            with serving(subjects[sizing], sizing, workload, prompts) as service:
                run = run_arrival(service, sizing, index, prompts, workload)
            results = replace(results, arrivals=(*results.arrivals, run))
            say(f"round {index + 1} of {repeats}: {_told(run, workload.targets_ms)}")
    return results


def _run_lone(llm: LLM, results: TargetResults, prompts: TargetPrompts, say: Say) -> TargetResults:
    """The same of prompts that come when nothing else runs."""
    workload, repeats = results.settings.workload, results.settings.repeats
    turns = _lone_turns(llm, workload.lone_chunks)
    for length in workload.lone_lengths:
        for turn in turns.values():
            time_pass(turn, prompts.lone[: min(_WARM_UP_TOKENS, length)], 0)
        for index in range(repeats):
            order = lone_contenders(results, length) if index else list(turns)
            shift = index % len(order)
            for chunk in [*order[shift:], *order[:shift]]:
                done = time_pass(turns[chunk], prompts.lone[:length], index)
                run = LoneRun(chunk, length, index, done.first_token_s)
                results = replace(results, lone=(*results.lone, run))
                name = "auto" if chunk is None else f"chunk {chunk:,}"
                say(
                    f"{length:,} tokens alone, round {index + 1} of {repeats}: {name}: {run.first_token_s:.2f} s"
                )
    return results


def _lone_turns(llm: LLM, chunks: Sequence[int]) -> dict[int | None, Turn]:
    own = with_target(llm, None)
    systems: dict[int | None, System] = {None: AutoSystem(own)}
    systems |= {chunk: PenstockSystem(SystemName.PENSTOCK, own.model, own.canon, chunk) for chunk in chunks}
    return {chunk: Turn(system, 1, 1) for chunk, system in systems.items()}


def _told(run: ArrivalRun, targets_ms: Sequence[int]) -> str:
    targets = targets_ms if run.sizing.target_ms is None else [run.sizing.target_ms]
    kept = ", ".join(
        f"{share_within(run.gap_seconds, target):.1%} of gaps keep {target} ms" for target in targets
    )
    return f"{run.sizing.label}: {kept}, first token after {run.first_token_s:.1f} s"
