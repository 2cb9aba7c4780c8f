"""Run the tests of this folder without pytest, several at a time:
`PYTHONPATH=src python3 -m tests.gpu [--workers N] [part of a name ...]`."""

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import torch

from tests.gpu import test_bits, test_kernels, test_parity
from tests.gpu.cases import calls

MODULES = (test_kernels, test_parity, test_bits)
MOST_WORKERS = 8


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


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0, 1 where a test failed, 2 where none could be run."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="part of a test's name (all tests)")
    num_cores = os.cpu_count() or 1
    parser.add_argument(
        "--workers",
        type=int,
        default=max(1, min(num_cores // 2, MOST_WORKERS)),
        help="processes (%(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error("--workers takes 1 or more")
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU: there is none here", file=sys.stderr)
        return 2
    chosen = [name for name in found() if not options.parts or any(part in name for part in options.parts)]
    if not chosen:
        print(f"no test's name has any of these in it: {', '.join(options.parts)}", file=sys.stderr)
        return 2
    failed: list[str] = []
    threads = max(1, num_cores // options.workers)
    with multiprocessing.get_context("spawn").Pool(
        options.workers, torch.set_num_threads, (threads,)
    ) as pool:
        for names in pool.imap_unordered(run, by_case(chosen)):
            failed += names
    print(f"{len(chosen) - len(failed)} ok, {len(failed)} failed", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
