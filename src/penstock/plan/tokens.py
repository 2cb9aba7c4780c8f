"""Part of a prompt, without a copy of it."""

from collections.abc import Iterator, Sequence
from operator import eq
from typing import Self, overload

from penstock.errors import SettingError
from penstock.plan.checks import check_int

_SHOWN = 4


class TokenView(Sequence[int]):
    """Read-only view of `tokens[start:end]`. The tokens must not change while a view of them is in use.

    A slice of a view is a view of the same tokens, not of the view. A view equals any sequence of equal ones.
    """

    __slots__ = ("_positions", "_tokens")
    _tokens: Sequence[int]
    _positions: range

    def __init__(self, tokens: Sequence[int], start: int = 0, end: int | None = None) -> None:
        num_tokens = len(tokens)
        end = num_tokens if end is None else check_int("end", end, 0)
        if not check_int("start", start, 0) <= end <= num_tokens:
            raise SettingError(
                "start",
                start,
                f"0 <= start <= end <= {num_tokens}",
                where=f"for {num_tokens} tokens",
                beside={"end": end},
            )
        if isinstance(tokens, TokenView):
            self._tokens, self._positions = tokens._tokens, tokens._positions[start:end]
        else:
            self._tokens, self._positions = tokens, range(start, end)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> int | Self:
        if not isinstance(index, slice):
            return self._tokens[self._positions[index]]
        view = self.__class__.__new__(self.__class__)
        view._tokens = self._tokens
        view._positions = self._positions[index]
        return view

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[int]:
        return map(self._tokens.__getitem__, self._positions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    # The tokens may be a list, and a view equals lists, which have no hash.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:_SHOWN]))
        return f"TokenView([{shown}{', ...' if len(self) > _SHOWN else ''}], len={len(self)})"
