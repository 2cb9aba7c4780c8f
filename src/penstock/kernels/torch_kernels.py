"""The reference kernels, in plain torch. What they promise about bits is measured by `penstock.kernels.probe`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.cache import TokenRange
from penstock.cache.kv import KV
from penstock.cache.recurrent import LayerStates
from penstock.kernels import torch_delta
from penstock.kernels.native_layers import DenseHeads, DenseLayer, DenseLayers
from penstock.kernels.native_quantised import QuantisedProducts
from penstock.kernels.protocol import ROW_GRID, DeltaHeads, HeadLayout
from penstock.kernels.quantised import QuantisedWeight, Weight
from penstock.kernels.shares import in_shares
from penstock.kernels.spans import (
    AttendedSpan,
    AttentionWork,
    Places,
    StateRows,
    StateWork,
    WrittenPlaces,
)
from penstock.plan.request import Span
from penstock.plan.tiles import cut_into_tiles

# A query keeps its bits as long as it keeps its place modulo this many rows of the attention kernel's input.
QUERY_GRID = 64

# The causal part of a tile is cut into squares of this size: what lies left of a square needs no mask, and the kernel
# computes a masked score as dearly as any other.
SQUARE = 256
# Rows of a square's causal piece, for queries that end before the square does. A smaller one gives the same bits as
# the whole one at these sizes (not at 192 of 256, where the library's products take another path).
PREFIX_SIZES = (64, 128)
# A decode's past is not split into parts of fewer tokens than this: merging costs more than it gains.
_SPLIT_TOKENS = 512
# Rows of a gated norm that are taken at once: what it holds in float32 then stays in a processor's cache.
_NORM_ROWS = 256
# The number of rows that packed weights are laid out for.
_PACKED_FOR_ROWS = 512


def flash_attention(
    queries: Tensor, keys: Tensor, values: Tensor, dropout: float, is_causal: bool, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of [batch, heads, n, head_dim], and the logarithms of the sums of exponentials [batch, heads, n]."""
    if queries.device.type == "cpu":
        found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, dropout, is_causal, scale=scale
        )
        return found
    return plain_attention(queries, keys, values, is_causal=is_causal, scale=scale)


def plain_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The same on any device, with all scores in memory."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1).float() for part in (keys, values))
    scores = queries.float() @ keys.transpose(2, 3) * scale
    if is_causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(dim=-1) @ values).to(queries.dtype), scores.logsumexp(dim=-1)


