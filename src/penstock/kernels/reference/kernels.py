"""What a device must be able to compute, in plain torch: the reference, and the interface of all other kernels.

Plain tensors in, plain tensors out; of a cache, kernels see a layer's keys, values and states. What is promised about
bits is measured by `penstock.kernels.probe`.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.cache.tensors import KV, LayerStates
from penstock.kernels.elementwise import ElementWise, in_shares
from penstock.kernels.experts import GroupedExperts, Router
from penstock.kernels.quantised import DenseLayer, QuantisedWeight, Weight
from penstock.kernels.reference import attention, delta
from penstock.kernels.spans import (
    AttendedSpan,
    AttentionWork,
    DeltaHeads,
    HeadLayout,
    MambaHeads,
    Scoring,
    ShortConv,
    StateNet,
    StateRows,
    StateWork,
    Work,
    WrittenPlaces,
    part_of,
)
from penstock.plan.grids import HEAD_ROWS, NORM_ROWS, QUERY_GRID, TILE, RowLaw
from penstock.plan.step import KernelKind
from penstock.plan.weight_settings import ActivationsName

if TYPE_CHECKING:  # a subclass has them
    from penstock.kernels.cuda.quantised import GpuProducts
    from penstock.kernels.native.layers import NativeLayers
    from penstock.kernels.native.quantised import NativeProducts

# The number of rows that packed weights are laid out for.
_PACKED_FOR_ROWS = 512


class TorchKernels:
    """Kernels for any device, made for the CPU. Those of a device override what they have faster."""

    name = "torch"
    libraries = ""  # beside torch, whose versions bits depend on
    # The set of them that the kernels are compiled for, where there are several.
    instructions: str | None = None
    activations: ActivationsName = "plain"  # as they go into products with weights in blocks
    slower: str | None = None  # why the device's faster ones do not run, and what would help
    law: RowLaw  # the shapes on which a row keeps its bits: as far as is known before a probe, then as it found
    # The output head runs on so many rows at a time, where their number must not matter.
    head_rows = HEAD_ROWS
    few_rows = 0  # up to so many, a product's order of sums does not depend on how many there are
    feed_rows = 0  # feed-forward blocks run on no more rows than this at a time; 0: on all
    activation_stride = 1  # rows of an activation are so many times as far apart as they are long
    expert_places = 0  # rows of all experts that are run at a time, at least; 0: those of all rows
    can_capture = False  # whether passes can be kept as graphs of a device's own
    keeps_expert_blocks = False  # whether `quantised_experts` has those whose weights are blocks
    # What makes weights of blocks, where `linear` takes them.
    quantised: "NativeProducts | GpuProducts | None" = None
    attend_tile = staticmethod(attention.attend_tile)
    attend_one = staticmethod(attention.attend_one)
    causal_conv = staticmethod(delta.causal_conv)
    gated_delta_rule = staticmethod(delta.gated_delta_rule)
    gated_delta_steps = staticmethod(delta.gated_delta_steps)
    mamba_rule = staticmethod(delta.mamba_rule)
    mamba_steps = staticmethod(delta.mamba_steps)

    def __init__(self, tile_size: int = TILE, row_slab: int = 0) -> None:
        self.law = RowLaw(tile_size, row_slab=row_slab)

    def memory_kind(self, dtype: torch.dtype, head_dim: int) -> KernelKind:
        """What a step's memory is estimated as, with heads of such a size."""
        return "torch"

    def prepare(self, work: Work, device: torch.device) -> Work:
        """The work of a pass with what the device needs of it, for all layers at once. What was not prepared is taken
        as well: every call then prepares it for itself."""
        return work

    def pack(self, weight: Tensor) -> Weight:
        """A weight [out, in] in the form that `linear` takes it in, of the same size."""
        # oneDNN's own layout, which it would otherwise make anew in every product: a single row takes half the
        # time, and fewer rows are enough for row-invariance than with the default float32 library.
        if not weight.is_cpu or not _can_pack(weight.dtype):
            return weight
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        return packed

    def round_rows(self) -> bool:
        """Round activations to 8 bits, by group, for products with weights in blocks that are made from now on. False
        where there are no such products."""
        return False

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, *, is_canonical: bool = True
    ) -> Tensor:
        """x [rows, in] times a packed weight [out, in], plus bias [out]. What is not canonical may be computed in the
        way that is fastest for a few rows, whose bits may differ."""
        if isinstance(weight, QuantisedWeight):
            raise TypeError("these kernels have no products with quantised weights")
        row_slab = self.law.row_slab
        if 0 < row_slab < x.shape[0]:
            return torch.cat([self._product(slab, weight, bias) for slab in torch.split(x, row_slab)])
        return self._product(x, weight, bias)

    def unpacked_bytes(self, weight: Weight) -> int:
        """What a product of many rows takes for the weight's values, beside rows and outputs."""
        return 0

    def linear_parts(
        self,
        x: Tensor,
        parts: Sequence[Weight],
        biases: Sequence[Tensor | None],
        *,
        is_canonical: bool = True,
    ) -> Tensor:
        """`linear` with several weights, side by side: each has the outputs after those of the one before."""
        if len(parts) == 1:
            return self.linear(x, parts[0], biases[0], is_canonical=is_canonical)
        out = x.new_empty(len(x), sum(part.shape[0] for part in parts))
        start = 0
        for part, bias in zip(parts, biases, strict=True):
            end = start + part.shape[0]
            self.linear_into(out[:, start:end], x, part, bias, is_canonical=is_canonical)
            start = end
        return out

    def linear_into(
        self, out: Tensor, x: Tensor, weight: Weight, bias: Tensor | None, *, is_canonical: bool
    ) -> None:
        """The same into `out` [rows, out], which may be a part of wider rows."""
        out.copy_(self.linear(x, weight, bias, is_canonical=is_canonical))

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not weight.is_mkldnn:
            return torch.nn.functional.linear(x, weight, bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out

    def dense_layers(self, layers: Sequence[DenseLayer]) -> "NativeLayers | None":
        """Such layers as one call, which gives the bits of products that are not canonical; None where there is none
        for them."""
        return None

    def stacks_experts(self, dtype: torch.dtype, activation: ElementWise | None = None) -> bool:
        """Whether `stacked_experts` has a layer's experts as one."""
        return False

    def stacked_experts(
        self,
        router: Router,
        gate_up: Weight,
        down: Weight,
        activation: ElementWise | None = None,
    ) -> GroupedExperts:
        """Experts with weights gate_up [experts, 2 * width, hidden] and down [experts, hidden, width], or of blocks
        [experts * 2 * width, hidden] and [experts * hidden, width]; without an activation, silu's."""
        raise TypeError("these kernels run experts one by one")

    def quantised_experts(
        self, router: Router, gate_up: Sequence[QuantisedWeight], down: Sequence[QuantisedWeight]
    ) -> GroupedExperts:
        """Experts with quantised weights, and silu for an activation."""
        raise TypeError("these kernels have no products with quantised weights")

    def embed(self, token_ids: Tensor, embedding: Weight) -> Tensor:
        """Rows [n, hidden] of an embedding [vocab, hidden], which is not packed unless it is quantised."""
        if isinstance(embedding, QuantisedWeight):
            raise TypeError("these kernels cannot read quantised weights")
        return embedding[token_ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension, computed in float32. A float32 weight is applied before
        rounding to the dtype of x, any other after it."""
        if x.dtype == torch.float32:
            return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
        if not x.is_cpu:
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

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """The norm of x [rows, size] without its mean, computed in float32."""
        if weight.dtype != x.dtype:
            return self.layer_norm(x.float(), weight, bias, eps).to(x.dtype)
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor,
        weight: Tensor,
        eps: float,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x + delta, both [rows, size], and the norm of that; `into` says where they go, if not to new tensors. It
        may name x and delta."""
        total = x + delta
        normed = self.rms_norm(total, weight, eps)
        return (total, normed) if into is None else (into[0].copy_(total), into[1].copy_(normed))

    def place_heads(
        self, projected: Tensor, heads: HeadLayout, cos: Tensor, sin: Tensor, kv: KV, places: WrittenPlaces
    ) -> Tensor:
        """Queries [rows, heads, head_dim] out of projected [rows, queries | keys | values | ...], normed where the
        heads have norms and rotated; keys, treated alike, and values of the first rows go to their places in `kv`,
        a layer's whole cache.

        cos and sin are [rows, rotary_dim], sin with its sign. What of a head lies beyond rotary_dim is not
        rotated."""
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
        """silu(gate) * up, for gate_up [rows, 2 * width] with the gate in the first half. It may be written over."""
        gate, up = gate_up.chunk(2, dim=-1)
        return in_shares(torch.ops.aten.silu.out, gate).mul_(up)

    def activate(self, inner: Tensor, function: ElementWise, *, is_gated: bool) -> Tensor:
        """function(gate) * up, for inner [rows, 2 * width] with the gate in the first half; of one without a gate,
        function(inner). It may be written over."""
        if not is_gated:
            return self.elementwise(function, inner)
        gate, up = inner.chunk(2, dim=-1)
        return self.elementwise(function, gate).mul_(up)

    def elementwise(self, function: ElementWise, x: Tensor) -> Tensor:
        """A function of x [rows, width], which may be written over."""
        return in_shares(function, x)

    def sigmoid(self, x: Tensor) -> Tensor:
        """The logistic function of x [rows, width]."""
        return in_shares(torch.ops.aten.sigmoid.out, x)

    def carry_states(self, projected: Tensor, net: StateNet, work: StateWork, states: LayerStates) -> Tensor:
        """A recurrent layer from its inputs to what its output projection takes [rows, value_size], with zeros where
        rows carry no state. Spans cut at multiples of 64 tokens give the same bits.

        Columns of `projected` are

        queries | keys | values | gates of the output | beta | decay     of a gated delta net
        values | keys | queries | gates of the output | step             of a Mamba-2 layer
        gates of the input | gates of the output | input                 of a short convolution

        with beta, decay and step in as many columns as `net` has lanes. Queries, keys and values first go through a
        causal convolution of each channel and silu; a delta net's queries and keys are then scaled to unit length,
        queries by key_head_dim ** -0.5 too."""
        sizes = net.sizes
        shape = (projected.shape[0], sizes.value_size)
        out = projected.new_zeros(shape) if work.end < shape[0] else projected.new_empty(shape)
        if isinstance(net, ShortConv):
            entry, gate, x = projected.chunk(3, dim=-1)
            for rows in work.rows:
                span = slice(rows.start, rows.end)
                tail, out_tail = states.tail(rows.read), states.tail_out(rows.write)
                mixed = self.causal_conv(
                    entry[span] * x[span], tail, net.conv_weight, out_tail, net.conv_bias, is_activated=False
                )
                torch.mul(gate[span], mixed, out=out[span])
            return out
        lanes = len(net.decay_rate)
        widths = [net.sizes.conv_size, sizes.value_size, *[lanes] * sizes.num_gates]
        convolved, gate, *gates = torch.split(projected, widths, dim=-1)
        if isinstance(net, DeltaHeads):
            log_decay, beta = self.delta_gates(gates[1], gates[0], net.decay_rate, net.decay_bias)
        else:
            log_decay, beta = self.mamba_gates(gates[0], net)
        of_heads = log_decay[:, : net.sizes.num_value_heads], beta[:, : net.sizes.num_value_heads]
        for rows in work.rows:
            span = slice(rows.start, rows.end)
            attended = self._carry(convolved[span], of_heads[0][span], of_heads[1][span], rows, net, states)
            out[span] = self.gated_norm(
                attended, gate[span], net.norm, net.norm_eps, gates_first=net.sizes.gates_first
            )
        return out

    def _carry(
        self,
        convolved: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        rows: StateRows,
        net: DeltaHeads | MambaHeads,
        states: LayerStates,
    ) -> Tensor:
        """One state through its rows: [n, heads, value_dim] in float32."""
        sizes, num_rows = net.sizes, rows.end - rows.start
        key, value = sizes.key_size, sizes.value_size
        inputs = convolved, states.tail(rows.read), net.conv_weight, states.tail_out(rows.write)
        if isinstance(net, DeltaHeads):
            queries, keys, values = torch.split(self.causal_conv(*inputs), [key, key, value], dim=-1)
            rule = self.gated_delta_rule if rows.is_prompt else self.gated_delta_steps
        else:
            mixed = self.causal_conv(*inputs, net.conv_bias)
            values, keys, queries = torch.split(mixed, [value, key, key], dim=-1)
            rule = self.mamba_rule if rows.is_prompt else self.mamba_steps
        values = values.view(num_rows, sizes.num_value_heads, -1)
        queries, keys = (each.view(num_rows, sizes.num_key_heads, -1) for each in (queries, keys))
        attended = rule(
            delta.RuleInputs(queries, keys, values, log_decay, beta),
            states.matrix(rows.read),
            states.matrix_out(rows.write),
        )
        return attended if isinstance(net, DeltaHeads) else attended.addcmul_(values, net.skip[:, None])

    def delta_gates(self, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithm of the decay, rate * softplus(a + bias), and beta, sigmoid(b), in float32.

        a and b are [n, lanes], rate and bias [lanes] in float32."""
        log_decay = in_shares(torch.ops.aten.softplus.out, a.float() + bias).mul_(rate)
        return log_decay, self.sigmoid(b.float())

    def mamba_gates(self, x: Tensor, net: MambaHeads) -> tuple[Tensor, Tensor]:
        """The logarithm of the decay, rate * step, and the step, softplus(x + bias) within its limits, in float32.

        x is [n, lanes]."""
        step = in_shares(torch.ops.aten.softplus.out, x.float() + net.decay_bias)
        step.clamp_(net.sizes.least_step, net.sizes.most_step)
        return step * net.decay_rate, step

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *, gates_first: bool = False
    ) -> Tensor:
        """The norm of each head of x [n, heads, dim], float32, times silu of gate [n, heads * dim]; in the dtype of
        the gate, and of its shape. The weight [dim] is float32; one of [groups, size] norms so many equal parts of
        all heads instead. `gates_first`: the norm is of the product. Without a weight there is no norm."""
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for start in range(0, x.shape[0], NORM_ROWS):
            rows = slice(start, start + NORM_ROWS)
            activated = in_shares(torch.ops.aten.silu.out, gate[rows].float())
            parts = x[rows]
            if gates_first or weight is None:
                parts = activated.mul_(parts.flatten(1)).view_as(parts)
            if weight is not None and weight.dim() > 1:
                parts = parts.reshape(-1, *weight.shape)
                parts = torch.nn.functional.rms_norm(parts, weight.shape[1:], eps=eps).mul_(weight)
            elif weight is not None:
                parts = torch.nn.functional.rms_norm(parts, weight.shape, weight, eps)
            flat = parts.flatten(1)
            out[rows] = flat if gates_first or weight is None else activated.mul_(flat)
        return out

    def per_head(self, x: Tensor, weight: Tensor, *, is_canonical: bool) -> Tensor:
        """x [rows, heads, in] times each head's weight [heads, in, out]: [rows, heads, out]. Where a row's bits must
        not depend on the others, products have one number of rows, whatever x has."""
        slab = QUERY_GRID if is_canonical else max(len(x), 1)
        out = x.new_empty((*x.shape[:2], weight.shape[2]))
        for start in range(0, len(x), slab):
            rows = x[start : start + slab]
            padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, slab - len(rows)))
            product = torch.bmm(padded.transpose(0, 1).contiguous(), weight)  # [heads, slab, out]
            out[start : start + slab] = product.transpose(0, 1)[: len(rows)]
        return out

    def preparations(self, num_rows: int, num_heads: int, kv: KV, scale: float) -> Iterator[None]:
        """What the first attention of so many rows to each length of a past waits for, done in advance: a piece at
        each step. `kv` is a layer's whole cache, as long as the longest past; nothing is written to it."""
        return iter(())

    def attend(self, queries: Tensor, work: AttentionWork, kv: KV, scoring: Scoring) -> Tensor:
        """Attention of queries [rows, heads, head_dim] to the tokens that each sees, in `kv`, a layer's whole cache.
        Returns [rows, heads * value_dim], with zeros where rows see nothing."""
        is_plain = attention.is_plain(scoring, kv)
        if is_plain and len(work.spans) == 1 == len(queries) and not work.spans[0].is_prompt:
            return self._attend_decode(queries[0], work.spans[0], 0, kv, scoring.scale).reshape(1, -1)
        attended = queries.new_empty((*queries.shape[:2], kv.values.shape[2]))
        for span in work.spans:
            if not is_plain:
                attention.attend_by_blocks(queries, span, kv, scoring, out=attended)
                continue
            if span.is_prompt:
                self._attend_prompt(queries, span, kv, scoring.scale, out=attended)
                continue
            for row in range(span.start, span.end):
                attended[row] = self._attend_decode(queries[row], span, row - span.start, kv, scoring.scale)
        attended[work.end :] = 0
        return attended.flatten(1)

    def _attend_prompt(
        self, queries: Tensor, span: AttendedSpan, kv: KV, scale: float, *, out: Tensor
    ) -> None:
        for piece in span.tiles(span.tile_size):
            tile, rows = piece.tile_start, piece.rows
            past = kv.read(part_of(span.places, 0, tile)) if tile else None
            own = kv.read_padded(part_of(span.places, tile, piece.end), span.tile_size or piece.end - tile)
            out[rows] = self.attend_tile(queries[rows], piece.start - tile, past, own, scale)

    def _attend_decode(self, query: Tensor, span: AttendedSpan, index: int, kv: KV, scale: float) -> Tensor:
        places = part_of(span.places, 0, span.position + index + 1)
        pieces = [places] if span.is_joined else [[place] for place in places]
        return self.attend_one(query, [kv.read(piece) for piece in pieces], scale)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
