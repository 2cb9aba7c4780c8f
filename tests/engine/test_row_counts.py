"""Memory does not grow with the number of different lengths that were read."""

import subprocess
import sys

_PROGRAM = """
from penstock.process_memory import resident_bytes
from tests.oracle import load_model, make_oracle, random_prompt, run_prompt

model = load_model(make_oracle("llama").folder)
for length in (300, 1, 17):
    run_prompt(model, random_prompt(length))
before = resident_bytes()
for length in range(1, 300):
    run_prompt(model, random_prompt(length))
print(resident_bytes() - before)
"""
MOST_BYTES = 96 << 20  # kernels that are kept for every length took more than 400 MiB


def test_prompts_of_every_length_leave_little_behind() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < MOST_BYTES
