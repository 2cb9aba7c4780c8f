"""What was kept is found again, to the bit, or not at all."""

import logging
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from penstock.cache.store.block_store import BlockStore, StoredState
from penstock.cache.tensors import CacheSpec
from tests.cache.storing import (
    ABOUT,
    HYBRID,
    PLAIN,
    assert_right,
    bytes_in,
    files_in,
    fill,
    keys_of,
    kv_of,
    num_found,
    open_store,
    state_of,
)

SPECS = pytest.mark.parametrize("spec", [PLAIN, HYBRID], ids=["plain", "hybrid"])


@SPECS
def test_another_store_finds_all_that_was_flushed(tmp_path: Path, spec: CacheSpec) -> None:
    keys = keys_of(9)
    first = open_store(tmp_path, spec)
    assert first.find(keys, 0, needs_state=spec is HYBRID) is None
    fill(first, keys, 0, spec)
    first.close()
    again = open_store(tmp_path, spec)
    assert num_found(again, keys, 0, spec) == 9
    assert num_found(again, keys, 4, spec) == 5
    assert num_found(again, keys[:3], 1, spec) == 2
    assert num_found(again, keys, 9, spec) == 0
    assert again.stats().num_damaged == 0
    assert again.stats().bytes_on_disk == sum(file.stat().st_size for file in files_in(tmp_path))
    again.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_every_dtype_is_found_again(tmp_path: Path, dtype: torch.dtype) -> None:
    assert HYBRID.recurrent is not None
    kv, recurrent = replace(HYBRID.kv, dtype=dtype), replace(HYBRID.recurrent, dtype=dtype)
    spec = CacheSpec((kv,), recurrent)
    keys = keys_of(2)
    store = open_store(tmp_path, spec)
    fill(store, keys, 0, spec)
    assert num_found(store, keys, 0, spec) == 2
    found = store.find(keys, 0, needs_state=True)
    assert found is not None
    assert found.state is not None
    assert (found.blocks[0].keys[0].dtype, found.blocks[0].values[0].dtype) == (dtype, dtype)
    assert found.state.tails.dtype == dtype
    assert found.state.tails.shape == (3, 3, 7)
    assert found.state.matrices.dtype == torch.float32
    assert found.state.matrices.shape == (3, 1, 5, 3)
    store.close()


def test_bytes_on_disk_are_counted_as_files_come_and_go(tmp_path: Path) -> None:
    keys = keys_of(6)
    store = open_store(tmp_path, HYBRID)

    def on_disk() -> int:
        files = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "about.json"]
        return sum(file.stat().st_size for file in files)

    for end in (1, 4, 6):
        fill(store, keys[:end], 0, HYBRID)
        assert store.stats().bytes_on_disk == on_disk()
        assert store.stats().num_written == 2 * end
    shorter = files_in(tmp_path)[0]
    shorter.write_bytes(shorter.read_bytes()[:-100])
    fill(store, keys, 0, HYBRID)  # one that is not as long as it should be is written again
    assert store.stats().bytes_on_disk == on_disk() + 100  # until the next look
    assert store.stats().num_written == 13
    assert open_store(tmp_path, HYBRID).stats().bytes_on_disk == on_disk()
    store.close()


def test_what_was_found_is_not_the_file(tmp_path: Path) -> None:
    keys = keys_of(2)
    store = open_store(tmp_path)
    fill(store, keys)
    found = store.find(keys, 0, needs_state=False)
    assert found is not None
    for block in found.blocks:
        block.keys[0].fill_(1)
        block.values[0].fill_(2)
    assert num_found(store, keys) == 2
    store.close()


def test_a_gap_ends_what_is_found(tmp_path: Path) -> None:
    keys = keys_of(6)
    store = open_store(tmp_path)
    fill(store, keys)
    files_in(tmp_path)[3].unlink()
    assert num_found(store, keys) == 3
    assert num_found(store, keys, 3) == 0
    assert num_found(store, keys, 4) == 2
    store.close()


