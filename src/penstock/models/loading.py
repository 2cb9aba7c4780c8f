"""A decoder from a file: one tensor at a time, each straight into its place, in the layout that the layers want."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.errors import SettingError
from penstock.kernels.device import device_kind
from penstock.kernels.elementwise import whole_lanes
from penstock.kernels.interface import DeltaHeads, Kernels
from penstock.kernels.quantised import GROUP, Q4_1, Q8_0, BlockForm, QuantisedWeight, Weight, quantise
from penstock.layers.attention import Attention
from penstock.layers.delta_net import DeltaNet
from penstock.layers.linear import Linear
from penstock.layers.mlp import ExpertMLP, GatedMLP
from penstock.machine import has_fast_bfloat16, memory_bytes, processor_flags
from penstock.models.decoder import Decoder, DecoderLayer
from penstock.models.expected import check_source
from penstock.models.fused import Part, Run, interleaved, runs_of
from penstock.models.source import WeightSource
from penstock.plan.memory import weight_bytes
from penstock.plan.model import DeltaNetConfig, ExpertsConfig
from penstock.plan.settings import (
    QUANTISED_WEIGHTS,
    WeightsName,
    WeightsSetting,
    settle_weights,
    settle_without_blocks,
)

# Values that are quantised at a time.
_QUANTISED_AT_ONCE = 1 << 20


def load_decoder(
    source: WeightSource,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    weights: WeightsName = "auto",
    layers: range | None = None,
) -> Decoder:
    """Build a model, or a stage of these `layers` alone, from a file. Matrices stay in the blocks that the file has
    them in where the kernels can compute with those (`auto`), become blocks (`int8`, `int4`), or are of `dtype`."""
    check_source(source)
    kind = device_kind(device)
    if weights in QUANTISED_WEIGHTS and not kind.takes_quantised:
        raise SettingError(
            "weights",
            weights,
            "auto, bf16 or f32",
            where=f"on {kind.name}",
            because="only a CPU computes with quantised weights",
        )
    if weights in QUANTISED_WEIGHTS and (kernels.quantised is None or dtype != torch.bfloat16):
        raise SettingError(
            "weights",
            weights,
            "bf16 or f32",
            where="here",
            because="quantised weights need the native kernels, a processor with AVX-512 and bfloat16, and dtype "
            "bfloat16",
        )
    every = range(source.config.num_layers)
    if layers is not None and not (
        layers and layers.step == 1 and layers[0] in every and layers[-1] in every
    ):
        raise SettingError("layers", layers, f"a range of at least one layer, of 0 to {every.stop}")
    return _Loader(source, kernels, dtype, device, weights, every if layers is None else layers).decoder()


def settled_weights(
    source: WeightSource,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    setting: WeightsSetting,
) -> WeightsSetting:
    """What `auto` comes to for these weights on this machine, and why."""
    is_quantised = any(source.block_form(name) is not None for name in source.names())
    if is_quantised and not device_kind(device).takes_quantised:
        return settle_without_blocks(setting, str(dtype).removeprefix("torch."))
    if kernels.quantised is None or dtype != torch.bfloat16 or not is_quantised:
        return setting
    return settle_weights(
        setting,
        fast_bfloat16=has_fast_bfloat16(processor_flags()),
        bfloat16_bytes=weight_bytes(source.config, dtype.itemsize),
        memory_bytes=memory_bytes(),
    )


class _Loader:
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
        self._names = source.names()
        self._config = source.config
        self._layers = layers
        self._part = source.config.of_layers(layers.start, layers.stop)
        self._attention_layers = self._part.attention_layers
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        self._products = kernels.quantised if dtype == torch.bfloat16 else None
        self._keeps_blocks = weights == "auto"
        self._form = {"int8": Q8_0, "int4": Q4_1}.get(weights)

    def decoder(self) -> Decoder:
        config, layers = self._config, self._layers
        is_first, is_last = layers.start == 0, layers.stop == config.num_layers
        embedding = "model.embed_tokens.weight"
        begin = self._vocabulary(embedding) if is_first else None
        loaded = [self._layer(index) for index in range(len(layers))]
        end: Weight | None = None
        if is_last and config.tied_head:
            end = self._vocabulary(embedding) if begin is None else begin
        elif is_last:
            end = self._vocabulary("lm_head.weight")
        return Decoder(
            config,
            self._kernels,
            loaded,
            self._norm(
                "model.norm.weight" if is_last else f"model.layers.{layers.stop}.input_layernorm.weight"
            ),
            begin,
            self._kernels.pack(end) if isinstance(end, Tensor) else end,
            self._dtype,
            layers.start,
        )

    def _vocabulary(self, name: str) -> Weight:
        """The embedding or the head, not packed. Where other matrices become blocks of 4 bits, these have 8: there is
        a row for each token, and no other makes up for its errors."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        if kept := self._kept([Part(name)], *shape):
            return kept[0]
        if self._form is None or shape[1] % GROUP:
            return self._tensor(name, *shape)
        return self._quantised(self._assembled([Part(name)], torch.float32, *shape), Q8_0)

    def _layer(self, index: int) -> DecoderLayer:
        """The layer `index` of this range."""
        config, prefix = self._part, f"model.layers.{self._layers[index]}"
        net, experts = config.delta_net, config.experts
        return DecoderLayer(
            mixer_norm=self._norm(f"{prefix}.input_layernorm.weight"),
            mixer=self._delta_net(f"{prefix}.linear_attn", net, net.layers.index(index))
            if net and index in net.layers
            else self._attention(f"{prefix}.self_attn", self._attention_layers.index(index)),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm.weight"),
            mlp=self._experts(f"{prefix}.mlp", experts)
            if experts and index in experts.layers
            else self._mlp(f"{prefix}.mlp", config.intermediate_size, config.mlp_bias),
        )

    # Attention

    def _attention(self, prefix: str, index: int) -> Attention:
        config = self._config
        query = config.num_heads * config.head_dim
        return Attention(
            index=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            qkv=self._fused(
                self._qkv(prefix, "weight"),
                self._qkv(prefix, "bias") if config.qkv_bias else [],
                self._qkv_size,
                config.hidden_size,
            ),
            out=self._linear(f"{prefix}.o_proj", config.hidden_size, query, config.out_bias),
            query_norm=self._norm(f"{prefix}.q_norm.weight", config.head_dim) if config.head_norm else None,
            key_norm=self._norm(f"{prefix}.k_norm.weight", config.head_dim) if config.head_norm else None,
            is_gated=config.gated_attention,
        )

    @property
    def _qkv_size(self) -> int:
        config = self._config
        num_heads = config.num_heads * (2 if config.gated_attention else 1) + 2 * config.num_kv_heads
        return num_heads * config.head_dim

    def _qkv(self, prefix: str, kind: str) -> list[Part]:
        config = self._config
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names = [f"{prefix}.{part}_proj.{kind}" for part in "qkv"]
        queries = Part(names[0])
        if config.gated_attention:
            # Files have each head's gate after its query; here all gates come last.
            places = interleaved(config.num_heads, [config.head_dim] * 2, [0, query + 2 * key])
            queries = Part(names[0], places=places)
        return [queries, Part(names[1], query), Part(names[2], query + key)]

    # Delta net

    def _delta_net(self, prefix: str, net: DeltaNetConfig, index: int) -> DeltaNet:
        heads = net.num_value_heads
        lanes = whole_lanes(heads)
        conv = self._float32(f"{prefix}.conv1d.weight", net.conv_size, 1, net.conv_kernel)
        rate, bias = torch.zeros(2, lanes, device=self._device)
        rate[:heads] = -self._float32(f"{prefix}.A_log", heads).exp()
        bias[:heads] = self._float32(f"{prefix}.dt_bias", heads)
        return DeltaNet(
            index=index,
            heads=DeltaHeads(
                num_key_heads=net.num_key_heads,
                num_value_heads=heads,
                key_head_dim=net.key_head_dim,
                value_head_dim=net.value_head_dim,
                norm_eps=self._config.norm_eps,
                conv_weight=conv[:, 0].t().contiguous(),
                decay_rate=rate,
                decay_bias=bias,
                norm=self._float32(f"{prefix}.norm.weight", net.value_head_dim),
            ),
            inputs=self._fused(
                self._delta_inputs(prefix, net, lanes),
                [],
                net.conv_size + net.value_size + 2 * lanes,
                self._config.hidden_size,
            ),
            out=self._linear(f"{prefix}.out_proj", self._config.hidden_size, net.value_size, False),
        )

    def _delta_inputs(self, prefix: str, net: DeltaNetConfig, lanes: int) -> list[Part]:
        """All input projections as one. Some files have them in two, key head by key head."""
        heads, gates = net.num_value_heads, net.conv_size + net.value_size
        if (joined := f"{prefix}.in_proj_qkvz.weight") in self._names:
            value = net.value_size // net.num_key_heads
            sizes = [net.key_head_dim, net.key_head_dim, value, value]
            starts = [0, net.key_size, 2 * net.key_size, net.conv_size]
            parts = [Part(joined, places=interleaved(net.num_key_heads, sizes, starts))]
        else:
            parts = [
                Part(f"{prefix}.in_proj_qkv.weight"),
                Part(f"{prefix}.in_proj_z.weight", net.conv_size),
            ]
        if (joined := f"{prefix}.in_proj_ba.weight") in self._names:
            sizes = [heads // net.num_key_heads] * 2
            places = interleaved(net.num_key_heads, sizes, [gates, gates + lanes])
            return [*parts, Part(joined, places=places)]
        return [
            *parts,
            Part(f"{prefix}.in_proj_b.weight", gates),
            Part(f"{prefix}.in_proj_a.weight", gates + lanes),
        ]

    # Feed-forward blocks

    def _mlp(self, prefix: str, inner: int, has_bias: bool) -> GatedMLP:
        hidden, width = self._config.hidden_size, whole_lanes(inner)

        def gate_up(kind: str) -> list[Part]:
            return [Part(f"{prefix}.gate_proj.{kind}"), Part(f"{prefix}.up_proj.{kind}", width)]

        return GatedMLP(
            gate_up=self._fused(gate_up("weight"), gate_up("bias") if has_bias else [], 2 * width, hidden),
            down=self._linear(f"{prefix}.down_proj", hidden, width, has_bias),
        )

    def _experts(self, prefix: str, experts: ExpertsConfig) -> ExpertMLP:
        hidden, count, shared = (
            self._config.hidden_size,
            experts.num_experts,
            experts.shared_intermediate_size,
        )
        height = count + (whole_lanes(1) if shared else 0)
        router = torch.zeros(height, hidden, dtype=self._dtype, device=self._device)
        self._source.load_into(f"{prefix}.gate.weight", router[:count])
        if shared:
            self._source.load_into(f"{prefix}.shared_expert_gate.weight", router[count : count + 1])
        if f"{prefix}.experts.gate_up_proj" in self._names:
            blocks = self._joined_experts(f"{prefix}.experts", experts)
        else:
            blocks = [
                self._mlp(f"{prefix}.experts.{expert}", experts.intermediate_size, False)
                for expert in range(count)
            ]
        return ExpertMLP(
            router=Linear((self._kernels.pack(router),)),
            experts=tuple(blocks),
            shared=self._mlp(f"{prefix}.shared_expert", shared, False) if shared else None,
            num_active=experts.num_active,
            is_normalised=experts.normalised,
        )

    def _joined_experts(self, prefix: str, experts: ExpertsConfig) -> list[GatedMLP]:
        """Experts that are stored as two tensors for all of them."""
        hidden, count, inner = self._config.hidden_size, experts.num_experts, experts.intermediate_size
        width = whole_lanes(inner)
        gate_up = self._tensor(f"{prefix}.gate_up_proj", count, 2 * inner, hidden)
        if width > inner:
            gate_up = pad(gate_up.view(count, 2, inner, hidden), (0, 0, 0, width - inner)).flatten(1, 2)
        gate_ups = [Linear((self._pack(gate_up[expert]),)) for expert in range(count)]
        del gate_up
        down = torch.zeros(count, hidden, width, dtype=self._dtype, device=self._device)
        self._source.load_into(f"{prefix}.down_proj", down[:, :, :inner])
        return [GatedMLP(gate_ups[expert], Linear((self._pack(down[expert]),))) for expert in range(count)]

    # Tensors

    def _tensor(self, name: str, *shape: int) -> Tensor:
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._source.load_into(name, out)
        return out

    def _linear(self, name: str, height: int, width: int, has_bias: bool) -> Linear:
        """One tensor of the file, and its bias."""
        bias = [Part(f"{name}.bias")] if has_bias else []
        return self._fused([Part(f"{name}.weight")], bias, height, width)

    def _fused(self, weights: list[Part], biases: list[Part], height: int, width: int) -> Linear:
        """Tensors as one weight [height, width], and as one bias."""
        bias = self._assembled(biases, self._dtype, height) if biases else None
        return Linear(self._weights(weights, height, width), bias)

    def _weights(self, parts: list[Part], height: int, width: int) -> tuple[Weight, ...]:
        """Tensors as one weight [height, width] for products; as several of successive outputs where the file's forms
        differ and are kept."""
        if kept := self._kept(parts, height, width):
            return kept
        dtype = self._dtype if self._form is None else torch.float32
        return (self._pack(self._assembled(parts, dtype, height, width)),)

    def _kept(self, parts: list[Part], height: int, width: int) -> tuple[Weight, ...]:
        """The same in the blocks that the file has them in, where those are to be kept; none without blocks."""
        if self._products is None or not self._keeps_blocks or width % GROUP:
            return ()
        runs = runs_of(self._source, parts, height)
        if all(run.form is None for run in runs):
            return ()
        return tuple(self._run(run, height, width) for run in runs)

    def _run(self, run: Run, height: int, width: int) -> Weight:
        if run.form is None:
            whole = self._assembled(list(run.parts), self._dtype, height, width)
            return self._kernels.pack(whole[run.start : run.end].clone())
        assert self._products is not None
        weight = self._products.zeros(run.form, run.end - run.start, width)
        for part in run.parts:
            outputs = part.outputs(self._source) - run.start
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
        return self._quantised(values, self._form)

    def _quantised(self, values: Tensor, form: BlockForm) -> QuantisedWeight:
        assert self._products is not None
        height, width = values.shape
        weight = self._products.zeros(form, height, width)
        for rows in torch.split(torch.arange(height), max(1, _QUANTISED_AT_ONCE // width)):
            self._products.place(weight, rows, quantise(values[rows], form))
        return weight

    def _assembled(self, parts: list[Part], dtype: torch.dtype, *shape: int) -> Tensor:
        """Tensors as one, each at its place; zeros around them."""
        out = torch.zeros(shape, dtype=dtype, device=self._device)
        for part in parts:
            stored = self._source.shape(part.name)
            if part.places is None:
                rows = out[part.start : part.start + stored[0]]
                self._source.load_into(part.name, rows[:, : stored[1]] if len(stored) > 1 else rows)
            else:
                values = torch.empty(stored, dtype=dtype, device=self._device)
                self._source.load_into(part.name, values)
                out[part.places] = values
        return out

    def _float32(self, name: str, *shape: int) -> Tensor:
        out = torch.empty(shape, dtype=torch.float32, device=self._device)
        self._source.load_into(name, out)
        return out

    def _norm(self, name: str, size: int = 0) -> Tensor:
        """A norm's weight. A zero-centred one is close to 1 once 1 is added, and would lose what matters of it in a
        shorter dtype."""
        size = size or self._config.hidden_size
        if self._config.zero_centred_norm:
            return self._float32(name, size).add_(1)
        return self._tensor(name, size)


def _is_within(outputs: Tensor, weight: QuantisedWeight) -> Tensor:
    return (outputs >= 0) & (outputs < weight.shape[0])
