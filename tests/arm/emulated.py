"""The native library on an emulated processor: a process that has this one's heap (`heap.cpp`), and is called through
a pipe (`calls.cpp`). As a plugin of pytest it takes the place of the library that this processor would load."""

import ctypes
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import pytest
from hypothesis import settings

from penstock.kernels.native import kernels

# A program with the kernels, and what runs it: names of files, in a row.
COMMAND_VARIABLE = "PENSTOCK_TEST_EMULATED"
_MOST_ARGUMENTS = 16
_MOST_EXAMPLES = 3
_SETTINGS = "_hypothesis_internal_use_settings"  # where hypothesis has a test's own


class EmulatedLibrary:
    """In place of a `ctypes.CDLL`."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._name = command[-1]  # its instructions are the part after the first dash
        self.num_calls = 0

    @cached_property
    def _process(self) -> "subprocess.Popen[bytes]":
        heap = ctypes.CDLL(None).penstock_heap_file()
        environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        return subprocess.Popen(
            [*self._command, str(heap)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            pass_fds=(heap,),
        )

    def __getattr__(self, name: str) -> "EmulatedFunction":
        function = EmulatedFunction(name, self._call)
        setattr(self, name, function)
        return function

    def _call(self, request: bytes) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.num_calls += 1
        self._process.stdin.write(request)
        self._process.stdin.flush()
        answer = self._process.stdout.read(8)
        if len(answer) != 8:
            raise RuntimeError(f"the emulated library ended with status {self._process.wait()}")
        return int.from_bytes(answer, "little", signed=True)


class EmulatedFunction:
    """In place of a function of `ctypes`, whose types are set as that one's."""

    def __init__(self, name: str, call: Callable[[bytes], int]) -> None:
        self._name = name.encode()
        self._call = call
        self.argtypes: list[Any] = []
        self.restype: Any = ctypes.c_int

    def __call__(self, *arguments: Any) -> int | None:
        types = self.argtypes or [ctypes.c_void_p] * len(arguments)
        words = [_word(of, argument) for of, argument in zip(types, arguments, strict=True)]
        words += [bytes(8)] * (_MOST_ARGUMENTS - len(words))
        result = self._call(self._name.ljust(64, b"\0") + b"".join(words))
        return None if self.restype is None else result


def _word(of: Any, argument: Any) -> bytes:
    if of in (ctypes.c_float, ctypes.c_double):
        return struct.pack("d", argument)
    if isinstance(argument, int | None):
        return struct.pack("q", int(argument or 0))
    argument = getattr(argument, "_obj", argument)  # what `byref` was given
    return struct.pack("q", ctypes.addressof(argument))


_library = EmulatedLibrary(os.environ[COMMAND_VARIABLE].split())
vars(kernels)["native_library"] = lambda: _library


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each example takes long: few are drawn."""
    for item in items:
        test = getattr(item, "obj", None)
        if (own := getattr(test, _SETTINGS, None)) is not None:
            fewer = settings(own, max_examples=_MOST_EXAMPLES, database=None, deadline=None)
            setattr(test, _SETTINGS, fewer)


@pytest.fixture(autouse=True)
def _is_emulated() -> Iterator[None]:
    before = _library.num_calls
    yield
    assert _library.num_calls > before, "the emulated library was not called"