def test_with_recurrent_state_what_is_found_ends_at_a_state(tmp_path: Path) -> None:
    keys = keys_of(8)
    store = open_store(tmp_path, HYBRID)
    store.put_blocks(0, keys, kv_of(keys, HYBRID))
    for num_blocks in (2, 5):
        store.put_state(num_blocks, keys[num_blocks - 1], StoredState(*state_of(keys[num_blocks - 1])))
    store.flush()
    assert num_found(store, keys, 0, HYBRID) == 5
    assert num_found(store, keys[:4], 0, HYBRID) == 2
    assert num_found(store, keys, 3, HYBRID) == 2
    assert num_found(store, keys, 5, HYBRID) == 0
    # Without states, where somebody has no use for them, the blocks alone.
    found = store.find(keys, 0, needs_state=False)
    assert found is not None
    assert (found.num_blocks, found.state) == (8, None)
    store.close()


@SPECS
def test_files_are_safetensors_that_anybody_can_read(tmp_path: Path, spec: CacheSpec) -> None:
    keys = keys_of(2)
    store = open_store(tmp_path, spec)
    fill(store, keys, 0, spec)
    store.close()
    for file in files_in(tmp_path):
        index = int(file.name[:8])
        with safe_open(file, framework="pt") as opened:
            about = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no dict)
        if file.name.endswith(".state.safetensors"):
            tails, matrices = state_of(keys[index - 1])
            assert (about["kind"], about["key"]) == ("state", keys[index - 1].hex())
            expected = {"tails": tails, "matrices": matrices}
        else:
            kv = [part[index] for part in spec.kv.parts_of(kv_of(keys, spec)[0])]
            assert (about["kind"], about["key"]) == ("block", keys[index].hex())
            expected = {"keys": kv[0], "values": kv[1]}
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (tensors[name].shape, tensors[name].dtype) == (tensor.shape, tensor.dtype)
            assert bytes_in(tensors[name]) == bytes_in(tensor)


