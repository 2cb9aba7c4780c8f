"""The gated delta rule, Mamba-2's rule, and the convolution before both, in plain torch.

A rule runs in blocks of 64 tokens, counted from the start of a span. A block is always computed at its full shape,
with zeros after the last token, so that a token's bits depend on its own block and on the state before it: spans that
end on multiples of 64 give the same bits however many there are.

Within a block, with S the state before it, g the sum of log decays up to a token and b its beta:

    u_i = b_i (v_i - exp(g_i) k_i S - sum over j < i of exp(g_i - g_j) (k_i . k_j) u_j)      what each token writes
    o_i = exp(g_i) q_i S + sum over j <= i of exp(g_i - g_j) (q_i . k_j) u_j                 what it reads
    S'  = exp(g_last) S + sum over j of exp(g_last - g_j) k_j u_j

The first line is a triangular system, (I + A) u = b v - b exp(g) k S. Its inverse and all else that does not depend
on S is computed for a few blocks at once; then S goes through them one after the other.

Mamba-2's rule is the same where nothing is subtracted from what a token writes: u_i = b_i v_i.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.device import device_kind
from penstock.kernels.elementwise import in_shares
from penstock.kernels.threads import num_threads
from penstock.plan.grids import ELEMENTS_PER_THREAD, MOST_STATE_BLOCKS, STATE_GRID

BLOCK = STATE_GRID
# A block of so few tokens is cheaper one token after the other.
STEP_TOKENS = 8
_NORM_EPS = 1e-6
# The inverse is made from diagonal blocks of this size upwards.
_CORNER = 16


def causal_conv(
    x: Tensor,
    tail: Tensor,
    weight: Tensor,
    out_tail: Tensor,
    bias: Tensor | None = None,
    *,
    is_activated: bool = True,
) -> Tensor:
    """silu of the convolution of each channel of x [n, channels] over time, or that alone, in the dtype of x.

    `tail` [taps - 1, channels], up to 64 rows, is what came before x; its successor goes to `out_tail`. `weight` is
    [taps, channels] in float32, with the tap of the token itself last, `bias` [channels]."""
    num_rows, num_before = x.shape[0], tail.shape[0]
    assert num_before <= BLOCK, "the taps of a convolution reach back one block at most"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    at_once = BLOCK * _blocks_at_once(x.shape[1])
    for start in range(0, num_rows, at_once):
        end = min(start + at_once, num_rows)
        size = end - start
        window = (x[start - num_before : end] if start else torch.cat((tail, x[:end]))).float()
        mixed = window[:size] * weight[0]
        for tap in range(1, num_before + 1):
            mixed.addcmul_(window[tap : tap + size], weight[tap])
        if bias is not None:
            mixed += bias
        out[start:end] = in_shares(torch.ops.aten.silu.out, mixed) if is_activated else mixed
    kept = x[num_rows - num_before :] if num_rows >= num_before else torch.cat((tail[num_rows:], x))
    out_tail.copy_(kept)
    return out


class RuleInputs(NamedTuple):
    """What a rule is told of each token of a span."""

    queries: Tensor  # [n, key_heads, key_dim]
    keys: Tensor  # [n, key_heads, key_dim]
    values: Tensor  # [n, heads, value_dim]
    log_decay: Tensor  # [n, heads] in float32
    beta: Tensor  # [n, heads] in float32

    def of(self, rows: slice) -> "RuleInputs":
        """The same of some tokens."""
        return RuleInputs(*[each[rows] for each in self])


def gated_delta_rule(inputs: RuleInputs, state: Tensor, out_state: Tensor) -> Tensor:
    """The gated delta rule over a span: outputs [n, heads, value_dim] in float32.

    Queries and keys are scaled to unit length here, queries by key_dim ** -0.5 too. `state` [heads, key_dim,
    value_dim], in float32, is that before the span; the one after it goes to `out_state`, which is another tensor.
    Spans cut at multiples of 64 tokens give the same bits."""
    return _in_blocks(inputs, state, out_state, is_delta=True)


def mamba_rule(inputs: RuleInputs, state: Tensor, out_state: Tensor) -> Tensor:
    """Mamba-2's rule over a span, as `gated_delta_rule`: queries and keys, C and B there, are taken as they are;
    beta is what values are multiplied by."""
    return _in_blocks(inputs, state, out_state, is_delta=False)


def _in_blocks(inputs: RuleInputs, state: Tensor, out_state: Tensor, *, is_delta: bool) -> Tensor:
    values = inputs.values
    num_tokens = values.shape[0]
    # One on a GPU, whose sums and products have another order where there are more of them.
    is_host = device_kind(values.device).is_host
    at_once = BLOCK * (_blocks_at_once(values.shape[1] * values.shape[2]) if is_host else 1)
    # Tokens after the last whole block are one more, filled up, unless they are few.
    in_blocks = num_tokens if num_tokens % BLOCK > STEP_TOKENS else num_tokens // BLOCK * BLOCK
    out = values.new_empty(values.shape, dtype=torch.float32)
    for start in range(0, in_blocks, at_once):
        rows = slice(start, min(start + at_once, in_blocks))
        blocks = _prepare(inputs.of(rows), is_delta=is_delta)
        outs = torch.empty_like(blocks.values)  # [blocks, H, B, V]
        for index in range(outs.shape[0]):
            _carry(blocks, index, state, out_state, outs[index])
            state = out_state
        out[rows] = outs.transpose(1, 2).flatten(0, 1)[: rows.stop - start]
    if in_blocks < num_tokens:
        rows, steps = slice(in_blocks, num_tokens), gated_delta_steps if is_delta else mamba_steps
        out[rows] = steps(inputs.of(rows), state, out_state)
    return out


def gated_delta_steps(inputs: RuleInputs, state: Tensor, out_state: Tensor) -> Tensor:
    """The same, one token after the other: the form for a single token."""
    queries, keys, values, log_decay, beta = inputs
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


def mamba_steps(inputs: RuleInputs, state: Tensor, out_state: Tensor) -> Tensor:
    """Mamba-2's rule, one token after the other."""
    queries, keys, values, log_decay, beta = inputs
    group = values.shape[1] // keys.shape[1]
    keys, queries = (part.float().repeat_interleave(group, dim=1) for part in (keys, queries))  # [n, H, K]
    written = values.float() * beta[..., None]
    decay = log_decay.exp()[..., None, None]
    out = torch.empty_like(written)
    for token in range(len(values)):
        torch.mul(state, decay[token], out=out_state)
        out_state.addcmul_(keys[token, :, :, None], written[token, :, None])
        torch.bmm(queries[token, :, None], out_state, out=out[token, :, None])
        state = out_state
    return out


