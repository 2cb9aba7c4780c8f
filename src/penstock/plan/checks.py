"""The checks that every number and every switch in this package goes through."""

from enum import StrEnum
from types import UnionType
from typing import TypeVar

from penstock.errors import SettingError

_Member = TypeVar("_Member", bound=StrEnum)


def check_int(name: str, value: object, minimum: int) -> int:
    """Return `value` if it is an integer of at least `minimum`. A bool is not an integer, nor is 512.0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise SettingError(name, value, f"an integer of at least {minimum}")
    return value


def check_bool(name: str, value: object) -> bool:
    """Return `value` if it is True or False. 1 is neither."""
    if not isinstance(value, bool):
        raise SettingError(name, value, "True or False")
    return value


def check_type(name: str, value: object, kind: type | UnionType, accepted: str) -> None:
    """Refuse what is not of this type."""
    if not isinstance(value, kind):
        raise SettingError(name, value, accepted)


def check_member(name: str, value: object, kind: type[_Member]) -> _Member:
    """The member of this name, such as `decode-priority` or `decode_priority`."""
    if isinstance(value, str):
        for member in kind:
            if value.replace("_", "-") == member.value:
                return member
    raise SettingError(name, value, f"one of {', '.join(kind)}")
