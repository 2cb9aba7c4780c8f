"""A fingerprint is of all that a block's bits depend on: it changes with each of them, and with nothing else."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock.engine.fingerprint as fingerprints
from penstock.engine.fingerprint import cache_fingerprint, weights_digest
from penstock.models.decoder import Decoder
from penstock.plan.grids import RowLaw
from penstock.plan.weight_settings import WeightsSetting
from tests.odd_files import ODD_FILES
from tests.oracle import load_model, make_oracle

CANON = RowLaw(512, 8, 0)


@dataclass(frozen=True)
class Loaded:
    path: Path
    model: Decoder
    canon: RowLaw = CANON
    weights: WeightsSetting = WeightsSetting("auto", "default")  # noqa: RUF009


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def llm(tmp_path: Path) -> Loaded:
    folder = tmp_path / "model"
    shutil.copytree(make_oracle("llama").folder, folder)
    for file in folder.iterdir():
        set_age(file, 10)
    return Loaded(folder, load_model(folder))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An item for each file whose bytes were read."""
    read: list[int] = []

    def counted(*data: bytes) -> Any:
        if not data:  # to be fed piece by piece
            read.append(1)
        return hashlib.sha256(*data)

    monkeypatch.setattr(fingerprints, "sha256", counted)
    return read


@pytest.fixture
def one_more_thread() -> Iterator[Callable[[], None]]:
    before = torch.get_num_threads()
    yield lambda: torch.set_num_threads(before + 1)
    torch.set_num_threads(before)


def set_age(file: Path, seconds: int) -> None:
    then = time.time_ns() - seconds * 10**9
    os.utime(file, ns=(then, then))


def flip_a_bit(file: Path) -> None:
    """In its last byte, with its size and its time as they were."""
    before = file.stat()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_it_stays_the_same_wherever_the_model_lies(llm: Loaded, tmp_path: Path) -> None:
    first = cache_fingerprint(llm)
    assert len(first) == 32
    assert cache_fingerprint(llm) == first
    moved = tmp_path / "elsewhere"
    shutil.copytree(llm.path, moved)
    assert cache_fingerprint(Loaded(moved, load_model(moved))) == first


def test_it_changes_with_each_thing_that_bits_depend_on(
    llm: Loaded, one_more_thread: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [cache_fingerprint(llm)]
    seen += [
        cache_fingerprint(replace(llm, canon=canon))
        for canon in (RowLaw(256, 8), RowLaw(512, 4), RowLaw(512, 8, 64), RowLaw(512, 8, expert_slab=32))
    ]
    seen.append(cache_fingerprint(replace(llm, model=load_model(llm.path, torch.bfloat16))))
    seen.append(cache_fingerprint(replace(llm, weights=WeightsSetting("int8", "argument"))))
    seen.append(cache_fingerprint(replace(llm, model=load_model(make_oracle("qwen3").folder))))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99")
        seen.append(cache_fingerprint(llm))
    with monkeypatch.context() as patch:
        patch.setattr(fingerprints, "code_digest", lambda: "other code")
        seen.append(cache_fingerprint(llm))
    one_more_thread()
    seen.append(cache_fingerprint(llm))
    assert len(set(seen)) == len(seen)


def test_weights_count_by_their_bytes(llm: Loaded, tmp_path: Path) -> None:
    (file,) = llm.path.glob("*.safetensors")
    before = weights_digest(llm.path)
    other = tmp_path / "other"
    shutil.copytree(llm.path, other)
    flip_a_bit(other / file.name)
    assert weights_digest(other) != before
    shutil.copy(file, llm.path / "more.safetensors")
    assert weights_digest(llm.path) != before
    assert weights_digest(file) != weights_digest(other / file.name)  # as for a GGUF file


def test_a_file_is_read_once_until_it_changes(llm: Loaded, home: Path, hashed: list[int]) -> None:
    (file,) = llm.path.glob("*.safetensors")
    before = weights_digest(llm.path)
    assert len(hashed) == 1
    assert weights_digest(llm.path) == before
    assert len(hashed) == 1
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    set_age(file, 5)
    assert weights_digest(llm.path) != before
    assert len(hashed) == 2
    # Another file in its place, of the same size and time.
    then = file.stat().st_mtime_ns
    copy = file.with_name("copy")
    copy.write_bytes(content)
    os.utime(copy, ns=(then, then))
    copy.rename(file)
    assert weights_digest(llm.path) == before
    assert len(hashed) == 3
    assert [left.name for left in home.iterdir()] == ["digests.json"]


def test_a_file_that_may_still_be_changing_is_not_remembered(
    llm: Loaded, hashed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = llm.path.glob("*.safetensors")
    written_ns = file.stat().st_mtime_ns
    monkeypatch.setattr(time, "time_ns", lambda: written_ns + 10**9)  # a second later
    before = weights_digest(llm.path)
    flip_a_bit(file)
    assert weights_digest(llm.path) != before
    assert len(hashed) == 2


@pytest.mark.parametrize("content", ["", "[", "[1]", '{"a": 1}', "\0", "null"])
def test_what_was_remembered_may_be_damaged(llm: Loaded, home: Path, content: str) -> None:
    before = weights_digest(llm.path)
    (home / "digests.json").write_text(content)
    assert weights_digest(llm.path) == before
    assert str(llm.path) in json.loads((home / "digests.json").read_text()).popitem()[0]


@pytest.mark.parametrize("put", ODD_FILES)
def test_what_was_remembered_may_be_no_file(llm: Loaded, home: Path, put: Callable[[Path], object]) -> None:
    before = weights_digest(llm.path)
    (home / "digests.json").unlink()
    put(home / "digests.json")
    os.mkfifo(llm.path / "pipe.safetensors")  # which is none of the model's
    assert weights_digest(llm.path) == before
    assert (home / "digests.json").is_file()


@pytest.mark.parametrize("memo", [1, None, {}, {"state": None, "sha256": "0"}])
def test_a_damaged_memory_of_one_file_is_not_believed(llm: Loaded, home: Path, memo: object) -> None:
    before = weights_digest(llm.path)
    memos = json.loads((home / "digests.json").read_text())
    (home / "digests.json").write_text(json.dumps(dict.fromkeys(memos, memo)))
    assert weights_digest(llm.path) == before


def test_a_home_that_cannot_be_written_costs_time_only(llm: Loaded, home: Path) -> None:
    before = weights_digest(llm.path)
    shutil.rmtree(home)
    home.write_text("a file")
    assert weights_digest(llm.path) == before
