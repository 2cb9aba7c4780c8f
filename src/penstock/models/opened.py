"""A model that is ready to load: weights and tokenizer of one file or folder."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ModelError
from penstock.models.expected import check_source
from penstock.models.folder import HfFolder
from penstock.models.folder_tokenizer import folder_tokenizer
from penstock.models.gguf_file import GgufFile
from penstock.models.gguf_tokenizer import gguf_tokenizer
from penstock.models.source import WeightSource
from penstock.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenedModel:
    source: WeightSource
    tokenizer: Tokenizer


def open_model(path: Path) -> OpenedModel:
    """Open a GGUF file or a Hugging Face folder, with every tensor's shape checked and none loaded yet."""
    if not path.exists():
        raise ModelError(f"there is no file or folder {path}")
    with ExitStack() as on_error:
        source = HfFolder(path) if path.is_dir() else GgufFile(path)
        on_error.callback(source.close)
        check_source(source)
        if isinstance(source, GgufFile):
            tokenizer = gguf_tokenizer(source.metadata, str(path))
        else:
            tokenizer = folder_tokenizer(path)
        on_error.pop_all()
        return OpenedModel(source, tokenizer)
