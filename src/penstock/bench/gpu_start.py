"""How soon a model is ready on a GPU, from the start of a process that finds no probe's result."""

import json
import os
import subprocess
import sys
import tempfile
import time

from penstock.bench.gpu_job import GpuJob
from penstock.bench.gpu_results import Figure
from penstock.bench.gpu_workload import GpuModel, Section
from penstock.errors import PenstockError

READY = "from the start of a process until ready"
_LONGEST_S = 240


def measure_start(job: GpuJob, model: GpuModel) -> None:
    """Once: loaded and probed. What Triton compiled before is there, if it was."""
    order = {
        "name": str(model),
        "settings": dict(job.plan.models[model]),
        "dtype": str(job.dtype).removeprefix("torch."),
        "device": str(job.device),
    }
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        answer = json.loads(_in_fresh_process(json.dumps(order), folder))
    label = f"{model}, {READY}"
    job.ledger.figure(Figure(Section.START, label, "s", (answer["ready_s"] - started,)))
    imported = answer["imported_s"] - started
    job.ledger.figure(Figure(Section.START, f"{label}, of it until all is imported", "s", (imported,)))


def _in_fresh_process(order: str, home: str) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "penstock.bench.gpu_ready", order],
            capture_output=True,
            text=True,
            check=True,
            timeout=_LONGEST_S,
            env={**os.environ, "PENSTOCK_HOME": home},
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["it said nothing"]
        raise PenstockError(
            f"a process that loads the model ended with {error.returncode}: {lines[-1]}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise PenstockError(f"a process that loads the model took longer than {_LONGEST_S} s") from error
    return done.stdout.splitlines()[-1]
