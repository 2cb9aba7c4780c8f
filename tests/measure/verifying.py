"""Small models to verify, faults to plant in them, and what was found."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.engine.llm import LLM
from penstock.frontends.cli import app
from tests.byte_models import model_of_bytes

FAMILIES = ("llama", "qwen3_moe", "qwen3_5_text")


@cache
def folder_of(family: str) -> Path:
    """A random model whose tokens are bytes."""
    return model_of_bytes(family, Path(mkdtemp(prefix="penstock-verify-")) / family)


@cache
def home() -> Path:
    """A cache folder for these tests, so that each model is probed once."""
    return Path(mkdtemp(prefix="penstock-home-"))


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[LLM], None]) -> None:
    """Whatever is loaded is changed before it is verified; the probe has seen it as it was."""

    def load(*arguments: Any, **settings: Any) -> LLM:
        llm = LLM(*arguments, **settings)
        change(llm)
        return llm

    monkeypatch.setattr("penstock.engine.llm.LLM", load)


def run_command(*arguments: str) -> Result:
    """`penstock` in this process. A refusal is one line on standard error."""
    done = CliRunner().invoke(app, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "Traceback" not in done.stderr
    return done


def assert_refused(words: str, *arguments: str, status: int = 2) -> None:
    """One line on standard error says why, after everything else."""
    done = run_command(*arguments)
    assert done.exit_code == status
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("penstock: ")
    assert words in line


@dataclass(frozen=True)
class Found:
    """The JSON that was written, and what was printed."""

    plain: dict[str, Any]
    printed: str

    @property
    def names(self) -> list[str]:
        return [each["name"] for each in self.plain["comparisons"]]

    def way(self, name: str) -> dict[str, Any]:
        way: dict[str, Any] = self.plain["comparisons"][self.names.index(name)]
        return way

    def passes(self, name: str) -> bool:
        return bool(self.way(name)["passed"])

    def first_break(self, name: str) -> tuple[str, int, str]:
        first = self.way(name)["breaks"][0]
        return first["what"], first["position"], first["how"]


Verify = Callable[..., Found]
