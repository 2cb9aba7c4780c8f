"""The folder of the disk store: what lies in it, and the few ways in which it changes.

    <folder>/<fingerprint>/about.json                      which model, for people
    <folder>/<fingerprint>/<index>-<key>.safetensors       a block
    <folder>/<fingerprint>/<blocks>-<key>.state.safetensors   a recurrent state
    <folder>/<fingerprint>/.tmp-<process>-<random>         a file that is being written
    <folder>/<fingerprint>/damaged/                        a few files that did not hold what they say

Several processes may use it at once, and none locks it. A file appears whole, by a rename, and never changes but for
its time of last use; so whatever another process does, a file is there as it was written or it is not there.
"""

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.cache.store.file import FileName

FINGERPRINT_DIGITS = 32
ABOUT = "about.json"
DAMAGED = "damaged"
_TEMPORARY = ".tmp-"
_MOST_DAMAGED = 4  # to look at; more tell nothing new, and take space
# A temporary file is written at once and renamed: one that nobody has touched for so long is a dead process's. If it
# is not, its writer finds it gone and does without. A time so far in the future is of a clock that was wrong.
_STALE_NS = 3600 * 10**9
_FINGERPRINT = re.compile(rf"[0-9a-f]{{{FINGERPRINT_DIGITS}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredFile:
    path: Path
    name: FileName | None  # None: a temporary or damaged one
    num_bytes: int
    used_ns: int  # when it was last written or used

    def is_stale(self, now_ns: int) -> bool:
        return abs(now_ns - self.used_ns) > _STALE_NS


@dataclass(frozen=True)
class ModelFiles:
    """The folder of one model, and the files in it that are the store's."""

    folder: Path
    files: list[StoredFile] = field(default_factory=list)
    temporary: list[StoredFile] = field(default_factory=list)
    damaged: list[StoredFile] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in (*self.files, *self.temporary, *self.damaged))


def scan(folder: Path) -> list[ModelFiles]:
    """Every model's files. What is not the store's is passed over; a folder that is not there is empty."""
    return [
        _scan_model(Path(entry.path))
        for entry in _entries(folder)
        if _FINGERPRINT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    ]


def _scan_model(folder: Path) -> ModelFiles:
    model = ModelFiles(folder)
    for entry in _entries(folder):
        name = FileName.parse(entry.name)
        if name is not None or entry.name.startswith(_TEMPORARY):
            (model.temporary if name is None else model.files).extend(_stored(entry, name))
    for entry in _entries(folder / DAMAGED):
        model.damaged.extend(_stored(entry, None))
    return model


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _stored(entry: os.DirEntry[str], name: FileName | None) -> Iterator[StoredFile]:
    with suppress(OSError):  # it has gone since
        found = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            yield StoredFile(Path(entry.path), name, found.st_size, found.st_mtime_ns)


def make_private(folder: Path) -> None:
    """Create a folder that its owner alone can look into, or see to it that it is one. OSError where it cannot be."""
    if not os.path.lexists(folder):
        with suppress(FileExistsError):  # by another process
            os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is no folder")
    if os.geteuid() not in (0, found.st_uid):
        raise PermissionError(errno.EPERM, f"{folder} belongs to another user")
    if found.st_mode & 0o077:
        os.chmod(folder, 0o700)


def check_owner(folder: Path) -> None:
    """PermissionError where another user, who could exchange what lies in it, owns a folder."""
    if os.geteuid() != 0 and os.stat(folder).st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"{folder} belongs to another user")


def write_file(path: Path, pieces: Sequence[bytes | memoryview], used_ns: int | None = None) -> None:
    """Write a file whole or not at all, durably but for its name (`sync_folder`). OSError where that fails, and then
    nothing is left behind."""
    temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    rest = rest[os.write(file, rest) :]
            os.fsync(file)
            os.rename(temporary, path)
            if used_ns is not None:
                os.utime(file, ns=(used_ns, used_ns))
        finally:
            os.close(file)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def sync_folder(folder: Path) -> None:
    """Make the names of the files in a folder durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def touch(path: Path, used_ns: int) -> None:
    """Note when a file was used. That never takes it back to an earlier time, unless its time lies in the future by
    so much that a clock was wrong. A file that has gone is none to note anything for."""
    with suppress(OSError):
        before_ns = os.lstat(path).st_mtime_ns
        if before_ns < used_ns or before_ns - time.time_ns() > _STALE_NS:
            os.utime(path, ns=(used_ns, used_ns), follow_symlinks=False)


def set_aside(path: Path) -> bool:
    """Move a damaged file out of the way, to be looked at; delete it where enough are there. Whether it was there."""
    with suppress(OSError):
        folder = path.parent / DAMAGED
        make_private(folder)
        if len(_entries(folder)) < _MOST_DAMAGED:
            os.rename(path, folder / path.name)
            return True
    return remove(path)


def remove(path: Path) -> bool:
    """Delete a file; whether it was there."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def clear_model(model: ModelFiles, before_ns: int | None = None) -> list[StoredFile]:
    """Delete a model's files, or those that were last used before a time; give those that were deleted. A folder that
    is empty then goes too. What is not the store's stays."""
    wanted = [*model.files, *model.temporary, *model.damaged]
    deleted = [
        file for file in wanted if (before_ns is None or file.used_ns < before_ns) and remove(file.path)
    ]
    with suppress(OSError):
        os.rmdir(model.folder / DAMAGED)
    left = {entry.name for entry in _entries(model.folder)}
    if left <= {ABOUT}:
        remove(model.folder / ABOUT)
        with suppress(OSError):
            os.rmdir(model.folder)
    return deleted
