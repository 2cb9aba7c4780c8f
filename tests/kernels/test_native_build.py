"""Compiling the native kernels: one builder at a time, nothing left of one that was killed, failures remembered."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penstock.kernels.interface import select_kernels
from penstock.kernels.native import build
from penstock.kernels.native.build import NativeUnavailableError
from penstock.machine import INSTRUCTION_SETS, ISA_VARIABLE, instruction_sets
from penstock.plan.settings import KERNELS_VARIABLE
from tests.odd_files import ODD_FILES

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
GOOD = "extern int penstock_one() { return 1; }\n"
BAD = "#error no such thing\n"
ENDLESS = '#include "pipe"\n'  # which nobody writes
library = build.native_library.__wrapped__


class Sources:
    """A small library in place of Penstock's, and how often a compiler was called for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.built = folder / "built"
        self._calls = folder / "calls"
        os.mkfifo(folder / "pipe")
        self.compiler = folder / "compiler"
        self.compiler.write_text(
            f'#!/bin/sh\ncase "$*" in --version) ;; *) echo >> {self._calls};; esac\nexec c++ "$@"\n'
        )
        self.compiler.chmod(0o755)

    def write(self, text: str) -> None:
        (self.folder / "source.cpp").write_text(text)

    @property
    def num_calls(self) -> int:
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0

    def processes(self) -> list[str]:
        """Compilers of these sources that are still there."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if "source.cpp" in command and str(self.folder) in command:
                found.append(command.replace("\0", " "))
        return found

    def partial(self) -> list[Path]:
        return [path for path in self.built.iterdir() if path.is_dir()]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sources]:
    made = Sources(tmp_path)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "processor_flags", lambda: frozenset(INSTRUCTION_SETS[instruction_sets()[-1]]))
    monkeypatch.setattr(build, "_FLAGS", ("-shared", "-fPIC"))
    monkeypatch.setenv("CXX", str(made.compiler))
    monkeypatch.setenv(KERNELS_VARIABLE, "auto")
    build.native_library.cache_clear()  # of tests before
    yield made
    build.native_library.cache_clear()


def wait_until(is_so: Callable[[], object], longest_s: float = 20.0) -> None:
    end = time.monotonic() + longest_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_compiles_and_all_have_it(sources: Sources) -> None:
    sources.write(GOOD)
    with ThreadPoolExecutor(6) as pool:
        names = {made._name for made in pool.map(lambda _: library(), range(6))}
    assert sources.num_calls == 1
    assert names == {str(path) for path in sources.built.glob("*.so")}


def test_a_failure_is_remembered_until_the_sources_change(
    sources: Sources, capsys: pytest.CaptureFixture[str]
) -> None:
    sources.write(BAD)
    for _ in range(3):
        kernels = select_kernels(torch.device("cpu"))
        assert kernels.name == "torch"
        assert re.search("no such thing.*tries again", kernels.slower or "")
        assert sources.num_calls == 1
    build.main()  # asked for
    assert sources.num_calls == 2
    assert "no such thing" in capsys.readouterr().err
    sources.write(GOOD)
    library()
    assert sources.num_calls == 3


@pytest.mark.parametrize("program", ["exit 0", "printf '\\377'", "exit 1", "sleep 60", "exec cat"])
def test_what_is_no_compiler_is_one_line_and_not_waited_for(
    sources: Sources, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """Neither one that makes nothing, nor one that does not even tell its version."""
    sources.write(GOOD)
    sources.compiler.write_text(f"#!/bin/sh\n{program}\n")
    monkeypatch.setattr(build, "_LONGEST_VERSION_S", 0.5)
    for _ in range(2):
        with pytest.raises(NativeUnavailableError, match=re.escape(str(sources.compiler))) as told:
            library()
        assert "\n" not in str(told.value)


def test_a_library_that_came_with_the_package_needs_no_compiler_and_is_of_its_sources(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources.write(GOOD)
    assert build.main(["--all"]) == 0  # as `make wheel` does
    num_calls = sources.num_calls
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(build, "_COMPILERS", ())
    monkeypatch.setattr(build, "allows_tiles", lambda: True)
    names = instruction_sets()
    for name in names:
        flags = frozenset(INSTRUCTION_SETS[name])
        monkeypatch.setattr(build, "processor_flags", lambda flags=flags: flags)
        assert Path(library()._name).name.startswith(f"penstock-{name}-")
        for lower in names[names.index(name) :]:
            monkeypatch.setenv(ISA_VARIABLE, lower)
            assert Path(library()._name).name.startswith(f"penstock-{lower}-")
        monkeypatch.delenv(ISA_VARIABLE)
    assert sources.num_calls == num_calls
    sources.write(GOOD + "// other sources\n")
    with pytest.raises(NativeUnavailableError, match="none came with the package"):
        library()


@pytest.mark.parametrize("put", ODD_FILES)
def test_what_is_no_file_is_replaced(sources: Sources, put: Callable[[Path], object]) -> None:
    sources.write(BAD)
    with pytest.raises(NativeUnavailableError):
        library()
    (failed,) = sources.built.glob("*.failed")
    names = (failed.name, "building.lock")
    for name in names:
        (sources.built / name).unlink()
        put(sources.built / name)
    with pytest.raises(NativeUnavailableError, match="no such thing"):
        library()
    assert "no such thing" in failed.read_text()
    assert sources.num_calls == 2


def test_a_build_that_takes_too_long_ends_with_all_its_processes(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources.write(ENDLESS)
    monkeypatch.setattr(build, "_LONGEST_BUILD_S", 0.5)
    for _ in range(2):
        with pytest.raises(NativeUnavailableError, match=r"took more than 0\.5 s .*tries again"):
            library()
    assert sources.num_calls == 1
    wait_until(lambda: not sources.processes())
    assert sources.partial() == []


def test_compilers_end_with_their_builder_and_others_go_on(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources.write(ENDLESS)
    script = (
        "import sys; from pathlib import Path; from penstock.kernels.native import build\n"
        "build.SOURCES, build._FLAGS = Path(sys.argv[1]), ('-shared', '-fPIC')\n"
        "build.processor_flags = lambda: frozenset(build.INSTRUCTION_SETS[build.instruction_sets()[-1]])\n"
        "build.native_library()"
    )
    builder = subprocess.Popen([sys.executable, "-c", script, str(sources.folder)])
    try:
        wait_until(lambda: any("cc1plus" in line for line in sources.processes()), 60)
        monkeypatch.setattr(build, "_LONGEST_WAIT_S", 0.2)
        with pytest.raises(NativeUnavailableError, match="another process is still compiling them"):
            library()
        assert sources.num_calls == 1
    finally:
        builder.send_signal(signal.SIGKILL)
        builder.wait()
    wait_until(lambda: not sources.processes())
    assert len(sources.partial()) == 1
    sources.write(GOOD)
    library()
    assert sources.partial() == []
