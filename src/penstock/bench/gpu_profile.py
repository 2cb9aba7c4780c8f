"""Where the time of a prompt goes on a GPU: kernel by kernel, and what the card draws and how fast it runs then."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.bench.gpu_device import free_memory, milliseconds, synchronize
from penstock.bench.gpu_job import GpuJob
from penstock.bench.gpu_models import Subject, first_token
from penstock.bench.gpu_power import watch_power
from penstock.bench.gpu_results import Figure, Unit
from penstock.bench.gpu_workload import PrefillCase, Section

_WARM_UPS = 2
# The first of these whose words a kernel's name has.
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "attention to a tile": ("tile_attention",),
    "attention of decodes": ("decode_attention", "join_parts"),
    "attention to the past": ("sdpa", "fmha", "flash"),
    "heads": ("place_heads",),
    "norms": ("norm",),
    "activation": ("silu",),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "few_rows"),
}
OTHERS = "others"


@dataclass(frozen=True)
class Launch:
    """A kernel, and when it ran, in microseconds."""

    kernel: str
    start: float
    end: float


def measure_profile(job: GpuJob, cases: tuple[PrefillCase, ...]) -> None:
    """Each prompt some times in a row, without a rest, then once with every kernel timed."""
    subject = job.subject(cases[0].model)
    for case in cases:
        with job.attempt(case.label):
            _measure(job, subject, case)


def _measure(job: GpuJob, subject: Subject, case: PrefillCase) -> None:
    space = subject.space(case.prompt_tokens)
    prompt = job.prompt(case.model, case.prompt_tokens)

    def read() -> object:
        return first_token(subject, space, prompt, case.chunk)

    def report(what: str, unit: Unit, values: list[float]) -> None:
        job.ledger.figure(Figure(Section.PROFILE, f"{case.label}, {what}", unit, tuple(values)))

    for _ in range(_WARM_UPS):
        read()
    times: list[float] = []
    samples = watch_power(
        lambda: times.extend(milliseconds(job.device, read) for _ in range(2 * job.repeats))
    )
    report("without a rest", "ms", times)
    if samples:
        report("clock", "MHz", [sample.clock_mhz for sample in samples])
        report("power", "W", [sample.watts for sample in samples])
        report("power, at most", "W", [samples[-1].most_watts])
    launches = _launches(job.device, read)
    for group, milliseconds_spent in grouped(launches).items():
        report(f"kernels: {group}", "ms", [milliseconds_spent])
    report("between kernels", "ms", [milliseconds_between(launches)])
    free_memory(job.device)


def _launches(device: torch.device, work: Callable[[], object]) -> list[Launch]:
    """Of the work, in the order in which they began."""
    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as found:
        work()
        synchronize(device)
    launches = [
        Launch(event.name, event.time_range.start, event.time_range.end)
        for event in found.events() or ()
        if event.device_type.name == device.type.upper() and event.time_range.end > event.time_range.start
    ]
    return sorted(launches, key=lambda launch: launch.start)


def grouped(launches: Sequence[Launch]) -> dict[str, float]:
    """The milliseconds of each group, the longest first."""
    spent: dict[str, float] = defaultdict(float)
    for launch in launches:
        spent[group_of(launch.kernel)] += (launch.end - launch.start) / 1e3
    return dict(sorted(spent.items(), key=lambda each: -each[1]))


def milliseconds_between(launches: Sequence[Launch]) -> float:
    """In which nothing ran, from the first of them to the last."""
    idle, done = 0.0, launches[0].start if launches else 0.0
    for launch in launches:
        idle += max(launch.start - done, 0.0)
        done = max(launch.end, done)
    return idle / 1e3


def group_of(kernel: str) -> str:
    name = kernel.lower()
    return next((group for group, words in _GROUPS.items() if any(word in name for word in words)), OTHERS)
