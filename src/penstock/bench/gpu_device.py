"""The device that is measured: its clock, its memory, and what it is called."""

import gc
import importlib.metadata
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.errors import SettingError

_PACKAGES = {"triton": "triton", "flash_linear_attention": "fla-core"}


@dataclass(frozen=True)
class Card:
    """A GPU, and the software that only matters on one."""

    name: str
    memory_bytes: int
    driver: str | None
    cuda: str | None
    cudnn: int | None
    triton: str | None
    flash_linear_attention: str | None


def require_gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise SettingError("there is no NVIDIA GPU that torch can use: `bench gpu` measures on one")
    return torch.device("cuda")


def this_card(device: torch.device) -> Card:
    packages = {name: _version(package) for name, package in _PACKAGES.items()}
    if device.type != "cuda":
        return Card(str(device), 0, None, None, None, **packages)
    properties = torch.cuda.get_device_properties(device)
    return Card(
        properties.name,
        properties.total_memory,
        _driver(),
        torch.version.cuda,
        torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        **packages,
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(device: torch.device, work: Callable[[], object]) -> float:
    """From when the device has nothing to do until it has nothing to do again."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return 1e3 * (time.perf_counter() - started)


def free_memory(device: torch.device) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def free_workspaces(device: torch.device) -> None:
    """Give back what libraries keep, too. There must be no graph: it would go on to use its work space."""
    free_memory(device)
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def allocated_bytes(device: torch.device) -> int:
    """What is allocated now; from now on the peak is counted."""
    _require_allocator(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    _require_allocator(device)
    return torch.cuda.max_memory_allocated(device)


def reserved_bytes(device: torch.device) -> int:
    """What the allocator has taken from the device, for graphs and for what may be allocated again."""
    _require_allocator(device)
    return torch.cuda.memory_reserved(device)


def _require_allocator(device: torch.device) -> None:
    if device.type != "cuda":
        raise SettingError(f"device {str(device)!r} has no allocator that counts: memory is measured on cuda")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None
