"""The disk store: full blocks, states and windows in files, for the next process that meets the same prefix.

It is a help and never a condition: whatever is wrong with its folder or its files is a warning, and the work is done
without them.
"""

import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from penstock.cache.keys import BlockKey
from penstock.cache.store.file import FileKind, FileLayout, FileName, TensorPart, blank_header, make_header
from penstock.cache.store.folder import set_aside, touch
from penstock.cache.store.limit import SizeLimit
from penstock.cache.store.output import FileToWrite, StoreOutput, StoreWriter, Warnings, size_of
from penstock.cache.tensors import CacheSpec
from penstock.files import open_plain
from penstock.plan.grids import BLOCK_TOKENS

_log = logging.getLogger("penstock.cache")

_QUEUE_BYTES = 256 << 20
# A file that is there and yet cannot be read. Other errors say nothing about the file: too many open ones, say.
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EIO, errno.EISDIR, errno.ENXIO)
_NUM_READERS = 2
_MOST_ASKED = 1 << 14  # keys, of a million tokens
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_WINDOW = "window"
_KEYS = "keys"
_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class StoredBlock:
    """Keys [num_layers, 64, num_kv_heads, head_dim] and values [..., value_dim] of a block for each K/V group without
    a window, mapped from its file. Latents are both."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class StoredState:
    """What a sequence goes on with after some blocks, mapped from its file: the recurrent state, tails [num_layers,
    conv_tail, conv_size] and matrices [num_layers, num_heads, key_dim, value_dim]; and of each K/V group that has a
    window its last blocks [window_blocks, block_elements], as `KVSpec.parts_of` has them."""

    tails: Tensor = _NOTHING
    matrices: Tensor = _NOTHING
    windows: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "StoredState":
        windows = (tensor for name, tensor in tensors.items() if name.startswith(_WINDOW))
        return cls(tensors.get("tails", _NOTHING), tensors.get("matrices", _NOTHING), tuple(windows))


@dataclass
class StoredPrefix:
    """Blocks [start, start + num_blocks) of a sequence, and the state after them. To be closed when they are copied:
    a file's memory is given back with the last of its tensors."""

    start: int
    blocks: tuple[StoredBlock, ...]
    state: StoredState | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def close(self) -> None:
        self.blocks = ()
        self.state = None


@dataclass(frozen=True)
class StoreStats:
    """What lies in the folder, of all models; and what this store did, in files."""

    bytes_on_disk: int
    max_bytes: int
    num_written: int
    num_evicted: int
    num_damaged: int
    num_dropped: int  # not written: the queue or the disk was full, or the folder could not be written


