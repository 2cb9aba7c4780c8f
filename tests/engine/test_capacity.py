"""How large a cache may be: by the memory that is free, on the machine and in the container."""

from pathlib import Path

import pytest
import torch

from penstock.cache.kv import KVSpec
from penstock.cache.recurrent import RecurrentSpec
from penstock.cache.tensors import CacheSpec
from penstock.engine import capacity
from penstock.errors import MemoryExhaustedError

KV = KVSpec(2, 2, 16, torch.float32)  # 512 bytes a token
SPEC = CacheSpec(KV)


def free_is(monkeypatch: pytest.MonkeyPatch, num_bytes: int | None) -> None:
    monkeypatch.setattr(capacity, "free_memory_bytes", lambda: num_bytes)


def test_a_cache_takes_half_of_what_is_free_in_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    free_is(monkeypatch, 2 * 512 * 1000)
    assert capacity.cache_tokens_that_fit(SPEC, 0, 10**9) == 960
    assert capacity.cache_tokens_that_fit(SPEC, 0, 500) == 500


def test_states_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    recurrent = RecurrentSpec(1, 3, 64, 2, 16, 16, torch.float32)
    free_is(monkeypatch, 2 * (4 * recurrent.bytes_per_slot + 512 * 64 * 5))
    assert capacity.cache_tokens_that_fit(CacheSpec(KV, recurrent), 4, 10**9) == 320
    with pytest.raises(MemoryExhaustedError, match="max_running"):
        capacity.cache_tokens_that_fit(CacheSpec(KV, recurrent), 400, 10**9)


def test_where_nobody_knows_it_is_what_could_be_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    free_is(monkeypatch, None)
    assert capacity.cache_tokens_that_fit(SPEC, 0, 12345) == 12345


def test_this_machine_has_memory() -> None:
    free = capacity.free_memory_bytes()
    assert free is not None
    assert 1 << 20 < free < 1 << 50


@pytest.mark.parametrize(("limit", "expected"), [("1000000", 750_000), ("max", None), ("nonsense", None)])
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, limit: str, expected: int | None) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("300000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\nactive_file 7\n")
    assert capacity._free_in_container(tmp_path) == expected
    assert capacity._free_in_container(tmp_path / "nowhere") is None
