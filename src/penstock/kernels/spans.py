"""What kernels are told: of a layer, its heads; of a pass, which rows see which tokens, where those lie, and which
states rows carry on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.cache import TokenRange
from penstock.plan.model import DeltaNetConfig, MambaConfig, ShortConvConfig

Places = Sequence[TokenRange]


@dataclass(frozen=True)
class Scoring:
    """How an attention layer weighs what its queries see."""

    scale: float  # of the dot products
    window: int = 0  # a query sees so many tokens, its own the last of them; 0: all up to its own
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0: they stay
    sinks: Tensor | None = None  # [heads], float32: a score beside those of the keys, which has no value

    def is_plain_for(self, head_dim: int) -> bool:
        """Whether that is a scale alone, and the usual one of heads of such a size."""
        has_more = self.window or self.soft_cap or self.sinks is not None
        return not has_more and self.scale == 1.0 / math.sqrt(head_dim)

    def first_seen(self, position: int) -> int:
        """The first token that a query at this position sees."""
        return max(position - self.window + 1, 0) if self.window else 0


@dataclass(frozen=True)
class HeadLayout:
    """The heads of an attention layer. Both norms are there, or neither."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    query_norm: Tensor | None = None  # [head_dim]
    key_norm: Tensor | None = None
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a gated delta net, and all it has beside its products."""

    sizes: DeltaNetConfig
    norm_eps: float
    conv_weight: Tensor  # [taps, conv_size], float32; the tap of the token itself is last
    decay_rate: Tensor  # [lanes], float32, negative
    decay_bias: Tensor  # [lanes], float32
    norm: Tensor  # [value_head_dim], float32


@dataclass(frozen=True)
class MambaHeads:
    """The heads of a Mamba-2 layer, and all it has beside its products. All tensors are float32."""

    sizes: MambaConfig
    norm_eps: float
    conv_weight: Tensor  # [taps, conv_size]; the tap of the token itself is last
    conv_bias: Tensor | None  # [conv_size]
    decay_rate: Tensor  # [lanes], negative
    decay_bias: Tensor  # [lanes]
    skip: Tensor  # [heads]: values go past the rule, too, times this
    norm: Tensor | None  # [norm_groups, value_size / norm_groups]


@dataclass(frozen=True)
class ShortConv:
    """A convolution that mixes tokens by itself. Its tensors are float32."""

    sizes: ShortConvConfig
    conv_weight: Tensor  # [taps, conv_size]; the tap of the token itself is last
    conv_bias: Tensor | None  # [conv_size]


StateNet = DeltaHeads | MambaHeads | ShortConv


@dataclass(frozen=True)
class TilePiece:
    """Tokens [start, end) of a span that lie in the tile beginning at `tile_start`, and their rows of the queries.

    Tiles are the fixed grid on which attention runs, so that a token's result does not depend on how its prompt was
    cut. A query in tile t sees the past [0, t*size) as one unmasked piece, its own tile as one square-causal piece.
    Chunks are cut anywhere; tiles never move:

        tokens   0        256       512       768
        tiles    [---0----)[---1----)[---2----)
        chunk          [ 100 ...... 600 )
        pieces         [100,256) [256,512) [512,600)     pasts: [0,0)  [0,256)  [0,512)
    """

    tile_start: int
    start: int
    end: int
    rows: slice


@dataclass(frozen=True)
class AttendedSpan:
    """Rows [start, end) of the queries, successive tokens of one sequence from `position` on: each sees all tokens up
    to its own, or its layer's window of them."""

    start: int
    end: int
    position: int
    places: Places  # of the sequence's tokens from `first_token` up to the last row's
    is_prompt: bool  # else each row is a decode of its own
    # How an implementation that works on a grid is to cut a prompt:
    tile_size: int = 0  # the grid, counted from the sequence's first token; 0: none
    origin: int = 0  # where the tile begins, if there is no grid
    # A decode's past in several places is copied together, so that where it lies changes no bits.
    is_joined: bool = False
    # Tokens before it are gone: every row's window is behind them. Whole blocks.
    first_token: int = 0

    @property
    def num_tokens(self) -> int:
        """All that the last row sees."""
        return self.position + self.end - self.start

    def places_of(self, start: int, end: int) -> list[TokenRange]:
        """Where tokens [start, end) lie, none of them gone."""
        return part_of(self.places, start - self.first_token, end - self.first_token)

    def tiles(self, tile_size: int) -> list[TilePiece]:
        """The rows cut at the grid of tiles; all of them as one, in the tile that begins at `origin`, where there is
        none (0)."""
        pieces, start, shift = [], self.position, self.start - self.position
        while start < self.num_tokens:
            tile_start = start // tile_size * tile_size if tile_size else self.origin
            end = min(tile_start + tile_size, self.num_tokens) if tile_size else self.num_tokens
            pieces.append(TilePiece(tile_start, start, end, slice(start + shift, end + shift)))
            start = end
        return pieces