@dataclass(frozen=True)
class _Blocks:
    """What is known of some blocks before the state that they begin with. All are [blocks, H, ...]."""

    pairs: Tensor  # [..., 2B, K]: keys, then queries
    values: Tensor  # [..., B, V]
    beta: Tensor  # [..., B, 1]
    decay: Tensor  # [..., B, 1]: from the block's start up to each token
    # [..., B, B]: of the system that gives what the tokens write; None: their own values.
    inverse: Tensor | None
    attention: Tensor  # [..., B, B]: what each token reads of what the tokens up to it write
    # [..., K, B]: where in the state it is written, as much as is left of it at the block's end.
    writers: Tensor


def _prepare(inputs: RuleInputs, *, is_delta: bool) -> _Blocks:
    queries, keys, values, log_decay, beta = inputs
    num_heads, num_key_heads = values.shape[1], keys.shape[1]
    group = num_heads // num_key_heads
    pairs = torch.cat((_by_block(keys), _by_block(queries)), dim=2)  # [N, KH, 2B, K]
    num_blocks, _, _, key_dim = pairs.shape
    if is_delta:
        pairs *= torch.rsqrt((pairs * pairs).sum(-1, keepdim=True) + _NORM_EPS)
        pairs[:, :, BLOCK:] *= key_dim**-0.5
    beta = _by_block(beta)[..., None]  # [N, H, B, 1]
    total = _by_block(log_decay).cumsum(-1)  # [N, H, B]

    # Decay from token j to token i, for j <= i; the differences above the diagonal could overflow.
    decays = (total[..., :, None] - total[..., None, :]).masked_fill_(
        _constants(total.device).above, -torch.inf
    )
    decays = _exp(decays).view(num_blocks, num_key_heads, group, BLOCK, BLOCK)
    dots = (pairs @ pairs[:, :, :BLOCK].transpose(2, 3)).unsqueeze(2)  # [N, KH, 1, 2B, B]
    shape = (num_blocks, num_heads, BLOCK, BLOCK)
    inverse = _inverse((dots[..., :BLOCK, :] * decays).view(shape).mul_(beta)) if is_delta else None
    attention = (dots[..., BLOCK:, :] * decays).view(shape)

    pairs = pairs.repeat_interleave(group, dim=1) if group > 1 else pairs  # [N, H, 2B, K]
    to_end = _exp(total[..., -1:] - total)[..., None]
    return _Blocks(
        pairs=pairs,
        values=_by_block(values),
        beta=beta,
        decay=_exp(total)[..., None],
        inverse=inverse,
        attention=attention,
        writers=(pairs[:, :, :BLOCK] * to_end).transpose(2, 3),
    )