def test_tensors_are_aligned_in_their_files(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keys = keys_of(3)
    fill(store, keys)
    found = store.find(keys, 0, needs_state=False)
    assert found is not None
    assert all(block.keys[0].data_ptr() % 64 == 0 for block in found.blocks)
    assert all(file.stat().st_size % 64 == 0 for file in files_in(tmp_path))
    store.close()


def test_what_is_on_disk_is_not_written_again(tmp_path: Path) -> None:
    keys = keys_of(4)
    store = open_store(tmp_path)
    fill(store, keys[:2])
    before = [file.stat().st_ino for file in files_in(tmp_path)]
    fill(store, keys)
    assert store.stats().num_written == 4
    assert [file.stat().st_ino for file in files_in(tmp_path)][:2] == before
    store.close()


def test_what_was_found_outlives_its_files(tmp_path: Path) -> None:
    keys = keys_of(3)
    store = open_store(tmp_path)
    fill(store, keys)
    found = store.find(keys, 0, needs_state=False)
    assert found is not None
    kept = found.blocks[0].keys[0]
    for file in files_in(tmp_path):
        file.unlink()
    assert_right(found, keys)
    found.close()
    assert (found.num_blocks, found.state) == (0, None)
    assert bytes_in(kept) == bytes_in(
        PLAIN.kv.parts_of(kv_of(keys)[0])[0][0]
    )  # no memory goes while a tensor has it
    store.close()


def test_files_are_for_their_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = open_store(tmp_path / "new" / "cache", HYBRID)
        fill(store, keys_of(2), 0, HYBRID)
        store.close()
    finally:
        os.umask(before)
    (model,) = (tmp_path / "new" / "cache").iterdir()
    assert len(model.name) == 32
    assert stat.S_IMODE(model.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(model.stat().st_mode) == 0o700
    assert len(list(model.iterdir())) == 5  # two blocks, two states, what it is
    for file in model.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_folder_that_exists_stays_as_it_is_but_for_its_models(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    open_store(tmp_path).close()
    (model,) = tmp_path.iterdir()
    model.chmod(0o777)
    open_store(tmp_path).close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE(model.stat().st_mode) == 0o700


def test_models_do_not_see_each_others_files(tmp_path: Path) -> None:
    keys = keys_of(2)
    one, other = open_store(tmp_path), open_store(tmp_path, fingerprint=b"another model" * 3)
    fill(one, keys)
    assert num_found(other, keys) == 0
    assert other.stats().num_damaged == 0
    one.close()
    other.close()


def test_a_folder_of_the_same_id_is_not_yet_the_same_model(tmp_path: Path) -> None:
    keys = keys_of(2)
    one = open_store(tmp_path, fingerprint=b"x" * 16 + b"one")
    other = open_store(tmp_path, fingerprint=b"x" * 16 + b"two")
    fill(one, keys)
    assert num_found(other, keys) == 0
    assert other.stats().num_damaged >= 1
    one.close()
    other.close()


def test_it_says_whose_files_they_are(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.close()
    assert [file.read_text().split() for file in tmp_path.glob("*/about.json")] == [
        ["{", '"model":', '"tiny",', '"dtype":', '"bfloat16"', "}"]
    ]
    assert ABOUT["model"] == "tiny"


def test_wrong_tensors_are_refused_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keys = keys_of(2)
    with pytest.raises(ValueError, match=r"must be torch\.bfloat16"):
        store.put_blocks(0, keys, [kv_of(keys)[0].float()])
    with pytest.raises(ValueError, match=r"\[2, 768\]"):
        store.put_blocks(0, keys, [kv_of(keys)[0][:1]])
    with pytest.raises(ValueError, match=r"\[2, 768\] on cpu, not .* on meta"):
        store.put_blocks(0, keys, [kv_of(keys)[0].to("meta")])
    with pytest.raises(ValueError, match="no recurrent state"):
        store.put_state(1, keys[0], StoredState(torch.zeros(1), torch.zeros(1)))
    store.close()
    hybrid = open_store(tmp_path, HYBRID)
    tails, matrices = state_of(keys[0])
    for wrong, name in (
        ((tails[:1], matrices), "tails"),
        ((tails, matrices[:1]), "matrices"),
        ((tails.float(), matrices), "tails"),
        ((tails, matrices.double()), "matrices"),
        ((tails, matrices.to("meta")), "matrices"),
    ):
        with pytest.raises(ValueError, match=f"{name} to keep must be"):
            hybrid.put_state(1, keys[0], StoredState(*wrong))
    assert hybrid.flush(60)
    assert hybrid.stats().num_written == 0
    hybrid.close()


def test_a_closed_store_keeps_and_finds_nothing(tmp_path: Path) -> None:
    keys = keys_of(2)
    store = open_store(tmp_path)
    fill(store, keys[:1])
    store.close()
    store.close()
    store.put_blocks(0, keys, kv_of(keys))
    assert store.flush(1)
    assert len(files_in(tmp_path)) == 1
    assert store.find(keys, 0, needs_state=False) is None
    assert (store.is_usable, store.has_room(1)) == (False, False)
    assert store.stats().num_dropped == 0  # nobody is told that a disk is slow


def test_a_store_that_is_closed_while_somebody_looks_finds_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, keys_of(2))
    store.close()
    store.is_usable = True  # as it was when they began to look
    assert store.find(keys_of(2), 0, needs_state=False) is None


def test_many_threads_read_while_another_is_written(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keys = keys_of(12)
    fill(store, keys[:6])
    wrong: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(20):
                assert num_found(store, keys) >= 6
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for index in range(6, 12):
        store.put_blocks(index, keys[index : index + 1], kv_of(keys[index : index + 1]))
    for thread in threads:
        thread.join()
    store.flush()
    assert not wrong
    assert num_found(store, keys) == 12
    store.close()


def test_no_files_stay_open(tmp_path: Path) -> None:
    keys = keys_of(40)
    store = open_store(tmp_path)
    fill(store, keys)
    found = store.find(keys, 0, needs_state=False)
    assert found is not None
    opened = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    # None of the store's: what other tests have left may open files at any time.
    assert not any(file.startswith(f"{tmp_path}{os.sep}") for file in opened)
    store.close()


def test_nothing_is_said_where_nothing_is_wrong(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "penstock.cache"):
        store: BlockStore = open_store(tmp_path)
        fill(store, keys_of(3))
        num_found(store, keys_of(3))
        store.close()
    assert not caplog.records
