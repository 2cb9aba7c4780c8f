"""One setting: its argument, else its variable, else its default, and why."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from penstock.errors import SettingError

SettingSource = Literal["argument", "environment", "default"]

T = TypeVar("T")
Environment = Mapping[str, str] | None  # None: the process's


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """What a setting came to: what applies, where that came from, why, and what was asked for ("auto": nothing)."""

    effective: T
    source: SettingSource = "default"
    reason: str = ""
    requested: Any = field(default="auto", compare=False)


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One setting: its argument, the variable that applies without that, and how either is read. `read` takes a value
    and what to call it in an error; `read_text` is for variables that are written otherwise. A variable that is empty
    may count as unset."""

    name: str
    variable: str
    default: T
    read: Callable[[object, str], T]
    read_text: Callable[[object, str], T] | None = None
    empty_is_unset: bool = False

    def resolve(
        self, argument: object = None, environ: Environment = None, *, called: str = "argument"
    ) -> Resolved[T]:
        """By the argument, which the reason calls so, else by the variable, else by default. A source that is
        overruled is not read."""
        if argument is not None:
            return Resolved(self.read(argument, self.name), "argument", f"set by {called}", argument)
        text = (os.environ if environ is None else environ).get(self.variable)
        if text is None or (not text and self.empty_is_unset):
            return Resolved(self.default)
        value = (self.read_text or self.read)(text, self.variable)
        return Resolved(value, "environment", f"set by {self.variable}", text)

    def called(self, source: SettingSource) -> str:
        """What the user knows it by."""
        return self.variable if source == "environment" else self.name


def one_of(*names: Any) -> Callable[[object, str], Any]:
    def read(value: object, name: str) -> Any:
        if not isinstance(value, str) or value not in names:
            raise SettingError(name, value, f"one of {', '.join(names)}")
        return value

    return read
