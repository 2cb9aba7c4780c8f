"""How soon a model is ready on a GPU, from the start of a process that finds no probe's result."""

import json
import os
import sys
import tempfile
import time

from penstock.bench.fresh_process import run_fresh
from penstock.bench.gpu_job import GpuJob
from penstock.bench.gpu_results import Figure
from penstock.bench.gpu_workload import GpuModel, Section

READY = "from the start of a process until ready"
_LONGEST_S = 240


def measure_start(job: GpuJob, model: GpuModel) -> None:
    """Loaded and probed: first by a process that finds no kernel compiled, then by one that finds them."""
    order = {
        "name": str(model),
        "settings": dict(job.plan.models[model]),
        "dtype": str(job.dtype).removeprefix("torch."),
        "device": str(job.device),
    }
    label = f"{model}, {READY}"
    with tempfile.TemporaryDirectory() as kernels:
        for name in (label, f"{label}, with kernels compiled before"):
            with tempfile.TemporaryDirectory() as home:
                started = time.monotonic()
                answer = json.loads(_in_fresh_process(json.dumps(order), home, kernels))
            job.ledger.figure(Figure(Section.START, name, "s", (answer["ready_s"] - started,)))
    imported = answer["imported_s"] - started
    job.ledger.figure(Figure(Section.START, f"{label}, of it until all is imported", "s", (imported,)))


def _in_fresh_process(order: str, home: str, kernels: str) -> str:
    command = [sys.executable, "-m", "penstock.bench.gpu_ready", order]
    environment = {**os.environ, "PENSTOCK_HOME": home, "TRITON_CACHE_DIR": kernels}
    return run_fresh(command, _LONGEST_S, environment).splitlines()[-1]
