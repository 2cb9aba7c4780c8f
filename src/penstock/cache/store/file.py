"""One file of the disk store: its name, its header, and whether it holds what it says. No tensors here.

A file is a safetensors file like any other. Its header is a function of what it holds, so a reader hashes the data,
makes the header that belongs to it, and compares: a change anywhere in the file shows. The checksum, `sha256` in the
header, is of the data and then of the header with zeros in the checksum's place.
"""

import json
import re
import stat
import struct
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from penstock.files import open_plain

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

FORMAT = "penstock cache 1"
# Tensors begin where a processor likes them to: the header is filled up with spaces to a multiple of this.
_ALIGNMENT_BYTES = 64
_SLICE_BYTES = 4 << 20
_NO_DIGEST = "0" * 64
_DIGEST_START = b'"sha256":"'
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_NAME = re.compile(r"([0-9]{8})-([0-9a-f]{2,128})(\.state)?\.safetensors", re.ASCII)


class FileKind(StrEnum):
    BLOCK = "block"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class FileName:
    """What a file is called by: a block and its place in its sequence, or the state after so many blocks."""

    kind: FileKind
    index: int
    key: str  # in hexadecimal

    @classmethod
    def of(cls, kind: FileKind, index: int, key: bytes) -> "FileName":
        return cls(kind, index, key.hex())

    @classmethod
    def parse(cls, text: str) -> "FileName | None":
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        return cls(FileKind.STATE if match[3] else FileKind.BLOCK, int(match[1]), match[2])

    def __str__(self) -> str:
        return f"{self.index:08d}-{self.key}{'.state' if self.kind is FileKind.STATE else ''}.safetensors"

    @property
    def num_blocks(self) -> int:
        """The length of the prefix that the file ends, in blocks."""
        return self.index + 1 if self.kind is FileKind.BLOCK else self.index


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor of a file; its dtype is as safetensors calls it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The tensors of a file, one after the other without gaps."""

    parts: tuple[TensorPart, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def make_header(name: FileName, fingerprint: str, layout: FileLayout, data: "Hash") -> bytes:
    """All that comes before the data, which was hashed."""
    blank = blank_header(name, fingerprint, layout)
    digest = data.copy()
    digest.update(blank)
    start = blank.index(_DIGEST_START) + len(_DIGEST_START)
    return blank[:start] + digest.hexdigest().encode() + blank[start + len(_NO_DIGEST) :]


def blank_header(name: FileName, fingerprint: str, layout: FileLayout) -> bytes:
    """The same with zeros for a checksum: as long as every header of such a file."""
    table: dict[str, object] = {
        "__metadata__": {
            "format": FORMAT,
            "kind": name.kind.value,
            "index": str(name.index),
            "key": name.key,
            "fingerprint": fingerprint,
            "sha256": _NO_DIGEST,
        }
    }
    start = 0
    for part in layout.parts:
        end = start + part.num_bytes
        table[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


def find_damage(path: Path, name: FileName) -> str | None:
    """What is wrong with a file in its model's folder, None where it is whole. All is judged by the file itself, so
    that no model is needed. OSError where it cannot be read."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        return "it is no plain file"
    try:
        with safe_open(path, framework="np") as file:
            fingerprint = (file.metadata() or {}).get("fingerprint", "")
            slices = {part: file.get_slice(part) for part in file.offset_keys()}
        parts = [TensorPart(part, kept.get_dtype(), tuple(kept.get_shape())) for part, kept in slices.items()]
        layout = FileLayout(tuple(parts))
        blank = blank_header(name, fingerprint, layout)
    except (SafetensorError, KeyError):  # of a dtype that no cache has
        return "it is no safetensors file of a cache"
    if not fingerprint.startswith(path.parent.name):
        return "it is of another model"
    if found.st_size != len(blank) + layout.num_bytes:
        return f"it has {found.st_size} bytes in place of {len(blank) + layout.num_bytes}"
    data = sha256()
    with open(open_plain(path), "rb") as file:
        header = file.read(len(blank))
        while piece := file.read(_SLICE_BYTES):
            data.update(piece)
    if header != make_header(name, fingerprint, layout, data):
        return "its bytes are not those that were written"
    return None
