"""What is awaited of another stage: it comes, fails or is not wanted any more, once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from penstock.engine.stages.link import Receipt

X = torch.ones(2, 3)


def test_what_comes_is_made_into_something_by_the_thread_that_has_it() -> None:
    threads: list[int] = []

    def double(x: Tensor | None) -> Tensor | None:
        threads.append(threading.get_ident())
        return None if x is None else 2 * x

    receipt, nothing = Receipt(double), Receipt(double)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(receipt.settle, X).result()
        pool.submit(nothing.settle, None).result()
    found = receipt.wait()
    assert found is not None
    assert torch.equal(found, 2 * X)
    assert nothing.wait() is None
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


def test_an_error_is_raised_where_it_is_waited_for() -> None:
    def fail(_: Tensor | None) -> Tensor | None:
        raise torch.OutOfMemoryError("injected")

    failing, lost = Receipt(fail), Receipt(fail)
    failing.settle(X)
    lost.fail(KeyError("first"))
    lost.fail(KeyError("second"))
    lost.settle(X)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        failing.wait()
    with pytest.raises(KeyError, match="first"):
        lost.wait()


def test_what_is_being_run_is_ended_and_what_is_dropped_is_not_begun() -> None:
    begun, goes_on, num_run = threading.Event(), threading.Event(), 0

    def run(x: Tensor | None) -> Tensor | None:
        nonlocal num_run
        num_run += 1
        begun.set()
        assert goes_on.wait(10)
        return x

    running, waiting = Receipt(run), Receipt(run)
    with ThreadPoolExecutor(2) as pool:
        settled = pool.submit(running.settle, X)
        assert begun.wait(10)
        running.fail(KeyError("too late"))  # at once, though it runs
        waiting.drop()
        dropped = pool.submit(running.drop)
        with pytest.raises(TimeoutError):
            dropped.result(0.1)
        goes_on.set()
        settled.result(10)
        dropped.result(10)
    waiting.settle(X)
    assert running.wait() is X
    assert num_run == 1
