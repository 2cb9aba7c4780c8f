"""Between the tensors that a model caches and the bytes of the store's files."""

import os
import stat
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from penstock.cache.store.file import FileKind, FileLayout, FileName, TensorPart, blank_header, make_header
from penstock.cache.tensors import CacheSpec
from penstock.plan.grids import BLOCK_TOKENS

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class StoredBlock:
    """Keys and values of a block for each K/V group, each [num_layers, 64, num_kv_heads, head_dim], mapped from its
    file."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class StoredState:
    """The recurrent state after some blocks: tails [num_layers, conv_tail, conv_size] and matrices [num_layers,
    num_heads, key_dim, value_dim], mapped from its file."""

    tails: Tensor
    matrices: Tensor


def group_names(group: int) -> tuple[str, str]:
    """What the keys and values of a K/V group are called in a file."""
    number = f".{group}" if group else ""
    return f"keys{number}", f"values{number}"


def layouts_of(spec: CacheSpec) -> dict[FileKind, FileLayout]:
    """What the files of a model hold."""
    parts: list[TensorPart] = []
    for index, kv in enumerate(spec.kv_groups):
        shape = (kv.num_layers, BLOCK_TOKENS, kv.num_kv_heads, kv.head_dim)
        parts += [TensorPart(name, _NAMES[kv.dtype], shape) for name in group_names(index)]
    layouts = {FileKind.BLOCK: FileLayout(tuple(parts))}
    recurrent = spec.recurrent
    if recurrent is not None:
        matrices = (recurrent.num_layers, *recurrent.matrix_shape)
        tails = (recurrent.num_layers, *recurrent.tail_shape)
        # The longer items first: what follows them is then aligned as well.
        layouts[FileKind.STATE] = FileLayout(
            (TensorPart("matrices", "F32", matrices), TensorPart("tails", _NAMES[recurrent.dtype], tails))
        )
    return layouts


def map_file(path: Path, name: FileName, fingerprint: str, layout: FileLayout) -> dict[str, Tensor] | None:
    """The tensors of a file by name, mapped and checked; None where it is damaged or not of this kind. OSError where
    it cannot be read, RuntimeError where it goes while it is opened."""
    start = len(blank_header(name, fingerprint, layout))
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size != start + layout.num_bytes:
            return None
        # torch's map keeps no file open, of which a process may have few. It is private, and nobody writes to it.
        mapped = torch.from_file(str(path), shared=False, size=found.st_size, dtype=torch.uint8)
    finally:
        os.close(file)
    held = mapped.numpy().data
    if held[:start].tobytes() != make_header(name, fingerprint, layout, sha256(held[start:])):
        return None
    tensors: dict[str, Tensor] = {}
    for part in layout.parts:
        data = mapped[start : start + part.num_bytes]
        tensors[part.name] = data.view(_DTYPES[part.dtype]).view(part.shape)
        start += part.num_bytes
    return tensors


def bytes_of(tensor: Tensor) -> list[memoryview]:
    """The bytes of each tensor[i], without a copy where they are contiguous."""
    if not tensor.numel():
        return [memoryview(b"")] * len(tensor)
    flat = tensor.contiguous().view(len(tensor), -1).view(torch.uint8).numpy()
    return [row.data for row in flat]


def check_part(part: TensorPart, given: Tensor, num_parts: tuple[int, ...] = ()) -> None:
    """ValueError unless this is a part of a file, or as many as `num_parts` says."""
    shape, dtype = (*num_parts, *part.shape), _DTYPES[part.dtype]
    if given.shape != shape or given.dtype != dtype or not given.is_cpu:
        raise ValueError(
            f"{part.name} to keep must be {dtype} {list(shape)} on cpu, "
            f"not {given.dtype} {list(given.shape)} on {given.device}"
        )
