"""What a device is to the engine: one class for each kind. No other file asks which kind a device is of."""

import platform
import traceback
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock import machine, process_memory
from penstock.errors import SettingError
from penstock.kernels.threads import num_threads
from penstock.plan.grids import DEFAULT_CHUNK_SIZE, GPU_CHUNK_SIZE
from penstock.plan.settings import DevicesFound, resolve_device, settle_device
from penstock.plan.step import KernelKind

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_HOPPER = 9
# What torch sets aside for cuBLAS, for each stream that has products.
_CUBLAS_BYTES, _CUBLAS_BYTES_HOPPER = 8320 << 10, 32 << 20


class DeviceKind:
    """A device. What stands here is a processor's; other kinds say what differs."""

    name = "cpu"
    kernels: KernelKind = "native"  # the best that there are for it
    is_host = True  # its tensors are the host's own memory
    has_own_memory = False  # that no other program takes, counted by torch's allocator
    takes_quantised = True  # it can have kernels for quantised weights
    draws = False  # samples whole steps by itself; else the host does, row by row
    records = False  # launches can be recorded as graphs
    copies_pinned = False  # it fetches pinned memory while the host goes on
    steps_in_flight = 1  # that are launched before the host waits for the first
    default_chunk = DEFAULT_CHUNK_SIZE
    probes_every_count = False  # products are tried with every number of rows that they will run with

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # Work

    def use(self) -> None:
        """Let the calling thread launch its work here."""

    def synchronize(self) -> None:
        """Return once all that was launched is done."""

    def marker(self) -> Callable[[], None] | None:
        """Waits for all that was launched by now, and for nothing after it. None: all of it is done."""
        return None

    # Memory

    def release(self, error: BaseException | None = None) -> None:
        """Give back what nobody holds any more, and what an error's stack holds."""
        if error is not None:
            traceback.clear_frames(error.__traceback__)
        self._empty_cache()

    def _empty_cache(self) -> None:
        pass

    def free_bytes(self) -> int | None:
        """Memory that could be taken without others having to give it up; None where the system does not tell."""
        return machine.free_memory_bytes()

    def memory_bytes(self) -> int | None:
        """What this process takes of it now; None where the system does not tell."""
        return process_memory.resident_bytes()

    def peak_bytes(self) -> int:
        """The most that was taken since the last `reset_peak`."""
        return process_memory.peak_resident_bytes()

    def reset_peak(self) -> bool:
        """Start measuring the peak anew. False where the system cannot."""
        return process_memory.reset_peak()

    # Numbers on their way from the host

    def copied(self, array: NDArray[np.int64]) -> Tensor:
        """The array as a tensor here, without waiting for the copy."""
        return self._staged(array).to(self.device, non_blocking=True)

    def all_copied(self, arrays: Sequence[NDArray[np.int64]]) -> Sequence[Tensor]:
        """The same for several, with one copy for all of them."""
        if self.is_host:
            return [torch.from_numpy(array) for array in arrays]
        return torch.split(self.copied(np.concatenate(arrays)), [len(array) for array in arrays])

    def fill(self, tensor: Tensor, array: NDArray[np.int64]) -> None:
        """Copy the array into a tensor of its shape, without waiting."""
        tensor.copy_(self._staged(array), non_blocking=True)

    def _staged(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))

    def fetched(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Copy a tensor to the host, behind what was launched by now and before all that is later; how to wait for
        it."""
        return tensor.cpu

    # What bits and times depend on

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a name; `auto` is bfloat16 where that is computed natively, else float32."""
        if name == "auto":
            return torch.bfloat16 if self._has_native_bfloat16() else torch.float32
        if name not in _DTYPES:
            raise SettingError("dtype", name, f"one of auto, {', '.join(_DTYPES)}")
        return _DTYPES[name]

    def _has_native_bfloat16(self) -> bool:
        if machine.instruction_set(machine.processor_flags()) in ("avx512", "avx2", "neon"):
            return False
        if hasattr(torch.cpu, "get_capabilities"):
            capabilities = torch.cpu.get_capabilities()
            return any(
                capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
            )
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA's, where it has it."""
        return None

    @property
    def library_bytes(self) -> int:
        """What libraries set aside once there are products."""
        return 0

    @property
    def num_threads(self) -> int:
        """Threads that share its work; 0 where there are none."""
        return num_threads()

    @property
    def product_name(self) -> str:
        return f"{self.name}: {machine.processor_name()}"

    @property
    def features(self) -> str:
        """All that its libraries may choose their code by."""
        facts = sorted(set(machine.processor_lines("model name", "model\t", "flags", "Features")))
        capability = torch.backends.cpu.get_cpu_capability()
        return "|".join([platform.machine(), platform.processor(), capability, *facts])


class _Cuda(DeviceKind):
    """A GPU of NVIDIA's. It runs behind the host: while it computes one step, the next is launched."""

    name = "cuda"
    kernels = "cuda"
    is_host = False
    has_own_memory = True
    draws = True
    records = True
    copies_pinned = True
    steps_in_flight = 2
    default_chunk = GPU_CHUNK_SIZE
    probes_every_count = True
    num_threads = 0

    @property
    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.device)

    @property
    def library_bytes(self) -> int:
        """For the usual stream, and for that on which steps are recorded."""
        return 2 * (_CUBLAS_BYTES_HOPPER if self.capability[0] >= _HOPPER else _CUBLAS_BYTES)

    def use(self) -> None:
        torch.cuda.set_device(self.device)  # a thread has the first GPU until it says otherwise

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def marker(self) -> Callable[[], None]:
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def fetched(self, tensor: Tensor) -> Callable[[], Tensor]:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        wait = self.marker()

        def fetch() -> Tensor:
            wait()
            return pinned

        return fetch

    def _empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free_bytes + unused

    def memory_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> bool:
        torch.cuda.reset_peak_memory_stats(self.device)
        return True

    def _staged(self, array: NDArray[np.int64]) -> Tensor:
        pinned = torch.empty(array.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        pinned.numpy()[...] = array  # torch would wake all its threads for a long one, which takes longer
        return pinned

    def _has_native_bfloat16(self) -> bool:
        with torch.cuda.device(self.device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    @property
    def product_name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def features(self) -> str:
        about = torch.cuda.get_device_properties(self.device)
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        size = f"{about.multi_processor_count} multiprocessors, {about.total_memory} bytes"
        return f"{about.name}, {size}, CUDA {torch.version.cuda}, cuDNN {cudnn}"


class _Mps(DeviceKind):
    """A GPU of Apple's, which shares the machine's memory. It does not compute in float64, so the host draws."""

    name = "mps"
    kernels = "torch"
    is_host = False
    takes_quantised = False
    num_threads = 0

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def marker(self) -> Callable[[], None]:
        return self.synchronize

    def _empty_cache(self) -> None:
        torch.mps.empty_cache()

    def _has_native_bfloat16(self) -> bool:
        return False

    @property
    def features(self) -> str:
        return f"{self.name}, {platform.platform()}"


DEVICE_KINDS: dict[str, type[DeviceKind]] = {kind.name: kind for kind in (DeviceKind, _Cuda, _Mps)}


@cache
def device_kind(device: torch.device) -> DeviceKind:
    """What the device is; one of another kind is an error."""
    kind = DEVICE_KINDS.get(device.type)
    if kind is None:
        raise SettingError(
            "device", str(device), f"one of {', '.join(DEVICE_KINDS)}", because="there are no kernels for it"
        )
    return kind(device)


def find_devices() -> DevicesFound:
    """What torch sees, and can use."""
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return DevicesFound(num_cuda, torch.backends.mps.is_available())


def chosen_device(argument: str | None = None) -> torch.device:
    """What the argument, else `PENSTOCK_DEVICE`, else `auto` comes to here."""
    return torch.device(settle_device(resolve_device(argument), find_devices()).name)
