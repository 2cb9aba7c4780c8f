"""Values of a file that nobody checked yet: read one by one, with a type and a range."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import ModelFileError
from penstock.models.reading import shortened


@dataclass(frozen=True)
class Fields:
    """Keyed values as a file has them. An absent key and a null one give the default; a wrong value is an
    error that names the file and the key."""

    origin: str  # the file's name, for messages
    values: Mapping[str, object]

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 1 << 31) -> int:
        """An integer in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, "an integer")
        if not low <= value <= high:
            raise self.error(key, value, f"an integer from {low} to {high}")
        return value

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

    def token_ids(self, key: str, default: int | None = None) -> tuple[int, ...]:
        """One token id or a list of them; an explicit null means none."""
        value = self.values.get(key, default)
        if value is None:
            return ()
        ids: dict[int, None] = {}
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
                raise self.error(key, value, "a token id or a list of them")
            ids[token] = None
        return tuple(ids)

    def error(self, key: str, value: object, accepted: str) -> ModelFileError:
        return ModelFileError(
            f"{self.origin}: {key} is {shortened(repr(value), 60)}, but {accepted} is needed"
        )

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(f"{self.origin}: {key} is missing")
        return value
