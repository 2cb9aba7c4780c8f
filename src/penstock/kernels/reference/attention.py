"""The reference's attention, in plain torch: a tile of a prompt, and one query of a decode; and both for layers with
windows, sinks or soft caps, which torch's kernels have not."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.cache.tensors import KV
from penstock.kernels.spans import AttendedSpan, Scoring
from penstock.kernels.threads import num_threads
from penstock.plan.grids import BLOCK_TOKENS, QUERY_GRID, SQUARE, TILE, VECTOR_BYTES

# A query keeps its bits as long as it keeps its place modulo QUERY_GRID rows of the attention kernel's input. The
# causal part of a tile is cut into squares: what lies left of one needs no mask, and the kernel computes a masked
# score as dearly as any other.
# Rows of a square's causal piece, for queries that end before the square does. A smaller one gives the same bits as
# the whole one at these sizes (not at 192 of 256, where the library's products take another path).
PREFIX_SIZES = (64, 128)
# A decode's past is not split into parts of fewer tokens than this: merging costs more than it gains.
_SPLIT_TOKENS = 512


def flash_attention(
    queries: Tensor, keys: Tensor, values: Tensor, dropout: float, is_causal: bool, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of [batch, heads, n, head_dim], and the logarithms of the sums of exponentials [batch, heads, n]."""
    if queries.is_cpu:
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


def is_plain(scoring: Scoring, kv: KV) -> bool:
    """Whether torch's kernels have all of such a layer's attention."""
    has_more = scoring.window or scoring.soft_cap or scoring.sinks is not None
    return not has_more and kv.keys.shape[2] == kv.values.shape[2]


def attend_by_blocks(queries: Tensor, span: AttendedSpan, kv: KV, scoring: Scoring, *, out: Tensor) -> None:
    """Attention of a span's rows, with all scores of a block of queries in memory, a KV head at a time.

    A prompt's queries stand in blocks that are counted from the sequence's first token: what a block is computed with
    has one shape and the same numbers, but for those that weigh nothing, whatever chunk the queries came in."""
    for piece in span.tiles(BLOCK_TOKENS if span.is_prompt else 1):
        size = BLOCK_TOKENS if span.is_prompt else 1
        end = piece.tile_start + size
        # What the block's first row sees may be gone, if that row is not among these.
        origin = scoring.first_seen(piece.tile_start) // BLOCK_TOKENS * BLOCK_TOKENS
        first = scoring.first_seen(piece.start) // BLOCK_TOKENS * BLOCK_TOKENS
        seen = kv.read_padded(span.places_of(first, piece.end), end - first)
        before = (0, 0, 0, 0, first - origin, 0)
        keys, values = (torch.nn.functional.pad(part.float(), before) for part in (seen.keys, seen.values))
        own = _padded(queries[piece.rows], piece.start - piece.tile_start, size).float()
        attended = _attend_with_scores(own, piece.tile_start, keys, values, origin, scoring)
        at = piece.start - piece.tile_start
        out[piece.rows] = attended[at : at + piece.end - piece.start]


