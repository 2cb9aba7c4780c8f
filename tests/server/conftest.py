"""Real servers on real sockets, over a tiny random model whose tokens are bytes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.llm import LLM
from penstock.frontends.server.settings import ServerSettings
from tests.byte_models import model_of_bytes
from tests.server.running import NAME, Running, running


@pytest.fixture(scope="package", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For these tests alone: those of other folders, before them or after, have the home that there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_HOME", str(tmp_path_factory.mktemp("home")))
        sizing = ("PREFILL_CHUNK", "PREFILL_ALIGN", "MAX_ACTIVATION", "TARGET_ITL", "TARGET_TTFT")
        for name in (*sizing, "API_KEY", "CACHE_DIR", "CACHE_SIZE"):
            patch.delenv(f"PENSTOCK_{name}", raising=False)
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes("llama", tmp_path_factory.mktemp("models") / NAME)


@pytest.fixture(scope="package")
def llm(model_folder: Path) -> LLM:
    return LLM(model_folder, dtype="float32", chunk=64, threads=1)


@pytest.fixture(scope="package")
def server(llm: LLM) -> Iterator[Running]:
    """One server for all tests that only ask."""
    with running(llm, ServerSettings(NAME)) as started:
        yield started


@pytest.fixture(scope="package")
def strict(llm: LLM) -> Iterator[Running]:
    """The same, of a server that takes only what it knows."""
    with running(llm, ServerSettings(NAME, strict_parameters=True, strict_model=True)) as started:
        yield started
