"""How kernels in Triton are launched, and what a program may have of a GPU."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from penstock.kernels.device import device_kind

_EARLY_CAPABILITY = (9, 0)
_MOST_EARLY_ROWS = 32
_EARLY: Mapping[str, bool] = {"IS_EARLY": True, "launch_pdl": True}
_HOPPER_SHARED_BYTES, _HOPPER_MULTIPROCESSORS = 232_448, 132


class KeptKernel:
    """A kernel, launched by its compiled form: finding that anew takes the host longer than the launch."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def launch(
        self,
        key: Hashable,
        grid: tuple[int, int, int],
        args: Sequence[object],
        constants: Mapping[str, object],
        **options: int,
    ) -> None:
        """`args` and then `constants` are in the order of the kernel's own. Calls with the same key differ in nothing
        that Triton compiles a kernel anew for: constants, types, alignment, numbers that it takes for constants."""
        found = self._compiled.get(key)
        if found is None:
            # The interpreter gives nothing to keep.
            self._compiled[key] = self._kernel[grid](*args, **constants, **options)
        else:
            found[grid](*args, *constants.values())


def early(device: torch.device, num_rows: int) -> Mapping[str, bool]:
    """Options of kernels over so many rows that wait by `await_others`: they are launched while the ones ahead end,
    where GPUs can, and as long as most of the time goes into launches and not into what they do."""
    return _EARLY if num_rows <= _MOST_EARLY_ROWS and _can_be_early(device) else {}


@cache
def _can_be_early(device: torch.device) -> bool:
    return (device_kind(device).capability or (0, 0)) >= _EARLY_CAPABILITY


class SideStream:
    """Where a GPU runs what is launched at the same time as what is launched after it, until they are joined."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_forked = False

    @contextmanager
    def fork(self, is_wanted: bool) -> Iterator[None]:
        """What is launched within comes after all that was launched before. What it reads must not be given back
        before `join`."""
        if not is_wanted or device_kind(self._device).capability is None:  # the interpreter has none
            yield
            return
        stream = _side_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        self._is_forked = True
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """What is launched from now on comes after all that."""
        if self._is_forked:
            torch.cuda.current_stream(self._device).wait_stream(_side_stream(self._device))
            self._is_forked = False


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def shared_bytes(device: torch.device) -> int:
    """What a program may have of a multiprocessor's memory."""
    return _property(device, "max_shared_mem", _HOPPER_SHARED_BYTES)


@cache
def num_multiprocessors(device: torch.device) -> int:
    return _property(device, "multiprocessor_count", _HOPPER_MULTIPROCESSORS)


def _property(device: torch.device, name: str, of_hopper: int) -> int:
    """Of a GPU; where kernels are interpreted, of Hopper's."""
    if device_kind(device).capability is None:
        return of_hopper
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)[name])


def precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
