"""The native kernels as a library: one that came with the package, or else one that is compiled on this machine.

They are never required: without them, `NativeUnavailableError` says why and what would help, and torch computes
everything. A library is for one set of instructions, and runs on any processor that has it. A wheel has one for each;
else it lies in the package's folder, or in the cache folder where that cannot be written:

    <folder>/penstock-<set>-<sources>-<compiler>.so      the library; digests stand for sources and compiler
    <folder>/penstock-<set>-<sources>-<compiler>.failed  why there is none: not compiled again until they change
    <folder>/building.lock                               locked by the only process that compiles
    <folder>/<another folder>                            what it compiles in, or what a killed one left
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from penstock.files import read_plain
from penstock.home import cache_home
from penstock.kernels.interface import KernelsUnavailableError
from penstock.machine import AMX, INSTRUCTION_SETS, instruction_set, instruction_sets, processor_flags

SOURCES = Path(__file__).parent
# Products and sums are contracted nowhere but where the source says so: a row's bits must not depend on what the
# compiler makes of a loop.
_FLAGS = (
    "-O3",
    "-ffp-contract=off",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-w",
)
_COMPILERS = ("c++", "g++", "clang++")
# By set of instructions, for any processor that has it.
_AVX512_BF16 = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
_TARGETS = {
    AMX: (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512_bf16": _AVX512_BF16,
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
    "neon": ("-march=armv8-a",),
}
# The system call by which a process asks to use tiles (arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_MAY_USE_TILES = (158, 0x1023, 18)
# Of a start. Whoever compiles them by a command has more patience.
_LONGEST_BUILD_S = 300.0
_LONGEST_RETRY_S = 3600.0
_LONGEST_WAIT_S = 60.0  # for another process that compiles
_LONGEST_VERSION_S = 10.0
_RETRY = "python -m penstock.kernels.native.build"
# Runs a command in a process group that ends, compilers under the command included, when standard input does: that is
# a pipe, whose other end a parent holds for as long as it lives.
_GROUP = """exec 3<&0; { read -r _ <&3; kill -9 0; } >/dev/null 2>&1 & watcher=$!
"$@" 3<&- </dev/null; status=$?; kill $watcher; wait $watcher; exit $status"""
_MOST_REASON_BYTES = 1 << 20
_log = logging.getLogger("penstock.kernels")


class NativeUnavailableError(KernelsUnavailableError):
    """The native kernels cannot be used here."""


class _BusyError(Exception):
    """Another process compiles."""


@functools.cache
def allows_tiles() -> bool:
    """Whether the system lets this process use AMX's tiles: it has to be asked, once for all threads."""
    return platform.machine() == "x86_64" and not ctypes.CDLL(None).syscall(
        *map(ctypes.c_long, _MAY_USE_TILES)
    )


@functools.cache
def native_library(is_retry: bool = False, *, with_tiles: bool = True) -> ctypes.CDLL:
    """The compiled kernels; built first if they are not there. A build that failed is not tried again before its
    sources or its compiler change, or with `is_retry`. They use tiles where the processor has them and the system
    allows it, unless they are to do without."""
    flags = processor_flags()
    if not (with_tiles and allows_tiles()):
        flags -= {*INSTRUCTION_SETS[AMX]} - {*INSTRUCTION_SETS["avx512_bf16"]}
    best = instruction_set(flags)
    if best is None:
        missing = [flag for flag in INSTRUCTION_SETS[instruction_sets()[-1]] if flag not in flags]
        raise NativeUnavailableError(f"the processor has no {', '.join(missing)}, and there are none without")
    if prebuilt := next((SOURCES / "prebuilt").glob(f"{_stem(best)}-*.so"), None):
        return _load(prebuilt)
    compiler = _compiler()
    paths = [folder / _name(best, compiler) for folder in (SOURCES / "built", cache_home() / "native")]
    reasons = []
    for path in (*filter(Path.is_file, paths), *paths):
        try:
            return _load(path if path.is_file() else _built(compiler, best, path, is_retry=is_retry))
        except _BusyError:
            raise NativeUnavailableError(
                "another process is still compiling them: start again after it"
            ) from None
        except OSError as error:  # a folder that cannot be written or locked
            reasons.append(str(error))
    raise NativeUnavailableError(f"there is no folder to compile them in: {'; '.join(reasons)}")


