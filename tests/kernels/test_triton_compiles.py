"""Every kernel for GPUs compiles for one, on a machine that has none."""

import subprocess
import sys

import pytest

from tests.kernels.triton_interpreter import require_interpreter


@pytest.mark.parametrize(
    "kernels", ["rows", "heads", "attention", "delta_nets", "experts", "quantised_experts", "weights"]
)
def test_every_kernel_compiles(kernels: str) -> None:
    require_interpreter()
    command = [sys.executable, "-m", "tests.kernels.triton_compiler", kernels]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
