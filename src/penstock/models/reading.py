"""Files that are not trusted: errors that name the file, values with a type and a range, sizes that no model has."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from penstock.errors import ModelError, ModelFileError, PenstockError
from penstock.plan.model import DeltaNetConfig, ExpertsConfig


def first_line(error: BaseException) -> str:
    """What an error of another library says, short enough for a message of ours; no terminal obeys it."""
    line = shortened((str(error).strip().splitlines() or [type(error).__name__])[0])
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line
    )


def shortened(text: str, limit: int = 300) -> str:
    """For names and values that somebody else chose the length of."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """The system does not let a file be read."""
    try:
        yield
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def trusting(what: str) -> Iterator[None]:
    """Another library is given a file's contents, and may fail in any way: the tokenizers library raises bare
    exceptions, and its panics are not even those."""
    try:
        yield
    except (PenstockError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ModelFileError(f"{what}: {first_line(error)}") from error


class Most(IntEnum):
    """A file that claims more is damaged or hostile."""

    WIDTH = 1 << 20
    HEADS = 1 << 14
    LAYERS = 1 << 12
    VOCABULARY = 1 << 24
    POSITIONS = 1 << 28
    # Of delta nets: a head's state is a matrix of its key size by its value size; all heads' take 256 MiB a layer.
    DELTA_HEAD = 1 << 10
    CONV_KERNEL = 64
    STATE = 1 << 26
    # Of mixtures of experts: in one layer, and in all of them, since each may have tensors of its own.
    EXPERTS = 1 << 12
    EXPERTS_IN_ALL = 1 << 17


# What scales rotary embeddings, scores and logits, either way; the base of the first: yarn takes its logarithm.
MIN_SCALE, MAX_SCALE = 1e-9, 1e9
_MIN_THETA, _MAX_THETA = 1.0, 1e15


@dataclass(frozen=True)
class Fields:
    """Keyed values as a file has them. An absent key and a null one give the default; a wrong value is an
    error that names the file and the key."""

    origin: str  # the file's name, for messages
    values: Mapping[str, object]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that no other default is given for
    keys: Mapping[str, str] = field(default_factory=dict)  # what the file calls some of them

    def knows(self, key: str) -> bool:
        """Whether the key has a default, be it null."""
        return self.keys.get(key, key) in self.defaults

    def has(self, key: str) -> bool:
        return self.values.get(self.keys.get(key, key)) is not None

    def or_default(self, key: str) -> object:
        """What a file has, be it null; else the family's default."""
        return self.values.get(key, self.defaults.get(key))

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 1 << 31) -> int:
        """An integer in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, "an integer")
        if not low <= value <= high:
            raise self.error(key, value, f"an integer from {low} to {high}")
        return value

    def size(self, key: str, most: Most, default: int | None = None) -> int:
        """An integer in [1, most]."""
        return self.integer(key, default, low=1, high=most)

    def layers_size(self, key: str, most: Most, num_layers: int) -> int:
        """An integer in [1, most], which a file may have once for each layer."""
        if not isinstance(value := self._get(key, None), list):
            return self.size(key, most)
        sizes = self.integers(key, low=1, high=most)
        if len(sizes) != num_layers or len(set(sizes)) != 1:
            raise self.error(key, value, f"one number, or the same for each of {num_layers} layers")
        return sizes[0]

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        above: float = 0.0,
        high: float = sys.float_info.max,
    ) -> float:
        """A number in (above, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, value, "a number")
        if not above < value <= high:
            raise self.error(key, value, f"a number above {above:g} and up to {high:g}")
        return float(value)

    def scale(self, key: str, default: float | None = None) -> float:
        """What scales a rotary embedding, scores or logits."""
        return self.number(key, default, above=MIN_SCALE, high=MAX_SCALE)

    def theta(self, key: str, default: float) -> float:
        """The base of a rotary embedding."""
        return self.number(key, default, above=_MIN_THETA, high=_MAX_THETA)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "a string")
        return value

    def integers(self, key: str, *, low: int = 0, high: int = 1 << 31) -> tuple[int, ...]:
        """A list of integers in [low, high]; empty when there is none."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(
            isinstance(each, int) and not isinstance(each, bool) and low <= each <= high for each in value
        ):
            raise self.error(key, value, f"a list of integers from {low} to {high}")
        return tuple(value)

    def scales(self, key: str, count: int) -> tuple[float, ...]:
        """So many factors that scale rotary embeddings."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != count:
            raise self.error(key, value, f"a list of {count} numbers")
        return tuple(Fields(self.origin, {key: each}).scale(key) for each in value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(key, value, "a list of strings")
        return tuple(value)

    def nested(self, key: str) -> "Fields":
        """The object under `key`; empty when there is none."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, value, "an object")
        return Fields(f"{self.origin}: {key}", value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; an explicit null means none."""
        value = self.values.get(key, self.defaults.get(key))
        if value is None:
            return ()
        ids: dict[int, None] = {}
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
                raise self.error(key, value, "a token id or a list of them")
            ids[token] = None
        return tuple(ids)

    def error(self, key: str, value: object, accepted: str) -> ModelFileError:
        key = self.keys.get(key, key)
        return ModelFileError(
            f"{self.origin}: {key} is {shortened(repr(value), 60)}, but {accepted} is needed"
        )

    def unsupported(self, key: str, instead: str) -> ModelError:
        """A value that is sound, and asks for what is not there."""
        value = shortened(json.dumps(self.values[key]), 60)
        return ModelError(f"{self.origin}: {shortened(key)} of {value} is not supported, {instead}")

    def _get(self, key: str, default: object) -> object:
        key = self.keys.get(key, key)
        value = self.values.get(key)
        if value is None:
            value = self.defaults.get(key) if default is None else default
        if value is None:
            raise ModelFileError(f"{self.origin}: {key} is missing")
        return value


def check_heads(origin: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads:
        raise ModelFileError(f"{origin}: {num_heads} heads cannot share {num_kv_heads} key and value heads")
    if head_dim < 2 or head_dim % 2:
        raise ModelFileError(f"{origin}: a head size of {head_dim} cannot be rotated in pairs")


def recurrent_layers(fields: Fields, listed: Sequence[bool], num_layers: int) -> tuple[int, ...]:
    """The layers without full attention: those that a file lists, else all between every so many."""
    if not listed:
        interval = fields.size("full_attention_interval", Most.LAYERS, 4)
        listed = [(index + 1) % interval > 0 for index in range(num_layers)]
    layers = tuple(index for index in range(num_layers) if listed[index])
    if len(layers) == num_layers:
        raise ModelError(
            f"{fields.origin}: none of the {num_layers} layers has full attention; "
            "models of linear attention alone are not supported"
        )
    return layers


def delta_net_of(origin: str, layers: tuple[int, ...], **sizes: int) -> DeltaNetConfig:
    """A delta net of sizes that a file has."""
    check_state(origin, "a delta net", **sizes)
    return DeltaNetConfig(num_layers=len(layers), layers=layers, **sizes)


def check_state(
    origin: str,
    what: str,
    *,
    num_key_heads: int,
    num_value_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    conv_kernel: int,
) -> None:
    """Raise unless there can be recurrent layers of such sizes."""
    if num_value_heads % num_key_heads:
        raise ModelFileError(
            f"{origin}: {num_value_heads} value heads of {what} cannot share {num_key_heads} key heads"
        )
    if (size := max(num_key_heads * key_head_dim, num_value_heads * value_head_dim)) > Most.WIDTH:
        raise ModelFileError(f"{origin}: {what}'s heads of {size} elements in all exceed {Most.WIDTH}")
    if (size := num_value_heads * key_head_dim * value_head_dim) > Most.STATE:
        raise ModelFileError(f"{origin}: {what}'s state of {size} elements exceeds {Most.STATE}")


def check_experts(origin: str, experts: ExpertsConfig) -> None:
    if experts.num_active > experts.num_experts:
        raise ModelFileError(
            f"{origin}: a token cannot go to {experts.num_active} experts where there are {experts.num_experts}"
        )
    active, count = experts.num_active, experts.num_experts
    groups, chosen = experts.num_groups, experts.num_active_groups
    if count % groups or not groups >= chosen >= active * groups / count:
        raise ModelFileError(
            f"{origin}: {active} of {count} experts cannot be chosen from {chosen} of {groups} groups"
        )
    if (num := experts.num_experts * len(experts.layers)) > Most.EXPERTS_IN_ALL:
        raise ModelFileError(f"{origin}: {num} experts in all layers together exceed {Most.EXPERTS_IN_ALL}")
