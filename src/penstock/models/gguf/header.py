"""A GGUF file's header: metadata and tensor table, read with every length checked against the file.

The gguf package's own reader trusts the file and takes seconds on a large vocabulary.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from penstock.errors import ModelFileError
from penstock.models.reading import reading

# Vocabularies of a quarter of a million tokens take some ten MiB.
MAX_HEADER_BYTES = 64 << 20
MAX_DIMS = 4

GgufValue = bool | int | float | str | list[str] | np.ndarray[tuple[int], np.dtype[np.generic]]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALAR_STRUCTS = {kind: struct.Struct("<" + code) for kind, code in _SCALARS.items()}
_STRING, _ARRAY = 8, 9
_ENDS_EARLY = "it ends within its header, or the header is absurdly large"
_NOT_UTF8 = "a string in its header is not UTF-8"
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # outermost first, as torch has it
    kind: GGMLQuantizationType
    start: int  # byte in the file
    num_bytes: int
    part: int = 0  # of the files of a model


@dataclass(frozen=True)
class GgufHeader:
    metadata: dict[str, GgufValue]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Parse and check the header. Takes time and memory in proportion to the header's size at most."""
    with reading(path), path.open("rb") as stream:
        return _Parser(path, stream, path.stat().st_size).header()


class _Parser:
    def __init__(self, path: Path, stream: BinaryIO, file_size: int) -> None:
        self.path = path
        self.stream = stream
        self.file_size = file_size
        self.left = min(file_size, MAX_HEADER_BYTES)  # bytes that the header may still take

    def header(self) -> GgufHeader:
        if self.take(4) != b"GGUF":
            raise ModelFileError(f"{self.path} is not a GGUF file")
        version = self.u32()
        if version & 0xFFFF == 0:
            raise self.damaged("it is big-endian, which is not supported")
        if version not in (2, 3):
            raise self.damaged(f"version {version} where 2 or 3 is accepted")
        num_tensors, num_keys = self.u64(), self.u64()
        metadata: dict[str, GgufValue] = {}
        for _ in range(self.bounded(num_keys, 13, "metadata keys")):
            key = self.string()
            if key in metadata:
                raise self.damaged(f"the key {key!r} is there twice")
            metadata[key] = self.value(self.u32())
        self.bounded(num_tensors, 32, "tensors")
        tensors = [self.tensor() for _ in range(num_tensors)]
        return GgufHeader(metadata, self.placed(tensors, self.alignment(metadata)))

    def take(self, count: int) -> bytes:
        data = self.stream.read(count) if count <= self.left else b""
        if len(data) != count:
            raise self.damaged(_ENDS_EARLY)
        self.left -= count
        return data

    def bounded(self, count: int, least_bytes: int, what: str) -> int:
        if count * least_bytes > self.left:
            raise self.damaged(f"{count} {what} are more than it has room for")
        return count

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def string(self) -> str:
        try:
            return self.take(self.u64()).decode()
        except UnicodeDecodeError as error:
            raise self.damaged(_NOT_UTF8) from error

    def value(self, kind: int) -> GgufValue:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.u32(), self.u64())
        scalar = _SCALAR_STRUCTS.get(kind)
        if scalar is None:
            raise self.damaged(f"a value of unknown type {kind}")
        number: bool | int | float = scalar.unpack(self.take(scalar.size))[0]
        return number

    def array(self, kind: int, count: int) -> GgufValue:
        if kind == _STRING:
            return self.strings(self.bounded(count, 8, "strings"))
        if kind not in _SCALARS:
            raise self.damaged(f"an array of unknown or nested type {kind}")
        dtype = np.dtype("<" + _SCALARS[kind])
        return np.frombuffer(self.take(self.bounded(count, dtype.itemsize, "values") * dtype.itemsize), dtype)

    def strings(self, count: int) -> list[str]:
        """As `string`, many times over: a vocabulary is most of a header."""
        read, unpack, left = self.stream.read, _U64.unpack, self.left
        found: list[str] = []
        try:
            for _ in range(count):
                (num_bytes,) = unpack(read(8))
                left -= 8 + num_bytes
                if left < 0:
                    raise self.damaged(_ENDS_EARLY)
                found.append(read(num_bytes).decode())
        except UnicodeDecodeError as error:
            raise self.damaged(_NOT_UTF8) from error
        except struct.error as error:
            raise self.damaged(_ENDS_EARLY) from error
        self.left = left
        return found

    def tensor(self) -> GgufTensor:
        name = self.string()
        num_dims = self.u32()
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.damaged(f"tensor {name!r} has {num_dims} dimensions")
        shape = tuple(self.u64() for _ in range(num_dims))[::-1]
        kind_id, start = self.u32(), self.u64()
        try:
            kind = GGMLQuantizationType(kind_id)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self.damaged(f"tensor {name!r} is of unknown type {kind_id}") from None
        # Python integers do not overflow, so a hostile product is simply larger than the file.
        num_bytes = math.prod(shape) // block * block_bytes
        if min(shape) < 1 or shape[-1] % block or num_bytes > self.file_size:
            raise self.damaged(f"tensor {name!r} has the impossible shape {list(shape)} for type {kind.name}")
        return GgufTensor(name, shape, kind, start, num_bytes)

    def alignment(self, metadata: dict[str, GgufValue]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.damaged(f"general.alignment is {alignment!r} where a power of two from 8 is needed")
        return alignment

    def placed(self, tensors: list[GgufTensor], alignment: int) -> dict[str, GgufTensor]:
        """Tensors by name, with places counted from the file's start: inside the file and without overlaps,
        which would let a small file ask for any amount of memory."""
        base = -(-self.stream.tell() // alignment) * alignment
        by_name: dict[str, GgufTensor] = {}
        end = base
        for tensor in sorted(tensors, key=lambda tensor: tensor.start):
            start = base + tensor.start
            if tensor.start % alignment or start < end or start + tensor.num_bytes > self.file_size:
                raise self.damaged(f"tensor {tensor.name!r} is misplaced or beyond the file's end")
            if tensor.name in by_name:
                raise self.damaged(f"tensor {tensor.name!r} is there twice")
            by_name[tensor.name] = GgufTensor(tensor.name, tensor.shape, tensor.kind, start, tensor.num_bytes)
            end = start + tensor.num_bytes
        return by_name

    def damaged(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is not a usable GGUF file: {what}")
