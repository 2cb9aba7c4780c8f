"""Run the tests of this folder without pytest: `PYTHONPATH=src python3 -m tests.gpu [part of a name ...]`."""

import sys
import time
import traceback
from collections.abc import Sequence

import torch

from tests.gpu import test_bits, test_kernels, test_parity
from tests.gpu.cases import calls

MODULES = (test_kernels, test_parity, test_bits)


def main(parts: Sequence[str]) -> int:
    """The exit status: 0, 1 where a test failed, 2 where none could be run."""
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU: there is none here", file=sys.stderr)
        return 2
    tests = [getattr(module, name) for module in MODULES for name in vars(module) if name.startswith("test_")]
    chosen = [
        (name, call)
        for test in tests
        for name, call in calls(test)
        if not parts or any(part in name for part in parts)
    ]
    if not chosen:
        print(f"no test's name has any of these in it: {', '.join(parts)}", file=sys.stderr)
        return 2
    failed = []
    for name, call in chosen:
        started = time.perf_counter()
        try:
            call()
            torch.cuda.synchronize()
        except Exception:
            traceback.print_exc(file=sys.stdout)
            failed.append(name)
        verdict = "FAILED" if failed[-1:] == [name] else "ok"
        print(f"{verdict:6} {time.perf_counter() - started:5.1f} s  {name}", flush=True)
    print(f"{len(chosen) - len(failed)} ok, {len(failed)} failed", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
