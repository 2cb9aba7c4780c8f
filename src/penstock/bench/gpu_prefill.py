"""Time to the first token on a GPU: Penstock's and transformers', taking turns; and what tiles cost of it."""

from collections.abc import Callable, Sequence
from typing import Any

from penstock.bench.gpu_device import free_memory, milliseconds
from penstock.bench.gpu_job import GpuJob
from penstock.bench.gpu_models import Subject, first_token, load_untiled, peer_first_token
from penstock.bench.gpu_results import Figure, GpuSystem
from penstock.bench.gpu_workload import PrefillCase, Section
from penstock.bench.timing import rounds
from penstock.cache.space import CacheSpace

# Libraries make plans in the first pass, graphs are captured in the second.
_WARM_UPS = 2
_LONG_PROMPT = 65_536
# transformers' passes that take longer than this are repeated so many times, at most.
_SLOW_PEER_MS, _SLOW_PEER_REPEATS = 1000.0, 3
_SLOWEST_PEER_MS, _SLOWEST_PEER_REPEATS = 8000.0, 1
TILES_COST = "time with tiles over without, less 1"


def measure_prefills(job: GpuJob, section: Section, cases: Sequence[PrefillCase]) -> None:
    """Cases of one model. A case that transformers fails in is measured without it."""
    subject = job.subject(cases[0].model)
    peer = _load_peer(job, cases)
    space = subject.space(max(case.prompt_tokens for case in cases))
    for case in cases:
        with job.attempt(case.label):
            _measure_prefill(job, section, case, subject, space, peer)


def measure_sweep(job: GpuJob) -> None:
    """More chunk sizes, for the picture."""
    plan = job.plan
    for model in dict.fromkeys(case.model for case in plan.sweeps):
        with job.attempt(str(model)):
            cases = [case for case in plan.sweeps if case.model is model]
            measure_prefills(job.repeating(plan.sweep_repeats), Section.SWEEP, cases)


def _measure_prefill(
    job: GpuJob, section: Section, case: PrefillCase, subject: Subject, space: CacheSpace, peer: Any
) -> None:
    prompt = job.prompt(case.model, case.prompt_tokens)

    def ours() -> object:
        return first_token(subject, space, prompt, case.chunk)

    def theirs() -> object:
        return peer_first_token(peer, prompt, case.chunk)

    turns: dict[GpuSystem, Callable[[], object]] = {"Penstock": ours}
    repeats: dict[GpuSystem, int] = {"Penstock": job.repeats}
    for _ in range(1 if case.prompt_tokens >= _LONG_PROMPT else _WARM_UPS):
        ours()
    if peer is not None and _has_peer(job, section, case) and (first_ms := _warm_up(job, case, theirs)):
        turns["transformers"], repeats["transformers"] = theirs, _peer_repeats(job.repeats, first_ms)
    times: dict[GpuSystem, list[float]] = {system: [] for system in turns}
    for index, order in enumerate(rounds(list(turns), job.repeats)):
        for system in order:
            if index < repeats[system]:
                times[system].append(milliseconds(job.device, turns[system]))
    for system, values in times.items():
        job.ledger.figure(Figure(section, case.label, "ms", tuple(values), system))


def measure_tiles(job: GpuJob, case: PrefillCase) -> None:
    """The same prompt on the tile grid and without it, taking turns."""
    weights = job.weights(case.model)
    tiled = job.subject(case.model)
    untiled = load_untiled(weights, job.dtype, job.device, case.chunk)
    space = tiled.space(case.prompt_tokens)
    prompt = job.prompt(case.model, case.prompt_tokens)

    def with_tiles() -> object:
        return first_token(tiled, space, prompt, case.chunk)

    def without() -> object:
        return first_token(untiled, space, prompt, case.chunk)

    for _ in range(_WARM_UPS):
        with_tiles()
        without()
    times: dict[str, list[float]] = {"with tiles": [], "without tiles": []}
    for order in rounds([("with tiles", with_tiles), ("without tiles", without)], job.repeats):
        for name, work in order:
            times[name].append(milliseconds(job.device, work))
    for name, values in times.items():
        job.ledger.figure(Figure(Section.TILES, f"{case.label}, {name}", "ms", tuple(values)))
    pairs = zip(times["with tiles"], times["without tiles"], strict=True)
    costs = tuple(ours / plain - 1 for ours, plain in pairs)
    job.ledger.figure(Figure(Section.TILES, f"{case.label}, {TILES_COST}", "share", costs))


def _load_peer(job: GpuJob, cases: Sequence[PrefillCase]) -> Any:
    """transformers' model; None where it is not wanted or cannot be had."""
    if not job.with_peer or all(case.prompt_tokens > job.peer_limit for case in cases):
        return None
    model = cases[0].model
    try:
        from penstock.measure.transformers_model import load_transformers

        return load_transformers(job.weights(model), job.dtype, job.device)
    except Exception as error:
        job.ledger.note(f"transformers cannot load {model}: {type(error).__name__}: {error}")
        return None


def _has_peer(job: GpuJob, section: Section, case: PrefillCase) -> bool:
    """Whether transformers is to read that too."""
    if section is Section.SWEEP and case.chunk not in job.plan.swept_peer_chunks:
        return False
    if case.prompt_tokens > job.peer_limit:
        job.ledger.note(
            f"{case.label}: not read by transformers, being longer than --peer-limit {job.peer_limit}"
        )
        return False
    return True


def _warm_up(job: GpuJob, case: PrefillCase, work: Callable[[], object]) -> float:
    """The time of transformers' first pass; 0 where it fails."""
    try:
        return milliseconds(job.device, work)
    except Exception as error:
        job.ledger.note(f"transformers fails in {case.label}: {type(error).__name__}: {error}")
    free_memory(job.device)
    return 0.0


def _peer_repeats(repeats: int, warm_up_ms: float) -> int:
    if warm_up_ms > _SLOWEST_PEER_MS:
        return min(repeats, _SLOWEST_PEER_REPEATS)
    return min(repeats, _SLOW_PEER_REPEATS) if warm_up_ms > _SLOW_PEER_MS else repeats
