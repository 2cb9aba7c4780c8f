"""Weights of a folder, as transformers' loading takes them: names that it knows, one tensor at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from penstock.errors import ModelFileError
from penstock.kernels.interface import Kernels
from penstock.models.by_transformers.config import TransformersConfig, transformers_config
from penstock.models.by_transformers.decoder import TransformersDecoder
from penstock.models.by_transformers.modules import NAME
from penstock.models.hf.config import text_model
from penstock.models.hf.folder import HfFolder, read_config_files
from penstock.models.reading import first_line
from penstock.models.source import describe_some
from penstock.plan.model import ModelConfig


class _Lazy:
    """A tensor that is read where transformers slices it."""

    def __init__(self, folder: "TransformersFolder", name: str) -> None:
        self._folder = folder
        self._name = name

    def __getitem__(self, all_of_it: object) -> torch.Tensor:
        return self._folder.load(self._name)


class TransformersFolder(HfFolder):
    """A folder whose model transformers' code runs. Its tensors are checked as they are loaded."""

    described: TransformersConfig

    def _read_config(self) -> ModelConfig:
        file, generation = read_config_files(self.path)
        name, config = text_model(file)
        self.described = transformers_config(file, config, name, generation)
        return self.described.model

    def _own_name(self, name: str) -> str:
        return name

    def _resolve_head(self) -> None:
        pass  # transformers does

    def load(self, name: str) -> torch.Tensor:
        """A tensor as the file has it."""
        out = torch.empty(self.shape(name), dtype=self.dtype_of(name))
        self.load_into(name, out)
        return out

    def decoder(self, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> TransformersDecoder:
        """The model, with its weights."""
        model, described = self._loaded(dtype), self.described
        return TransformersDecoder(described.model, kernels, model.to(device), described.trace, dtype, device)

    def _loaded(self, dtype: torch.dtype) -> Any:
        """transformers' model. Raises unless its tensors are all there, in their shapes; `unused` are the others."""
        described = self.described
        try:
            with _quietly():
                model, info = described.model_class.from_pretrained(
                    None,
                    config=described.own,
                    state_dict={name: _Lazy(self, name) for name in self.shapes},
                    dtype=dtype,
                    attn_implementation=NAME,
                    experts_implementation=NAME,
                    output_loading_info=True,
                )
        except (RuntimeError, ValueError, KeyError) as error:
            raise ModelFileError(
                f"{self.describe()}: transformers refuses it: {first_line(error)}"
            ) from error
        wrong = [*sorted(info["missing_keys"]), *(str(each[0]) for each in info["mismatched_keys"])]
        if wrong or info["error_msgs"]:
            raise ModelFileError(f"{self.describe()}: {describe_some(wrong)} missing, or of another shape")
        self.unused = frozenset(info["unexpected_keys"])
        return model.eval()


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' bars and warnings."""
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()
