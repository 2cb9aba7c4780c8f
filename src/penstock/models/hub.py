"""From what the user calls a model to where it lies."""

import re
from pathlib import Path

from penstock.errors import ModelError, ModelFileError
from penstock.models.hf.folder import PICKLE_REASON, PICKLE_SUFFIXES
from penstock.models.pull import NO_ROOM, Note, Report, pull_smollm2
from penstock.models.reading import first_line, shortened

DEFAULT_MODEL = "smollm2"

_REPOSITORY = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]
# Folders hold other formats, and some repositories have all weights a second time in their maker's format.
_UNWANTED = ["*/*", "consolidated*"]
_ACCEPTED = (
    f"accepted are '{DEFAULT_MODEL}', a GGUF file, a folder with config.json and safetensors, "
    "or a Hugging Face name like org/name"
)


def resolve_model(name: str, report: Report | None = None, note: Note | None = None) -> Path:
    """The GGUF file or model folder that `name` stands for, downloaded first where it has to be. `report` is
    told how far a download is, `note` what else there is to wait for."""
    if name == DEFAULT_MODEL:
        return pull_smollm2(report, note)
    shown = repr(shortened(name))
    try:
        path = Path(name).expanduser()
        if name and path.is_dir():
            return path
        if path.is_file():
            return _model_file(path)
    except RuntimeError:  # of expanduser
        raise ModelError(f"there is no model {shown}: no such user has a home folder; {_ACCEPTED}") from None
    except OSError as error:
        raise ModelError(f"there is no model {shown}: {error.strerror or error}; {_ACCEPTED}") from error
    if _REPOSITORY.fullmatch(name) and not name.endswith(".gguf"):
        return _from_hugging_face(name)
    raise ModelError(f"there is no model {shown}: no such file or folder; {_ACCEPTED}")


def _model_file(path: Path) -> Path:
    if path.suffix in PICKLE_SUFFIXES:
        raise ModelFileError(f"{path} is refused: {PICKLE_REASON}")
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} holds weights alone; give the folder with its config.json and tokenizer")
    return path


def _from_hugging_face(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except Exception as error:  # no connection, no such repository, no permission, a full disk
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise ModelError(f"cannot keep {name}: {error.strerror}: {error.filename}") from error
        raise ModelError(
            f"there is no file or folder {name!r}, and Hugging Face does not give it: {first_line(error)}; "
            f"{_ACCEPTED}"
        ) from error
    if not any(folder.glob("*.safetensors")):
        _refuse_pickles(name)
    return folder


def _refuse_pickles(name: str) -> None:
    """Pickles are never downloaded, so that only the repository's list tells why no weights came."""
    try:
        from huggingface_hub import list_repo_files

        pickles = sorted(file for file in list_repo_files(name) if file.endswith(PICKLE_SUFFIXES))
    except Exception:  # no connection, say; what came is then judged by itself
        return
    if pickles:
        raise ModelFileError(
            f"{name} on Hugging Face holds only pickled weights ({pickles[0]}), which are refused: {PICKLE_REASON}"
        )
