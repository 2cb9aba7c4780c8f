"""What a user may call a model, and what is said when there is none."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from penstock.errors import ModelError, ModelFileError
from penstock.models import hub
from penstock.models.hub import resolve_model
from penstock.models.opened import open_model


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Calls for Hugging Face, which are answered with a folder."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name: [])
    return calls


def test_the_default_model_is_pulled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "pull_smollm2", lambda report, note: tmp_path / "pulled.gguf")
    assert resolve_model("smollm2") == tmp_path / "pulled.gguf"


def test_paths_are_taken_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, downloads: list[dict[str, Any]]
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("org/name") == Path("org/name")
    assert resolve_model("model.gguf") == Path("model.gguf")
    assert resolve_model("~/model.gguf") == tmp_path / "model.gguf"
    assert downloads == []


def test_other_names_go_to_hugging_face(tmp_path: Path, downloads: list[dict[str, Any]]) -> None:
    assert resolve_model("org/some-model.v2_0") == tmp_path / "snapshot"
    (call,) = downloads
    assert call["name"] == "org/some-model.v2_0"
    assert not any(pattern in call["allow_patterns"] for pattern in ("*", "*.bin", "*.pt", "*.py"))


def test_the_patterns_let_through_what_a_model_needs_and_no_more() -> None:
    files = {
        "config.json": True,
        "tokenizer.json": True,
        "chat_template.jinja": True,
        "model-00001-of-00002.safetensors": True,
        "model.safetensors.index.json": True,
        "pytorch_model.bin": False,
        "consolidated.safetensors": False,
        "original/model.safetensors": False,
        "modeling_custom.py": False,
        "onnx/model.onnx": False,
        "README.md": False,
    }
    kept = filter_repo_objects(files, allow_patterns=hub._WANTED, ignore_patterns=hub._UNWANTED)
    assert set(kept) == {file for file, wanted in files.items() if wanted}


def test_a_download_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError("no route to host\nand a long traceback")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"'org/name'.*no route to host;.*accepted are") as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["", "smollm3", "a/b/c", "./nothing", "/no/where", "x.gguf", "a/x.gguf", "-/-"]
)
def test_anything_else_is_an_error_that_says_what_is_accepted(
    name: str, downloads: list[dict[str, Any]]
) -> None:
    with pytest.raises(ModelError, match=r"accepted are 'smollm2', a GGUF file, .* Hugging Face name"):
        resolve_model(name)
    assert downloads == []


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt", "pkl"])
def test_a_pickle_is_refused_with_the_reason(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(b"\x80\x04.")
    with pytest.raises(ModelFileError, match="pickle runs whatever code"):
        resolve_model(str(path))


def test_weights_alone_are_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="give the folder"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_a_repository_of_pickles_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, downloads: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name: ["config.json", "pytorch_model.bin"])
    with pytest.raises(ModelFileError, match=r"org/name .*\(pytorch_model\.bin\).*pickle runs whatever code"):
        resolve_model("org/name")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").touch()
    assert resolve_model("org/name") == tmp_path / "snapshot"


@pytest.mark.parametrize(
    ("name", "words"),
    [("~no-such-user/x", "home folder; accepted are"), ("x" * 5000, "File name too long; accepted are")],
)
def test_names_that_the_system_refuses_are_one_short_line(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        resolve_model(name)
    assert len(str(caught.value)) < 600


def test_a_path_that_must_not_be_looked_at_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(self: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    for name in ("is_dir", "is_file", "exists"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, refuse)
            with pytest.raises(ModelError, match="Permission denied"):
                open_model(resolve_model(str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ModelFileError, match=f"cannot read {tmp_path}: Permission denied"):
        open_model(tmp_path)
