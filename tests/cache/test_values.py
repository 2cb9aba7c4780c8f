"""What is passed on between parts of the cache is a value, which nobody changes."""

import importlib
import pkgutil
from dataclasses import is_dataclass

import penstock.cache
from tests.numbers_of import numbers_of

# An entry of the index, and tensors that are closed: both change in place.
MUTABLE = {"_Node", "StoredPrefix"}

# Numbers that are neither 0 nor false, where nobody gives others.
NUMBERS = {
    "-1": "states.EMPTY",
    "0.05": "store.limit._SCAN_SHARE",
    "0.9": "store.limit._ROOM_TO_LEAVE",
    "16": "blocks._ROOM_BLOCKS",
    "16384": "store.block_store._MOST_ASKED",
    "2": "space.CacheSpace.for_tokens.num_slots store.block_store._NUM_READERS",
    "268435456": "store.block_store._QUEUE_BYTES",
    "30.0": "store.block_store.BlockStore.close.timeout_s",
    "32": "keys.KEY_BYTES store.folder.FINGERPRINT_DIGITS",
    "3600000000000": "store.folder._STALE_NS",
    "4": "store.folder._MOST_DAMAGED",
    "4194304": "store.file._SLICE_BYTES",
    "60.0": "store.limit._SCAN_S store.output._DISK_FULL_PAUSE_S",
    "64": "prefix._STALE_ENTRIES store.file._ALIGNMENT_BYTES tensors._ALIGNMENT_BYTES",
}


def test_values_are_frozen() -> None:
    found = 0
    for module in pkgutil.walk_packages(penstock.cache.__path__, "penstock.cache."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if is_dataclass(value) and isinstance(value, type) and value.__module__ == module.name:
                found += 1
                assert value.__dataclass_params__.frozen == (name not in MUTABLE), name  # type: ignore[attr-defined]
    assert found > 15


def test_numbers_are_those_that_were_meant() -> None:
    assert numbers_of(penstock.cache) == {number: set(names.split()) for number, names in NUMBERS.items()}