class BlockStore:
    """The files of one model in a cache folder, which other models and other processes use as well.

    Reading is for any thread. Writing is done by a thread of the store's own: `put_blocks` and `put_state` return at
    once, and what finds no room in the queue is dropped. Where the folder cannot be used, `is_usable` is False, and
    nothing is found or kept.
    """

    def __init__(
        self, folder: Path, fingerprint: bytes, spec: CacheSpec, *, max_bytes: int, about: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self._fingerprint = fingerprint.hex()
        self._layouts = _layouts_of(spec)
        self._whole_groups = [kv for kv in spec.kv_groups if not kv.window]
        self._lock = threading.Lock()  # of what follows
        self._num_damaged = self._num_refused = 0
        self._asked: OrderedDict[BlockKey, int] = OrderedDict()
        self._warnings = Warnings()
        self._limit = SizeLimit(folder, max_bytes)
        self._output = StoreOutput(folder, self._fingerprint, about, self._limit, self._warnings)
        self._writer = StoreWriter(_QUEUE_BYTES)
        self._readers = ThreadPoolExecutor(_NUM_READERS, "penstock-store-reader")
        self.is_usable = self._output.open()

    @property
    def keeps_states(self) -> bool:
        """Whether blocks of this model are of use only with a state or windows after them."""
        return FileKind.STATE in self._layouts

    def find(self, keys: Sequence[BlockKey], start: int, *, needs_state: bool) -> StoredPrefix | None:
        """The blocks from `start` on that are on disk and whole, as far as they go without a gap; with `needs_state`
        only up to the last one after which there is a state. None where there are none.

        `keys` are all of the sequence: what is on disk of them counts as used now, before `start` too.
        """
        if not self.is_usable:
            return None
        end = start
        while end < len(keys) and self._has(FileKind.BLOCK, end, keys[end]):
            end += 1
        self._note_use(keys, end)
        if needs_state:
            return self._find_with_state(keys, start, end)
        blocks = self._read_blocks(keys, start, end)
        return StoredPrefix(start, tuple(blocks)) if blocks else None

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much more may wait to be written now."""
        return self.is_usable and self._writer.has_room(num_bytes)

    def give_up(self, num_blocks: int) -> None:
        """So many blocks found no room while there was time for them."""
        with self._lock:
            self._num_refused += num_blocks
        self._warn_slow()

    def put_blocks(self, start: int, keys: Sequence[BlockKey], kv: Sequence[Tensor]) -> bool:
        """Keep blocks [start, start + len(keys)) of a sequence: of each K/V group [num_blocks, block_elements] on the
        CPU, as `KVSpec.parts_of` has them, and nobody else's from now on. Those on disk stay as they are. False where
        too much waits to be written: it may be tried again."""
        for index, (group, given) in enumerate(zip(self._whole_groups, kv, strict=True)):
            _check(_group_names(index)[0], given, (len(keys), group.block_elements), group.dtype)
        names = [FileName.of(FileKind.BLOCK, start + place, key) for place, key in enumerate(keys)]
        data = zip(*(_bytes_of(group) for group in kv), strict=True)  # of each block, its groups
        return self._put(names, keys, [list(pieces) for pieces in data])

    def put_state(self, index: int, key: BlockKey, kept: StoredState) -> None:
        """Keep the state and the windows after `index` blocks, the last of which has this key. The tensors are on the
        CPU, and nobody else's from now on."""
        if not self.keeps_states:
            raise ValueError("this model has no recurrent state and no windows to keep")
        parts = self._layouts[FileKind.STATE].parts
        given = {"matrices": kept.matrices, "tails": kept.tails}
        names = [part.name for part in parts if part.name not in given]
        given |= dict(zip(names, kept.windows, strict=True))
        data = []
        for part in parts:
            _check(part.name, given[part.name], part.shape, _DTYPES[part.dtype])
            data.append(_bytes_of(given[part.name].unsqueeze(0))[0])
        self._put([FileName.of(FileKind.STATE, index, key)], [key], [data])

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was put before is on disk, or dropped; whether it is by then."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is waiting, but for no longer than that, and end the threads. Nothing is found or kept then."""
        self.is_usable = False
        if not self._writer.close(timeout_s):
            _log.warning("%g s did not suffice to write to %s: the rest is not kept", timeout_s, self.folder)
        self._readers.shutdown()

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                bytes_on_disk=self._limit.num_bytes,
                max_bytes=self._limit.max_bytes,
                num_written=self._output.num_written,
                num_evicted=self._limit.num_evicted,
                num_damaged=self._num_damaged,
                num_dropped=self._output.num_dropped + self._num_refused,
            )

    def _find_with_state(self, keys: Sequence[BlockKey], start: int, end: int) -> StoredPrefix | None:
        """The same, where blocks [start, end) are there. States are looked for first, so that no more blocks are read
        than can be used."""
        blocks: list[StoredBlock] = []  # from `start` on
        for num_blocks in range(end, start, -1):
            key = keys[num_blocks - 1]
            if num_blocks > end or not self._has(FileKind.STATE, num_blocks, key):
                continue
            state = self._read(FileKind.STATE, num_blocks, key)
            if state is None:
                continue
            blocks += self._read_blocks(keys, start + len(blocks), num_blocks)
            if start + len(blocks) >= num_blocks:
                return StoredPrefix(start, tuple(blocks[: num_blocks - start]), StoredState.of(state))
            end = start + len(blocks)  # the next block is damaged: an earlier state may do
        return None

    def _has(self, kind: FileKind, index: int, key: BlockKey) -> bool:
        return size_of(self._output.path(FileName.of(kind, index, key))) is not None

    def _read_blocks(self, keys: Sequence[BlockKey], start: int, end: int) -> list[StoredBlock]:
        """Those of blocks [start, end) before the first that is missing or damaged."""
        read = partial(self._read, FileKind.BLOCK)
        try:  # hashing leaves Python's lock to others, so two threads take half the time
            found = list(self._readers.map(read, range(start, end), keys[start:end]))
        except RuntimeError:  # the store was closed in between
            return []
        blocks: list[StoredBlock] = []
        for tensors in found:
            if tensors is None:
                break
            parts = iter(tensors.values())
            groups = [[next(parts) for _ in range(group.num_parts)] for group in self._whole_groups]
            blocks.append(
                StoredBlock(tuple(group[0] for group in groups), tuple(group[-1] for group in groups))
            )
        return blocks

    def _read(self, kind: FileKind, index: int, key: BlockKey) -> dict[str, Tensor] | None:
        """The tensors of a file. None where it is not there, or not what it should be: then it is set aside."""
        name = FileName.of(kind, index, key)
        path = self._output.path(name)
        try:
            tensors = _map_file(path, name, self._fingerprint, self._layouts[kind])
        except OSError as error:
            if error.errno not in _UNREADABLE:
                return None
            tensors = None
        except RuntimeError:
            return None
        if tensors is None:
            self._warnings.say("damaged", "%s is damaged: what it held is computed again", path)
            with self._lock:  # another thread may have met it too
                self._num_damaged += set_aside(path)
        return tensors

    def _put(self, names: list[FileName], keys: Sequence[BlockKey], data: list[list[memoryview]]) -> bool:
        if not self.is_usable:
            return True
        now_ns = time.time_ns()
        with self._lock:
            used_ns = [self._asked.get(key, now_ns) for key in keys]
        files = [
            FileToWrite(name, self._layouts[name.kind], pieces, used)
            for name, pieces, used in zip(names, data, used_ns, strict=True)
        ]
        num_bytes = sum(file.layout.num_bytes for file in files)
        if not self._writer.put(num_bytes, partial(self._output.write, files)):
            with self._lock:
                self._num_refused += len(files)
            self._warn_slow()
            return False
        return True

    def _warn_slow(self) -> None:
        self._warnings.say(
            "queue", "%s is written too slowly: some of what was read is not kept", self.folder
        )

    def _note_use(self, keys: Sequence[BlockKey], end: int) -> None:
        """All blocks of a prefix are used when it is asked for: those on disk now, and those that come to be written.
        Had each the time when it was written, a prefix would be evicted from its head on."""
        now_ns = time.time_ns()
        with self._lock:
            for key in keys:
                self._asked[key] = now_ns
                self._asked.move_to_end(key)
            while len(self._asked) > _MOST_ASKED:
                self._asked.popitem(last=False)
        if end:
            self._writer.put(0, partial(self._touch, keys[:end], now_ns))

    def _touch(self, keys: Sequence[BlockKey], used_ns: int) -> None:
        for index, key in enumerate(keys):
            touch(self._output.path(FileName.of(FileKind.BLOCK, index, key)), used_ns)
            if FileKind.STATE in self._layouts:
                touch(self._output.path(FileName.of(FileKind.STATE, index + 1, key)), used_ns)


