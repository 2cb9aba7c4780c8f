"""Whatever is wrong with the folder or the disk: a warning, and the work goes on without the store."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import penstock.cache.store.block_store as stores
from penstock.cache.store.output import StoreWriter
from tests.cache.storing import files_in, fill, keys_of, kv_of, num_found, open_store

KEYS = keys_of(4)


def nothing_but_files(folder: Path) -> bool:
    return not list(folder.glob("*/.tmp-*"))


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/no-such-folder", "/dev/null"])
def test_a_folder_that_cannot_be_is_a_warning(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = open_store(tmp_path / place)
    assert not store.is_usable
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(tmp_path / place) in caplog.text
    store.put_blocks(0, KEYS, kv_of(KEYS))
    assert store.flush()
    assert store.find(KEYS, 0, needs_state=False) is None
    assert store.stats().num_written == 0
    store.close()
    assert len(caplog.records) == 1
    assert (tmp_path / "file").read_text() == "not a folder"


def test_a_models_folder_that_is_a_link_is_not_used(tmp_path: Path) -> None:
    first = open_store(tmp_path / "cache")
    first.close()
    (model,) = (tmp_path / "cache").iterdir()
    shutil.rmtree(model)
    (tmp_path / "elsewhere").mkdir()
    model.symlink_to(tmp_path / "elsewhere")
    assert not open_store(tmp_path / "cache").is_usable
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="everything is writable to root")
def test_a_folder_that_cannot_be_written_is_still_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    fill(store, KEYS[:2])
    store.close()
    (model,) = tmp_path.iterdir()
    model.chmod(0o500)
    try:
        store = open_store(tmp_path)
        assert num_found(store, KEYS) == 2
        store.put_blocks(2, KEYS[2:], kv_of(KEYS[2:]))
        store.flush()
        assert store.stats().num_dropped == 2
        assert len(caplog.records) == 1
        store.close()
    finally:
        model.chmod(0o700)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EIO])
def test_a_file_that_cannot_be_written_is_dropped_and_later_ones_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    store = open_store(tmp_path)
    fill(store, KEYS[:1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", raising(code))
        for _ in range(3):
            fill(store, KEYS, 1)
    assert store.stats().num_dropped == 9
    assert len(caplog.records) == 1  # one line for each kind of error
    assert os.strerror(code) in caplog.text
    assert nothing_but_files(tmp_path)
    assert num_found(store, KEYS) == 1
    fill(store, KEYS, 1)
    assert num_found(store, KEYS) == 4
    store.close()


def test_a_full_disk_is_left_alone_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    real, tries, now = os.write, [0], [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def full_after_a_while(file: int, data: Any) -> int:
        tries[0] += 1
        if tries[0] > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data)

    monkeypatch.setattr(os, "write", full_after_a_while)
    fill(store, KEYS)
    assert tries[0] == 4  # header and data of the first block, the header of the second
    assert nothing_but_files(tmp_path)
    now[0] += 59
    fill(store, KEYS, 1)
    assert tries[0] == 4
    assert store.stats().num_dropped == 6
    assert num_found(store, KEYS) == 1
    monkeypatch.setattr(os, "write", real)
    now[0] += 2
    fill(store, KEYS, 1)
    assert num_found(store, KEYS) == 4
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    store.close()


LIMITED = """
import resource, sys
from pathlib import Path
from tests.cache.storing import *
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
store = open_store(Path(sys.argv[1]))
keys = keys_of(3)
fill(store, keys)
assert store.stats().num_dropped == 3 and store.stats().num_written == 0
assert num_found(store, keys) == 0
store.close()
"""


def test_a_write_that_really_stops_half_way_leaves_nothing(tmp_path: Path) -> None:
    """The system takes 1,000 bytes of a file and no more."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stderr
    assert not files_in(tmp_path)
    assert nothing_but_files(tmp_path)


@pytest.mark.parametrize("whole", [True, False], ids=["all of it", "the model's"])
def test_a_folder_that_vanishes_is_made_again(tmp_path: Path, whole: bool) -> None:
    folder = tmp_path / "cache"
    store = open_store(folder)
    fill(store, KEYS[:2])
    (model,) = folder.iterdir()
    shutil.rmtree(folder if whole else model)
    assert num_found(store, KEYS) == 0
    assert store.stats().num_damaged == 0
    fill(store, KEYS)
    assert num_found(store, KEYS) == 4
    assert (model / "about.json").exists()
    store.close()


