"""The law that hybrids' bits rest on: a delta net gives the same outputs and the same state, whether it reads its
tokens in one span or in several that end on multiples of 64."""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels.protocol import Kernels
from penstock.kernels.shares import whole_lanes
from penstock.plan.shape import DeltaNetShape

# More blocks than any implementation takes at once, and a part of one.
_NUM_TOKENS = 9 * 64 + 13
_SCHEDULES = (
    (64, _NUM_TOKENS),
    (512, _NUM_TOKENS),
    (256, 320, _NUM_TOKENS),
    (*range(64, 577, 64), _NUM_TOKENS),
)


def recurrence_holds(kernels: Kernels, shape: DeltaNetShape, normal: Callable[..., Tensor]) -> bool:
    """`normal` makes random tensors of a shape, in the dtype that is probed."""
    key_size = shape.num_key_heads * shape.key_head_dim
    sizes = [key_size, key_size, shape.value_size]
    lanes = whole_lanes(shape.num_value_heads)
    qkv, gate = normal(_NUM_TOKENS, sum(sizes)), normal(_NUM_TOKENS, shape.value_size)
    a, b = normal(_NUM_TOKENS, lanes), normal(_NUM_TOKENS, lanes)
    taps = normal(shape.conv_kernel, sum(sizes)).float()
    rate, bias, weight = (
        -normal(lanes).float().exp(),
        normal(lanes).float(),
        normal(shape.value_head_dim).float(),
    )
    heads = slice(0, shape.num_value_heads)

    def run(ends: tuple[int, ...]) -> list[Tensor]:
        tail = qkv.new_zeros(shape.conv_kernel - 1, sum(sizes))
        state = torch.zeros(
            shape.num_value_heads, shape.key_head_dim, shape.value_head_dim, device=qkv.device
        )
        outs, start = [], 0
        for end in ends:
            rows = slice(start, end)
            next_tail, next_state = torch.empty_like(tail), torch.empty_like(state)
            mixed = kernels.causal_conv(qkv[rows], tail, taps, next_tail)
            queries, keys, values = torch.split(mixed, sizes, dim=-1)
            log_decay, beta = kernels.delta_gates(a[rows], b[rows], rate, bias)
            attended = kernels.gated_delta_rule(
                queries.view(end - start, shape.num_key_heads, -1),
                keys.view(end - start, shape.num_key_heads, -1),
                values.view(end - start, shape.num_value_heads, -1),
                log_decay[:, heads],
                beta[:, heads],
                state,
                next_state,
            )
            outs += [mixed, attended.flatten(1), kernels.gated_norm(attended, gate[rows], weight, 1e-6)]
            tail, state, start = next_tail, next_state, end
        return [torch.cat(outs[kind::3]) for kind in range(3)] + [tail, state]

    whole = run((_NUM_TOKENS,))
    return all(
        all(torch.equal(ours, theirs) for ours, theirs in zip(run(ends), whole, strict=True))
        for ends in _SCHEDULES
    )
