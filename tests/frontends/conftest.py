"""A tiny random model that a command can open, and the commands run on it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from penstock.frontends.cli import app
from tests.byte_models import model_of_bytes
from tests.models.hybrids import rewrite_weights

# Arguments after `penstock generate --model <the tiny model>`, and standard input.
Generate = Callable[..., Result]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model whose tokens are bytes."""
    return model_of_bytes("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with recurrent state, as it is published: names of a model of text and pictures, more weights."""
    folder = model_of_bytes("qwen3_5_text", tmp_path_factory.mktemp("models") / "hybrid")
    rewrite_weights(folder, as_published)
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    return folder


def as_published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed = {name.replace("model.", "model.language_model.", 1): tensors[name] for name in tensors}
    more = {"mtp.fc.weight": torch.zeros(2, 2), "model.visual.pos_embed.weight": torch.zeros(3, 2)}
    return renamed | more


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _environment(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(cache_folder))
    sizing = ("PREFILL_CHUNK", "PREFILL_ALIGN", "MAX_ACTIVATION", "TARGET_ITL", "TARGET_TTFT")
    ours = (f"PENSTOCK_{name}" for name in (*sizing, "CACHE_DIR", "CACHE_SIZE"))
    for name in (*ours, "FORCE_COLOR", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def generate(tiny_model: Path) -> Generate:
    """Runs `penstock generate` in this process."""

    def run(*arguments: str, **settings: Any) -> Result:
        return CliRunner().invoke(app, ["generate", "--model", str(tiny_model), *arguments], **settings)

    return run


# A runner in the background may have it ignored, and children inherit that.
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
# An interrupt while the prompt is read, at the moment when so many tokens of it are, however fast that is.
INTERRUPTED_AT = """
import os
from penstock.frontends.display import LineDisplay
progress = LineDisplay.progress
def interrupted(display, told):
    progress(display, told)
    if not interrupted.is_done and told.num_done >= {num_tokens}:
        interrupted.is_done = True
        os.kill(os.getpid(), signal.SIGINT)
interrupted.is_done = False
LineDisplay.progress = interrupted
"""


@pytest.fixture
def start(tiny_model: Path) -> Callable[..., "subprocess.Popen[bytes]"]:
    """Starts `penstock generate` as a process of its own. `before` is a program that runs first, in that process."""

    def popen(*arguments: str, before: str = "", **settings: Any) -> "subprocess.Popen[bytes]":
        code = f"{before}\nfrom penstock.frontends.cli import main\nmain()"
        run = ["-c", code] if before else ["-m", "penstock"]
        command = [sys.executable, *run, "generate", "--model", str(tiny_model), "--threads", "1"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # Unbuffered, so that a test may read a part and leave the rest to communicate().
        return subprocess.Popen([*command, *arguments], bufsize=0, **{**pipes, **settings})

    return popen
