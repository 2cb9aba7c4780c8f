"""Where a model's weights come from: files, whose tensors are checked against the table, and what they leave over."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.errors import ModelFileError
from penstock.kernels.quantised import BlockForm
from penstock.models.bytefile import ByteFile
from penstock.models.reading import shortened
from penstock.models.weights import Shape, expected_shapes
from penstock.plan.memory import WeightBits
from penstock.plan.model import ModelConfig

_SHOWN = 4
_NAME_LENGTH = 80
_LAYER = re.compile(r"(?:model\.layers|blk)\.([0-9]{1,9})\.")
_VISION = (
    *("model.visual.", "visual.", "v.", "mm.", "vision_tower.", "model.vision_tower."),
    *("multi_modal_projector.", "model.multi_modal_projector."),
)


class WeightSource(ABC):
    """A model's weights, one tensor at a time, with Hugging Face's names and transformers' layout."""

    config: ModelConfig
    shapes: Mapping[str, Shape]  # of all tensors
    # Names of those that the model has no use for, once they were checked.
    unused: frozenset[str] = frozenset()
    # Kinds of blocks among them whose values no form has.
    unpacked: tuple[str, ...] = ()

    def names(self) -> frozenset[str]:
        return frozenset(self.shapes)

    def shape(self, name: str) -> Shape:
        return self.shapes[name]

    @abstractmethod
    def load_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with the tensor, converted to its dtype. `out` has the tensor's shape and may be a part
        of a larger tensor, so that fused weights are assembled in place. Needs a few MiB besides `out`."""

    def block_form(self, name: str) -> BlockForm | None:
        """How the rows of a tensor are stored, where they are quantised and `blocks` can give them as they are."""
        return None

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """The rows of such a tensor, in order, as rows of blocks [n, bytes]: some MiB at a time where the file has
        them in that order too. What one gives is overwritten by the next."""
        raise NotImplementedError(f"{name} is not quantised")

    @abstractmethod
    def describe(self) -> str:
        """The file and what is in it, in a few words."""

    def close(self) -> None:  # noqa: B027
        """Nothing is read after it."""


class FileSource(WeightSource):
    """Weights in files: `kinds` are the names of their tensors' dtypes."""

    format: str

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[ByteFile] = []
        self._kinds: list[str] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _open(self) -> None:
        """Read what is known of the tensors, and check it."""

    def describe(self) -> str:
        common = max(set(self._kinds), key=self._kinds.count) if self._kinds else "empty"
        return f"{self.path.name} ({self.format}, {self.config.family}, {common})"

    def close(self) -> None:
        for file in self._files:
            file.close()


def require_shape(name: str, shape: Shape, out: torch.Tensor) -> None:
    if tuple(out.shape) != shape:
        raise ModelFileError(
            f"tensor {name} has shape {list(shape)} in the file, but the model needs {list(out.shape)}"
        )


def check_source(source: WeightSource) -> frozenset[str]:
    """Raise unless the file has every tensor that its configuration calls for, in the right shape, before anything is
    allocated.

    Returns the names of tensors that the model has no use for."""
    present = source.names()
    expected = expected_shapes(source.config, present)
    missing = [name for name in expected if name not in present]
    if missing:
        raise ModelFileError(f"{source.describe()}: {describe_some(missing)} missing")
    wrong = [
        f"{name} is {list(source.shape(name))} where its configuration says {list(shape)}"
        for name, shape in expected.items()
        if source.shape(name) != shape
    ]
    if wrong:
        raise ModelFileError(f"{source.describe()}: {describe_some(wrong)}")
    return present - expected.keys()


def describe_some(items: list[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


@dataclass(frozen=True)
class SkippedWeights:
    """The names of weights that are left in the file."""

    multi_token: tuple[str, ...] = ()  # layers that predict several tokens at once
    vision: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def describe(self) -> str | None:
        """One line for a user; None where nothing is worth a word."""
        kinds = {"multi-token-prediction": self.multi_token, "vision": self.vision, "unknown": self.unknown}
        parts = [_counted(len(names), kind) for kind, names in kinds.items() if names]
        if self.unknown:
            # Somebody else chose these names: quotes and escapes where they are not plain.
            shown = [name if name.isprintable() else repr(name) for name in self.unknown[:_SHOWN]]
            more = [f"{len(self.unknown) - _SHOWN} more"] if len(self.unknown) > _SHOWN else []
            parts[-1] += f" ({', '.join([*(shortened(name, _NAME_LENGTH) for name in shown), *more])})"
        return f"skipped: {', '.join(parts)}" if parts else None


def skipped_weights(config: ModelConfig, unused: Iterable[str]) -> SkippedWeights:
    """`unused` as `check_source` returns it. A tied head that is stored all the same and rotary frequencies say
    nothing that the model does not know: they are left out."""
    multi_token, vision, unknown = [], [], []
    for name in sorted(unused):
        if name.endswith(".inv_freq") or (config.tied_head and name == "lm_head.weight"):
            continue
        layer = _LAYER.match(name)
        if name.startswith("mtp.") or (layer and int(layer[1]) >= config.num_layers):
            multi_token.append(name)
        elif name.startswith(_VISION):
            vision.append(name)
        else:
            unknown.append(name)
    return SkippedWeights(tuple(multi_token), tuple(vision), tuple(unknown))


def _counted(number: int, kind: str) -> str:
    return f"{number} {kind} weight{'' if number == 1 else 's'}"


def _is_mixed(source: WeightSource, name: str) -> bool:
    """Whether an expert's gate and what it gates have different forms: a GPU has them as one, and keeps neither."""
    base, _, kind = name.rpartition("_proj.weight")[0].rpartition(".")
    other = f"{base}.{'up' if kind == 'gate' else 'gate'}_proj.weight"
    is_either = ".mlp.experts." in name and kind in ("gate", "up") and other in source.names()
    return is_either and source.block_form(name) != source.block_form(other)


def stored_bits(source: WeightSource, plain_bits: int, *, on_gpu: bool = False) -> WeightBits:
    """What a file's weights take where they are kept as it has them, the others having `plain_bits`."""
    embedding = "model.embed_tokens.weight"
    sizes: dict[str, float] = {}
    bits: dict[str, float] = {}
    for name in source.names():
        shape = source.shape(name)
        if len(shape) == 2:
            form = source.block_form(name)
            sizes[name] = math.prod(shape)
            if form is None or (on_gpu and _is_mixed(source, name)):
                bits[name] = plain_bits
            else:
                bits[name] = form.device_bits_of(shape[1]) if on_gpu else form.resident_bits
    matrices = [name for name in sizes if name not in (embedding, "lm_head.weight")]
    total = sum(sizes[name] for name in matrices)
    return WeightBits(
        matrices=sum(sizes[name] * bits[name] for name in matrices) / total,
        vocabulary=bits[embedding],
        is_tied=source.config.tied_head and source.block_form(embedding) is not None,
    )
