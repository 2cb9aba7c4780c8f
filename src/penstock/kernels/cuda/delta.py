"""Gated delta nets on a GPU: decodes in one launch, prompts in a few.

Slots are read on the device, and no launch depends on what they are: a pass can be captured in a graph.
"""

import torch
import triton
from torch import Tensor

from penstock.cache.tensors import LayerStates
from penstock.kernels.cuda import fla
from penstock.kernels.cuda.work import DecodeStates, SpanStates, device_states
from penstock.kernels.reference.delta import RuleInputs
from penstock.kernels.spans import DeltaHeads, StateWork
from penstock.kernels.triton.delta import (
    decode_states_kernel,
    delta_steps_kernel,
    gated_norm_kernel,
    prepare_span_kernel,
    read_state_kernel,
    write_state_kernel,
)
from penstock.plan.grids import PIECE_TOKENS, STATE_GRID

# Columns of a head's state that one program carries from token to token.
_STEP_COLUMNS = 32
_COPY_BLOCK = 4096
_NORM_HEADS = 16


def carry_states(projected: Tensor, net: DeltaHeads, work: StateWork, states: LayerStates) -> Tensor:
    found = device_states(work, projected.device)
    out = projected.new_empty(projected.shape[0], net.sizes.value_size)
    for span in found.spans:
        rows = slice(span.start, span.end)
        _carry_span(projected[rows], net, span, states, out[rows])
    if found.decodes is not None:
        _carry_decodes(projected, net, found.decodes, states, out)
    if found.end < out.shape[0]:
        out[found.end :] = 0
    return out


def _carry_decodes(
    projected: Tensor, net: DeltaHeads, work: DecodeStates, states: LayerStates, out: Tensor
) -> None:
    decode_states_kernel[(len(work.rows), net.sizes.num_value_heads)](
        projected,
        work.rows,
        work.read,
        work.write,
        net.conv_weight,
        net.decay_rate,
        net.decay_bias,
        net.norm,
        states.tails,
        states.matrices,
        out,
        projected.stride(0),
        states.tails.stride(0),
        states.matrices.stride(0),
        net.sizes.key_head_dim**-0.5,
        net.norm_eps,
        **_heads(net),
        LANES=len(net.decay_rate),
        TAPS=len(net.conv_weight),
        KEY_BLOCK=triton.next_power_of_2(net.sizes.key_head_dim),
        VALUE_BLOCK=triton.next_power_of_2(net.sizes.value_head_dim),
        num_warps=8,
    )


def _carry_span(
    projected: Tensor, net: DeltaHeads, work: SpanStates, states: LayerStates, out: Tensor
) -> None:
    num_tokens = len(projected)
    in_blocks = fla.can_run(projected.dtype, net.sizes.key_head_dim)
    matrices = states.matrices
    state = torch.empty(matrices.shape[1:], dtype=matrices.dtype, device=matrices.device)
    grid = (triton.cdiv(state.numel(), _COPY_BLOCK),)
    read_state_kernel[grid](
        matrices, work.read, state, matrices.stride(0), state.numel(), BLOCK=_COPY_BLOCK, num_warps=8
    )
    for start in range(0, num_tokens, PIECE_TOKENS):
        end = min(start + PIECE_TOKENS, num_tokens)
        inputs = _prepare(projected, start, end, net, work, states, is_summed=in_blocks)
        rule = fla.gated_delta_blocks if in_blocks else _delta_steps
        attended, state = rule(inputs, state, net.sizes.key_head_dim**-0.5)
        gated_norm_kernel[(end - start, triton.cdiv(net.sizes.num_value_heads, _NORM_HEADS))](
            attended,
            projected[start:, net.sizes.conv_size :],
            net.norm,
            out[start:],
            projected.stride(0),
            net.norm_eps,
            NUM_HEADS=net.sizes.num_value_heads,
            DIM=net.sizes.value_head_dim,
            HEADS=_NORM_HEADS,
            BLOCK=triton.next_power_of_2(net.sizes.value_head_dim),
            num_warps=4,
        )
    write_state_kernel[grid](
        state, matrices, work.write, matrices.stride(0), state.numel(), BLOCK=_COPY_BLOCK, num_warps=8
    )


def _prepare(
    projected: Tensor,
    start: int,
    end: int,
    net: DeltaHeads,
    work: SpanStates,
    states: LayerStates,
    *,
    is_summed: bool,
) -> RuleInputs:
    """Of a span's tokens [start, end). Log decays are summed up as the blocks' kernels take them, or not."""
    num_tokens, sizes = end - start, net.sizes
    queries, keys = projected.new_empty(2, num_tokens, sizes.num_key_heads, sizes.key_head_dim)
    values = projected.new_empty(num_tokens, sizes.num_value_heads, sizes.value_head_dim)
    log_decay, beta = torch.empty(
        2, num_tokens, sizes.num_value_heads, dtype=torch.float32, device=projected.device
    )
    inputs = RuleInputs(queries, keys, values, log_decay, beta)
    num_parts = 2 * sizes.num_key_heads + sizes.num_value_heads + 1
    prepare_span_kernel[(triton.cdiv(num_tokens, STATE_GRID), num_parts)](
        projected,
        *inputs,
        net.conv_weight,
        net.decay_rate,
        net.decay_bias,
        states.tails,
        work.read,
        work.write,
        projected.stride(0),
        states.tails.stride(0),
        start,
        end,
        len(projected),
        **_heads(net),
        LANES=len(net.decay_rate),
        TAPS=len(net.conv_weight),
        IS_SUMMED=is_summed,
        ROWS=STATE_GRID,
        HEAD_BLOCK=triton.next_power_of_2(max(net.sizes.key_head_dim, net.sizes.value_head_dim)),
        LANE_BLOCK=triton.next_power_of_2(net.sizes.num_value_heads),
        num_warps=4,
    )
    return inputs


def _delta_steps(inputs: RuleInputs, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One token after the other, in float32: slow, and with the same bits wherever a span is cut."""
    num_tokens, num_heads, value_dim = inputs.values.shape
    num_key_heads, key_dim = inputs.keys.shape[1:]
    out = torch.empty(inputs.values.shape, dtype=torch.float32, device=state.device)
    next_state = torch.empty_like(state)
    delta_steps_kernel[(num_heads, triton.cdiv(value_dim, _STEP_COLUMNS))](
        *inputs,
        state,
        next_state,
        out,
        num_tokens,
        scale,
        KEY_HEADS=num_key_heads,
        VALUE_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_BLOCK=triton.next_power_of_2(key_dim),
        VALUE_BLOCK=_STEP_COLUMNS,
        num_warps=4,
    )
    return out, next_state


def _heads(net: DeltaHeads) -> dict[str, int]:
    return {
        "KEY_HEADS": net.sizes.num_key_heads,
        "VALUE_HEADS": net.sizes.num_value_heads,
        "KEY_DIM": net.sizes.key_head_dim,
        "VALUE_DIM": net.sizes.value_head_dim,
    }
