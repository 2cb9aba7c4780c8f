"""Servers on real clusters of Ray's: `make test-ray` runs these, and there they must not be skipped."""

import os
from pathlib import Path

import pytest

from tests.byte_models import model_of_bytes
from tests.ray.running import NAME

WANTED = "PENSTOCK_TEST_RAY"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(WANTED) != "1":
        for item in items:
            if "tests/ray/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="make test-ray runs it, with Ray installed"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes("llama", tmp_path_factory.mktemp("models") / NAME)
