"""What a prefill on a GPU holds beyond weights and cache, against what is predicted."""

from penstock.bench.gpu_device import allocated_bytes, free_workspaces, peak_bytes, reserved_bytes
from penstock.bench.gpu_job import GpuJob
from penstock.bench.gpu_models import Subject, first_token
from penstock.bench.gpu_results import Figure
from penstock.bench.gpu_workload import PrefillCase, Section
from penstock.cache.space import CacheSpace
from penstock.models.shape import workspace_of
from penstock.plan.activation import step_memory
from penstock.plan.step_shape import StepShape

ACTIVATIONS = "activations"
OFF_BY = "predicted activations over measured, off by"
_PASSES = 3
_GIB = 2**30


def measure_memory(job: GpuJob, case: PrefillCase) -> None:
    """The allocator's peak, less weights and cache, in passes of which the second records graphs: a graph that runs
    again asks the allocator for nothing. What libraries and tables keep counts too."""
    free_workspaces(job.device)
    before = allocated_bytes(job.device)
    subject = job.subject(case.model)
    space = subject.space(case.prompt_tokens)
    prompt = job.prompt(case.model, case.prompt_tokens)
    known = before + subject.model.num_weight_bytes + cache_bytes(space)
    free_workspaces(job.device)  # the probe's
    allocated_bytes(job.device)
    for _ in range(_PASSES):
        first_token(subject, space, prompt, case.chunk)
    measured = peak_bytes(job.device) - known
    kept = allocated_bytes(job.device) - known
    reserved = reserved_bytes(job.device) - known

    def report(what: str, value: float) -> None:
        job.ledger.figure(Figure(Section.MEMORY, f"{case.label}, {what}", "GiB", (value / _GIB,)))

    report(ACTIVATIONS, measured)
    report(f"{ACTIVATIONS}, of them kept between passes", kept)
    report(f"{ACTIVATIONS}, with what the allocator has set aside", reserved)
    predicted = predicted_bytes(subject, case)
    ratio = predicted / measured
    report(f"{ACTIVATIONS}, predicted", predicted)
    job.ledger.figure(
        Figure(Section.MEMORY, f"{case.label}, predicted activations over measured", "x", (ratio,))
    )
    job.ledger.figure(Figure(Section.MEMORY, f"{case.label}, {OFF_BY}", "share", (abs(ratio - 1),)))


def cache_bytes(space: CacheSpace) -> int:
    return space.tensors.num_bytes


def predicted_bytes(subject: Subject, case: PrefillCase) -> int:
    """Of the step that needs the most."""
    size = case.chunk or case.prompt_tokens
    starts = range(0, case.prompt_tokens, size)
    return max(
        step_memory(
            subject.model.config,
            StepShape.of_chunk(
                min(size, case.prompt_tokens - start), start, is_last=start + size >= case.prompt_tokens
            ),
            dtype_bytes=subject.model.dtype.itemsize,
            workspace=workspace_of(subject.model),
        ).peak_bytes
        for start in starts
    )
