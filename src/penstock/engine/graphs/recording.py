"""How graphs are recorded, and what of their memory is seen from outside."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")
_recording = threading.Lock()  # one at a time, whoever records


class Recorder:
    """Records graphs that never run at the same time: what they need for a while is the same memory."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result]:
        """What `work` launches, as a graph; nothing runs. All that it launches must have run once before."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._stream.device)
        with _recording, torch.cuda.stream(self._stream), _without_garbage_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        return graph, result


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """What is collected may hold graphs and memory of a device's: giving those back spoils what is being recorded."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def borrowed(tensor: Tensor) -> Tensor:
    """The same numbers, without keeping their memory from being used again: by graphs that are recorded later, and
    run after whoever reads these."""
    storage = tensor.untyped_storage()
    # No public call makes a tensor of memory that others own.
    pointer = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), storage.device, storage.nbytes()
    )
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(pointer, tensor.storage_offset(), tensor.shape, tensor.stride())
