"""One forward pass, as the layers see it: rows of tokens, where their keys go, and what each attends to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.cache.tensors import CacheTensors
from penstock.kernels.device import device_kind
from penstock.kernels.interface import Kernels
from penstock.kernels.spans import PassWork
from penstock.layers.rotary import RotaryTables


@dataclass(frozen=True)
class ForwardBatch(PassWork):
    """Spans of tokens to run in one pass, one after the other, then padding rows.

    The last layer's queries are needed only where logits are wanted: `logit_rows` says which rows of the batch
    those are (`num_logits` of them, then padding), and `last_layer` is their work. Numbers are the host's: the model
    takes them to its device, all at once.
    """

    token_ids: NDArray[np.int64]  # [rows]
    positions: NDArray[np.int64]  # [rows]
    end_position: int  # above every position
    num_tokens: int  # rows before the padding
    logit_rows: NDArray[np.int64]  # [last layer's rows]
    num_logits: int
    is_canonical: bool  # whether a row's bits must not depend on how many others there are
    # [rows] 1 for those of requests whose rotary embedding is that of long ones; none where no row is
    long_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64), kw_only=True)


@dataclass(frozen=True)
class LateTokens:
    """Tokens of some rows that the device has, and the host learns of later: for `rows`, those at `places` of
    `tokens`."""

    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    tokens: Tensor

    @classmethod
    def in_order(cls, tokens: Tensor) -> "LateTokens":
        """Those of the first rows."""
        order = np.arange(len(tokens))
        return cls(order, order, tokens)

    def put_into(self, token_ids: Tensor) -> None:
        """Without waiting for them."""
        order = np.arange(len(self.rows))
        if np.array_equal(self.rows, order) and np.array_equal(self.places, order):
            token_ids[: len(order)].copy_(self.tokens[: len(order)])
        else:
            rows, places = device_kind(token_ids.device).all_copied((self.rows, self.places))
            token_ids.index_copy_(0, rows, self.tokens[places].to(token_ids.dtype))


class Overlap(NamedTuple):
    """How a pass goes together with those before and after it that are on the device with it."""

    late: LateTokens | None = None  # of the one before
    nearly: Callable[[], None] | None = None  # called when all but the last layers are launched


NO_OVERLAP = Overlap()


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A batch on its way through the layers: what every layer is told beside its rows."""

    batch: ForwardBatch
    caches: CacheTensors
    kernels: Kernels
    rotary: RotaryTables  # of each row's position
