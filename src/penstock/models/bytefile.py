"""Reading a large file piece by piece.

Not by memory map: a mapped page counts as this process's memory, and a file cut short under a map is a crash.
"""

from pathlib import Path

import torch

from penstock.errors import ModelFileError
from penstock.models.reading import reading

# Large enough for the disk, small enough to stay in a CPU's cache between the read and the conversion.
SLICE_BYTES = 4 << 20


class ByteFile:
    """A file that is read at given places."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            self._stream = path.open("rb", buffering=0)

    def read_into(self, start: int, buffer: torch.Tensor) -> None:
        """Fill `buffer` (uint8, contiguous, on the CPU) with the bytes from `start` on."""
        view = memoryview(buffer.numpy().data)
        with reading(self.path):
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
    if rows.dtype == stored and rows.device.type == "cpu" and rows.is_contiguous():
        file.read_into(start, rows.view(-1).view(torch.uint8))
        return
    row_bytes = rows[0].numel() * stored.itemsize
    num_rows = max(1, SLICE_BYTES // row_bytes)
    buffer = torch.empty(min(num_rows, rows.shape[0]) * row_bytes, dtype=torch.uint8)
    for first in range(0, rows.shape[0], num_rows):
        part = rows[first : first + num_rows]
        raw = buffer[: part.shape[0] * row_bytes]
        file.read_into(start + first * row_bytes, raw)
        part.copy_(raw.view(stored).view(part.shape))
