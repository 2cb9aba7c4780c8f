"""A gated delta net: a causal convolution, then a delta rule, both with a state that is carried from span to span."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.cache.tensors import CacheTensors
from penstock.kernels.protocol import Kernels
from penstock.kernels.quantised import Weight
from penstock.kernels.spans import AttentionWork
from penstock.layers.batch import ForwardBatch, StateRows
from penstock.layers.joined import FusedWeight, project


@dataclass(frozen=True)
class DeltaNet:
    """One layer. All its inputs are one product, whose columns lie as

    queries | keys | values | gates of the output | beta, in whole lanes | decay, in whole lanes
    """

    index: int  # among the model's delta-net layers
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    norm_eps: float
    in_weight: FusedWeight  # [2 * key_size + 2 * value_size + 2 * lanes, hidden]
    conv_weight: Tensor  # [taps, 2 * key_size + value_size], float32
    decay_rate: Tensor  # [lanes], float32, negative
    decay_bias: Tensor  # [lanes], float32
    norm: Tensor  # [value_head_dim], float32
    out_weight: Weight  # [hidden, value_size]

    def take_in(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        caches: CacheTensors,
        kernels: Kernels,
    ) -> tuple[Tensor, ...]:
        """Carry the states over x [rows, hidden]. Returns the gated, normed outputs [rows, value_size]."""
        projected = project(x, self.in_weight, None, batch, kernels)
        conv_size = self.conv_weight.shape[1]
        value_size = self.num_value_heads * self.value_head_dim
        lanes = self.decay_rate.shape[0]
        qkv, gate, beta, decay = torch.split(projected, [conv_size, value_size, lanes, lanes], dim=-1)
        log_decay, beta = kernels.delta_gates(decay, beta, self.decay_rate, self.decay_bias)
        gates = log_decay[:, : self.num_value_heads], beta[:, : self.num_value_heads]
        out = x.new_zeros(x.shape[0], value_size) if batch.num_tokens < x.shape[0] else torch.empty_like(gate)
        for rows in batch.states:
            span = slice(rows.start, rows.end)
            attended = self._carry(
                qkv[span], gates[0][span], gates[1][span], rows, caches, kernels
            )  # [n, heads, value_head_dim]
            out[span] = kernels.gated_norm(attended, gate[span], self.norm, self.norm_eps)
        return (out,)

    def give_out(
        self,
        rows: tuple[Tensor, ...],
        work: AttentionWork,
        batch: ForwardBatch,
        caches: CacheTensors,
        kernels: Kernels,
    ) -> Tensor:
        """What `take_in` gave, or some rows of it, to the block's output [rows, hidden]."""
        return kernels.linear(rows[0], self.out_weight, is_canonical=batch.is_canonical)

    def _carry(
        self,
        qkv: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        rows: StateRows,
        caches: CacheTensors,
        kernels: Kernels,
    ) -> Tensor:
        states, index = caches.states, self.index
        mixed = kernels.causal_conv(
            qkv, states.tail(index, rows.read), self.conv_weight, states.tail_out(index, rows.write)
        )
        key_size = self.num_key_heads * self.key_head_dim
        queries, keys, values = torch.split(
            mixed, [key_size, key_size, mixed.shape[1] - 2 * key_size], dim=-1
        )
        num_rows = rows.end - rows.start
        rule = kernels.gated_delta_rule if rows.is_prompt else kernels.gated_delta_steps
        return rule(
            queries.view(num_rows, self.num_key_heads, -1),
            keys.view(num_rows, self.num_key_heads, -1),
            values.view(num_rows, self.num_value_heads, -1),
            log_decay,
            beta,
            states.matrix(index, rows.read),
            states.matrix_out(index, rows.write),
        )
