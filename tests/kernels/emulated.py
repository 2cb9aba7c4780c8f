"""Native kernels for AMX on processors that have none: the same source, with the tiles in software."""

import ctypes
from functools import cache
from typing import Any

import pytest

from penstock.kernels.native import build, kernels
from penstock.kernels.native.build import NativeUnavailableError, native_library
from penstock.machine import AMX, INSTRUCTION_SETS, instruction_set, processor_flags

BELOW = "avx512_bf16"
EMULATED = "-DPENSTOCK_EMULATED_AMX"
# Products, experts, and what these are made of. All else is as it is without tiles.
_SOURCES = ("quantised.cpp", "experts.cpp", "rows.cpp", "threads.cpp")


class _Library:
    """What was compiled with tiles, and the rest of the library without."""

    def __init__(self, with_tiles: ctypes.CDLL) -> None:
        self._with_tiles = with_tiles
        self._without = native_library()
        self._name = with_tiles._name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._with_tiles if hasattr(self._with_tiles, name) else self._without, name)


@cache
def _emulated_library() -> _Library:
    compiler = build._compiler()
    path = build.SOURCES / "built" / build._name(BELOW, compiler).replace(BELOW, f"{AMX}-emulated")
    path.parent.mkdir(exist_ok=True)
    with build._locked(path.with_name("building.lock"), 300.0):
        if not path.is_file():
            failure = build._compile([compiler, *build._TARGETS[BELOW], EMULATED], path, 300.0, _SOURCES)
            assert failure is None, failure
    return _Library(build._load(path))


def use_emulated_amx(patch: pytest.MonkeyPatch) -> None:
    """Native kernels that are made from now on are those of a processor with AMX."""
    if instruction_set(processor_flags()) != BELOW:
        pytest.skip(f"tiles are emulated with {BELOW}, which is not what this processor has, or is to use")
    try:
        library = _emulated_library()
    except NativeUnavailableError as error:
        pytest.skip(f"the native kernels cannot be had: {error}")
    flags = processor_flags() | {*INSTRUCTION_SETS[AMX]}
    patch.setattr(kernels, "processor_flags", lambda: flags)
    patch.setattr(kernels, "native_library", lambda: library)
