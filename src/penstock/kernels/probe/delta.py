"""The law that hybrids' bits rest on: a delta net gives the same outputs and the same state, whether it reads its
tokens in one span or in several that end on multiples of 64."""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.cache.recurrent import RecurrentCache, RecurrentSpec
from penstock.cache.states import EMPTY
from penstock.kernels.elementwise import whole_lanes
from penstock.kernels.interface import DeltaHeads, Kernels
from penstock.kernels.spans import StateRows, StateWork
from penstock.plan.grids import STATE_GRID
from penstock.plan.model import DeltaNetShape

# More blocks than any implementation takes at once, and a part of one.
_NUM_TOKENS = 9 * STATE_GRID + 13
_SCHEDULES = (
    (STATE_GRID, _NUM_TOKENS),
    (8 * STATE_GRID, _NUM_TOKENS),
    (4 * STATE_GRID, 5 * STATE_GRID, _NUM_TOKENS),
    (*range(STATE_GRID, _NUM_TOKENS, STATE_GRID), _NUM_TOKENS),
)


def recurrence_holds(kernels: Kernels, shape: DeltaNetShape, normal: Callable[..., Tensor]) -> bool:
    """`normal` makes random tensors of a shape, in the dtype that is probed."""
    lanes = whole_lanes(shape.num_value_heads)
    conv_size = 2 * shape.num_key_heads * shape.key_head_dim + shape.value_size
    projected = normal(_NUM_TOKENS, conv_size + shape.value_size + 2 * lanes)
    net = DeltaHeads(
        num_key_heads=shape.num_key_heads,
        num_value_heads=shape.num_value_heads,
        key_head_dim=shape.key_head_dim,
        value_head_dim=shape.value_head_dim,
        norm_eps=1e-6,
        conv_weight=normal(shape.conv_kernel, conv_size).float(),
        decay_rate=-normal(lanes).float().exp(),
        decay_bias=normal(lanes).float(),
        norm=normal(shape.value_head_dim).float(),
    )
    spec = RecurrentSpec(
        1,
        shape.conv_kernel - 1,
        conv_size,
        shape.num_value_heads,
        shape.key_head_dim,
        shape.value_head_dim,
        projected.dtype,
    )

    def run(ends: tuple[int, ...]) -> list[Tensor]:
        """Outputs, then the tail and the matrix after the last token. States go to and fro between two slots."""
        states = RecurrentCache(spec, 2, projected.device).layer(0)
        outs, start, slot = [], 0, EMPTY
        for index, end in enumerate(ends):
            rows = StateRows(0, end - start, slot, index % 2, is_prompt=True)
            outs.append(kernels.carry_states(projected[start:end], net, StateWork((rows,)), states))
            start, slot = end, rows.write
        return [torch.cat(outs), states.tail(slot), states.matrix(slot)]

    whole = run((_NUM_TOKENS,))
    return all(
        all(torch.equal(ours, theirs) for ours, theirs in zip(run(ends), whole, strict=True))
        for ends in _SCHEDULES
    )
