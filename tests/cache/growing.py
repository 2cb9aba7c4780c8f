"""How much some lines of code make a process grow."""

import subprocess
import sys

_PROGRAM = """
import torch
import penstock.cache.tensors
from penstock.process_memory import anonymous_bytes

before = anonymous_bytes()
{code}
print(anonymous_bytes() - before)
"""


def growth_in_fresh_process(code: str) -> int:
    """Bytes that a process holds more of, once it has run these lines. What other tests left behind, or do meanwhile,
    has no part in it, nor have pages of libraries that the code is the first to run."""
    program = _PROGRAM.format(code=code)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    return int(done.stdout)
