"""Run the tests of this folder without pytest, several at a time:
`PYTHONPATH=src python3 -m tests.gpu [--workers N] [part of a name ...]`."""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence

import torch

from tests.gpu.runner import by_case, found, run

MOST_WORKERS = 8


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
