import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from penstock.errors import ModelError
from penstock.models.hub import resolve_model

# How long an example takes says nothing, where other tests run at the same time.
settings.register_profile(
    "patient", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, pulled once. Where it cannot be had, tests are skipped, but not in CI."""
    try:
        return resolve_model("smollm2")
    except ModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the default model cannot be had: {error}")
