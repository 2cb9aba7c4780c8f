"""A decoder of a file's tensors: one at a time, each straight into its place, in the layout that the layers want."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.kernels.elementwise import ACTIVATIONS, ElementWise, xielu
from penstock.kernels.experts import GroupedExperts, Router
from penstock.kernels.interface import Kernels
from penstock.kernels.quantised import (
    F8_ROW,
    GROUP,
    PACKED,
    Q4_1,
    Q8_0,
    BlockForm,
    QuantisedWeight,
    Weight,
    quantise,
)
from penstock.kernels.spans import DeltaHeads, HeadLayout, MambaHeads, Scoring, ShortConv, StateNet
from penstock.layers.attention import Attention
from penstock.layers.latent import LatentAttention
from penstock.layers.linear import Linear
from penstock.layers.mlp import MLP, ApartNorms, ExpertMLP, NoBlock
from penstock.layers.norm import Norm
from penstock.layers.recurrent import Recurrent, SideBySide
from penstock.models.decoder import Decoder, DecoderLayer, Mixer
from penstock.models.source import WeightSource
from penstock.models.weights import (
    ApartWeights,
    AttentionWeights,
    ExpertsWeights,
    LatentWeights,
    LayerWeights,
    MixerWeights,
    MLPWeights,
    NormWeights,
    Product,
    RecurrentWeights,
    Rows,
    SideBySideWeights,
    Stored,
    weight_table,
)
from penstock.plan.grids import whole_lanes
from penstock.plan.model import DeltaNetConfig, ShortConvConfig
from penstock.plan.weight_settings import (
    WeightsName,
)

# Values that are quantised at a time.
_QUANTISED_AT_ONCE = 1 << 20
# What matrices are quantised to at loading, by what a user calls it.
QUANTISED_FORMS: Mapping[str, BlockForm] = {"fp8": F8_ROW, "int8": Q8_0, "int4": Q4_1}


def vocabulary_form(form: BlockForm) -> BlockForm:
    """Of the embedding and the head, where other matrices become blocks of this form. They have 8 bits: there is a
    row for each token, and no other makes up for its errors."""
    return F8_ROW if form is F8_ROW else Q8_0


@dataclass(frozen=True)
class _Run:
    """Outputs [start, end) of a matrix, with the tensors that some of them come from, all stored in one form, or none
    of them in blocks."""

    start: int
    end: int
    form: BlockForm | None
    parts: tuple[Rows, ...]


def _runs_of(form_of: Callable[[str], BlockForm | None], parts: Sequence[Rows], height: int) -> list[_Run]:
    """The longest runs that make up a matrix of so many outputs. Outputs that no tensor has, which are zero, go with
    those before them."""
    forms = list(dict.fromkeys(form_of(part.name) for part in parts))
    if len(forms) == 1:
        return [_Run(0, height, forms[0], tuple(parts))]
    owners: dict[BlockForm | None, list[Rows]] = {form: [] for form in forms}
    stored = torch.full((height,), -1)  # by output, the index of its form
    for part in parts:
        form = form_of(part.name)
        stored[part.outputs()] = forms.index(form)
        owners[form].append(part)
    known = torch.where(stored < 0, 0, torch.arange(height)).cummax(0).values
    kinds, lengths = torch.unique_consecutive(stored[known].clamp_min(0), return_counts=True)
    ends = lengths.cumsum(0).tolist()
    return [
        _Run(start, end, forms[kind], tuple(owners[forms[kind]]))
        for start, end, kind in zip([0, *ends[:-1]], ends, kinds.tolist(), strict=True)
    ]


class Assembler:
    def __init__(
        self,
        source: WeightSource,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightsName,
        layers: range,
    ) -> None:
        self._source = source
        self._config = source.config
        self._table = weight_table(source.config, source.names())
        self._layers = layers
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        self._products = kernels.quantised if dtype == torch.bfloat16 else None
        self._keeps_blocks = weights == "auto"
        self._form = QUANTISED_FORMS.get(weights)

    def decoder(self) -> Decoder:
        table, layers = self._table, self._layers
        is_last = layers.stop == len(table.layers)
        embedding = self._vocabulary(table.embedding) if layers.start == 0 else None
        mixers: Counter[int] = Counter()  # of each K/V group, and of recurrent layers, the next one's index
        loaded = []
        for layer in table.layers[layers.start : layers.stop]:
            kind = layer.mixer.group if isinstance(layer.mixer, AttentionWeights) else -1
            loaded.append(self._layer(layer, mixers[kind]))
            mixers[kind] += layer.mixer is not None
        head: Weight | None = None
        if is_last and table.head is None:
            head = self._vocabulary(table.embedding) if embedding is None else embedding
        elif is_last and table.head is not None:
            head = self._vocabulary(table.head)
        return Decoder(
            self._config,
            self._kernels,
            loaded,
            self._norm(table.norm if is_last else table.layers[layers.stop].mixer_norm),
            embedding,
            self._kernels.pack(head) if isinstance(head, Tensor) else head,
            self._dtype,
            self._device,
            layers.start,
        )

    def _vocabulary(self, stored: Stored) -> Weight:
        """The embedding or the head, not packed."""
        height, width = stored.shape
        if kept := self._kept([Rows(stored.name, height)], height, width):
            return kept[0]
        if self._form is None or width % GROUP:
            return self._tensor(stored)
        values = self._assembled([Rows(stored.name, height)], torch.float32, height, width)
        return self._quantised([values], vocabulary_form(self._form), height, width)

    # Layers

    def _layer(self, layer: LayerWeights, mixer_index: int) -> DecoderLayer:
        """`mixer_index` counts layers with the same kind of mixer, and of the same K/V group."""
        return DecoderLayer(
            mixer_norm=self._norm(layer.mixer_norm),
            mixer=self._mixer(layer.mixer, mixer_index),
            mlp_norm=self._norm(layer.mlp_norm),
            mlp=self._second(layer.mlp),
            mixer_exit=self._norm(layer.mixer_exit),
            mlp_exit=self._norm(layer.mlp_exit),
            scale=float(self._tensor(layer.scale, torch.float32)) if layer.scale else 1.0,
        )

    def _second(self, weights: MLPWeights | ExpertsWeights | None) -> MLP | ExpertMLP | NoBlock:
        if weights is None:
            return NoBlock()
        return self._experts(weights) if isinstance(weights, ExpertsWeights) else self._mlp(weights)

    def _mixer(self, weights: MixerWeights | None, index: int) -> Mixer:
        if weights is None:
            return NoBlock()
        if isinstance(weights, SideBySideWeights):
            recurrent = self._recurrent(weights.recurrent, index)
            return SideBySide(self._attention(weights.attention, index), recurrent)
        if isinstance(weights, LatentWeights):
            return self._latent(weights, index)
        if isinstance(weights, RecurrentWeights):
            return self._recurrent(weights, index)
        return self._attention(weights, index)

    def _latent(self, weights: LatentWeights, index: int) -> LatentAttention:
        config, sizes = self._config, self._config.latent
        assert sizes is not None
        if isinstance(weights.of_latent, Stored):
            of_latent = self._tensor(weights.of_latent).view(config.num_heads, -1, sizes.rank)
            of_keys, of_values = torch.split(of_latent, [sizes.key_dim, sizes.value_dim], dim=1)
        else:
            of_keys, of_values = map(self._tensor, weights.of_latent)
            of_keys = of_keys.transpose(1, 2)
        return LatentAttention(
            index=index,
            num_heads=config.num_heads,
            sizes=sizes,
            inputs=self._linear(weights.inputs),
            queries=self._linear(weights.queries) if weights.queries else None,
            query_norm=self._norm_weight(weights.query_norm) if weights.query_norm else None,
            latent_norm=self._norm_weight(weights.latent_norm),
            of_keys=of_keys.contiguous(),
            of_values=of_values.transpose(1, 2).contiguous(),
            out=self._linear(weights.out),
            scoring=Scoring(config.attention_scale or (sizes.key_dim + sizes.rotary_dim) ** -0.5),
            query_scale=self._query_scale,
        )

    @property
    def _query_scale(self) -> int:
        """Behind the rotary tables, where there is one."""
        return bool(self._config.rotary.query_growth) * (1 + bool(self._config.other_rotary))

    def _attention(self, weights: AttentionWeights, index: int) -> Attention:
        config, norms, size = self._config, None, weights.head_dim
        if weights.query_norm is not None and weights.key_norm is not None:
            norms = self._norm_weight(weights.query_norm), self._norm_weight(weights.key_norm)
        is_own = config.norm_all_heads or config.norm_after_rotary
        query_norm, key_norm = (None, None) if norms is None or is_own else norms
        return Attention(
            index=index,
            heads=HeadLayout(
                config.num_heads, weights.num_kv_heads, size, query_norm, key_norm, config.norm_eps
            ),
            qkv=self._linear(weights.qkv),
            out=self._linear(weights.out),
            scoring=Scoring(
                config.attention_scale or 1.0 / math.sqrt(size),
                config.window.size if config.window and weights.group else 0,
                config.attention_softcap or 0.0,
                self._tensor(weights.sinks, torch.float32) if weights.sinks else None,
            ),
            group=weights.group,
            is_gated=config.gated_attention,
            rotary=weights.rotary,
            query_scale=self._query_scale,
            norms=norms if is_own else None,
            is_normed_late=config.norm_after_rotary,
            value_norm=torch.ones(size, dtype=self._dtype, device=self._device)
            if config.value_norm
            else None,
        )

    def _recurrent(self, weights: RecurrentWeights, index: int) -> Recurrent:
        return Recurrent(
            index, self._state_net(weights), self._linear(weights.inputs), self._linear(weights.out)
        )

    def _state_net(self, weights: RecurrentWeights) -> StateNet:
        def tensor(stored: Stored | None) -> Tensor | None:
            return None if stored is None else self._tensor(stored, torch.float32)

        net, eps = self._config.recurrent, self._config.norm_eps
        taps = self._tensor(weights.conv, torch.float32)[:, 0].t().contiguous()
        bias, norm = tensor(weights.conv_bias), tensor(weights.norm)
        assert net is not None
        if isinstance(net, ShortConvConfig):
            return ShortConv(net, taps, bias)
        heads = net.num_value_heads
        decay_rate, decay_bias = torch.zeros(2, whole_lanes(heads), device=self._device)
        assert weights.decay_log is not None
        assert weights.decay_bias is not None
        decay_rate[:heads] = -self._tensor(weights.decay_log, torch.float32).exp()
        decay_bias[:heads] = self._tensor(weights.decay_bias, torch.float32)
        if isinstance(net, DeltaNetConfig):
            assert norm is not None
            return DeltaHeads(net, eps, taps, decay_rate, decay_bias, norm)
        assert weights.skip is not None
        skip = self._tensor(weights.skip, torch.float32)
        norm = None if norm is None else norm.view(net.norm_groups, -1)
        return MambaHeads(net, eps, taps, bias, decay_rate, decay_bias, skip, norm)

    def _mlp(self, weights: MLPWeights, clamp: float = 0.0) -> MLP:
        return MLP(
            self._linear(weights.gate_up),
            self._linear(weights.down),
            self._activation(weights.activation),
            self._config.gated_mlp,
            clamp,
        )

    def _activation(self, parameters: tuple[Stored, ...] = ()) -> ElementWise | None:
        """None: silu, of a gate."""
        config = self._config
        if parameters:
            stored = (self._tensor(each, torch.float32).flatten() for each in parameters)
            alpha_p, alpha_n, beta, eps = torch.cat(list(stored)).tolist()
            return xielu(_softplus(alpha_p), beta + _softplus(alpha_n), beta, eps)
        function = ACTIVATIONS[config.activation]
        return None if config.gated_mlp and function is ACTIVATIONS["silu"] else function

    def _experts(self, weights: ExpertsWeights) -> ExpertMLP:
        experts = self._config.experts
        assert experts is not None
        count, hidden = weights.router.shape
        # The shared expert's gate is a score more.
        height = count + (whole_lanes(1) if weights.shared_gate else 0)
        router = torch.zeros(height, hidden, dtype=self._dtype, device=self._device)
        self._source.load_into(weights.router.name, router[:count])
        if weights.shared_gate:
            self._source.load_into(weights.shared_gate.name, router[count : count + 1])
        bias, apart = weights.choice_bias, weights.apart
        rule = Router(
            experts,
            self._tensor(bias, torch.float32) if bias else None,
            self._tensor(apart.expert_scales, torch.float32) if apart else None,
        )
        return ExpertMLP(
            router=rule,
            scoring=Linear(
                (self._kernels.pack(router),),
                self._tensor(weights.router_bias) if weights.router_bias else None,
            ),
            experts=self._expert_blocks(weights, rule),
            shared=self._mlp(weights.shared) if weights.shared else None,
            norms=self._apart(apart) if apart else None,
        )

    def _apart(self, weights: ApartWeights) -> ApartNorms:
        eps = self._config.norm_eps
        norms = {name: Norm(eps, self._tensor(getattr(weights, name))) for name in weights._fields[:5]}
        router = norms["router"].weight
        assert router is not None
        router.mul_(len(router) ** -0.5)
        return ApartNorms(**norms)

    def _expert_blocks(self, weights: ExpertsWeights, router: Router) -> tuple[MLP, ...] | GroupedExperts:
        config, function = router.config, self._activation()
        # Those with biases may have clamped gates, too.
        if self._stacks_experts(weights, function) and not config.bias and self._config.gated_mlp:
            inner, outer = self._expert_stacks(weights)
            return self._kernels.stacked_experts(router, inner, outer, function)
        if weights.stacked is None:
            experts = tuple(self._mlp(expert, config.clamp) for expert in weights.experts)
        else:
            stacks = [
                [Linear((self._pack(each),)) for each in stack] for stack in self._stored_stacks(weights)
            ]
            experts = tuple(MLP(first, second, function) for first, second in zip(*stacks, strict=True))
        quantised = [_quantised_parts(expert) for expert in experts if expert.activation is None]
        gate_up, down = ([pair[at] for pair in quantised if pair is not None] for at in range(2))
        if len(down) < len(experts) or not self._kernels.keeps_expert_blocks:
            return experts
        return self._kernels.quantised_experts(router, gate_up, down)

    def _stacks_experts(self, weights: ExpertsWeights, function: ElementWise | None) -> bool:
        """Not where they are blocks, or become some, and may stay so."""
        if not self._kernels.stacks_experts(self._dtype, function):
            return False
        if self._products is None or not self._kernels.keeps_expert_blocks:
            return True
        names = (part.name for expert in weights.experts for part in expert.down.rows("weight"))
        has_blocks = self._keeps_blocks and any(map(self._source.block_form, names))
        return self._form is None and not has_blocks

    def _expert_stacks(self, weights: ExpertsWeights) -> list[Weight]:
        """[experts, 2 * width, hidden] and [experts, hidden, width]; of blocks, one expert's outputs after the
        other's."""
        if weights.stacked is not None:
            return [self._packed_stack(stack) for stack in self._stored_stacks(weights)]
        experts = weights.experts
        return [self._stack([each.gate_up for each in experts]), self._stack([each.down for each in experts])]

    def _stored_stacks(self, weights: ExpertsWeights) -> tuple[Tensor, Tensor]:
        """Where a file has them as such: of whole vectors, with zeros to fill them."""
        assert weights.stacked is not None
        stored, (count, hidden, inner) = weights.stacked, weights.stacked[1].shape
        gate_up, missing = self._tensor(stored[0]), whole_lanes(inner) - inner
        if missing:
            gate_up = pad(gate_up.view(count, 2, inner, hidden), (0, 0, 0, missing)).flatten(1, 2)
        down = torch.zeros(count, hidden, whole_lanes(inner), dtype=self._dtype, device=self._device)
        self._source.load_into(stored[1].name, down[:, :, :inner])
        return gate_up, down

    def _stack(self, products: Sequence[Product]) -> Weight:
        """The weights of products of one shape; in their blocks, where all have the same."""
        height, width = products[0].num_out, products[0].num_in
        count = len(products)
        parts = [
            part._replace(start=part.start + index * height)
            for index, product in enumerate(products)
            for part in product.rows("weight")
        ]
        if self._products is not None and self._keeps_blocks and width % GROUP == 0:
            form, *others = dict.fromkeys(self._form_of(part.name) for part in parts)
            if form is not None and not others:
                return self._run(_Run(0, count * height, form, tuple(parts)), count * height, width)
        if self._form is None or width % GROUP:
            stack = torch.zeros(count * height, width, dtype=self._dtype, device=self._device)
            return self._fill(stack, parts).view(count, height, width)
        experts = (
            self._assembled(product.rows("weight"), torch.float32, height, width) for product in products
        )
        return self._quantised(experts, self._form, count * height, width)

    def _packed_stack(self, stack: Tensor) -> Weight:
        if self._form is None or stack.shape[2] % GROUP:
            return stack
        return self._quantised(stack, self._form, stack.shape[0] * stack.shape[1], stack.shape[2])

    # Tensors

    def _tensor(self, stored: Stored, dtype: torch.dtype | None = None) -> Tensor:
        out = torch.empty(stored.shape, dtype=dtype or self._dtype, device=self._device)
        self._source.load_into(stored.name, out)
        return out

    def _norm(self, weights: NormWeights) -> Norm:
        config = self._config
        if weights.weight is None:
            return Norm()
        weight = self._norm_weight(weights.weight)
        bias = self._tensor(weights.bias, weight.dtype) if weights.bias else None
        return Norm(config.norm_eps, weight, bias, config.layer_norm)

    def _norm_weight(self, stored: Stored) -> Tensor:
        """A norm's weight. A zero-centred one is close to 1 once 1 is added, and would lose what matters of it in a
        shorter dtype."""
        if self._config.zero_centred_norm:
            return self._tensor(stored, torch.float32).add_(1)
        return self._tensor(stored)

    def _linear(self, product: Product) -> Linear:
        bias = None
        if product.has_bias:
            bias = self._assembled(product.rows("bias"), self._dtype, product.num_out)
        return Linear(self._weights(product.rows("weight"), product.num_out, product.num_in), bias)

    def _weights(self, parts: Sequence[Rows], height: int, width: int) -> tuple[Weight, ...]:
        """Tensors as one weight [height, width] for products; as several of successive outputs where the file's forms
        differ and are kept."""
        if kept := self._kept(parts, height, width):
            return kept
        dtype = self._dtype if self._form is None else torch.float32
        return (self._pack(self._assembled(parts, dtype, height, width)),)

    def _form_of(self, name: str) -> BlockForm | None:
        """That a tensor is kept in."""
        form = self._source.block_form(name)
        assert self._products is not None
        return form if form is not None and self._products.takes(form, self._device) else None

    def _kept(self, parts: Sequence[Rows], height: int, width: int) -> tuple[Weight, ...]:
        """The same in the blocks that the file has them in, where those are to be kept; none without blocks."""
        if self._products is None or not self._keeps_blocks or width % GROUP:
            return ()
        runs = _runs_of(self._form_of, parts, height)
        if all(run.form is None for run in runs):
            return ()
        return tuple(self._run(run, height, width) for run in runs)

    def _run(self, run: _Run, height: int, width: int) -> Weight:
        if run.form is None:
            whole = self._assembled(run.parts, self._dtype, height, width)
            return self._kernels.pack(whole[run.start : run.end].clone())
        assert self._products is not None
        weight = self._products.zeros(run.form, run.end - run.start, width, self._device)
        for part in run.parts:
            outputs = part.outputs() - run.start
            if not bool(_is_within(outputs, weight).any()):
                continue
            for blocks in self._source.blocks(part.name):
                here, outputs = outputs[: len(blocks)], outputs[len(blocks) :]
                own = _is_within(here, weight)
                self._products.place(weight, *((here, blocks) if own.all() else (here[own], blocks[own])))
        return weight

    def _pack(self, values: Tensor) -> Weight:
        if self._form is None or values.shape[1] % GROUP:
            return self._kernels.pack(values.to(self._dtype))
        return self._quantised([values], self._form, *values.shape)

    def _quantised(
        self, parts: Iterable[Tensor], form: BlockForm, height: int, width: int
    ) -> QuantisedWeight:
        """A weight of values [rows, width], some after the other."""
        assert self._products is not None
        weight = self._products.zeros(form, height, width, self._device)
        start = 0
        for values in parts:
            for some in torch.split(values, max(1, _QUANTISED_AT_ONCE // width)):
                outputs = torch.arange(start, start + len(some))
                self._products.place(weight, outputs, quantise(some, form))
                start += len(some)
        return weight

    def _assembled(self, parts: Sequence[Rows], dtype: torch.dtype, *shape: int) -> Tensor:
        """Tensors as one, each at its place; zeros around them."""
        return self._fill(torch.zeros(shape, dtype=dtype, device=self._device), parts)

    def _fill(self, out: Tensor, parts: Sequence[Rows]) -> Tensor:
        for part in parts:
            stored = self._source.shape(part.name)
            if part.heads is None:
                rows = out[part.start : part.start + stored[0]]
                self._source.load_into(part.name, rows[:, : stored[1]] if len(stored) > 1 else rows)
            else:
                values = torch.empty(stored, dtype=out.dtype, device=self._device)
                self._source.load_into(part.name, values)
                out[part.outputs()] = values
        return out


def _quantised_parts(block: MLP) -> tuple[QuantisedWeight, QuantisedWeight] | None:
    """Both weights, where each is of one form of blocks."""
    match block.gate_up.parts, block.down.parts:
        case (QuantisedWeight() as gate_up,), (QuantisedWeight() as down,) if gate_up.form is not PACKED:
            return gate_up, down
    return None


def _softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def _is_within(outputs: Tensor, weight: QuantisedWeight) -> Tensor:
    return (outputs >= 0) & (outputs < weight.shape[0])
