"""A tiny random model that a command can open, and the commands run on it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from penstock.frontends.cli import app
from tests.oracle import make_oracle

CONTEXT = 6000
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"

# Arguments after `penstock generate --model <the tiny model>`, and standard input.
Generate = Callable[..., Result]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model whose tokens are bytes."""
    oracle = make_oracle("llama", vocab_size=256, max_position_embeddings=CONTEXT)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(oracle.folder, folder)
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _environment(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(cache_folder))
    for name in ("PENSTOCK_PREFILL_CHUNK", "PENSTOCK_PREFILL_ALIGN", "FORCE_COLOR", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def generate(tiny_model: Path) -> Generate:
    """Runs `penstock generate` in this process."""

    def run(*arguments: str, **settings: Any) -> Result:
        return CliRunner().invoke(app, ["generate", "--model", str(tiny_model), *arguments], **settings)

    return run


@pytest.fixture
def start(tiny_model: Path) -> Callable[..., "subprocess.Popen[bytes]"]:
    """Starts `penstock generate` as a process of its own."""

    def popen(*arguments: str, **settings: Any) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "penstock", "generate", "--model", str(tiny_model), "--threads", "1"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # Unbuffered, so that a test may read a part and leave the rest to communicate().
        return subprocess.Popen([*command, *arguments], bufsize=0, **{**pipes, **settings})

    return popen
