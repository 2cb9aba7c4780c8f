"""Blocks on disk of a model in stages: each stage keeps its layers' part, in files of its own, and what counts is
what all of them have. Which blocks are kept and looked for, the driver says."""

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from penstock.cache.keys import KEY_BYTES, BlockKey
from penstock.cache.store.block_store import BlockStore, StoredPrefix
from penstock.cache.tensors import CacheSpec, CacheTensors
from penstock.cache.transfer import copy_in, copy_kept_in, copy_kept_out, copy_out
from penstock.engine.stages.control import Control, Message

_log = logging.getLogger("penstock.engine")


def stage_fingerprint(fingerprint: bytes, layers: range) -> bytes:
    """What names a stage's part of a model's blocks."""
    return sha256(fingerprint + f"{layers.start}:{layers.stop}".encode()).digest()


def joined_keys(keys: Sequence[BlockKey]) -> bytes:
    return b"".join(keys)


def _keys_of(data: bytearray) -> list[BlockKey]:
    if len(data) % KEY_BYTES:
        raise ValueError(f"keys of {len(data)} bytes")
    return [bytes(data[start : start + KEY_BYTES]) for start in range(0, len(data), KEY_BYTES)]


@dataclass(frozen=True)
class Ticket:
    """What all stages have found of a prompt, and hold until it is copied or given up."""

    number: int
    generation: int


class StageStore:
    """A worker's part. Nothing is kept before `open`; what is looked for earlier is found after it."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._store: BlockStore | None = None
        self._found: dict[int, StoredPrefix] = {}
        self._is_open = threading.Event()
        # Files are looked at beside the steps.
        self._finder = ThreadPoolExecutor(1, "stage-finder")

    def open(self, about: Mapping[str, Any], fingerprint: bytearray, spec: CacheSpec) -> None:
        self._store = BlockStore(
            Path(about["folder"]),
            bytes(fingerprint),
            spec,
            max_bytes=int(about["max_bytes"]),
            about=about["about"],
        )
        self._is_open.set()

    def close(self) -> None:
        """Write what waits."""
        self._is_open.set()
        self._finder.shutdown()
        if self._store is not None:
            self._store.close()

    def find(self, message: Message) -> None:
        """Returns at once; what is found is told."""
        self._finder.submit(self._find, message)

    def _find(self, message: Message) -> None:
        self._is_open.wait()  # a driver that asks has one, and layers may still be loaded
        number, start = int(message.about["ticket"]), int(message.about["start"])
        found: StoredPrefix | None = None
        try:
            keys = _keys_of(message.data)
            if self._store is not None:
                found = self._store.find(keys, start, needs_state=self._store.keeps_states)
        except Exception as error:  # the disk is a help: what is not found is read
            _log.warning("what is on disk of a prompt could not be looked for", exc_info=error)
        if found is not None:
            self._found[number] = found
        about = {**message.about, "num_blocks": 0 if found is None else found.num_blocks}
        self._control.send("found", about)

    def forget(self, ticket: int) -> None:
        """In its turn, too: it may be copied before."""
        if (found := self._found.pop(ticket, None)) is not None:
            found.close()

    def handle(self, message: Message, tensors: CacheTensors) -> None:
        """Copies between files and a cache, in their turn among the steps."""
        about, store = message.about, self._store
        if store is None:
            return
        match message.kind:
            case "fetch":
                found = self._found[int(about["ticket"])]
                first, blocks = int(about["first"]), about["blocks"]
                copy_in(tensors, [blocks], found.blocks[first : first + len(blocks)])
                if found.state is not None:
                    copy_kept_in(tensors, about["windows"], about["slot"], found.state)
            case "keep":
                copied = copy_out(tensors, [about["blocks"]])
                store.put_blocks(int(about["start"]), _keys_of(message.data), copied)
            case "keep_state" if store.keeps_states:
                kept = copy_kept_out(tensors, about["windows"], about["slot"])
                store.put_state(int(about["index"]), bytes(message.data), kept)
