"""The folder stays within its limit, and what was unused for longest goes first."""

import os
import time
from pathlib import Path

import pytest

from penstock.cache.store.file import FileKind, FileName
from penstock.cache.store.folder import ModelFiles, StoredFile, scan
from penstock.cache.store.limit import eviction_order
from tests.cache.storing import (
    HYBRID,
    files_in,
    fill,
    keys_of,
    kv_of,
    num_found,
    open_store,
)

HOUR_NS = 3600 * 10**9


@pytest.fixture
def file_bytes(tmp_path: Path) -> int:
    """The size of one block's file."""
    store = open_store(tmp_path / "one")
    fill(store, keys_of(1))
    store.close()
    (file,) = files_in(tmp_path / "one")
    return file.stat().st_size


def total(folder: Path) -> int:
    return sum(file.stat().st_size for file in files_in(folder))


def age(folder: Path, hours: float) -> None:
    """As if all that is there had last been used so long ago."""
    then = time.time_ns() - int(hours * HOUR_NS)
    for file in files_in(folder):
        os.utime(file, ns=(then, then))


def test_the_oldest_prefix_goes_first_and_the_end_of_it_before_its_head(
    tmp_path: Path, file_bytes: int
) -> None:
    folder = tmp_path / "cache"
    store = open_store(folder, max_bytes=10 * file_bytes)
    old, new, last = keys_of(5, "old"), keys_of(4, "new"), keys_of(3, "last")
    for keys in (old, new):
        assert store.find(keys, 0, needs_state=False) is None  # as an engine does, before it reads a prompt
        fill(store, keys)
    assert store.stats().num_evicted == 0
    fill(store, last)
    # 9 were there: a 10th fits, the 11th has two go, so that it is the 9th, and there is room for another.
    assert total(folder) <= 10 * file_bytes
    assert num_found(store, last) == 3
    assert num_found(store, new) == 4
    assert num_found(store, old) == 3
    assert store.stats().num_evicted == 2
    assert store.stats().bytes_on_disk == total(folder)
    store.close()


def test_what_is_used_stays(tmp_path: Path, file_bytes: int) -> None:
    folder = tmp_path / "cache"
    store = open_store(folder, max_bytes=10 * file_bytes)
    used, unused = keys_of(5, "used"), keys_of(4, "unused")
    fill(store, used)
    fill(store, unused)
    age(folder, 2)
    assert num_found(store, used, 3) == 2  # what comes before is in memory, and used as well
    fill(store, keys_of(4, "last"))
    assert num_found(store, used) == 5
    assert num_found(store, unused) == 0
    store.close()


def test_the_limit_is_of_all_models_together(tmp_path: Path, file_bytes: int) -> None:
    folder = tmp_path / "cache"
    other = open_store(folder, fingerprint=b"other" + bytes(27), max_bytes=10 * file_bytes)
    fill(other, keys_of(8))
    age(folder, 2)
    store = open_store(folder, max_bytes=10 * file_bytes)
    assert store.stats().bytes_on_disk == 8 * file_bytes
    fill(store, keys_of(8))
    assert total(folder) <= 10 * file_bytes
    assert num_found(store, keys_of(8)) == 8
    assert num_found(other, keys_of(8)) == 2
    store.close()
    other.close()


def test_one_prompt_larger_than_the_limit_keeps_its_head(tmp_path: Path, file_bytes: int) -> None:
    folder = tmp_path / "cache"
    store = open_store(folder, max_bytes=10 * file_bytes)
    keys = keys_of(30)
    assert store.find(keys, 0, needs_state=False) is None
    for start in range(0, 30, 2):
        store.put_blocks(start, keys[start : start + 2], kv_of(keys[start : start + 2]))
        store.flush()
        assert total(folder) <= 10 * file_bytes
    assert num_found(store, keys) >= 6
    store.close()


