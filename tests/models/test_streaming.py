"""Loading never holds the weights twice: besides the place they go to, it needs a few MiB."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

# In a process of its own, whose peak memory is nobody else's. The places are written to first, so that they count.
MEASURE = """
import resource, sys, torch
from pathlib import Path
from penstock.models.hf.folder import HfFolder
from penstock.models.gguf.file import GgufFile

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

torch.set_num_threads(1)
path, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
source = HfFolder(path) if path.is_dir() else GgufFile(path)
places = {name: torch.ones(source.shape(name), dtype=dtype) for name in source.names()}
before = peak_bytes()
for name, place in places.items():
    source.load_into(name, place)
print(sum(place.nbytes for place in places.values()), peak_bytes() - before)
"""
MOST = 24 << 20


def measure(path: Path, dtype: str) -> tuple[int, int]:
    command = [sys.executable, "-c", MEASURE, str(path), dtype]
    loaded, extra = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(loaded), int(extra)


@pytest.mark.skipif(sys.platform == "win32", reason="no peak memory of a process there")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_is_streamed(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"model.embed_tokens.weight": torch.randn(1 << 16, 384)}, tmp_path / "model.safetensors")
    loaded, extra = measure(tmp_path, dtype)
    assert loaded >= 2 * MOST
    assert extra < MOST


@pytest.mark.skipif(sys.platform == "win32", reason="no peak memory of a process there")
def test_a_gguf_is_streamed(smollm2_path: Path) -> None:
    loaded, extra = measure(smollm2_path, "bfloat16")
    assert loaded >= 2 * MOST
    assert extra < MOST
