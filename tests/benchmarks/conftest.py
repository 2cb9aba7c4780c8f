import gc
from pathlib import Path

import pytest

from tests.byte_models import model_of_bytes


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few thousand weights, whose tokens are bytes."""
    return model_of_bytes("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes("qwen3_5_text", tmp_path_factory.mktemp("models") / "tiny-hybrid")


@pytest.fixture(autouse=True)
def _few_objects_to_collect() -> None:
    """A suite collects garbage before every turn: of a test's own objects, not of all that others imported."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _private_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path_factory.getbasetemp() / "benchmarks-home"))