def _stem(instructions: str) -> str:
    parts = [*_FLAGS, *_TARGETS[instructions]]
    parts += [path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]
    return f"penstock-{instructions}-{_hash(*parts)}"


def _name(instructions: str, compiler: str) -> str:
    return f"{_stem(instructions)}-{_hash(_version(compiler))}.so"


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compiler() -> str:
    found = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is None:
        raise NativeUnavailableError(
            f"none came with the package, and there is no C++ compiler, none of {', '.join(_COMPILERS)}: "
            "install one, or Penstock's wheel for Linux"
        )
    return found


def _version(compiler: str) -> str:
    command, limit_s = [compiler, "--version"], _LONGEST_VERSION_S
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=limit_s
        )
        return done.stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailableError(f"the compiler {compiler} cannot be run: {error}") from error


def _built(compiler: str, instructions: str, path: Path, *, is_retry: bool) -> Path:
    """Compile, unless another process has done so meanwhile or it has failed before. An `OSError` is the folder's."""
    failed = path.with_suffix(".failed")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name("building.lock"), _LONGEST_RETRY_S if is_retry else _LONGEST_WAIT_S):
        if path.is_file():
            return path
        reason = None if is_retry else _known_failure(failed)
        if reason is None:
            for left in filter(Path.is_dir, path.parent.iterdir()):  # by builders that were killed
                shutil.rmtree(left, ignore_errors=True)
            reason = _compile(
                [compiler, *_TARGETS[instructions]], path, _LONGEST_RETRY_S if is_retry else _LONGEST_BUILD_S
            )
            failed.unlink(missing_ok=True)
            if reason is None:
                return path
            failed.write_text(reason)
        raise NativeUnavailableError(f"{reason} ({_RETRY} tries again)")


def _known_failure(path: Path) -> str | None:
    try:
        return read_plain(path, _MOST_REASON_BYTES).decode(errors="replace")
    except OSError:
        return None


@contextlib.contextmanager
def _locked(path: Path, wait_s: float) -> Iterator[None]:
    """Lock a file, which ends with the process at the latest."""
    import fcntl  # absent on Windows, where nothing gets here

    end, is_told = time.monotonic() + wait_s, False
    with open(
        os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb"
    ) as file:  # waits for no pipe's reader
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise _BusyError from None
                if not is_told:
                    _log.info("waiting for another process that is compiling the native kernels")
                is_told = True
            time.sleep(0.1)
        yield


def _compile(
    compiler: list[str], path: Path, longest_s: float, names: Sequence[str] = ("*.cpp",)
) -> str | None:
    """Compile in a folder of its own, then rename. Returns why it failed."""
    _log.info("compiling the native kernels for this machine, once; this takes a minute or so")
    sources = [str(source) for name in names for source in sorted(SOURCES.glob(name))]
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as folder:
        out, said = Path(folder) / path.name, Path(folder) / "said.txt"
        command = ["sh", "-c", _GROUP, "sh", *compiler, *_FLAGS, "-o", str(out), *sources]
        with (
            said.open("w") as file,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=os.environ | {"TMPDIR": folder},
                start_new_session=True,
            ) as process,
        ):
            try:
                status = process.wait(longest_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return f"compiling them with {compiler[0]} took more than {longest_s:g} s"
        if status != 0 or not out.is_file():
            lines = [line for line in said.read_text(errors="replace").splitlines() if "error" in line]
            return f"compiling them with {compiler[0]} failed: {lines[0] if lines else 'it said nothing'}"
        os.replace(out, path)
    return None


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"{path} cannot be loaded: {error}") from error
    # Torch's OpenMP, by whatever name torch has it. Without it, the library's own threads do all its work.
    with contextlib.suppress(OSError, AttributeError):
        torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        library.penstock_use_openmp(torchs.GOMP_parallel)
    return library


def main(arguments: Sequence[str] = ()) -> int:
    """Build them now, even where that failed before, and say what became of it: installing calls this. With `--all`,
    those for every set of instructions that such a machine may have, which a wheel is made of."""
    try:
        if list(arguments) != ["--all"]:
            native_library(is_retry=True)
            return 0
        compiler = _compiler()
        for each in instruction_sets():
            print(_built(compiler, each, SOURCES / "prebuilt" / _name(each, compiler), is_retry=True))
    except NativeUnavailableError as error:
        print(f"the native kernels are not used: {error}; torch computes everything", file=sys.stderr)
        return int("--all" in arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
