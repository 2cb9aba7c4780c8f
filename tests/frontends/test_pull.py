"""`penstock pull`, without the network."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.errors import ModelError
from penstock.frontends.cli import app
from penstock.frontends.display import Report
from penstock.models import hub
from penstock.models.pull import Note


def test_the_path_is_printed_and_the_download_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(report: Report | None, note: Note | None) -> Path:
        assert report is not None
        for num_bytes in range(0, 93_000_001, 1_000_000):
            report(num_bytes, 93_000_000)
        return Path("/somewhere/model.gguf")

    monkeypatch.setattr(hub, "pull_smollm2", download)
    done = CliRunner().invoke(app, ["pull", "smollm2"])
    assert done.exit_code == 0
    assert done.stdout == "/somewhere/model.gguf\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("downloading the model, 93 MB")


def test_what_cannot_be_pulled_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(report: Report | None, note: Note | None) -> Path:
        raise ModelError("cannot download it:\nno network")

    monkeypatch.setattr(hub, "pull_smollm2", fail)
    for name, said in [("smollm2", "cannot download it: no network"), ("other", "there is no model 'other'")]:
        done = CliRunner().invoke(app, ["pull", name])
        assert done.exit_code == 3
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"penstock: {said}")


def test_any_model_that_can_be_named_can_be_pulled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "_from_hugging_face", lambda name: tmp_path / name)
    for name, path in [("org/name", tmp_path / "org" / "name"), (str(tmp_path), tmp_path)]:
        done = CliRunner().invoke(app, ["pull", name])
        assert (done.exit_code, done.stdout) == (0, f"{path}\n")
