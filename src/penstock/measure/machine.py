"""The machine and the software that a result belongs to."""

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

import penstock
from penstock.machine import processor_name
from penstock.plan.units import format_bytes


@dataclass(frozen=True)
class Machine:
    cpu: str
    num_cpus: int  # that this process may use
    num_threads: int
    memory_bytes: int
    system: str
    python: str
    torch: str
    transformers: str
    penstock: str
    commit: str | None
    date: str
    load_average: float | None  # over the last minute, before the measurements

    @property
    def facts(self) -> dict[str, list[str]]:
        """Hardware, threads and software, as a report's head names them."""
        commit = f" ({self.commit})" if self.commit else ""
        return {
            "machine": [self.cpu, f"{self.num_cpus} CPUs", format_bytes(self.memory_bytes), self.system],
            "threads": [str(self.num_threads)],
            "software": [
                f"penstock {self.penstock}{commit}",
                f"torch {self.torch}",
                f"transformers {self.transformers}",
                f"Python {self.python}",
            ],
        }


def this_machine() -> Machine:
    return Machine(
        cpu=processor_name(),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=importlib.metadata.version("transformers"),
        penstock=penstock.__version__,
        commit=_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def _commit() -> str | None:
    """The commit of the checkout that this file is part of, with a mark where files differ from it. None where it is
    part of none, or git is absent."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)
        changes = ", with changes" if git("status", "--porcelain", ":/") else ""
        return git("rev-parse", "--short", "HEAD") + changes
    except (OSError, subprocess.SubprocessError):
        return None
