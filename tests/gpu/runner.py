"""Tests of this folder, run in processes of their own: what those are given must be found by name there."""

import time
import traceback
from collections.abc import Callable, Sequence

import torch

from tests.gpu import test_bits, test_kernels, test_parity
from tests.gpu.cases import calls

MODULES = (test_kernels, test_parity, test_bits)


def found() -> dict[str, Callable[[], None]]:
    tests = [getattr(module, name) for module in MODULES for name in vars(module) if name.startswith("test_")]
    return {name: call for test in tests for name, call in calls(test)}


def run(names: Sequence[str]) -> list[str]:
    """Those that failed, one after the other: what they share is made once in a process."""
    failed, tests = [], found()
    for name in names:
        started, failure = time.perf_counter(), ""
        try:
            tests[name]()
            torch.cuda.synchronize()
        except Exception:
            failure = traceback.format_exc()
            failed.append(name)
        seconds = time.perf_counter() - started
        print(f"{failure}{'FAILED' if failure else 'ok':6} {seconds:5.1f} s  {name}", flush=True)
    return failed


def by_case(names: Sequence[str]) -> list[list[str]]:
    """Tests of one case together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("[")[2] or name, []).append(name)
    return list(groups.values())
