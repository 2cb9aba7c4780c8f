"""Which thread runs torch: each that does has a pool of workers of its own."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

_Result = TypeVar("_Result")


def in_own_thread(work: Callable[[], _Result]) -> _Result:
    """Run on a thread that ends with the work, and its workers with it.

    Workers spin while they wait for each other, but only as long as there are no more of them than processors. A pool
    that an idle thread keeps would make those of the thread that runs steps sleep between any two operations, which
    costs a decode a third of its speed.
    """
    num_threads = torch.get_num_threads()
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        torch.set_num_threads(num_threads)  # each thread has a number of its own
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="penstock-work", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
