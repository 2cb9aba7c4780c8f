"""A model that is ready to load: weights and tokenizer of one file or folder."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ModelError, SettingError
from penstock.models.hf.config import text_model
from penstock.models.hf.folder import HfFolder, is_by_transformers, read_config_files
from penstock.models.hf.tokenizer import folder_tokenizer
from penstock.models.reading import reading
from penstock.models.source import SkippedWeights, WeightSource, check_source, skipped_weights
from penstock.models.text.tokenizer import Tokenizer
from penstock.plan.settings import ModelImpl


@dataclass(frozen=True)
class OpenedModel:
    source: WeightSource
    tokenizer: Tokenizer

    @property
    def skipped(self) -> SkippedWeights:
        """Known at once, or where transformers loads them, afterwards."""
        return skipped_weights(self.source.config, self.source.unused)


def open_model(path: Path, model_impl: ModelImpl = "auto") -> OpenedModel:
    """Open a GGUF file or a Hugging Face folder, with every tensor's shape checked and none loaded yet (where
    transformers' code is to run it, they are checked as they are loaded)."""
    with ExitStack() as on_error:
        source = open_weights(path, model_impl)
        on_error.callback(source.close)
        if not source.config.by_transformers:
            source.unused = check_source(source)
        is_folder = isinstance(source, HfFolder)
        tokenizer = (
            folder_tokenizer(path, source.config.vocab_size)
            if is_folder
            else _gguf_tokenizer(source, str(path))
        )
        on_error.pop_all()
        return OpenedModel(source, tokenizer)


def open_weights(path: Path, model_impl: ModelImpl = "auto") -> WeightSource:
    """The weights alone, as the file has them. `model_impl` is whose code is to run them."""
    with reading(path):
        if not path.exists():
            raise ModelError(f"there is no file or folder {path}")
        is_folder = path.is_dir()
    if is_folder and is_by_transformers(text_model(read_config_files(path)[0])[0], model_impl):
        from penstock.models.by_transformers.folder import TransformersFolder  # loads transformers' models

        return TransformersFolder(path)
    if is_folder:
        return HfFolder(path)
    if model_impl == "transformers":
        raise SettingError(
            "model_impl",
            model_impl,
            "auto or penstock",
            where="for a GGUF file",
            because="it reads folders alone",
        )
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
