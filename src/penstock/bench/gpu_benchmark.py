"""The measurements on a GPU, section by section: one that fails is reported, and the others go on."""

import time
import traceback
from collections.abc import Callable, Sequence

from penstock.bench.gpu_bits import measure_bits
from penstock.bench.gpu_decode import measure_decodes, measure_mixed
from penstock.bench.gpu_device import free_memory, synchronize
from penstock.bench.gpu_job import GpuJob
from penstock.bench.gpu_memory import measure_memory
from penstock.bench.gpu_prefill import measure_prefills, measure_sweep, measure_tiles
from penstock.bench.gpu_profile import measure_profile
from penstock.bench.gpu_start import measure_start
from penstock.bench.gpu_workload import GpuModel, Section
from penstock.errors import PenstockError


def run_sections(job: GpuJob, sections: Sequence[Section]) -> None:
    """In their order. After an error that the device does not recover from, the others are not tried."""
    for index, section in enumerate(sections):
        _run(job, section)
        if not _is_alive(job):
            for other in sections[index + 1 :]:
                job.ledger.failed("not run", PenstockError(f"the device failed in {section}"))
                job.ledger.ended(other, 0.0)
            return


def _run(job: GpuJob, section: Section) -> None:
    started = time.perf_counter()
    try:
        _work(job, section)()
    except Exception as error:
        traceback.print_exc()
        job.ledger.failed("stopped", error)
    job.ledger.ended(section, time.perf_counter() - started)


def _is_alive(job: GpuJob) -> bool:
    """Whether the device still does what it is told; its memory is free again."""
    try:
        free_memory(job.device)
        synchronize(job.device)
    except RuntimeError:
        return False
    return True


def _work(job: GpuJob, section: Section) -> Callable[[], None]:
    plan = job.plan
    match section:
        case Section.LARGE | Section.SMALL | Section.HYBRID:
            return lambda: measure_prefills(job, section, plan.prefills[section])
        case Section.SWEEP:
            return lambda: measure_sweep(job)
        case Section.DECODE:
            return lambda: measure_decodes(job)
        case Section.MEMORY:
            return lambda: measure_memory(job, plan.memory)
        case Section.START:
            return lambda: measure_start(job, plan.start)
        case Section.BITS:
            return lambda: _bits(job)
        case Section.TILES:
            return lambda: measure_tiles(job, plan.tiles)
        case Section.PROFILE:
            return lambda: measure_profile(job, plan.profiles)
        case Section.MIXED:
            return lambda: measure_mixed(job, plan.mixed)


def _bits(job: GpuJob) -> None:
    for model in GpuModel:
        with job.attempt(str(model)):
            measure_bits(job, model)