class TorchKernels:
    """Kernels for the CPU."""

    name = "torch"
    libraries = ""
    row_grid = ROW_GRID
    head_rows = 8
    feed_rows = 0
    activation_stride = 1
    can_capture = False
    quantised: QuantisedProducts | None = None
    causal_conv = staticmethod(torch_delta.causal_conv)
    gated_delta_rule = staticmethod(torch_delta.gated_delta_rule)
    gated_delta_steps = staticmethod(torch_delta.gated_delta_steps)

    def __init__(self, tile_size: int = 512, row_slab: int = 0) -> None:
        self.tile_size = tile_size
        self.row_floor = 1
        self.row_slab = row_slab
        self.expert_slab = 0
        self.avoided_rows: tuple[int, ...] = ()

    def pack(self, weight: Tensor) -> Tensor:
        # oneDNN's own layout, which it would otherwise make anew in every product: a single row takes half the
        # time, and fewer rows are enough for row-invariance than with the default float32 library.
        if weight.device.type != "cpu" or not _can_pack(weight.dtype):
            return weight
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        return packed

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, *, is_canonical: bool = True
    ) -> Tensor:
        if isinstance(weight, QuantisedWeight):
            raise TypeError("these kernels have no products with quantised weights")
        if 0 < self.row_slab < x.shape[0]:
            return torch.cat([self._product(slab, weight, bias) for slab in torch.split(x, self.row_slab)])
        return self._product(x, weight, bias)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not weight.is_mkldnn:
            return torch.nn.functional.linear(x, weight, bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out

    def dense_layers(self, layers: Sequence[DenseLayer], heads: DenseHeads) -> DenseLayers | None:
        return None

    def embed(self, token_ids: Tensor, embedding: Weight) -> Tensor:
        if isinstance(embedding, QuantisedWeight):
            raise TypeError("these kernels cannot read quantised weights")
        return embedding[token_ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float32:
            return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
        if x.device.type != "cpu":
            wide = x.float()
            normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
            return (
                (normed * weight).to(x.dtype)
                if weight.dtype == torch.float32
                else normed.to(x.dtype) * weight
            )
        # On a processor a decode feels that these are nine calls. The layer norm of (x, -x), whose mean is
        # zero and whose variance is the mean square of x, is five.
        size = weight.shape[0]
        both = torch.cat((x, x.neg()), dim=-1)
        if weight.dtype == torch.float32:
            doubled = torch.cat((weight, weight))
            return torch.nn.functional.layer_norm(both, (2 * size,), doubled, eps=eps)[..., :size]
        return torch.nn.functional.layer_norm(both, (2 * size,), eps=eps)[..., :size] * weight

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor,
        weight: Tensor,
        eps: float,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        total = x + delta
        normed = self.rms_norm(total, weight, eps)
        return (total, normed) if into is None else (into[0].copy_(total), into[1].copy_(normed))

    def place_heads(
        self, projected: Tensor, heads: HeadLayout, cos: Tensor, sin: Tensor, kv: KV, places: WrittenPlaces
    ) -> Tensor:
        rows = projected.view(projected.shape[0], -1, heads.head_dim)
        num_heads, num_rotated = heads.num_heads, heads.num_heads + heads.num_kv_heads
        if heads.query_norm is not None and heads.key_norm is not None:
            queries = self.rms_norm(rows[:, :num_heads], heads.query_norm, heads.norm_eps)
            keys = self.rms_norm(rows[:, num_heads:num_rotated], heads.key_norm, heads.norm_eps)
            queries, keys = self.rotate(queries, cos, sin), self.rotate(keys, cos, sin)
        else:
            rotated = self.rotate(rows[:, :num_rotated], cos, sin)
            queries, keys = rotated[:, :num_heads], rotated[:, num_heads:]
        num_tokens = places.num_tokens
        values = rows[:num_tokens, num_rotated : num_rotated + heads.num_kv_heads]
        kv.write(places.ranges, keys[:num_tokens], values)
        return queries

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of x [rows, heads, head_dim]."""
        # The two halves of a head are the pairs' first and second parts. `sin` is negative in its first half, so
        # that a rotation is two products and a sum, which round alike in vector and scalar code.
        size = cos.shape[-1]
        part = x[..., :size]
        rotated = torch.roll(part, size // 2, dims=-1).mul_(sin[:, None]).add_(part * cos[:, None])
        return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), dim=-1)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return in_shares(torch.ops.aten.silu.out, gate).mul_(up)

    def sigmoid(self, x: Tensor) -> Tensor:
        return in_shares(torch.ops.aten.sigmoid.out, x)

    def carry_states(
        self, projected: Tensor, net: DeltaHeads, work: StateWork, states: LayerStates
    ) -> Tensor:
        lanes = net.decay_rate.shape[0]
        qkv, gate, beta, decay = torch.split(projected, [net.conv_size, net.value_size, lanes, lanes], dim=-1)
        log_decay, beta = self.delta_gates(decay, beta, net.decay_rate, net.decay_bias)
        gates = log_decay[:, : net.num_value_heads], beta[:, : net.num_value_heads]
        out = torch.zeros_like(gate) if work.end < gate.shape[0] else torch.empty_like(gate)
        for rows in work.rows:
            span = slice(rows.start, rows.end)
            attended = self._carry(qkv[span], gates[0][span], gates[1][span], rows, net, states)
            out[span] = self.gated_norm(attended, gate[span], net.norm, net.norm_eps)
        return out

    def _carry(
        self,
        qkv: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        rows: StateRows,
        net: DeltaHeads,
        states: LayerStates,
    ) -> Tensor:
        """One state through its rows: [n, heads, value_dim] in float32."""
        mixed = self.causal_conv(qkv, states.tail(rows.read), net.conv_weight, states.tail_out(rows.write))
        queries, keys, values = torch.split(mixed, [net.key_size, net.key_size, net.value_size], dim=-1)
        num_rows = rows.end - rows.start
        rule = self.gated_delta_rule if rows.is_prompt else self.gated_delta_steps
        return rule(
            queries.view(num_rows, net.num_key_heads, -1),
            keys.view(num_rows, net.num_key_heads, -1),
            values.view(num_rows, net.num_value_heads, -1),
            log_decay,
            beta,
            states.matrix(rows.read),
            states.matrix_out(rows.write),
        )

    def delta_gates(self, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithm of the decay, rate * softplus(a + bias), and beta, sigmoid(b), in float32.

        a and b are [n, lanes], rate and bias [lanes] in float32."""
        log_decay = in_shares(torch.ops.aten.softplus.out, a.float() + bias).mul_(rate)
        return log_decay, self.sigmoid(b.float())

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm of each head of x [n, heads, dim], float32, times silu of gate [n, heads * dim]; in the dtype of
        the gate, and of its shape. The weight [dim] is float32."""
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for start in range(0, x.shape[0], _NORM_ROWS):
            rows = slice(start, start + _NORM_ROWS)
            activated = in_shares(torch.ops.aten.silu.out, gate[rows].float())
            normed = torch.nn.functional.rms_norm(x[rows], weight.shape, weight, eps)
            out[rows] = activated.mul_(normed.flatten(1))
        return out

    def preparations(self, num_rows: int, num_heads: int, kv: KV, scale: float) -> Iterator[None]:
        return iter(())

    def attend(self, queries: Tensor, work: AttentionWork, kv: KV, scale: float) -> Tensor:
        if len(work.spans) == 1 == len(queries) and not work.spans[0].is_prompt:
            return self._attend_decode(queries[0], work.spans[0], 0, kv, scale).reshape(1, -1)
        attended = queries.new_empty(queries.shape)
        for span in work.spans:
            if span.is_prompt:
                self._attend_prompt(queries, span, kv, scale, out=attended)
                continue
            for row in range(span.start, span.end):
                attended[row] = self._attend_decode(queries[row], span, row - span.start, kv, scale)
        attended[work.end :] = 0
        return attended.flatten(1)

    def _attend_prompt(
        self, queries: Tensor, span: AttendedSpan, kv: KV, scale: float, *, out: Tensor
    ) -> None:
        end = span.num_tokens
        if span.tile_size:
            pieces = cut_into_tiles(Span(span.position, end), span.tile_size)
            cuts = [(piece.tile_start, piece.start, piece.end) for piece in pieces]
        else:
            cuts = [(span.origin, span.position, end)]
        for tile_start, piece_start, piece_end in cuts:
            rows = slice(span.start + piece_start - span.position, span.start + piece_end - span.position)
            past = kv.read(_part(span.places, 0, tile_start)) if tile_start else None
            own = kv.read_padded(
                _part(span.places, tile_start, piece_end), span.tile_size or piece_end - tile_start
            )
            out[rows] = self.attend_tile(queries[rows], piece_start - tile_start, past, own, scale)

    def _attend_decode(self, query: Tensor, span: AttendedSpan, index: int, kv: KV, scale: float) -> Tensor:
        places = _part(span.places, 0, span.position + index + 1)
        pieces = [places] if span.is_joined else [[place] for place in places]
        return self.attend_one(query, [kv.read(piece) for piece in pieces], scale)

    def attend_tile(self, queries: Tensor, offset: int, past: KV | None, own: KV, scale: float) -> Tensor:
        """Attention of queries [n, heads, head_dim] that stand at `offset` in their tile.

        `past` is all that lies before the tile, seen by every query; `own` is the tile, whole (its keys after
        the last query may hold anything finite). Returns [n, heads, head_dim]."""
        end = offset + queries.shape[0]
        tile_size = own.keys.shape[0]
        past_piece = None if past is None else _attend_all(queries, offset, past, scale)
        attended = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for square in range(offset // SQUARE * SQUARE, end, SQUARE):
            square_size = min(SQUARE, tile_size - square)  # smaller only where a tile is a chunk of any size
            first, last = max(offset, square), min(end, square + square_size)
            rows = slice(first - offset, last - offset)
            pieces = [] if past_piece is None else [past_piece.rows(rows)]
            if square:
                before = KV(own.keys[:square], own.values[:square])
                pieces.append(_attend_all(queries[rows], first, before, scale))
            square_kv = KV(own.keys[square:], own.values[square:])
            pieces.append(_attend_square(queries[rows], first - square, square_kv, square_size, scale))
            _merge(pieces, first - square, square_size, out=attended[rows])
        return attended

    def attend_one(self, query: Tensor, past: Sequence[KV], scale: float) -> Tensor:
        """Attention of one query [heads, head_dim] to everything in `past`, in any number of pieces."""
        num_heads, head_dim = query.shape
        num_kv_heads = past[0].keys.shape[1]
        group = num_heads // num_kv_heads
        # A group's queries are the rows: [1, KV, G, D].
        grouped = query.view(1, num_kv_heads, group, head_dim)
        if group == 1 and query.dtype == torch.bfloat16:
            # The kernel is several times slower on a single row than on two.
            grouped = torch.nn.functional.pad(grouped, (0, 0, 0, 1))
        parts = [part for piece in past for part in _split(piece, num_kv_heads)]
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        for keys, values in parts:  # [B, KV, tokens, D]
            out, lse = flash_attention(
                grouped.expand(keys.shape[0], -1, -1, -1), keys, values, 0.0, False, scale=scale
            )
            outs.append(out[:, :, :group])
            lses.append(lse[:, :, :group])
        if len(outs) == 1 and outs[0].shape[0] == 1:
            return outs[0].reshape(num_heads, head_dim)
        weights = torch.softmax(torch.cat(lses), dim=0)[..., None]  # [pieces, KV, G, 1]
        merged = (torch.cat(outs) * weights).sum(dim=0).to(query.dtype)
        return merged.reshape(num_heads, head_dim)


def _part(places: Places, start: int, end: int) -> list[TokenRange]:
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


def _split(past: KV, num_kv_heads: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values as [B, KV, tokens, D]: a long past in B equal parts, so that there is work for every thread,
    and what is left over in one of its own."""
    num_tokens = past.keys.shape[0]
    num_parts = 1
    while num_kv_heads * num_parts < 4 * torch.get_num_threads():
        num_parts *= 2
    num_parts = max(min(num_parts, num_tokens // _SPLIT_TOKENS), 1)
    size = num_tokens // num_parts
    parts = [(slice(0, size * num_parts), num_parts)]
    if size * num_parts < num_tokens:
        parts.append((slice(size * num_parts, num_tokens), 1))
    return [
        (
            past.keys[tokens].view(count, -1, *past.keys.shape[1:]).transpose(1, 2),
            past.values[tokens].view(count, -1, *past.values.shape[1:]).transpose(1, 2),
        )
        for tokens, count in parts
    ]


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True)
class _Piece:
    """Queries' attention to a part of their keys, to be merged with that to the others."""

    out: Tensor  # [n, H, D]
    lse: Tensor  # [H, n], the logarithm of the sum of the exponentials of the scores

    def rows(self, rows: slice) -> "_Piece":
        return _Piece(self.out[rows], self.lse[:, rows])


def _attend_all(queries: Tensor, offset: int, kv: KV, scale: float) -> _Piece:
    """Queries [n, H, D] that stand at `offset` in their tile, each to all of the keys.

    The queries of a group of heads are stacked as rows: keys are read once a group, and the kernel works on larger
    blocks. The bits are those of head by head."""
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads = kv.keys.shape[1]
    group = num_heads // num_kv_heads
    padded = _padded(
        queries, offset % QUERY_GRID, -(-(offset % QUERY_GRID + num_queries) // QUERY_GRID) * QUERY_GRID
    )
    num_rows = padded.shape[0]
    stacked = padded.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    out, lse = flash_attention(
        stacked.reshape(1, num_kv_heads, group * num_rows, head_dim),
        kv.keys.transpose(0, 1)[None],
        kv.values.transpose(0, 1)[None],
        0.0,
        False,
        scale=scale,
    )
    out = out.view(num_kv_heads, group, num_rows, head_dim).permute(2, 0, 1, 3)
    piece = _Piece(out.reshape(num_rows, num_heads, head_dim), lse.reshape(num_heads, num_rows))
    return piece.rows(slice(offset % QUERY_GRID, offset % QUERY_GRID + num_queries))


def _attend_square(queries: Tensor, offset: int, kv: KV, square_size: int, scale: float) -> _Piece:
    """Queries [n, H, D] that stand at `offset` in their square, each to the keys up to its own."""
    end = offset + queries.shape[0]
    size = min((size for size in PREFIX_SIZES if end <= size < square_size), default=square_size)
    padded = _padded(queries, offset, size)
    out, lse = flash_attention(
        padded.transpose(0, 1)[None],
        kv.keys[:size].transpose(0, 1)[None],
        kv.values[:size].transpose(0, 1)[None],
        0.0,
        True,
        scale=scale,
    )
    return _Piece(out[0].transpose(0, 1), lse[0]).rows(slice(offset, end))


def _padded(queries: Tensor, offset: int, num_rows: int) -> Tensor:
    """[num_rows, H, D] with the queries at `offset` and zeros around them."""
    if queries.shape[0] == num_rows:
        return queries
    padded = queries.new_zeros(num_rows, *queries.shape[1:])
    padded[offset : offset + queries.shape[0]] = queries
    return padded


def _merge(pieces: list[_Piece], offset: int, square_size: int, *, out: Tensor) -> None:
    """Write the pieces' common result, for queries that stand at `offset` in their square, to `out` [n, H, D]."""
    if len(pieces) == 1:
        out.copy_(pieces[0].out)
        return
    num_queries, num_heads, _ = out.shape
    # The weights are computed on the square's full shape: a vectorised exponential and its scalar tail differ in
    # the last bit, so where a row stands among them must not depend on the chunk.
    rows = slice(offset, offset + num_queries)
    lse = pieces[0].lse.new_zeros(len(pieces), num_heads, square_size)
    for index, piece in enumerate(pieces):
        lse[index, :, rows] = piece.lse
    weights = lse.softmax(dim=0).transpose(1, 2)[:, rows, :, None]  # [pieces, n, H, 1]
    total = pieces[0].out * weights[0]
    for piece, weight in zip(pieces[1:-1], weights[1:-1], strict=True):
        total += piece.out * weight
    torch.add(total, pieces[-1].out * weights[-1], out=out)
