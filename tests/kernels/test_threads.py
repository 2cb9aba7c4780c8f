"""Who does a step's work, and that nobody can tell from its bits."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.kernels import threads
from penstock.kernels.native.build import NativeUnavailableError, native_library
from penstock.kernels.native.kernels import NativeKernels
from penstock.kernels.quantised import Q8_0, QuantisedWeight, quantise
from penstock.kernels.threads import Crowd, StepThreads, native_threads, num_threads


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    try:
        native_library()
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    return NativeKernels()


def quantised(kernels: NativeKernels, num_out: int, num_in: int) -> QuantisedWeight:
    if kernels.quantised is None:
        pytest.skip("the processor has no bfloat16 products")
    weight = kernels.quantised.zeros(Q8_0, num_out, num_in)
    kernels.quantised.place(weight, torch.arange(num_out), quantise(torch.randn(num_out, num_in), Q8_0))
    return weight


def test_a_step_without_torch_leaves_it_one_thread() -> None:
    with (
        StepThreads(is_host=True, torch_multiplies=False) as _,
        StepThreads(is_host=True, torch_multiplies=True),
    ):
        assert (torch.get_num_threads(), num_threads(), native_threads()) == (1, 3, 3)
    assert (torch.get_num_threads(), num_threads(), native_threads()) == (3, 3, -3)


@pytest.mark.parametrize("is_host", [True, False])
def test_otherwise_torch_has_all_of_them(is_host: bool) -> None:
    with StepThreads(is_host=is_host, torch_multiplies=is_host):
        assert (torch.get_num_threads(), native_threads()) == (3, -3)


def test_they_come_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), StepThreads(is_host=True, torch_multiplies=False):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3


def test_a_crowd_comes_and_goes(tmp_path: Path) -> None:
    loads, now = tmp_path / "loadavg", 1.0
    crowd = Crowd(loads, num_processors=2, own=running_threads(tmp_path, 1))

    def look(num_running: int, times: int = 1) -> list[bool]:
        nonlocal now
        found = []
        for _ in range(times):
            now += 1.01 * (Crowd.EVERY_THERE_S if crowd.is_there else Crowd.EVERY_S)
            loads.write_text(f"0.5 0.4 0.3 {num_running}/400 999\n")
            found.append(crowd.look(now, 2))
        return found

    assert look(1) == [False]  # after a pause: this one, and another that is to come
    assert not any(look(2, 50))
    assert not any([*look(3, Crowd.NUM_LOOKS - 1), *look(2), *look(3, Crowd.NUM_LOOKS - 1)])
    assert look(3) == [True]
    assert not crowd.look(now + Crowd.EVERY_THERE_S / 2, 2)  # too soon to ask
    assert not any(look(2, 50))  # one of ours, and somebody else's, who takes what the other of ours needs
    assert look(1, 8) == [False] * 6 + [True, False]
    # It was there all along: it must be quiet for twice as long, and at most a second.
    waits = []
    for _ in range(6):
        assert look(4, Crowd.NUM_LOOKS)[-1]
        came = now
        while not look(1)[0]:
            pass
        waits.append(now - came)
    assert waits == pytest.approx([0.5, 1, 1, 1, 1, 1], abs=2 * Crowd.EVERY_THERE_S)


def test_a_crowd_that_grows_is_left_more(tmp_path: Path) -> None:
    loads = tmp_path / "loadavg"
    crowd, now = Crowd(loads, num_processors=8, own=running_threads(tmp_path, 8)), 1.0
    left = []
    for num_running in (10, 10, 10, 12, 10, 10):
        loads.write_text(f"0 0 0 {num_running}/9 9")
        now += 1.01 * Crowd.EVERY_THERE_S
        left.append((crowd.look(now, 8), crowd.processors_left))
    assert left == [(False, 2), (True, 6), (False, 6), (True, 4), (False, 4), (True, 6)]


def test_who_begins_knows_of_others_before_its_own_threads_are_awake(tmp_path: Path) -> None:
    loads = tmp_path / "loadavg"
    crowd, now = Crowd(loads, num_processors=2), 1.0
    for num_running, is_crowded in ((1, False), (2, True)):
        loads.write_text(f"0 0 0 {num_running}/9 9")
        crowd.look(now, 2)
        assert bool(crowd._num_crowded) == is_crowded
        now += 2 * Crowd.PAUSE_S


def running_threads(folder: Path, count: int) -> Path:
    """As the system tells of so many threads that run, and one that sleeps."""
    for index in range(count + 1):
        (folder / "task" / str(index)).mkdir(parents=True)
        state = "R" if index < count else "S"
        (folder / "task" / str(index) / "stat").write_text(f"{index} (a) R (b) {state} 1 1 1")
    return folder / "task"


def test_a_system_that_does_not_tell_has_no_crowd(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path / "absent", num_processors=2)
    assert not any(crowd.look(float(second), 1) for second in range(9))


def test_in_a_crowd_torch_has_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = tmp_path / "loadavg"
    loads.write_text("0 0 0 9/9 9")
    crowd, now = Crowd(loads, num_processors=2, own=running_threads(tmp_path, 1)), 1.0
    monkeypatch.setattr(threads, "Crowd", lambda: crowd)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    steps = StepThreads(is_host=True, torch_multiplies=True)
    with steps:
        for _ in range(Crowd.NUM_LOOKS):
            assert torch.get_num_threads() == 3
            now += 1.01 * Crowd.EVERY_S
            steps.look()
        assert (torch.get_num_threads(), native_threads()) == (1, 3)
    assert torch.get_num_threads() == 3
    with steps:
        assert torch.get_num_threads() == 1
        loads.write_text("0 0 0 1/9 9")
        crowd._num_processors = 3
        now += 2 * Crowd.QUIET_S
        steps.look()
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("num_processors", "num_own", "runs", "left"),
    [
        (2, 2, [3, 3], 1),
        (2, 2, [4, 4], 1),
        (16, 16, [20, 18], 14),
        (16, 16, [32, 32], 4),
        (8, 2, [9, 9], 2),
    ],
)
def test_others_are_left_what_they_want(
    tmp_path: Path, num_processors: int, num_own: int, runs: list[int], left: int
) -> None:
    loads = tmp_path / "loadavg"
    crowd = Crowd(loads, num_processors)
    for index, num_running in enumerate(runs):
        loads.write_text(f"0 0 0 {num_running}/99 9")
        crowd.look(2 * Crowd.EVERY_S * index, num_own)
    assert crowd.is_there
    assert crowd.processors_left == left


def test_float32_keeps_its_threads() -> None:
    steps = StepThreads(is_host=True, torch_multiplies=True, dtype=torch.float32)
    with steps:
        for _ in range(9):
            steps.look()
            assert torch.get_num_threads() == 3
    assert steps._crowd is None


@pytest.mark.parametrize(("num_out", "num_in"), [(960, 576), (384, 1024), (1024, 1536), (100, 130)])
def test_torchs_products_of_bfloat16_do_not_tell_how_many(num_out: int, num_in: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=generator).bfloat16()
    for num_rows in (1, 2, 7, 16, 64, 100, 256):
        x = torch.randn(num_rows, num_in, generator=generator).bfloat16()
        found = []
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            found.append(torch.nn.functional.linear(x, weight))
        assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("num_rows", [1, 3, 40, 200])
def test_bits_do_not_tell_whose_threads(
    kernels: NativeKernels, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight, x = quantised(kernels, 200, 128), torch.randn(num_rows, 128).bfloat16()

    def run(count: int) -> Tensor:
        for module in ("kernels", "quantised"):
            monkeypatch.setattr(f"penstock.kernels.native.{module}.native_threads", lambda: count)
        out = kernels.linear(x, weight)
        return kernels.rms_norm(kernels.silu_and_mul(out), torch.ones(100), 1e-6)

    alone = run(1)
    for count in (2, 5, 17, -2, -4):
        for _ in range(20):
            assert torch.equal(run(count), alone)


def test_callers_at_once_and_after_a_fork(kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, x = quantised(kernels, 320, 64), torch.randn(2, 64).bfloat16()
    monkeypatch.setattr("penstock.kernels.native.quantised.native_threads", lambda: 4)
    expected, wrong = kernels.linear(x, weight, is_canonical=False), []

    def call() -> None:
        for _ in range(300):
            if not torch.equal(kernels.linear(x, weight, is_canonical=False), expected):
                wrong.append(threading.get_ident())

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
    child = os.fork()
    if child == 0:  # its pool is a new one: the threads stayed with the parent
        os._exit(0 if torch.equal(kernels.linear(x, weight, is_canonical=False), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
