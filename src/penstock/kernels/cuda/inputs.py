"""What a device is told of a pass, kept with the pass."""

from collections.abc import Callable
from typing import TypeVar

_Made = TypeVar("_Made")
_KEPT = "_on_device"


def made_once(work: object, make: Callable[[], _Made]) -> _Made:
    """What a device is told of a pass's work: made for the first layer, and kept with it for the others."""
    kept = vars(work)
    if _KEPT not in kept:
        kept[_KEPT] = make()
    found: _Made = kept[_KEPT]
    return found


def keep(work: object, made: object) -> None:
    """Let work stand for what a device has already."""
    vars(work)[_KEPT] = made
