"""The one table of a model's weights, by which files are checked and loaded.

Names and layouts are those of Hugging Face's Llama and Qwen, whatever the file; others give their own as these. A
family that differs from Llama by settings that `ModelConfig` has needs no line here: it is a row of `FAMILIES` in
`hf/config.py`, and one of `ARCHITECTURES` in `gguf/config.py`. One with other tensors changes the table, and a layer
that takes them.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from penstock.plan.grids import whole_lanes
from penstock.plan.model import (
    DeltaNetConfig,
    ExpertsConfig,
    LatentConfig,
    MambaConfig,
    ModelConfig,
    RecurrentConfig,
    input_size,
)

Shape = tuple[int, ...]

# Of the activation xielu: the logarithms that its slopes come from, then constants.
XIELU_PARAMETERS: dict[str, Shape] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


class Stored(NamedTuple):
    """A tensor of a file."""

    name: str
    shape: Shape


class HeadRows(NamedTuple):
    """Rows that a file has head by head, for each head `sizes` rows of several parts: the parts begin at `starts`."""

    num_heads: int
    sizes: tuple[int, ...]
    starts: tuple[int, ...]


class PairedRows(NamedTuple):
    """Heads of `size` rows, of which `rotated`, from `first` on, have the two elements of each rotated pair side by
    side; all first elements are to lie before all second ones."""

    num_heads: int
    size: int
    rotated: int
    first: int = 0

    def outputs(self) -> torch.Tensor:
        own = torch.arange(self.size)
        part = slice(self.first, self.first + self.rotated)
        own[part] = own[part].view(2, -1).t().flatten()
        return (own + torch.arange(self.num_heads)[:, None] * self.size).flatten()


class Rows(NamedTuple):
    """A tensor of a file as rows of a fused weight: from `start` on, in their order or in that of pairs, or head by
    head."""

    name: str
    num_rows: int
    start: int = 0
    heads: HeadRows | PairedRows | None = None

    def outputs(self) -> torch.Tensor:
        """Where its rows go [num_rows]."""
        if isinstance(self.heads, PairedRows):
            paired = self.heads.outputs()  # those of queries and keys; values after them stay
            return self.start + torch.cat((paired, torch.arange(len(paired), self.num_rows)))
        if self.heads is None:
            return torch.arange(self.start, self.start + self.num_rows)
        num_heads = self.heads.num_heads
        parts = [
            start + torch.arange(num_heads * size).view(num_heads, size)
            for size, start in zip(self.heads.sizes, self.heads.starts, strict=True)
        ]
        return self.start + torch.cat(parts, dim=1).flatten()


@dataclass(frozen=True)
class Product:
    """A weight [num_out, num_in], fused of tensors [rows, stored_in], and a bias; zeros around them."""

    parts: tuple[Rows, ...]  # named without .weight and .bias
    num_out: int
    num_in: int
    stored_in: int
    has_bias: bool = False

    def rows(self, kind: str) -> list[Rows]:
        """Of the weight, or of the bias."""
        return [part._replace(name=f"{part.name}.{kind}") for part in self.parts]

    def stored(self) -> Iterator[Stored]:
        for part in self.parts:
            yield Stored(f"{part.name}.weight", (part.num_rows, self.stored_in))
            if self.has_bias:
                yield Stored(f"{part.name}.bias", (part.num_rows,))


class NormWeights(NamedTuple):
    weight: Stored | None  # None: there is no norm
    bias: Stored | None = None


class AttentionWeights(NamedTuple):
    qkv: Product  # queries, keys, values, and gates of the output where there are any
    out: Product
    query_norm: Stored | None
    key_norm: Stored | None
    sinks: Stored | None  # of each head
    rotary: int  # among the model's; no tensor
    group: int  # of the K/V groups; no tensor, as the next two
    num_kv_heads: int
    head_dim: int


class LatentWeights(NamedTuple):
    inputs: Product  # queries or their latent, the latent, the rotated part of the key
    queries: Product | None
    query_norm: Stored | None
    latent_norm: Stored
    # Of each head what makes its key, then what makes its value; or both apart, the first transposed.
    of_latent: Stored | tuple[Stored, Stored]
    out: Product


class RecurrentWeights(NamedTuple):
    inputs: Product  # in the columns that `Kernels.carry_states` takes
    out: Product
    conv: Stored
    conv_bias: Stored | None = None
    # Where there is a rule after the convolution:
    decay_bias: Stored | None = None
    decay_log: Stored | None = None
    skip: Stored | None = None
    norm: Stored | None = None


class SideBySideWeights(NamedTuple):
    attention: AttentionWeights
    recurrent: RecurrentWeights


MixerWeights = AttentionWeights | LatentWeights | RecurrentWeights | SideBySideWeights


class MLPWeights(NamedTuple):
    gate_up: Product
    down: Product
    activation: tuple[Stored, ...] = ()  # its parameters, each one number


class ExpertsWeights(NamedTuple):
    router: Stored
    router_bias: Stored | None
    experts: tuple[MLPWeights, ...]  # none where they are stacked
    stacked: tuple[Stored, Stored] | None  # gate and up, and down, of all experts together
    shared: MLPWeights | None
    shared_gate: Stored | None
    choice_bias: Stored | None
    apart: "ApartWeights | None" = None


class ApartWeights(NamedTuple):
    """Norms of the parts of a mixture, as in `ApartNorms`; the router's is scaled, and each expert's output."""

    shared: Stored
    experts: Stored
    router: Stored
    shared_exit: Stored
    experts_exit: Stored
    expert_scales: Stored


class LayerWeights(NamedTuple):
    mixer_norm: NormWeights
    mixer: MixerWeights | None  # None: there is none
    mlp_norm: NormWeights
    mlp: MLPWeights | ExpertsWeights | None
    mixer_exit: NormWeights
    mlp_exit: NormWeights
    scale: Stored | None = None


class ModelWeights(NamedTuple):
    embedding: Stored
    layers: tuple[LayerWeights, ...]
    norm: NormWeights
    head: Stored | None  # None: it is tied to the embedding


def weight_table(config: ModelConfig, present: Collection[str] = ()) -> ModelWeights:
    """Every tensor of a model, and where it goes. Where files differ in whether some tensors are stored as one (a
    layer's experts, a delta net's projections), the names in `present` decide."""
    vocabulary = (config.vocab_size, config.hidden_size)
    return ModelWeights(
        Stored("model.embed_tokens.weight", vocabulary),
        tuple(_layer(config, index, present) for index in range(config.num_layers)),
        _norm("model.norm", config),
        None if config.tied_head else Stored("lm_head.weight", vocabulary),
    )


# Of norms after the blocks: families have several names for them, which mean other norms elsewhere.
MIXER_EXIT, MLP_EXIT = "mixer_exit_norm", "mlp_exit_norm"
EXPERTS_ENTRY, EXPERTS_EXIT, SHARED_EXIT = "experts_norm", "experts_exit_norm", "shared_exit_norm"


def _layer(config: ModelConfig, index: int, present: Collection[str]) -> LayerWeights:
    prefix = f"model.layers.{index}"
    if config.feeding_layers is not None:
        return _single_block(prefix, config, index, present)
    before, after = config.pre_norm, config.post_norm
    is_apart = config.experts is not None and config.experts.normed_apart
    return LayerWeights(
        _norm(f"{prefix}.input_layernorm", config, before),
        _mixer(prefix, config, index, present),
        _norm(
            f"{prefix}.post_attention_layernorm",
            config,
            before and not config.parallel_blocks and not is_apart,
        ),
        _second(f"{prefix}.mlp", config, index, present),
        _norm(f"{prefix}.{MIXER_EXIT}", config, after),
        _norm(f"{prefix}.{MLP_EXIT}", config, after),
        Stored(f"{prefix}.layer_scalar", (1,)) if config.layer_scale else None,
    )


def _single_block(prefix: str, config: ModelConfig, index: int, present: Collection[str]) -> LayerWeights:
    """One block, be it either, and one norm before it."""
    norm, nothing = _norm(f"{prefix}.input_layernorm", config), NormWeights(None)
    if index in (config.feeding_layers or ()):
        block = _second(f"{prefix}.mlp", config, index, present)
        return LayerWeights(nothing, None, norm, block, nothing, nothing)
    return LayerWeights(norm, _mixer(prefix, config, index, present), nothing, None, nothing, nothing)


def _second(
    prefix: str, config: ModelConfig, index: int, present: Collection[str]
) -> MLPWeights | ExpertsWeights:
    experts = config.experts
    if experts and index in experts.layers:
        return _experts(prefix, config, experts, present)
    return _mlp(_dense_prefix(prefix, present), config, config.intermediate_size, present, config.mlp_bias)


def _mixer(prefix: str, config: ModelConfig, index: int, present: Collection[str]) -> MixerWeights:
    if config.latent:
        return _latent(f"{prefix}.self_attn", config, config.latent, present)
    attention = _attention(f"{prefix}.self_attn", config, index, present)
    if (net := config.recurrent) is None or index not in net.layers:
        return attention
    recurrent = _recurrent(f"{prefix}.linear_attn", config.hidden_size, net, present)
    return SideBySideWeights(attention, recurrent) if index in config.attention_layers else recurrent


def _dense_prefix(prefix: str, present: Collection[str]) -> str:
    """Of a model without experts, some files call the dense block what is their shared expert elsewhere."""
    shared = f"{prefix}.shared_expert"
    return shared if f"{shared}.gate_up_proj.weight" in present else prefix


def _norm(prefix: str, config: ModelConfig, exists: bool = True) -> NormWeights:
    if not exists:
        return NormWeights(None)
    shape = (config.hidden_size,)
    bias = Stored(f"{prefix}.bias", shape) if config.norm_bias else None
    return NormWeights(Stored(f"{prefix}.weight", shape), bias)


def _attention(prefix: str, config: ModelConfig, index: int, present: Collection[str]) -> AttentionWeights:
    is_windowed = config.window is not None and index in config.window.layers
    hidden, (num_kv_heads, size) = config.hidden_size, config.kv_heads(windowed=is_windowed)
    query, key = config.num_heads * size, num_kv_heads * size
    gates = query if config.gated_attention else 0
    # Files have each head's gate after its query; here all gates come last.
    heads = HeadRows(config.num_heads, (size, size), (0, query + 2 * key)) if gates else None

    def paired(num_heads: int) -> PairedRows | None:
        rotated = config.rotary_dim or size
        return PairedRows(num_heads, size, rotated) if config.interleaved_rotary else None

    values = "k" if config.values_are_keys and not is_windowed else "v"
    if f"{prefix}.qkv_proj.weight" in present:
        both = paired(config.num_heads + num_kv_heads)
        qkv: tuple[Rows, ...] = (Rows(f"{prefix}.qkv_proj", query + 2 * key, heads=both),)
    else:
        qkv = (
            Rows(f"{prefix}.q_proj", query + gates, heads=heads or paired(config.num_heads)),
            Rows(f"{prefix}.k_proj", key, query, paired(num_kv_heads)),
            Rows(f"{prefix}.{values}_proj", key, query + key),
        )
    widths = {"q": query, "k": key} if config.norm_all_heads else {"q": size, "k": size}
    query_norm, key_norm = (
        Stored(f"{prefix}.{name}_norm.weight", (widths[name],)) if config.head_norm else None for name in "qk"
    )
    return AttentionWeights(
        Product(qkv, query + 2 * key + gates, hidden, hidden, config.qkv_bias),
        Product((Rows(f"{prefix}.o_proj", hidden),), hidden, query, query, config.out_bias),
        query_norm,
        key_norm,
        Stored(f"{prefix}.sinks", (config.num_heads,)) if config.sinks else None,
        int(index in config.other_rotary_layers),
        int(is_windowed),
        num_kv_heads,
        size,
    )


def _latent(prefix: str, config: ModelConfig, sizes: LatentConfig, present: Collection[str]) -> LatentWeights:
    hidden, heads, rotated = config.hidden_size, config.num_heads, sizes.rotary_dim
    query, latent = sizes.query_size(heads), sizes.rank + rotated
    by_head = of_latent = None
    if config.interleaved_rotary:
        by_head = PairedRows(heads, sizes.key_dim + rotated, rotated, sizes.key_dim)
        of_latent = PairedRows(1, latent, rotated, sizes.rank)
    first = Rows(f"{prefix}.q_proj", query, heads=by_head)
    queries = None
    if rank := sizes.query_rank:
        first = Rows(f"{prefix}.q_a_proj", rank)
        queries = Product((Rows(f"{prefix}.q_b_proj", query, heads=by_head),), query, rank, rank)
    inputs = (first, Rows(f"{prefix}.kv_a_proj_with_mqa", latent, first.num_rows, of_latent))
    values = heads * sizes.value_dim
    both: Stored | tuple[Stored, Stored]
    both = Stored(f"{prefix}.kv_b_proj.weight", (heads * (sizes.key_dim + sizes.value_dim), sizes.rank))
    if f"{prefix}.k_b_proj.weight" in present:
        both = (
            Stored(f"{prefix}.k_b_proj.weight", (heads, sizes.rank, sizes.key_dim)),
            Stored(f"{prefix}.v_b_proj.weight", (heads, sizes.value_dim, sizes.rank)),
        )
    return LatentWeights(
        Product(inputs, sizes.input_size(heads), hidden, hidden, config.qkv_bias),
        queries,
        Stored(f"{prefix}.q_a_layernorm.weight", (rank,)) if rank else None,
        Stored(f"{prefix}.kv_a_layernorm.weight", (sizes.rank,)),
        both,
        Product((Rows(f"{prefix}.o_proj", hidden),), hidden, values, values, config.out_bias),
    )


def _recurrent(prefix: str, hidden: int, net: RecurrentConfig, present: Collection[str]) -> RecurrentWeights:
    """All input projections are one."""
    conv = Stored(f"{prefix}.conv1d.weight", (net.conv_size, 1, net.conv_kernel))
    out = (Rows(f"{prefix}.out_proj", hidden),)
    if isinstance(net, DeltaNetConfig):
        return RecurrentWeights(
            Product(_delta_net_inputs(prefix, net, present), input_size(net), hidden, hidden),
            Product(out, hidden, net.value_size, net.value_size),
            conv,
            decay_bias=Stored(f"{prefix}.dt_bias", (net.num_value_heads,)),
            decay_log=Stored(f"{prefix}.A_log", (net.num_value_heads,)),
            norm=Stored(f"{prefix}.norm.weight", (net.value_head_dim,)),
        )
    inputs, has_conv_bias = Rows(f"{prefix}.in_proj", net.projected_size), net.bias
    own: dict[str, Stored] = {}
    if isinstance(net, MambaConfig):
        has_conv_bias, heads = net.conv_bias, (net.num_value_heads,)
        # Files have gates before what is convolved.
        sizes = (net.value_size, net.conv_size, net.num_value_heads)
        parts = HeadRows(1, sizes, (net.conv_size, 0, net.projected_size))
        inputs = inputs._replace(num_rows=sum(sizes), heads=parts)
        own = {
            "decay_bias": Stored(f"{prefix}.dt_bias", heads),
            "decay_log": Stored(f"{prefix}.A_log", heads),
        }
        own["skip"] = Stored(f"{prefix}.D", heads)
        if net.norm_groups:
            own["norm"] = Stored(f"{prefix}.norm.weight", (net.value_size,))
    if has_conv_bias:
        own["conv_bias"] = Stored(f"{prefix}.conv1d.bias", (net.conv_size,))
    return RecurrentWeights(
        Product((inputs,), input_size(net), hidden, hidden, net.bias),
        Product(out, hidden, net.value_size, net.value_size, net.bias),
        conv,
        **own,
    )


def _delta_net_inputs(prefix: str, net: DeltaNetConfig, present: Collection[str]) -> tuple[Rows, ...]:
    """Some files have them in two, key head by key head."""
    heads, lanes, gates = (
        net.num_value_heads,
        whole_lanes(net.num_value_heads),
        net.conv_size + net.value_size,
    )
    value, pairs = net.value_size // net.num_key_heads, heads // net.num_key_heads
    inputs: tuple[Rows, ...] = (
        Rows(f"{prefix}.in_proj_qkv", net.conv_size),
        Rows(f"{prefix}.in_proj_z", net.value_size, net.conv_size),
    )
    if f"{prefix}.in_proj_qkvz.weight" in present:
        sizes = (net.key_head_dim, net.key_head_dim, value, value)
        starts = (0, net.key_size, 2 * net.key_size, net.conv_size)
        by_head = HeadRows(net.num_key_heads, sizes, starts)
        inputs = (Rows(f"{prefix}.in_proj_qkvz", gates, heads=by_head),)
    if f"{prefix}.in_proj_ba.weight" in present:
        by_head = HeadRows(net.num_key_heads, (pairs, pairs), (gates, gates + lanes))
        inputs += (Rows(f"{prefix}.in_proj_ba", 2 * heads, heads=by_head),)
    else:
        inputs += (
            Rows(f"{prefix}.in_proj_b", heads, gates),
            Rows(f"{prefix}.in_proj_a", heads, gates + lanes),
        )
    return inputs


def _mlp(
    prefix: str,
    config: ModelConfig,
    inner: int,
    present: Collection[str],
    bias: bool = False,
    interleaved: bool = False,
) -> MLPWeights:
    """Gate and up may be stored as one, one after the other or row by row."""
    hidden, width = config.hidden_size, whole_lanes(inner)
    if not config.gated_mlp:
        rows: tuple[Rows, ...] = (Rows(f"{prefix}.up_proj", inner),)
    elif f"{prefix}.gate_up_proj.weight" in present:
        count, size = (inner, 1) if interleaved else (1, inner)
        both = HeadRows(count, (size, size), (0, width))
        rows = (Rows(f"{prefix}.gate_up_proj", 2 * inner, heads=both),)
    else:
        rows = (Rows(f"{prefix}.gate_proj", inner), Rows(f"{prefix}.up_proj", inner, width))
    parameters = XIELU_PARAMETERS if config.activation == "xielu" else {}
    return MLPWeights(
        Product(rows, (2 if config.gated_mlp else 1) * width, hidden, hidden, bias),
        Product((Rows(f"{prefix}.down_proj", hidden),), hidden, width, inner, bias),
        tuple(Stored(f"{prefix}.act_fn.{name}", shape) for name, shape in parameters.items()),
    )


def _experts(
    prefix: str, config: ModelConfig, experts: ExpertsConfig, present: Collection[str]
) -> ExpertsWeights:
    hidden = config.hidden_size
    count, inner, shared = experts.num_experts, experts.intermediate_size, experts.shared_intermediate_size
    gate_up = Stored(f"{prefix}.experts.gate_up_proj", (count, 2 * inner, hidden))
    down = Stored(f"{prefix}.experts.down_proj", (count, hidden, inner))
    each_alone = f"{prefix}.experts.0.down_proj.weight" in present
    is_stacked = gate_up.name in present or (experts.normed_apart and not each_alone)
    return ExpertsWeights(
        Stored(f"{prefix}.gate.weight", (count, hidden)),
        Stored(f"{prefix}.gate.bias", (count,)) if experts.bias else None,
        tuple(
            _mlp(f"{prefix}.experts.{expert}", config, inner, present, experts.bias, experts.interleaved)
            for expert in range(0 if is_stacked else count)
        ),
        (gate_up, down) if is_stacked else None,
        _mlp(prefix if experts.normed_apart else f"{prefix}.shared_expert", config, shared, present)
        if shared
        else None,
        Stored(f"{prefix}.shared_expert_gate.weight", (1, hidden))
        if shared and experts.shared_gate
        else None,
        Stored(f"{prefix}.gate.e_score_correction_bias", (count,)) if experts.choice_bias else None,
        _apart(prefix.removesuffix(".mlp"), hidden, count) if experts.normed_apart else None,
    )


def _apart(prefix: str, hidden: int, num_experts: int) -> ApartWeights:
    def norm(name: str) -> Stored:
        return Stored(f"{prefix}.{name}", (hidden,))

    return ApartWeights(
        norm("post_attention_layernorm.weight"),
        norm(f"{EXPERTS_ENTRY}.weight"),
        norm("router.scale"),
        norm(f"{SHARED_EXIT}.weight"),
        norm(f"{EXPERTS_EXIT}.weight"),
        Stored(f"{prefix}.router.per_expert_scale", (num_experts,)),
    )


def expected_shapes(config: ModelConfig, present: Collection[str] = ()) -> dict[str, Shape]:
    """Every tensor of a model, by its name."""
    return dict(_stored(weight_table(config, present)))


def _stored(weights: object) -> Iterator[Stored]:
    if isinstance(weights, Stored):
        yield weights
    elif isinstance(weights, Product):
        yield from weights.stored()
    elif isinstance(weights, tuple):
        for each in weights:
            yield from _stored(each)