def _group_names(group: int) -> tuple[str, str]:
    """What the keys and values of a K/V group are called in a file."""
    number = f".{group}" if group else ""
    return f"{_KEYS}{number}", f"values{number}"


def _layouts_of(spec: CacheSpec) -> dict[FileKind, FileLayout]:
    """What the files of a model hold."""
    parts: list[TensorPart] = []
    state: list[TensorPart] = []
    if (recurrent := spec.recurrent) is not None:
        state.append(TensorPart("matrices", "F32", (recurrent.num_layers, *recurrent.matrix_shape)))
        tails = (recurrent.num_layers, *recurrent.tail_shape)
        state.append(TensorPart("tails", _NAMES[recurrent.dtype], tails))
    for index, kv in enumerate(spec.kv_groups):
        if kv.window:
            shape = (kv.window_blocks, kv.block_elements)
            state.append(TensorPart(f"{_WINDOW}.{index}", _NAMES[kv.dtype], shape))
            continue
        for name, sizes in zip(_group_names(index)[: kv.num_parts], kv.shapes, strict=False):
            parts.append(TensorPart(name, _NAMES[kv.dtype], (kv.num_layers, BLOCK_TOKENS, *sizes)))
    layouts = {FileKind.BLOCK: FileLayout(tuple(parts))}
    if state:
        # The longer items first: what follows them is then aligned as well.
        state.sort(key=lambda part: _DTYPES[part.dtype].itemsize, reverse=True)
        layouts[FileKind.STATE] = FileLayout(tuple(state))
    return layouts


def _map_file(path: Path, name: FileName, fingerprint: str, layout: FileLayout) -> dict[str, Tensor] | None:
    """The tensors of a file by name, mapped and checked; None where it is damaged or not of this kind. OSError where
    it cannot be read, RuntimeError where it goes while it is opened."""
    start = len(blank_header(name, fingerprint, layout))
    file = open_plain(path)
    try:
        found = os.fstat(file)
        if found.st_size != start + layout.num_bytes:
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


def _bytes_of(tensor: Tensor) -> list[memoryview]:
    """The bytes of each tensor[i], without a copy where they are contiguous."""
    if not tensor.numel():
        return [memoryview(b"")] * len(tensor)
    flat = tensor.contiguous().view(len(tensor), -1).view(torch.uint8).numpy()
    return [row.data for row in flat]


def _check(name: str, given: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if given.shape != shape or given.dtype != dtype or not given.is_cpu:
        raise ValueError(
            f"{name} to keep must be {dtype} {list(shape)} on cpu, "
            f"not {given.dtype} {list(given.shape)} on {given.device}"
        )
