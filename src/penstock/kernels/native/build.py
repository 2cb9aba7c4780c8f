"""Compiles the native kernels for this machine, where it has a compiler and its processor can run them.

They are never required: without them, `NativeUnavailableError` says why, and torch computes everything. The library
lies in the package's folder, or in the cache folder where that cannot be written, under a name that stands for the
sources, the compiler and the processor.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from penstock.home import cache_home
from penstock.kernels.interface import KernelsUnavailableError
from penstock.machine import processor_flags

SOURCES = Path(__file__).parent
# Products and sums are contracted nowhere but where the source says so: a row's bits must not depend on what the
# compiler makes of a loop.
_FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-std=c++17",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-w",
)
_COMPILERS = ("c++", "g++", "clang++")
_NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_LONGEST_BUILD_S = 300


class NativeUnavailableError(KernelsUnavailableError):
    """The native kernels cannot be used here."""


@functools.cache
def native_library() -> ctypes.CDLL:
    """The compiled kernels; built first if they are not there."""
    flags = processor_flags()
    missing = [flag for flag in _NEEDED if flag not in flags]
    if missing:
        raise NativeUnavailableError(f"the processor has no {', '.join(missing)}")
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NativeUnavailableError(f"there is no C++ compiler: none of {', '.join(_COMPILERS)} is found")
    name = f"penstock-{_digest(compiler, flags)}.so"
    folders = (SOURCES / "built", cache_home() / "native")
    for folder in folders:
        if (folder / name).exists():
            return _load(folder / name)
    for folder in folders:
        if _is_writable(folder):
            _build(compiler, folder / name)
            return _load(folder / name)
    raise NativeUnavailableError(f"neither {folders[0]} nor {folders[1]} can be written")


def _digest(compiler: str, flags: frozenset[str]) -> str:
    parts = [str(_FLAGS), " ".join(sorted(flags)), _version(compiler)]
    parts += [path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NativeUnavailableError(f"the compiler {compiler} cannot be run: {error}") from error


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _build(compiler: str, path: Path) -> None:
    """Compile to a file of its own, then rename: another process may be doing the same."""
    sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder) / path.name
        command = [compiler, *_FLAGS, "-o", str(out), *sources]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_LONGEST_BUILD_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeUnavailableError(f"compiling them failed: {error}") from error
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["it said nothing"]
            raise NativeUnavailableError(f"compiling them with {compiler} failed: {lines[0]}")
        os.replace(out, path)


def _load(path: Path) -> ctypes.CDLL:
    torch.get_num_threads()  # torch's OpenMP is loaded by now, and the library shares it by its name
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"{path} cannot be loaded: {error}") from error


def main() -> int:
    """Build them now, and say what became of it: installing calls this."""
    try:
        native_library()
    except NativeUnavailableError as error:
        print(f"the native kernels are not used: {error}; torch computes everything", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