def _carry(blocks: _Blocks, index: int, state: Tensor, out_state: Tensor, out: Tensor) -> None:
    """Take the state through one block: its outputs [H, B, V] go to `out`."""
    beta, decay = blocks.beta[index], blocks.decay[index]
    if blocks.inverse is None:
        held = torch.bmm(blocks.pairs[index, :, BLOCK:], state)  # [H, B, V]
        written = blocks.values[index] * beta
    else:
        held = torch.bmm(blocks.pairs[index], state)  # [H, 2B, V]
        target = torch.addcmul(blocks.values[index], held[:, :BLOCK], decay, value=-1).mul_(beta)
        held, written = held[:, BLOCK:], torch.bmm(blocks.inverse[index], target)
    torch.baddbmm(held * decay, blocks.attention[index], written, out=out)
    torch.baddbmm(state * decay[:, -1:], blocks.writers[index], written, out=out_state)


def _inverse(system: Tensor) -> Tensor:
    """(I + A)^-1 for A the part of `system` [N, H, B, B] below the diagonal.

    For a lower triangle of 2 x 2 blocks with inverses P and Q on the diagonal and L below, the inverse has -Q L P
    below. That doubles the size of what is inverted: within the corners by masked products of whole corners, beyond
    them block by block. Sums stay short, as in forward substitution; powers of A would overflow."""
    num_blocks, num_heads = system.shape[:2]
    matrices = system.flatten(0, 1)
    size = _CORNER
    constants = _constants(system.device)
    masks = constants.corner_masks
    corners = torch.stack(
        [matrices[:, at : at + size, at : at + size] for at in range(0, BLOCK, size)], dim=1
    ).flatten(0, 1)
    inverse = constants.corner_identity - corners * masks[0]
    for mask in masks[1:]:
        inverse = torch.baddbmm(inverse, inverse, torch.bmm(corners * mask, inverse), alpha=-1)
    while size < BLOCK:
        below = torch.stack(
            [matrices[:, at + size : at + 2 * size, at : at + size] for at in range(0, BLOCK, 2 * size)],
            dim=1,
        ).flatten(0, 1)
        halves = inverse.view(-1, 2, size, size)
        joined = halves.new_zeros(halves.shape[0], 2 * size, 2 * size)
        joined[:, :size, :size] = halves[:, 0]
        joined[:, size:, size:] = halves[:, 1]
        joined[:, size:, :size] = torch.bmm(torch.bmm(halves[:, 1], below), halves[:, 0]).neg_()
        inverse, size = joined, 2 * size
    return inverse.view(num_blocks, num_heads, BLOCK, BLOCK)


@dataclass(frozen=True)
class _Constants:
    above: Tensor  # [B, B], true above the diagonal
    corner_identity: Tensor
    corner_masks: list[Tensor]  # of each doubling within a corner: the lower left parts that it fills


@cache
def _constants(device: torch.device) -> _Constants:
    index = torch.arange(_CORNER, device=device)
    masks = []
    size = 1
    while size < _CORNER:
        part, half = index // (2 * size), index // size % 2
        is_below = (part[:, None] == part) & (half[:, None] == 1) & (half == 0)
        masks.append(is_below.float())
        size *= 2
    above = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=device).triu(1)
    return _Constants(above, torch.eye(_CORNER, device=device), masks)


def _blocks_at_once(width: int) -> int:
    """How many blocks of tokens of so many elements to work on together."""
    return max(1, min(ELEMENTS_PER_THREAD * num_threads() // width, MOST_STATE_BLOCKS))


def _by_block(x: Tensor) -> Tensor:
    """[tokens, heads, ...] as [blocks, heads, B, ...] in float32, with zeros after the last token."""
    num_tokens, num_heads = x.shape[:2]
    whole, rest = divmod(num_tokens, BLOCK)
    shape = (whole + (rest > 0), num_heads, BLOCK, *x.shape[2:])
    blocks = torch.empty(shape, dtype=torch.float32, device=x.device)
    blocks[:whole] = x[: whole * BLOCK].view(whole, BLOCK, *x.shape[1:]).transpose(1, 2)
    if rest:
        blocks[whole, :, :rest] = x[whole * BLOCK :].transpose(0, 1)
        blocks[whole, :, rest:] = 0
    return blocks


def _exp(x: Tensor) -> Tensor:
    """The exponential of x [..., B], in place, whose bits do not depend on how many blocks there are."""
    in_shares(torch.ops.aten.exp.out, x.view(-1, BLOCK), out=x.view(-1, BLOCK))
    return x
