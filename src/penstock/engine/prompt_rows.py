"""What is made of a prompt's own rows, behind the last layer, chunk by chunk: how likely its tokens were, or one
vector of them all."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.engine.sampler import TokenLogprobs, rank_rows

# Rows whose logits are looked at together: what a chunk takes beside its layers.
SLICE_ROWS = 64
# Of a sum, in whole numbers of this part of 1: it does not depend on the order, nor on chunks.
_PARTS_OF_ONE = 2**24

Pooling = Literal["mean", "last"]


class PromptRows(ABC):
    """Reads rows of one prompt. Nothing is known before it is taken, with the commit of the rows' step; rows that
    were taken are not read again, should their tokens be."""

    def __init__(self) -> None:
        self.num_taken = 0

    def read(self, rows: Tensor, start: int, logits_of: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        """Read rows [n, hidden] of the tokens from `start` on. Returns what waits for the device, and gives what
        `take` takes."""
        num_known = max(self.num_taken - start, 0)
        return self._read(rows[num_known:], start + num_known, logits_of)

    @abstractmethod
    def _read(self, rows: Tensor, start: int, logits_of: Callable[[Tensor], Tensor]) -> Callable[[], Any]: ...

    @abstractmethod
    def take(self, found: Any) -> None: ...


class PromptScores(PromptRows):
    """The log-probability of each token after those before it. The first has none."""

    def __init__(self, tokens: Sequence[int], num_most_likely: int) -> None:
        super().__init__()
        self._tokens = tokens
        self._num_most_likely = num_most_likely
        self._new: list[TokenLogprobs | None] = [None]

    def _read(
        self, rows: Tensor, start: int, logits_of: Callable[[Tensor], Tensor]
    ) -> Callable[[], list[TokenLogprobs]]:
        following = self._tokens[start + 1 : start + 1 + len(rows)]  # none after the last
        found = [
            rank_rows(
                logits_of(rows[first : first + SLICE_ROWS][: len(tokens)]), tokens, self._num_most_likely
            )
            for first in range(0, len(following), SLICE_ROWS)
            if (tokens := following[first : first + SLICE_ROWS])
        ]
        return lambda: [each for ranked in found for each in ranked.listed()]

    def take(self, found: list[TokenLogprobs]) -> None:
        self._new += found

    def news(self) -> tuple[TokenLogprobs | None, ...]:
        """Of the tokens after those that were told before."""
        new, self._new = tuple(self._new), []
        return new


class PooledRows(PromptRows):
    """The mean of all rows, or the last one, of length 1."""

    def __init__(self, pooling: Pooling) -> None:
        super().__init__()
        self._pooling = pooling
        self._sum: Tensor | None = None  # [hidden], whole numbers

    def _read(
        self, rows: Tensor, start: int, logits_of: Callable[[Tensor], Tensor]
    ) -> Callable[[], Tensor | None]:
        if self._pooling == "last":
            rows = rows[-1:]
        return lambda: (rows.cpu().double() * _PARTS_OF_ONE).round_().long().sum(dim=0) if len(rows) else None

    def take(self, found: Tensor | None) -> None:
        if found is not None:
            self._sum = found if self._sum is None or self._pooling == "last" else self._sum + found

    @property
    def vector(self) -> list[float]:
        assert self._sum is not None, "a prompt has a row at least"
        total = self._sum.double()
        return torch.nn.functional.normalize(total, dim=0).float().tolist()
