"""How large a cache may be: by the memory that is free, on the machine and in the container."""

from pathlib import Path

import pytest
import torch

from penstock import machine
from penstock.cache.tensors import CacheSpec, KVSpec, RecurrentSpec
from penstock.engine import capacity
from penstock.errors import MemoryExhaustedError
from penstock.kernels.device import DEVICE_KINDS, device_kind

KV = KVSpec(2, 2, 16, torch.float32)  # 512 bytes a token
SPEC = CacheSpec((KV,))
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


def free_is(monkeypatch: pytest.MonkeyPatch, num_bytes: int | None) -> None:
    for kind in DEVICE_KINDS.values():
        monkeypatch.setattr(kind, "free_bytes", lambda self: num_bytes)


def test_a_cache_takes_half_of_what_is_free_in_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    free_is(monkeypatch, 2 * 512 * 1000)
    assert capacity.cache_tokens_that_fit(SPEC, 0, 10**9, CPU) == 960
    assert capacity.cache_tokens_that_fit(SPEC, 0, 500, CPU) == 500
    free_is(monkeypatch, 2 * 512 * 64)
    assert capacity.cache_tokens_that_fit(SPEC, 0, 10**9, CPU) == 64
    free_is(monkeypatch, 2 * 512 * 64 - 1)
    with pytest.raises(MemoryExhaustedError):
        capacity.cache_tokens_that_fit(SPEC, 0, 10**9, CPU)


def test_states_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    recurrent = RecurrentSpec(1, 3, 64, 2, 16, 16, torch.float32)
    free_is(monkeypatch, 2 * (4 * recurrent.bytes_per_slot + 512 * 64 * 5))
    assert capacity.cache_tokens_that_fit(CacheSpec((KV,), recurrent), 4, 10**9, CPU) == 320
    with pytest.raises(MemoryExhaustedError, match="max_running"):
        capacity.cache_tokens_that_fit(CacheSpec((KV,), recurrent), 400, 10**9, CPU)


def test_on_a_gpu_a_cache_takes_most_of_what_a_measured_step_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    step_bytes, margin = 1 << 30, 256 << 20
    rest = 512 * 64 * 1000
    free_is(monkeypatch, step_bytes * 5 // 4 + margin + rest)
    fits = capacity.cache_tokens_that_fit(SPEC, 0, 10**9, CUDA, step_bytes)
    assert fits == 64 * 900
    assert capacity.cache_tokens_that_fit(SPEC, 0, 640, CUDA, step_bytes) == 640
    with pytest.raises(
        MemoryExhaustedError, match=r"1.5 GiB are free.* 90% may be used beside 1.8 GiB that a step"
    ):
        capacity.cache_tokens_that_fit(SPEC, 0, 10**9, CUDA, (5 << 30) // 4)


def test_what_the_allocator_holds_and_does_not_use_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert device_kind(CUDA).free_bytes() == 1400


def test_where_nobody_knows_it_is_what_could_be_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    free_is(monkeypatch, None)
    assert capacity.cache_tokens_that_fit(SPEC, 0, 12345, CPU) == 12345


def test_this_machine_has_memory() -> None:
    free = device_kind(CPU).free_bytes()
    assert free is not None
    assert 1 << 20 < free < 1 << 50


def test_a_limit_of_a_nested_slice_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = tmp_path / "sys/fs/cgroup/user.slice"
    (slices / "job").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/user.slice/job\n")
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 16777216 kB\n")
    (slices / "memory.max").write_text(f"{1 << 30}\n")
    (slices / "memory.current").write_text(f"{1 << 28}\n")
    monkeypatch.setattr(machine.free_memory_bytes, "__kwdefaults__", {"root": tmp_path})
    assert device_kind(CPU).free_bytes() == (1 << 30) - (1 << 28)
