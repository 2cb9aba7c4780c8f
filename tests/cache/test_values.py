"""What is passed on between parts of the cache is a value, which nobody changes."""

import importlib
import pkgutil
from dataclasses import is_dataclass

import penstock.cache
from tests.defaults import numbers_by_default

# An entry of the index, and tensors that are closed: both change in place.
MUTABLE = {"_Node", "StoredPrefix"}

# A caller that says nothing gets nothing: 0, no, none. But for these.
BY_DEFAULT = {
    "2": "space.CacheSpace.for_tokens.num_slots",
    "30.0": "store.block_store.BlockStore.close.timeout_s",
}


def test_values_are_frozen() -> None:
    found = 0
    for module in pkgutil.walk_packages(penstock.cache.__path__, "penstock.cache."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if is_dataclass(value) and isinstance(value, type) and value.__module__ == module.name:
                found += 1
                assert value.__dataclass_params__.frozen == (name not in MUTABLE), name  # type: ignore[attr-defined]
    assert found > 15


def test_what_a_caller_does_not_say() -> None:
    assert numbers_by_default(penstock.cache) == {
        number: set(names.split()) for number, names in BY_DEFAULT.items()
    }
