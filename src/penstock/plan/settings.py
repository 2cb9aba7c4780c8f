"""The chunk size that applies and whether it is aligned, where each came from and why."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from penstock.errors import SettingError
from penstock.plan.checks import check_bool, check_int
from penstock.plan.config import DEFAULT_CHUNK_SIZE
from penstock.plan.grids import STATE_GRID

CHUNK_VARIABLE = "PENSTOCK_PREFILL_CHUNK"
ALIGN_VARIABLE = "PENSTOCK_PREFILL_ALIGN"
SettingSource = Literal["argument", "environment", "default"]

# Digits and nothing else: no sign, space, underscore or leading zero; short enough for any int conversion.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)


@dataclass(frozen=True)
class ChunkSetting:
    """A resolved chunk size: what was asked for, what applies (0: the whole prompt in one chunk), and why.

    What applies is a multiple of `grid`; 1 is no grid. Where it is automatic, it is what a prompt begins with if
    nothing speaks for less or more.
    """

    requested: str
    effective: int
    source: SettingSource
    reason: str
    grid: int = 1
    is_auto: bool = False


@dataclass(frozen=True)
class AlignSetting:
    """Whether chunk sizes are rounded up to whole blocks, where a model has recurrent state."""

    enabled: bool
    source: SettingSource

    def grid(self, *, has_state: bool) -> int:
        """The grid of chunk sizes on a model with recurrent state, or without: there nothing is to be aligned."""
        return STATE_GRID if self.enabled and has_state else 1


def resolve_chunk_size(
    argument: int | str | None = None, *, environ: Mapping[str, str] | None = None, grid: int = 1
) -> ChunkSetting:
    """The chunk size from the argument, else from `PENSTOCK_PREFILL_CHUNK`, else `auto`.

    Either is a number of tokens, 0 (off: the whole prompt in one chunk) or `auto`. Text is taken strictly: no
    spaces, signs or capitals. An overruled source is not read. A size that is not a multiple of `grid`, which
    a model with recurrent state has, is rounded up to one, and the reason says so.
    """
    check_int("grid", grid, 1)
    environ = os.environ if environ is None else environ
    if argument is not None:
        return _resolve("chunk_size", argument, "argument", grid)
    if CHUNK_VARIABLE in environ:
        return _resolve(CHUNK_VARIABLE, environ[CHUNK_VARIABLE], "environment", grid)
    return _auto("default", grid)


def resolve_align(argument: bool | None = None, *, environ: Mapping[str, str] | None = None) -> AlignSetting:
    """Whether to align chunks, from the argument, else from `PENSTOCK_PREFILL_ALIGN` (0 or 1), else yes."""
    environ = os.environ if environ is None else environ
    if argument is not None:
        return AlignSetting(check_bool("align", argument), "argument")
    if ALIGN_VARIABLE in environ:
        text = environ[ALIGN_VARIABLE]
        if text not in ("0", "1"):
            raise SettingError(
                ALIGN_VARIABLE,
                text,
                f"1 to round chunk sizes up to a multiple of {STATE_GRID} on models with recurrent state, or 0 to "
                "keep any size",
            )
        return AlignSetting(text == "1", "environment")
    return AlignSetting(True, "default")


def _resolve(name: str, value: object, source: SettingSource, grid: int) -> ChunkSetting:
    if value == "auto":
        return _auto(source, grid)
    size = _number_of_tokens(name, value)
    reason = f"set by {name if source == 'environment' else source}"
    if size == 0:
        reason += ": off, the whole prompt in one chunk"
    return _on_grid(str(size), size, source, reason, grid)


def _auto(source: SettingSource, grid: int) -> ChunkSetting:
    return replace(_on_grid("auto", DEFAULT_CHUNK_SIZE, source, "auto", grid), is_auto=True)


def _number_of_tokens(name: str, value: object) -> int:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise SettingError(
        name,
        value,
        "a number of tokens in digits, such as 512, 0 (off: the whole prompt in one chunk) or auto",
    )


def _on_grid(requested: str, size: int, source: SettingSource, reason: str, grid: int) -> ChunkSetting:
    effective = -(-size // grid) * grid
    if effective != size:
        reason = (
            f"{reason}, rounded up from {size} to {effective}, a multiple of {grid}: on a model with recurrent "
            f"state such chunks give the same bits and run faster; align=False or --no-align keeps {size}"
        )
    return ChunkSetting(requested, effective, source, reason, grid)
