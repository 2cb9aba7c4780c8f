"""How much a prefill makes a process grow, measured in a process of its own."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from penstock.bench.systems import System, SystemName, load_systems
from penstock.kernels.device import chosen_device
from penstock.measure.growth import WARM_UP_TOKENS, grown_bytes, in_fresh_process
from penstock.models.opened import open_weights

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Growth:
    """Of one process, during one prefill."""

    system: SystemName
    prompt_tokens: int
    growth_bytes: int
    cache_bytes: int

    @property
    def activation_bytes(self) -> int:
        return self.growth_bytes - self.cache_bytes


@dataclass(frozen=True)
class Job:
    """What a fresh process is to measure."""

    model: str  # a path
    system: SystemName
    dtype: str
    chunk: int
    num_threads: int
    prompt: tuple[int, ...]
    device: str | None = None  # None: as the environment says


def measure_growth(system: System, prompt: Sequence[int], device: torch.device = _CPU) -> Growth:
    """Growth of this process. It should be a fresh one: heap that earlier work left behind hides growth."""
    system.generate(prompt[:WARM_UP_TOKENS], 2, lambda token: None)
    cached: list[int] = []
    growth = grown_bytes(lambda: cached.append(system.generate(prompt, 1, lambda token: None)), device)
    return Growth(system.name, len(prompt), growth, cached[0])


def growth_in_fresh_process(job: Job) -> Growth:
    """Run a job in a process of its own."""
    reply = in_fresh_process("penstock.bench.memory", asdict(job), f"the memory of {job.system}")
    return Growth(**{**reply, "system": SystemName(reply["system"])})


def _main() -> None:
    fields = json.load(sys.stdin)
    job = Job(**{**fields, "system": SystemName(fields["system"])})
    torch.set_num_threads(job.num_threads)
    source = open_weights(Path(job.model))
    names, dtype = [job.system], getattr(torch, job.dtype)
    system = load_systems(names, source, dtype, job.chunk, job.device)[job.system]
    source.close()
    print(json.dumps(asdict(measure_growth(system, job.prompt, chosen_device(job.device)))))


if __name__ == "__main__":
    _main()
