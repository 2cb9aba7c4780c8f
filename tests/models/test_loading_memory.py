"""Loading a model never holds its weights twice."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch
from pathlib import Path
from penstock.process_memory import peak_resident_bytes, reset_peak, resident_bytes
from penstock.kernels.reference.kernels import TorchKernels
from penstock.models.loading import load_decoder
from penstock.models.opened import open_model

kernels = TorchKernels()
kernels.linear(torch.ones(1, 64), kernels.pack(torch.ones(64, 64)))  # the library's own start-up
opened = open_model(Path(sys.argv[1]))
reset_peak()
before = resident_bytes()
model = load_decoder(opened.source, kernels, torch.float32, torch.device("cpu"))
print(peak_resident_bytes() - before, model.num_weight_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's account of resident memory")
def test_peak_is_the_weights_and_one_tensor(smollm2_path: Path) -> None:
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(smollm2_path)], check=True, capture_output=True, text=True
    ).stdout
    growth, weights = map(int, output.split())
    assert growth < 1.25 * weights
    assert weights < 1.22 * 4 * 134_515_008  # parameters of the model, and its tied head once more
