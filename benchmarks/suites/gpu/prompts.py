"""Whole prompts on a GPU: time beside transformers, what tiles cost, memory, starting, and where the time goes."""

import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import OURS
from benchmarks.suites.gpu.job import Job, over
from benchmarks.suites.gpu.models import Subject, load_untiled
from benchmarks.suites.gpu.plan import PrefillCase
from benchmarks.systems import Child
from penstock.cache.space import CacheSpace
from penstock.errors import PenstockError
from penstock.models.decoder import activation_model

ACTIVATIONS, OFF_BY = "activations", "predicted activations over measured, off by"
READY = "from the start of a process until ready"
TILES_COST = "time with tiles over without, less 1"
PEER = "transformers"
# Libraries make plans in the first pass, graphs are captured in the second.
WARM_UPS = 2
_LONG_PROMPT = 65_536
# transformers' passes that take longer than this are repeated so many times, at most.
_SLOW_PEER_MS, _SLOW_PEER_REPEATS = 1000.0, 3
_SLOWEST_PEER_MS, _SLOWEST_PEER_REPEATS = 8000.0, 1
_MEMORY_PASSES = 3
_GIB = 2**30


def measure_prefills(
    job: Job, errors: list[str], cases: Sequence[PrefillCase], loaded: Subject | None = None
) -> None:
    """Cases of one model. A case that transformers fails in is measured without it."""
    subject, peer = loaded or job.subject(cases[0].model), load_peer(job, cases)
    space = subject.space(max(case.prompt_tokens for case in cases))
    for case in cases:
        with job.attempt(case.label, errors):
            measure_prefill(job, case, subject, space, peer)


def measure_prefill(
    job: Job, case: PrefillCase, subject: Subject, space: CacheSpace, peer: Any, *, ratio: bool = False
) -> None:
    """One of them, taking turns with transformers."""
    prompt = job.prompt(case.model, case.prompt_tokens)
    turns: dict[str, Callable[[], object]] = {
        OURS: lambda: subject.first_token(space, prompt, case.chunk),
        PEER: lambda: peer_first_token(peer, prompt, case.chunk),
    }
    repeats = {OURS: job.repeats, PEER: 0}
    for _ in range(1 if case.prompt_tokens >= _LONG_PROMPT else WARM_UPS):
        turns[OURS]()
    if peer is not None and _has_peer(job, case):
        repeats[PEER] = _peer_repeats(job, case, turns[PEER])
    job.figures(case.label, job.time_turns(turns, repeats), ratio=ratio)


@torch.inference_mode()
def peer_first_token(model: Any, prompt: Sequence[int], chunk: int) -> int:
    """The same with transformers: slices of the prompt, one after the other, with the cache that it makes itself."""
    token_ids = torch.tensor([prompt], device=model.device)
    known = None
    for part in torch.split(token_ids, chunk or len(prompt), dim=1):
        output = model(input_ids=part, past_key_values=known, use_cache=True, logits_to_keep=1)
        known = output.past_key_values
    return int(output.logits[0, -1].argmax())


def load_peer(job: Job, cases: Sequence[PrefillCase]) -> Any:
    """transformers' model; None where it is not wanted or cannot be had."""
    if not job.with_peer or all(case.prompt_tokens > job.peer_limit for case in cases):
        return None
    try:
        from penstock.measure.transformers_model import load_transformers

        return load_transformers(job.weights(cases[0].model), job.dtype, job.device)
    except Exception as error:
        job.note(f"transformers cannot load {cases[0].model}: {type(error).__name__}: {error}")
        return None


def _has_peer(job: Job, case: PrefillCase) -> bool:
    """Whether transformers is to read that too."""
    if job.section == "sweep" and case.chunk not in job.plan.swept_peer_chunks:
        return False
    if case.prompt_tokens > job.peer_limit:
        job.note(f"{case.label}: not read by transformers, being longer than --peer-limit {job.peer_limit}")
        return False
    return True


def _peer_repeats(job: Job, case: PrefillCase, work: Callable[[], object]) -> int:
    """By the time of transformers' first pass; 0 where it fails."""
    try:
        first_ms = job.milliseconds(work)
    except Exception as error:
        job.note(f"transformers fails in {case.label}: {type(error).__name__}: {error}")
        job.free_memory()
        return 0
    if first_ms > _SLOWEST_PEER_MS:
        return min(job.repeats, _SLOWEST_PEER_REPEATS)
    return min(job.repeats, _SLOW_PEER_REPEATS) if first_ms > _SLOW_PEER_MS else job.repeats


