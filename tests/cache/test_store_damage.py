"""A file that is not what was written is noticed, set aside and never used."""

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.store.file import FileName, find_damage
from penstock.cache.tensors import CacheSpec
from tests.cache.storing import HYBRID, PLAIN, files_in, fill, keys_of, num_found, open_store

KEYS = keys_of(4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four blocks and the states after each of them."""
    folder = tmp_path_factory.mktemp("whole")
    store = open_store(folder, HYBRID)
    fill(store, KEYS, 0, HYBRID)
    store.close()
    return folder


def blocks_and_states(folder: Path) -> tuple[list[Path], list[Path]]:
    files = files_in(folder)
    states = [file for file in files if ".state." in file.name]
    return [file for file in files if file not in states], states


def expect_noticed(whole: Path, folder: Path, damage: Callable[[bytes], bytes], place: int, of: str) -> None:
    """Damage one file of a copy: it is noticed with and without its model, and what does not need it is found."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    blocks, states = blocks_and_states(folder)
    file = (blocks if of == "block" else states)[place]
    damaged = damage(file.read_bytes())
    if damaged == file.read_bytes():
        return
    file.write_bytes(damaged)
    name = FileName.parse(file.name)
    assert name is not None
    assert find_damage(file, name) is not None
    store = open_store(folder, HYBRID)
    found = num_found(store, KEYS, 0, HYBRID)
    # A block that is damaged ends the prefix before it. A state that is damaged leaves the one before it; but only
    # the last is needed, so the others are not looked at.
    assert found == (place if of == "block" or place == 3 else 4)
    is_seen = of == "block" or place == 3
    assert store.stats().num_damaged == is_seen
    assert file.exists() == (not is_seen)
    if is_seen:
        assert [aside.name for aside in (file.parent / "damaged").iterdir()] == [file.name]
        assert num_found(store, KEYS, 0, HYBRID) == found
        # It is computed again, and all is as it was.
        fill(store, KEYS, place, HYBRID)
        assert num_found(store, KEYS, 0, HYBRID) == 4
    store.close()


@settings(max_examples=40)
@given(st.data(), st.integers(0, 3), st.sampled_from(["block", "state"]))
def test_every_flipped_bit_is_noticed(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, place: int, of: str
) -> None:
    def flip(content: bytes) -> bytes:
        at = data.draw(st.integers(0, len(content) - 1))
        mask = data.draw(st.integers(1, 255))
        return content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :]

    expect_noticed(whole, tmp_path_factory.getbasetemp() / "flipped", flip, place, of)


@settings(max_examples=40)
@given(st.data(), st.integers(0, 3), st.sampled_from(["block", "state"]))
def test_every_cut_and_every_addition_is_noticed(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, place: int, of: str
) -> None:
    def cut(content: bytes) -> bytes:
        if data.draw(st.booleans()):
            return content + data.draw(st.binary(min_size=1, max_size=100))
        return content[: data.draw(st.integers(0, len(content) - 1))]

    expect_noticed(whole, tmp_path_factory.getbasetemp() / "cut", cut, place, of)


def test_every_byte_of_a_header_counts(whole: Path, tmp_path: Path) -> None:
    """The header is the small part, which random places seldom meet."""
    (file, *_), _ = blocks_and_states(whole)
    name = FileName.parse(file.name)
    assert name is not None
    assert find_damage(file, name) is None
    content = file.read_bytes()
    folder = tmp_path / file.parent.name
    folder.mkdir()
    copy = folder / file.name
    for at in range(8 + int.from_bytes(content[:8], "little")):
        copy.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert find_damage(copy, name) is not None, f"byte {at}"


@pytest.mark.parametrize(
    "put",
    [
        pytest.param(lambda file: file.write_bytes(b""), id="empty"),
        pytest.param(lambda file: file.write_bytes(b"\xff" * 5000), id="garbage"),
        pytest.param(lambda file: file.write_bytes(b"\x02" + bytes(7) + b"{}"), id="no tensors"),
        pytest.param(lambda file: file.mkdir(), id="a folder"),
        pytest.param(lambda file: file.symlink_to("/etc/passwd"), id="a link"),
        pytest.param(lambda file: file.symlink_to("nowhere"), id="a link to nothing"),
        pytest.param(os.mkfifo, id="a pipe"),
    ],
)
def test_what_is_no_file_of_ours_is_set_aside(tmp_path: Path, put: Callable[[Path], object]) -> None:
    store = open_store(tmp_path)
    fill(store, KEYS)
    file = files_in(tmp_path)[2]
    file.unlink()
    put(file)
    assert num_found(store, KEYS) == 2
    assert store.stats().num_damaged == 1
    assert not os.path.lexists(file)
    fill(store, KEYS, 2)
    assert num_found(store, KEYS) == 4
    store.close()


def test_a_whole_file_in_anothers_place_is_foreign(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, KEYS)
    first, second, third, _ = files_in(tmp_path)
    shutil.copy(first, second)
    shutil.copy(first, first.with_name(third.name))
    assert num_found(store, KEYS) == 1
    store.close()


def test_a_model_of_other_shapes_finds_nothing(tmp_path: Path) -> None:
    other = CacheSpec((replace(PLAIN.kv, num_layers=1, num_kv_heads=2),))  # of as many bytes
    store = open_store(tmp_path)
    fill(store, KEYS)
    store.close()
    changed = open_store(tmp_path, other)
    assert changed.find(KEYS, 0, needs_state=False) is None
    assert changed.stats().num_damaged >= 1
    changed.close()


def test_only_a_few_damaged_files_are_kept_to_be_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(12)
    store = open_store(tmp_path)
    fill(store, keys)
    for file in files_in(tmp_path):
        file.write_bytes(b"damaged")
    for start in range(12):
        assert num_found(store, keys, start) == 0
    store.close()
    (aside,) = tmp_path.glob("*/damaged")
    assert len(list(aside.iterdir())) == 4
    assert stat.S_IMODE(aside.stat().st_mode) == 0o700
    assert not files_in(tmp_path)
    assert store.stats().num_damaged == 12
    assert len(caplog.records) == 1  # one line, not twelve
    assert "is damaged" in caplog.text
