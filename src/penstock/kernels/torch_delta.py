"""The gated delta rule and its convolution in plain torch.

Both run in blocks of 64 tokens, counted from the start of a span. A block is always computed at its full shape, with
zeros after the last token, so that a token's bits depend on its own block and on the state before it: spans that end
on multiples of 64 give the same bits however many there are.

Within a block, with S the state before it, g the sum of log decays up to a token and b its beta:

    u_i = b_i (v_i - exp(g_i) k_i S - sum over j < i of exp(g_i - g_j) (k_i . k_j) u_j)      what each token writes
    o_i = exp(g_i) q_i S + sum over j <= i of exp(g_i - g_j) (q_i . k_j) u_j                 what it reads
    S'  = exp(g_last) S + sum over j of exp(g_last - g_j) k_j u_j

The first line is a triangular system (I + A) u = b (v - exp(g) k S).
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BLOCK = 64
# A block of so few tokens is cheaper one token after the other.
STEP_TOKENS = 8
_NORM_EPS = 1e-6
# The inverse is made from diagonal blocks of this size upwards.
_CORNER = 16


def causal_conv(x: Tensor, tail: Tensor, weight: Tensor, out_tail: Tensor) -> Tensor:
    num_rows, num_before = x.shape[0], tail.shape[0]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for start in range(0, num_rows, BLOCK):
        end = min(start + BLOCK, num_rows)
        lines = x[start - num_before : end] if start else torch.cat((tail, x[:end]))
        size = BLOCK if end - start > STEP_TOKENS else end - start
        window = _padded_to(lines, size + num_before)
        mixed = window[:size] * weight[0]
        for tap in range(1, num_before + 1):
            mixed.addcmul_(window[tap : tap + size], weight[tap])
        out[start:end] = torch.nn.functional.silu(mixed)[: end - start]
    kept = x[num_rows - num_before :] if num_rows >= num_before else torch.cat((tail[num_rows:], x))
    out_tail.copy_(kept)
    return out


def gated_delta_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    out_state: Tensor,
) -> Tensor:
    num_tokens = values.shape[0]
    out = values.new_empty(values.shape, dtype=torch.float32)
    for start in range(0, num_tokens, BLOCK):
        rows = slice(start, min(start + BLOCK, num_tokens))
        form = _block if rows.stop - start > STEP_TOKENS else gated_delta_steps
        out[rows] = form(
            queries[rows], keys[rows], values[rows], log_decay[rows], beta[rows], state, out_state
        )
        state = out_state
    return out


def gated_delta_steps(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    out_state: Tensor,
) -> Tensor:
    num_tokens, num_heads, _ = values.shape
    key_dim = keys.shape[-1]
    group = num_heads // keys.shape[1]
    pairs = torch.stack((keys, queries), dim=2).float()  # [n, KH, 2, K]
    pairs *= torch.rsqrt((pairs * pairs).sum(-1, keepdim=True) + _NORM_EPS)
    pairs[:, :, 1] *= key_dim**-0.5
    pairs = pairs.repeat_interleave(group, dim=1)  # [n, H, 2, K]
    overlaps = (pairs[:, :, 0] * pairs[:, :, 1]).sum(-1, keepdim=True)  # [n, H, 1]
    decay = log_decay.exp()[:, :, None]
    out = values.new_empty(values.shape, dtype=torch.float32)
    for token in range(num_tokens):
        remembered = torch.bmm(pairs[token], state).mul_(decay[token, :, None])  # [H, 2, V]
        written = (values[token].float() - remembered[:, 0]).mul_(beta[token][:, None])
        torch.addcmul(remembered[:, 1], overlaps[token], written, out=out[token])
        torch.mul(state, decay[token, :, None], out=out_state)
        out_state.addcmul_(pairs[token, :, 0, :, None], written[:, None])
        state = out_state
    return out


def _block(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    out_state: Tensor,
) -> Tensor:
    """One block, padded to its full shape. Tokens come first in all arguments, heads inside."""
    num_tokens, num_heads, _ = values.shape
    num_key_heads, key_dim = keys.shape[1:]
    group = num_heads // num_key_heads
    pairs = torch.zeros(num_key_heads, 2 * BLOCK, key_dim)  # keys, then queries
    pairs[:, :num_tokens] = keys.transpose(0, 1)
    pairs[:, BLOCK : BLOCK + num_tokens] = queries.transpose(0, 1)
    pairs *= torch.rsqrt((pairs * pairs).sum(-1, keepdim=True) + _NORM_EPS)
    pairs[:, BLOCK:] *= key_dim**-0.5
    values = _padded_heads(values)  # [H, B, V]
    beta = _padded_heads(beta)[:, :, None]
    total = _padded_heads(log_decay).cumsum(-1)  # [H, B]

    # Decay from token j to token i, for j <= i; the differences above the diagonal could overflow.
    decays = (total[:, :, None] - total[:, None]).masked_fill_(_constants().above, -torch.inf).exp_()
    dots = torch.bmm(pairs, pairs[:, :BLOCK].transpose(1, 2))  # [KH, 2B, B]
    by_group = decays.view(num_key_heads, group, BLOCK, BLOCK)
    system = (dots[:, None, :BLOCK] * by_group).view_as(decays).mul_(beta)
    reads = (dots[:, None, BLOCK:] * by_group).view_as(decays)

    pairs = pairs.repeat_interleave(group, dim=0) if group > 1 else pairs  # [H, 2B, K]
    since_start = total.exp()[:, :, None]
    remembered = torch.bmm(pairs, state)  # [H, 2B, V]
    target = torch.addcmul(values, remembered[:, :BLOCK], since_start, value=-1).mul_(beta)
    written = torch.bmm(_inverse(system), target)
    out = torch.baddbmm(remembered[:, BLOCK:] * since_start, reads, written)

    to_end = (total[:, -1:] - total).exp()[:, :, None]
    fading_keys = (pairs[:, :BLOCK] * to_end).transpose(1, 2)
    torch.baddbmm(state * since_start[:, -1:], fading_keys, written, out=out_state)
    return out.transpose(0, 1)[:num_tokens]


def _inverse(system: Tensor) -> Tensor:
    """(I + A)^-1 for A the part of `system` [H, B, B] below the diagonal.

    For a lower triangle of 2 x 2 blocks with inverses P and Q on the diagonal and L below, the inverse has -Q L P
    below. That doubles the size of what is inverted: within the corners by masked products of whole corners, beyond
    them block by block. Sums stay short, as in forward substitution; powers of A would overflow."""
    num_heads = system.shape[0]
    size, count = _CORNER, BLOCK // _CORNER
    grid = system.view(num_heads, count, size, count, size)
    corners = torch.stack([grid[:, index, :, index] for index in range(count)], dim=1).flatten(0, 1)
    masks = _constants().corner_masks
    inverse = _constants().corner_identity - corners * masks[0]
    for mask in masks[1:]:
        inverse = torch.baddbmm(inverse, inverse, torch.bmm(corners * mask, inverse), alpha=-1)
    while count > 1:
        grid = system.view(num_heads, count, size, count, size)
        below = torch.stack([grid[:, row, :, row - 1] for row in range(1, count, 2)], dim=1).flatten(0, 1)
        halves = inverse.view(num_heads * count // 2, 2, size, size)
        joined = system.new_zeros(num_heads * count // 2, 2 * size, 2 * size)
        joined[:, :size, :size] = halves[:, 0]
        joined[:, size:, size:] = halves[:, 1]
        torch.baddbmm(
            joined[:, size:, :size],
            torch.bmm(halves[:, 1], below),
            halves[:, 0],
            beta=0,
            alpha=-1,
            out=joined[:, size:, :size],
        )
        inverse, size, count = joined, 2 * size, count // 2
    return inverse


@dataclass(frozen=True)
class _Constants:
    above: Tensor  # [B, B], true above the diagonal
    corner_identity: Tensor
    corner_masks: list[Tensor]  # of each doubling within a corner: the lower left parts that it fills


@cache
def _constants() -> _Constants:
    index = torch.arange(_CORNER)
    masks = []
    size = 1
    while size < _CORNER:
        part, half = index // (2 * size), index // size % 2
        is_below = (part[:, None] == part) & (half[:, None] == 1) & (half == 0)
        masks.append(is_below.float())
        size *= 2
    above = torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu(1)
    return _Constants(above, torch.eye(_CORNER), masks)


def _padded_to(lines: Tensor, num_rows: int) -> Tensor:
    """[num_rows, ...] in float32, with zeros after the lines."""
    padded = torch.zeros(num_rows, *lines.shape[1:])
    padded[: lines.shape[0]] = lines
    return padded


def _padded_heads(x: Tensor) -> Tensor:
    """[tokens, heads, ...] as [heads, B, ...] in float32, with zeros after the last token."""
    padded = torch.zeros(x.shape[1], BLOCK, *x.shape[2:])
    padded[:, : x.shape[0]] = x.transpose(0, 1)
    return padded