def test_a_folder_that_becomes_a_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache"
    store = open_store(folder)
    shutil.rmtree(folder)
    folder.write_text("now a file")
    for _ in range(3):
        fill(store, KEYS)
        assert num_found(store, KEYS) == 0
    assert store.stats().num_dropped == 12
    assert len(caplog.records) == 1
    store.close()


def test_too_many_open_files_says_nothing_about_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    fill(store, KEYS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", raising(errno.EMFILE))
        assert store.find(KEYS, 0, needs_state=False) is None
    assert store.stats().num_damaged == 0
    assert num_found(store, KEYS) == 4
    store.close()


def test_a_slow_disk_never_keeps_the_engine_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks for which the queue has no room are dropped, and counted."""
    (kv,) = kv_of(KEYS)
    batch_bytes = kv.numel() * kv.element_size()
    monkeypatch.setattr(stores, "_QUEUE_BYTES", 2 * batch_bytes)
    store = open_store(tmp_path)
    is_slow, real = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (is_slow.wait(60), real(file))[1])
    for number in range(5):
        keys = keys_of(4, f"prompt {number}")
        assert store.put_blocks(0, keys, kv_of(keys)) == (number < 2)
    assert store.stats().num_dropped == 12
    assert not store.flush(0.01)
    is_slow.set()
    assert store.flush(60)
    assert store.stats().num_written == 8
    assert [num_found(store, keys_of(4, f"prompt {number}")) for number in range(5)] == [4, 4, 0, 0, 0]
    assert len(caplog.records) == 1
    # One batch is taken however large it is, where no other waits.
    monkeypatch.setattr(stores, "_QUEUE_BYTES", 1)
    small = open_store(tmp_path / "small")
    fill(small, KEYS)
    assert num_found(small, KEYS) == 4
    small.close()
    store.close()


def test_closing_waits_no_longer_than_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    is_slow, real = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (is_slow.wait(60), real(file))[1])
    store.put_blocks(0, KEYS, kv_of(KEYS))
    store.close(0.01)
    is_slow.set()
    store.close()  # the second time there is nothing to wait for


def test_a_job_that_fails_does_not_end_the_writer(caplog: pytest.LogCaptureFixture) -> None:
    writer = StoreWriter(100)
    done: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    assert writer.put(1, fail)
    assert writer.put(1, lambda: done.append(1))
    assert writer.flush(60)
    assert done == [1]
    assert "ZeroDivisionError" in caplog.text
    thread = writer._thread
    assert thread is not None
    assert writer.close(60)
    assert not thread.is_alive()
    assert not writer.put(1, lambda: done.append(2))


def raising(code: int) -> Any:
    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def test_256_mib_may_wait_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    go_on, real = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (go_on.wait(60), real(file))[1])
    (kv,) = kv_of(KEYS)
    store.put_blocks(0, KEYS, [kv])
    left = (256 << 20) - kv.nbytes
    assert store.has_room(left)
    assert not store.has_room(left + 1)
    go_on.set()
    assert store.flush(60)
    assert store.has_room(1 << 40)  # one batch always has room
    store.close()


def test_times_of_use_are_known_of_so_many_keys(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keys = [number.to_bytes(4, "big") for number in range((1 << 14) + 3)]
    assert store.find(keys, 0, needs_state=False) is None
    assert list(store._asked) == keys[3:]
    assert store.find(keys[3:5], 0, needs_state=False) is None
    assert list(store._asked) == [*keys[5:], *keys[3:5]]
    store.close()


def test_a_writer_that_is_closed_too_soon_owes_nothing() -> None:
    """Jobs that will never run are not waited for; the one that runs is."""
    writer, go_on = StoreWriter(100), threading.Event()
    ran: list[int] = []

    def job(number: int) -> None:
        go_on.wait(60)
        ran.append(number)

    for number in range(4):
        assert writer.put(1, partial(job, number))
    assert not writer.close(0.05)
    assert not writer.flush(0.05)
    go_on.set()
    assert writer.flush(60)
    assert ran == [0]
    assert not writer.put(1, partial(job, 4))