def measure_sweep(job: Job, errors: list[str]) -> None:
    """More chunk sizes, for the picture."""
    for model in dict.fromkeys(case.model for case in job.plan.sweeps):
        with job.attempt(model, errors):
            cases = [case for case in job.plan.sweeps if case.model == model]
            measure_prefills(replace(job, repeats=job.plan.sweep_repeats), errors, cases)


def measure_tiles(job: Job, errors: list[str]) -> None:
    """The same prompt on the tile grid and without it, taking turns."""
    case = job.plan.tiles
    subjects = {
        "with tiles": job.subject(case.model),
        "without tiles": load_untiled(job.weights(case.model), job.dtype, job.device, case.chunk),
    }
    space = subjects["with tiles"].space(case.prompt_tokens)
    prompt = job.prompt(case.model, case.prompt_tokens)
    turns = {name: partial(each.first_token, space, prompt, case.chunk) for name, each in subjects.items()}
    for read in WARM_UPS * [*turns.values()]:
        read()
    times = job.time_turns(turns, dict.fromkeys(turns, job.repeats))
    for name, values in times.items():
        job.figure(f"{case.label}, {name}", "ms", values)
    costs = [ratio - 1 for ratio in over(times["with tiles"], times["without tiles"])]
    job.figure(f"{case.label}, {TILES_COST}", "share", costs)


def measure_memory(job: Job, errors: list[str]) -> None:
    """The allocator's peak, less weights and cache, in passes of which the second records graphs: a graph that runs
    again asks the allocator for nothing. What libraries and tables keep counts too."""
    case, device = job.plan.memory, job.device
    if device.type != "cuda":
        raise PenstockError(f"{str(device)!r} has no allocator that counts: memory is measured on cuda")

    def allocated_bytes() -> int:
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)

    def free_workspaces() -> None:
        """What libraries keep, too. There must be no graph: it would go on to use its work space."""
        job.free_memory()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    free_workspaces()
    before = allocated_bytes()
    subject = job.subject(case.model)
    space = subject.space(case.prompt_tokens)
    prompt = job.prompt(case.model, case.prompt_tokens)
    known = before + subject.model.num_weight_bytes + space.tensors.num_bytes
    free_workspaces()  # the probe's
    allocated_bytes()
    for _ in range(_MEMORY_PASSES):
        subject.first_token(space, prompt, case.chunk)
    measured = torch.cuda.max_memory_allocated(device) - known
    predicted = activation_model(subject.model).largest_step(case.prompt_tokens, case.chunk).peak_bytes
    for what, num_bytes in {
        ACTIVATIONS: measured,
        f"{ACTIVATIONS}, of them kept between passes": allocated_bytes() - known,
        f"{ACTIVATIONS}, with what the allocator has set aside": torch.cuda.memory_reserved(device) - known,
        f"{ACTIVATIONS}, predicted": predicted,
    }.items():
        job.figure(f"{case.label}, {what}", "GiB", [num_bytes / _GIB])
    ratio = predicted / measured
    job.figure(f"{case.label}, predicted activations over measured", "x", [ratio])
    job.figure(f"{case.label}, {OFF_BY}", "share", [abs(ratio - 1)])


def measure_start(job: Job, errors: list[str]) -> None:
    """Loaded and probed: first by a process that finds no kernel compiled, then by one that finds them."""
    model = job.plan.start
    dtype, settings = str(job.dtype).removeprefix("torch."), dict(job.plan.models[model])
    engine, what = "benchmarks.suites.gpu.models:ReadyEngine", "a process that loads the model"
    label = f"{model}, {READY}"
    with tempfile.TemporaryDirectory() as kernels:
        for name in (label, f"{label}, with kernels compiled before"):
            with tempfile.TemporaryDirectory() as home:
                env = {"PENSTOCK_HOME": home, "TRITON_CACHE_DIR": kernels}
                started = time.monotonic()
                with Child(engine, what, env=env) as child:
                    answer = child.ask(
                        "ready", name=model, settings=settings, dtype=dtype, device=str(job.device)
                    )
            job.figure(name, "s", [answer["ready_s"] - started])
    job.figure(f"{label}, of it until all is imported", "s", [answer["imported_s"] - started])


