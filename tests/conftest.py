import gc
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from penstock.errors import ModelError
from penstock.models.hub import resolve_model

# Kernels for GPUs are interpreted where there is none. Triton looks at this when it is imported, and nothing above
# imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
else:  # models run on the processor, but where a test asks for another device
    os.environ.setdefault("PENSTOCK_DEVICE", "cpu")

# Of whoever runs the tests: some tests have one of their own, while they run.
_HOME = os.environ.get("PENSTOCK_HOME")

# How long an example takes says nothing, where other tests run at the same time.
settings.register_profile(
    "patient", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Random numbers that a test does not seed are the same in every run, whatever tests its process ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _quick_collection() -> None:
    """Garbage is looked for in what a file's tests make: in all that is loaded it would take a third of a second each
    time, and benchmarks look before every turn."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, pulled once. Where it cannot be had, tests are skipped, but not in CI."""
    with pytest.MonkeyPatch.context() as patch:
        if _HOME is None:
            patch.delenv("PENSTOCK_HOME", raising=False)
        else:
            patch.setenv("PENSTOCK_HOME", _HOME)
        try:
            return resolve_model("smollm2")
        except ModelError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"the default model cannot be had: {error}")
