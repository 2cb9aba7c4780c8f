"""From what the user calls a model to where it lies."""

import re
from pathlib import Path

from penstock.errors import ModelError, ModelFileError
from penstock.models.fields import first_line
from penstock.models.folder import PICKLE_SUFFIXES
from penstock.models.pull import Report, pull_smollm2

DEFAULT_MODEL = "smollm2"

_REPOSITORY = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]
# Folders hold other formats, and some repositories have all weights a second time in their maker's format.
_UNWANTED = ["*/*", "consolidated*"]
_ACCEPTED = (
    f"accepted are '{DEFAULT_MODEL}', a GGUF file, a folder with config.json and safetensors, "
    "or a Hugging Face name like org/name"
)


def resolve_model(name: str, report: Report | None = None) -> Path:
    """The GGUF file or model folder that `name` stands for, downloaded first where it has to be."""
    if name == DEFAULT_MODEL:
        return pull_smollm2(report)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if path.is_file():
        return _model_file(path)
    if _REPOSITORY.fullmatch(name) and not name.endswith(".gguf"):
        return _from_hugging_face(name)
    raise ModelError(f"there is no model {name!r}: no such file or folder; {_ACCEPTED}")


def _model_file(path: Path) -> Path:
    if path.suffix in PICKLE_SUFFIXES:
        raise ModelFileError(
            f"{path} is refused: loading a pickle runs whatever code it contains; convert it to safetensors"
        )
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} holds weights alone; give the folder with its config.json and tokenizer")
    return path


def _from_hugging_face(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except Exception as error:  # no connection, no such repository, no permission, a full disk
        raise ModelError(
            f"there is no file or folder {name!r}, and Hugging Face does not give it: {first_line(error)}; "
            f"{_ACCEPTED}"
        ) from error