def test_one_batch_larger_than_the_limit_is_written_as_far_as_it_goes(
    tmp_path: Path, file_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    store = open_store(folder, max_bytes=5 * file_bytes)
    fill(store, keys_of(8))
    assert num_found(store, keys_of(8)) == 5
    assert store.stats().num_dropped == 3
    assert "larger cache size" in caplog.text
    store.close()


def test_a_file_larger_than_the_limit_is_not_written_and_evicts_nothing(
    tmp_path: Path, file_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path / "one", fingerprint=b"other" + bytes(27), max_bytes=file_bytes - 1)
    for name in ("a", "b"):
        fill(store, keys_of(2, name))
    assert len(files_in(tmp_path / "one")) == 1  # the one that was there
    assert store.stats().num_dropped == 4
    assert len(caplog.records) == 1
    store.close()


def test_another_processes_files_are_seen_before_the_folder_grows_far_over_its_limit(
    tmp_path: Path, file_bytes: int
) -> None:
    folder = tmp_path / "cache"
    stores = [open_store(folder, max_bytes=40 * file_bytes) for _ in range(2)]
    for number in range(40):
        for name, store in zip("ab", stores, strict=True):
            fill(store, keys_of(2, f"{name}{number}"))
        assert total(folder) <= 44 * file_bytes
    for store in stores:
        store.close()


def test_states_count_and_go_with_their_blocks(tmp_path: Path) -> None:
    store = open_store(tmp_path, HYBRID, max_bytes=40_000)
    for number in range(12):
        keys = keys_of(2, f"prompt {number}")
        assert store.find(keys, 0, needs_state=True) is None
        fill(store, keys, 0, HYBRID)
        assert total(tmp_path) <= 40_000
        assert num_found(store, keys, 0, HYBRID) == 2
    assert store.stats().num_evicted > 0
    store.close()


def test_clocks_that_go_back_do_no_harm(
    tmp_path: Path, file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    store = open_store(folder, max_bytes=10 * file_bytes)
    early, late = keys_of(4, "early"), keys_of(4, "late")
    fill(store, early)
    age(folder, -0.5)  # half an hour ahead
    before = [file.stat().st_mtime_ns for file in files_in(folder)]
    assert num_found(store, early) == 4
    store.flush()
    assert [file.stat().st_mtime_ns for file in files_in(folder)] == before  # never back
    age(folder, -1000)  # of a clock that was far ahead: no reason to keep it for a thousand hours
    fill(store, late)
    fill(store, keys_of(4, "last"))
    assert num_found(store, late) == 4
    assert num_found(store, early) == 2
    # Back to before all of it: files are found, written and evicted as ever.
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 10**9 * 10**9)
    for name in ("x", "y", "z"):
        fill(store, keys_of(4, name))
        assert num_found(store, keys_of(4, name)) == 4
        assert total(folder) <= 10 * file_bytes
    store.close()


def test_a_use_is_noted_even_where_the_time_was_wrong(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, keys_of(2))
    age(tmp_path, -1000)
    now = time.time_ns()
    assert num_found(store, keys_of(2)) == 2
    store.flush()
    assert all(abs(file.stat().st_mtime_ns - now) < HOUR_NS for file in files_in(tmp_path))
    store.close()


def test_the_order_is_by_use_then_from_the_end(tmp_path: Path) -> None:
    now = 10**18

    def file(index: int, used_ns: int, kind: FileKind = FileKind.BLOCK) -> StoredFile:
        return StoredFile(tmp_path / f"{kind}{index}", FileName(kind, index, "aa"), 1, used_ns)

    oldest_state = file(3, now - 5, FileKind.STATE)
    files = [file(0, now), file(0, now - 5), file(1, now - 5), file(2, now - 5), oldest_state, file(7, now)]
    from_future = file(9, now + 2 * HOUR_NS)
    damaged = StoredFile(tmp_path / "damaged", None, 1, now)
    order = eviction_order([ModelFiles(tmp_path, [*files, from_future], [], [damaged])], now)
    assert order[:2] == [damaged, from_future]
    assert [entry.name.num_blocks for entry in order[2:] if entry.name] == [3, 3, 2, 1, 8, 1]


def test_what_dead_processes_left_is_cleared_away_and_live_ones_are_left_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, keys_of(1))
    store.close()
    (model,) = scan(tmp_path)
    times = {"dead": 2, "future": -2, "live": 0, "clock": -0.1}
    for name, hours in times.items():
        left = model.folder / f".tmp-1-{name}"
        left.write_bytes(b"half a file")
        then = time.time_ns() - int(hours * HOUR_NS)
        os.utime(left, ns=(then, then))
    (model.folder / "mine.txt").write_text("not the store's")
    store = open_store(tmp_path)
    assert {file.name for file in model.folder.glob(".tmp-*")} == {".tmp-1-live", ".tmp-1-clock"}
    assert (model.folder / "mine.txt").exists()
    assert store.stats().bytes_on_disk == total(tmp_path) + 2 * len(b"half a file")
    store.close()
