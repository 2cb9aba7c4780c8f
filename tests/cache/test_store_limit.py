"""The folder stays within its limit, and what was unused for longest goes first."""

import os
import secrets
import time
from pathlib import Path

import pytest

from penstock.cache.store.file import FileKind, FileName
from penstock.cache.store.folder import (
    ModelFiles,
    StoredFile,
    check_owner,
    clear_model,
    make_private,
    scan,
    touch,
    write_file,
)
from penstock.cache.store.limit import SizeLimit, eviction_order
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


def put(folder: Path, index: int, num_bytes: int, used_ns: int | None = None) -> Path:
    """A file of a model, as another process would have written it."""
    model = folder / ("ab" * 16)
    model.mkdir(parents=True, exist_ok=True)
    path = model / str(FileName(FileKind.BLOCK, index, "aa"))
    path.write_bytes(bytes(num_bytes))
    if used_ns is not None:
        os.utime(path, ns=(used_ns, used_ns))
    return path


def test_what_others_write_is_seen_after_a_twentieth_of_the_limit_or_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limit = SizeLimit(tmp_path, 1000)
    put(tmp_path, 0, 400)

    def seen() -> int:
        assert limit.make_room(1, set(), time.time_ns(), 1)
        return limit.num_bytes

    limit.add(50)
    assert seen() == 50
    limit.add(1)
    assert seen() == 400
    put(tmp_path, 1, 100)
    limit.add(50)  # counted from the last look on
    assert seen() == 450
    now[0] += 60
    assert seen() == 450
    now[0] += 0.5
    assert seen() == 500


def test_a_limit_may_be_reached_and_not_passed(tmp_path: Path) -> None:
    limit = SizeLimit(tmp_path, 1000)
    now = time.time_ns()
    assert limit.make_room(1000, set(), now, 1)
    assert not limit.make_room(1001, set(), now, 1)
    old, new = put(tmp_path, 0, 300, now - HOUR_NS), put(tmp_path, 1, 200, now - 5)
    limit = SizeLimit(tmp_path, 1000)
    assert limit.num_bytes == 500
    assert limit.make_room(500, set(), now, 1)
    assert (old.exists(), new.exists(), limit.num_evicted) == (True, True, 0)
    # 501 do not fit: it goes on to nine tenths of the limit, of which 500 less 300 are enough.
    assert limit.make_room(501, set(), now, 1)
    assert (old.exists(), new.exists(), limit.num_evicted, limit.num_bytes) == (False, True, 1, 200)


@pytest.mark.parametrize(("num_bytes", "left"), [(700, 1), (701, 0)])
def test_evicting_ends_at_nine_tenths_of_the_limit(tmp_path: Path, num_bytes: int, left: int) -> None:
    now = time.time_ns()
    for index in range(2):
        put(tmp_path, index, 200, now - HOUR_NS + index)
    limit = SizeLimit(tmp_path, 1000)
    assert limit.make_room(num_bytes, set(), now, 1)
    assert (len(files_in(tmp_path)), limit.num_bytes) == (left, 200 * left)


def test_what_is_kept_and_what_would_go_later_is_not_evicted(tmp_path: Path) -> None:
    now = time.time_ns()
    files = [put(tmp_path, index, 300, now) for index in range(3)]
    # All were used when the new one was: those further on in their prefix go before it, the end first.
    assert not SizeLimit(tmp_path, 1000).make_room(200, set(), now, 3)
    assert [file.exists() for file in files] == [True, True, True]
    assert not SizeLimit(tmp_path, 1000).make_room(200, set(files[2:]), now, 2)
    assert [file.exists() for file in files] == [True, True, True]
    assert SizeLimit(tmp_path, 1000).make_room(200, set(files[2:]), now, 1)
    assert [file.exists() for file in files] == [True, False, True]


def test_a_file_is_stale_after_an_hour_either_way(tmp_path: Path) -> None:
    file = StoredFile(tmp_path, None, 1, 10**18)
    for away in (-HOUR_NS, HOUR_NS, 0):
        assert not file.is_stale(10**18 + away)
    for away in (-HOUR_NS - 1, HOUR_NS + 1):
        assert file.is_stale(10**18 + away)


def test_a_use_is_noted_forwards_only(tmp_path: Path) -> None:
    now = time.time_ns()
    path = put(tmp_path, 0, 1, now)
    for noted, expected in ((now - 1, now), (now, now), (now + 1000, now + 1000), (now, now + 1000)):
        touch(path, noted)
        assert path.stat().st_mtime_ns == expected
    touch(tmp_path / "gone", now)
    assert not (tmp_path / "gone").exists()


def test_a_model_is_cleared_of_what_was_last_used_before_a_time(tmp_path: Path) -> None:
    now = time.time_ns()
    before, at = put(tmp_path, 0, 1, now - 1), put(tmp_path, 1, 1, now)
    temporary = at.with_name(".tmp-1-x")
    temporary.write_bytes(b"")
    os.utime(temporary, ns=(now - 1, now - 1))
    (at.parent / "about.json").write_text("{}")
    (model,) = scan(tmp_path)
    assert {file.path for file in clear_model(model, now)} == {before, temporary}
    assert at.exists()
    assert (at.parent / "about.json").exists()
    (model,) = scan(tmp_path)
    assert [file.path for file in clear_model(model)] == [at]
    assert not at.parent.exists()


def test_what_is_not_the_stores_keeps_its_folder(tmp_path: Path) -> None:
    file = put(tmp_path, 0, 1)
    (file.parent / "mine").write_text("")
    (file.parent / "about.json").write_text("{}")
    (model,) = scan(tmp_path)
    clear_model(model)
    assert sorted(entry.name for entry in file.parent.iterdir()) == ["about.json", "mine"]


def test_folders_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    for mode, expected in ((0o755, 0o700), (0o710, 0o700), (0o701, 0o700), (0o500, 0o500)):
        folder.chmod(mode)
        make_private(folder)
        assert folder.stat().st_mode & 0o777 == expected
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        make_private(tmp_path / "file")


def test_a_folder_is_of_whoever_runs_it_or_of_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid() or 1234
    os.chown(tmp_path, owner, -1)
    for user in (0, owner):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        check_owner(tmp_path)
        make_private(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for look in (check_owner, make_private):
        with pytest.raises(PermissionError):
            look(tmp_path)
    check_owner(Path("/"))  # root may exchange anything, anyway


def test_nothing_is_written_into_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary file has a name that nobody guesses; whoever did can still not say what is written to."""
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    theirs, path = tmp_path / "theirs", tmp_path / "file"
    theirs.write_text("theirs")
    for guess in (Path.hardlink_to, Path.symlink_to):
        guess(link := tmp_path / f".tmp-{os.getpid()}-guessed", theirs)
        with pytest.raises(FileExistsError):
            write_file(path, [b"ours"])
        link.unlink()
    assert theirs.read_text() == "theirs"
    write_file(path, [b"ours"])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "theirs"]


def test_a_models_folder_has_32_digits_of_its_fingerprint(tmp_path: Path) -> None:
    store = open_store(tmp_path, fingerprint=bytes(range(32)))
    store.close()
    assert [folder.name for folder in tmp_path.iterdir()] == [bytes(range(16)).hex()]


def test_a_link_is_no_models_folder(tmp_path: Path) -> None:
    elsewhere = put(tmp_path / "elsewhere", 0, 1).parent
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / ("cd" * 16)).symlink_to(elsewhere)
    assert scan(folder) == []