@dataclass(frozen=True)
class WrittenPlaces:
    """Where the first rows of a pass go, one after the other."""

    ranges: Places

    @cached_property
    def num_tokens(self) -> int:
        return sum(map(len, self.ranges))

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """[ranges, 2]: start, number of tokens."""
        return _as_array(self.ranges)


@dataclass(frozen=True)
class AttentionWork:
    """What the queries of a pass attend to. Rows beyond the last span are padding, and attend to nothing."""

    spans: tuple[AttendedSpan, ...]

    @cached_property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[spans, 5]: first row, rows, position, first place, first token; and [places, 2]: start, number of
        tokens."""
        rows: list[tuple[int, ...]] = []
        places: list[TokenRange] = []
        for span in self.spans:
            rows.append((span.start, span.end - span.start, span.position, len(places), span.first_token))
            places += span.places
        return np.array(rows, dtype=np.int64).reshape(-1, 5), _as_array(places)

    @cached_property
    def end(self) -> int:
        """The row after the last that attends to something."""
        return max((span.end for span in self.spans), default=0)


@dataclass(frozen=True)
class StateRows:
    """Rows [start, end) of a pass, successive tokens of one sequence: the state in slot `read` is that before them,
    the one after them goes into slot `write`."""

    start: int
    end: int
    read: int
    write: int
    is_prompt: bool


@dataclass(frozen=True)
class StateWork:
    """The recurrent states that the rows of a pass carry on, in this order: all rows but the padding."""

    rows: tuple[StateRows, ...] = ()

    @cached_property
    def end(self) -> int:
        """The row after the last that carries a state."""
        return max((rows.end for rows in self.rows), default=0)


@dataclass(frozen=True)
class GroupWork:
    """What the attention layers of one K/V group are told of a pass."""

    places: WrittenPlaces  # where the keys and values of the first rows go
    all_layers: AttentionWork
    last_layer: AttentionWork  # of the rows whose logits are wanted


@dataclass(frozen=True)
class PassWork(GroupWork):
    """What kernels are told of one pass, and itself the work of the first K/V group. `Kernels.prepare` makes it what
    they need of it on their device."""

    states: StateWork  # where a model has recurrent layers
    windows: tuple[GroupWork, ...] = field(default=(), kw_only=True)  # of the K/V groups after the first

    @property
    def groups(self) -> tuple[GroupWork, ...]:
        return (self, *self.windows)

    def group(self, index: int) -> GroupWork:
        return self.windows[index - 1] if index else self


Work = TypeVar("Work", bound=PassWork)


def part_of(places: Places, start: int, end: int) -> list[TokenRange]:
    """Tokens [start, end) of a sequence whose tokens lie at `places`."""
    part: list[TokenRange] = []
    first = 0
    for place in places:
        after = first + len(place)
        if first < end and start < after:
            part.append(
                TokenRange(place.start + max(start - first, 0), place.start + min(end, after) - first)
            )
        first = after
    return part


def _as_array(places: Places) -> NDArray[np.int64]:
    pairs = [(place.start, place.end - place.start) for place in places]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