def _attend_with_scores(
    queries: Tensor, position: int, keys: Tensor, values: Tensor, first: int, scoring: Scoring
) -> Tensor:
    """Queries [n, H, D] from `position` on to keys and values of the tokens from `first` on, all in float32."""
    num_rows, num_heads, _ = queries.shape
    num_tokens, num_kv_heads, value_dim = values.shape
    group = num_heads // num_kv_heads
    rows = torch.arange(position, position + num_rows, device=queries.device)[:, None]
    tokens = torch.arange(first, first + num_tokens, device=queries.device)
    is_hidden = tokens > rows
    if scoring.window:
        is_hidden |= tokens <= rows - scoring.window
    out = queries.new_empty((num_rows, num_heads, value_dim))
    for kv_head in range(num_kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        own = queries[:, heads].transpose(0, 1).reshape(group * num_rows, -1)
        scores = (own @ keys[:, kv_head].T).mul_(scoring.scale).view(group, num_rows, num_tokens)
        if scoring.soft_cap:
            scores = scores.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
        scores = scores.masked_fill_(is_hidden, -torch.inf)
        if scoring.sinks is not None:
            sinks = scoring.sinks[heads, None, None].expand(group, num_rows, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(dim=-1)[..., :num_tokens].reshape(group * num_rows, num_tokens)
        out[:, heads] = (weights @ values[:, kv_head]).view(group, num_rows, -1).transpose(0, 1)
    return out


def attend_by_tiles(queries: Tensor, span: AttendedSpan, kv: KV, scoring: Scoring, *, out: Tensor) -> None:
    """The same for layers without windows, on any device, with the scores of a block of queries to one tile of tokens
    in memory: tiles are counted from the sequence's first token, too."""
    size = BLOCK_TOKENS if span.is_prompt else 1
    num_heads, head_dim = queries.shape[1:]
    for piece in span.tiles(size):
        at, count = piece.start - piece.tile_start, piece.end - piece.start
        own = _padded(queries[piece.rows], at, size).float().transpose(0, 1)  # [H, n, D]
        rows = torch.arange(piece.tile_start, piece.tile_start + size, device=queries.device)[:, None]
        total = own.new_zeros((num_heads, size, out.shape[2]))
        largest, weight = own.new_full((num_heads, size, 1), -torch.inf), own.new_zeros((num_heads, size, 1))
        for start in range(0, piece.end, TILE):
            seen = kv.read_padded(span.places_of(start, min(start + TILE, piece.end)), TILE)
            keys, values = (part.float().permute(1, 2, 0) for part in (seen.keys, seen.values))  # [KV, D, T]
            grouped = own.reshape(len(keys), -1, head_dim)
            scores = (grouped @ keys).mul_(scoring.scale).view(num_heads, size, TILE)
            tokens = torch.arange(start, start + TILE, device=queries.device)
            scores.masked_fill_(tokens > rows, -torch.inf)
            most = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
            scores = (scores - most).exp_()
            kept = (largest - most).exp_()
            weight = weight * kept + scores.sum(dim=-1, keepdim=True)
            found = scores.view(len(keys), -1, TILE) @ values.transpose(1, 2)
            total = total * kept + found.view_as(total)
            largest = most
        out[piece.rows] = (total / weight)[:, at : at + count].transpose(0, 1).to(out.dtype)


def attend_tile(queries: Tensor, offset: int, past: KV | None, own: KV, scale: float) -> Tensor:
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
            pieces.append(_attend_all(queries[rows], first, own.first(square), scale))
        square_kv = KV(own.keys[square:], own.values[square:])
        pieces.append(_attend_square(queries[rows], first - square, square_kv, square_size, scale))
        _merge(pieces, first - square, square_size, out=attended[rows])
    return attended


def attend_one(query: Tensor, past: Sequence[KV], scale: float) -> Tensor:
    """Attention of one query [heads, head_dim] to everything in `past`, in any number of pieces."""
    num_heads, head_dim = query.shape
    if query.data_ptr() % VECTOR_BYTES:  # else its sums would depend on its row among others
        query = query.clone()
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


def _split(past: KV, num_kv_heads: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values as [B, KV, tokens, D]: a long past in B equal parts, so that there is work for every thread,
    and what is left over in one of its own."""
    num_tokens = past.keys.shape[0]
    num_parts = 1
    while num_kv_heads * num_parts < 4 * num_threads():
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
    """[num_rows, H, D] with the queries at `offset` and zeros around them. Where rows are no whole vectors, always a
    copy: its rows lie where those of any other do."""
    is_whole = (queries.data_ptr() | queries.stride(0) * queries.itemsize) % VECTOR_BYTES == 0
    if queries.shape[0] == num_rows and is_whole:
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
