"""Reading a large file piece by piece.

Not by memory map: a mapped page counts as this process's memory, and a file cut short under a map is a crash.
"""

import re
from itertools import cycle
from pathlib import Path
from threading import Lock

import torch

from penstock.errors import ModelFileError
from penstock.kernels.device import device_kind
from penstock.models.reading import reading

# Large enough for the disk, small enough to stay in a CPU's cache between the read and the conversion.
SLICE_BYTES = 4 << 20
# The name of the first of several files.
_PART = re.compile(r"(.*-)00001(-of-)([0-9]{5})(\.gguf)")


def parts_of(path: Path) -> list[Path]:
    """The files of a model in one file, or in several, of which this is the first; whether they are there or not."""
    if (found := _PART.fullmatch(path.name)) is None:
        return [path]
    stem, of, count, ending = found.groups()
    return [path.with_name(f"{stem}{index:05}{of}{count}{ending}") for index in range(1, int(count) + 1)] or [
        path
    ]


class ByteFile:
    """A file that is read at given places."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()  # threads may read: a place and what lies there are one
        with reading(path):
            self._stream = path.open("rb", buffering=0)

    def read_into(self, start: int, buffer: torch.Tensor) -> None:
        """Fill `buffer` (uint8, contiguous, on the CPU) with the bytes from `start` on."""
        view = memoryview(buffer.numpy().data)
        with reading(self.path), self._lock:
            self._stream.seek(start)
            while view:
                count = self._stream.readinto(view)
                if not count:
                    raise ModelFileError(f"{self.path} ends early, {len(view)} bytes before a tensor does")
                view = view[count:]

    def close(self) -> None:
        self._stream.close()


def copy_plain(file: ByteFile, start: int, stored: torch.dtype, out: torch.Tensor) -> None:
    """Fill `out` with the row-major elements of type `stored` that begin at byte `start`."""
    if out.numel() == 0:
        return
    rows = out.detach() if out.dim() else out.detach().view(1)
    if rows.dtype == stored and rows.is_cpu and rows.is_contiguous():
        file.read_into(start, rows.view(-1).view(torch.uint8))
        return
    row_bytes = rows[0].numel() * stored.itemsize
    num_rows = min(max(1, SLICE_BYTES // row_bytes), rows.shape[0])
    places = cycle(_places(num_rows * row_bytes, rows.device))
    for first in range(0, rows.shape[0], num_rows):
        part = rows[first : first + num_rows]
        place = next(places)
        raw = place.part(part.shape[0] * row_bytes)
        file.read_into(start + first * row_bytes, raw)
        place.copy(raw.view(stored).view(part.shape), part)


class _Place:
    """Where a slice of a file lies on its way to a tensor."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)

    def part(self, num_bytes: int) -> torch.Tensor:
        """So many bytes of it, of which nobody needs what they hold."""
        return self._buffer[:num_bytes]

    def copy(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values)


class _PinnedPlace(_Place):
    """The same on the way to a GPU, which fetches it by itself and converts it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.current_stream(device)
        self._fetched = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def part(self, num_bytes: int) -> torch.Tensor:
        self._fetched.synchronize()
        return super().part(num_bytes)

    def copy(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values.to(out.device, non_blocking=True))
        self._fetched.record(self._stream)


def _places(num_bytes: int, device: torch.device) -> list[_Place]:
    """Two on the way to a GPU: one slice is read while the one before is fetched."""
    if device_kind(device).copies_pinned:
        return [_PinnedPlace(num_bytes, device) for _ in range(2)]
    return [_Place(num_bytes)]