# The first of these whose words a kernel's name has.
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "attention to a tile": ("tile_attention",),
    "attention of decodes": ("decode_attention", "join_parts"),
    "attention to the past": ("sdpa", "fmha", "flash"),
    "heads": ("place_heads",),
    "norms": ("norm",),
    "activation": ("silu",),
    "experts": ("route_kernel", "group_kernel", "expert_kernel", "weighted_sum"),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "few_rows"),
}


@dataclass(frozen=True)
class Launch:
    """A kernel, and when it ran, in microseconds."""

    kernel: str
    start: float
    end: float


def measure_profile(job: Job, errors: list[str]) -> None:
    """Each prompt some times in a row, without a rest, then once with every kernel timed."""
    cases = job.plan.profiles
    subject = job.subject(cases[0].model)
    for case in cases:
        with job.attempt(case.label, errors):
            _profile(job, subject, case)


def _profile(job: Job, subject: Subject, case: PrefillCase) -> None:
    space, prompt = subject.space(case.prompt_tokens), job.prompt(case.model, case.prompt_tokens)

    read = partial(subject.first_token, space, prompt, case.chunk)
    for _ in range(WARM_UPS):
        read()
    times: list[float] = []
    samples = watch_power(lambda: times.extend(job.milliseconds(read) for _ in range(2 * job.repeats)))
    job.figure(f"{case.label}, without a rest", "ms", times)
    if samples:
        clocks, watts, most = zip(*samples, strict=True)
        job.figure(f"{case.label}, clock", "MHz", clocks)
        job.figure(f"{case.label}, power", "W", watts)
        job.figure(f"{case.label}, power, at most", "W", most[-1:])
    launches = _launches(job, read)
    for group, spent_ms in grouped(launches).items():
        job.figure(f"{case.label}, kernels: {group}", "ms", [spent_ms])
    job.figure(f"{case.label}, between kernels", "ms", [milliseconds_between(launches)])


def _launches(job: Job, work: Callable[[], object]) -> list[Launch]:
    """Of the work, in the order in which they began."""
    is_gpu = job.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as found:
        work()
        job.synchronize()
    launches = [
        Launch(event.name, event.time_range.start, event.time_range.end)
        for event in found.events() or ()
        if event.device_type.name == job.device.type.upper() and event.time_range.end > event.time_range.start
    ]
    return sorted(launches, key=lambda launch: launch.start)


def grouped(launches: Sequence[Launch]) -> dict[str, float]:
    """The milliseconds of each group, the longest first."""
    spent: dict[str, float] = defaultdict(float)
    for launch in launches:
        name = launch.kernel.lower()
        groups = (group for group, words in _GROUPS.items() if any(word in name for word in words))
        spent[next(groups, "others")] += (launch.end - launch.start) / 1e3
    return dict(sorted(spent.items(), key=lambda each: -each[1]))


def milliseconds_between(launches: Sequence[Launch]) -> float:
    """In which nothing ran, from the first of them to the last."""
    idle, done = 0.0, launches[0].start if launches else 0.0
    for launch in launches:
        idle += max(launch.start - done, 0.0)
        done = max(launch.end, done)
    return idle / 1e3


_POWER = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw,power.limit", "--format=csv,noheader,nounits")


def watch_power(
    work: Callable[[], object], command: Sequence[str] = (*_POWER, "--id=0", "--loop-ms=100")
) -> list[tuple[float, ...]]:
    """Run something, and say what the first GPU did meanwhile, time after time: its clock in MHz, what it drew, and
    what it may draw, in watts. Nothing where that is not known."""
    with tempfile.TemporaryFile("w+") as file:
        try:
            watching = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
        except OSError:
            work()
            return []
        try:
            gives_up_s = time.monotonic() + 5.0
            while not (begun_at := os.fstat(file.fileno()).st_size) and watching.poll() is None:
                if time.monotonic() > gives_up_s:
                    break
                time.sleep(0.01)
            work()
        finally:
            watching.terminate()
            watching.wait()
        file.seek(begun_at)
        return [sample for line in file if (sample := _parse_power(line)) is not None]


def _parse_power(line: str) -> tuple[float, ...] | None:
    """None of a line that was not written to its end, or says that something is not supported."""
    try:
        sample = tuple(float(part) for part in line.split(","))
    except ValueError:
        return None
    return sample if line.endswith("\n") and len(sample) == 3 else None
