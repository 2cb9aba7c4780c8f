"""A model that is ready to load: weights and tokenizer of one file or folder."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ModelError
from penstock.models.hf.folder import HfFolder
from penstock.models.hf.tokenizer import folder_tokenizer
from penstock.models.reading import reading
from penstock.models.text.tokenizer import Tokenizer
from penstock.models.weights import SkippedWeights, WeightSource, check_source, skipped_weights


@dataclass(frozen=True)
class OpenedModel:
    source: WeightSource
    tokenizer: Tokenizer
    skipped: SkippedWeights


def open_model(path: Path) -> OpenedModel:
    """Open a GGUF file or a Hugging Face folder, with every tensor's shape checked and none loaded yet."""
    with ExitStack() as on_error:
        source = open_weights(path)
        on_error.callback(source.close)
        skipped = skipped_weights(source.config, check_source(source))
        is_folder = isinstance(source, HfFolder)
        tokenizer = (
            folder_tokenizer(path, source.config.vocab_size)
            if is_folder
            else _gguf_tokenizer(source, str(path))
        )
        on_error.pop_all()
        return OpenedModel(source, tokenizer, skipped)


def open_weights(path: Path) -> WeightSource:
    """The weights alone, as the file has them."""
    with reading(path):
        if not path.exists():
            raise ModelError(f"there is no file or folder {path}")
        is_folder = path.is_dir()
    if is_folder:
        return HfFolder(path)
    try:  # where the package is absent, everything but GGUF files works
        from penstock.models.gguf.file import GgufFile
    except ImportError as error:
        raise ModelError("reading GGUF files needs the gguf package: pip install gguf") from error
    return GgufFile(path)


def _gguf_tokenizer(source: WeightSource, origin: str) -> Tokenizer:
    from penstock.models.gguf.file import GgufFile
    from penstock.models.gguf.tokenizer import gguf_tokenizer

    assert isinstance(source, GgufFile)
    return gguf_tokenizer(source.metadata, origin)
