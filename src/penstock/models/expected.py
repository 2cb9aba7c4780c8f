"""The tensors that a configuration calls for, checked against a file before anything is allocated."""

from collections.abc import Collection, Iterator

from penstock.errors import ModelFileError
from penstock.models.source import WeightSource
from penstock.plan.model import DeltaNetConfig, ExpertsConfig, ModelConfig

_SHOWN = 4

Shape = tuple[int, ...]
Named = tuple[str, Shape]


def expected_shapes(config: ModelConfig, present: Collection[str] = ()) -> dict[str, Shape]:
    """Every tensor of the model, by its Hugging Face name. Where files differ in whether some tensors are stored as
    one (a layer's experts, a delta net's projections), the names in `present` decide."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (config.hidden_size,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (config.hidden_size,)
        if config.delta_net and index in config.delta_net.layers:
            shapes.update(_delta_net(f"{layer}.linear_attn", config.hidden_size, config.delta_net, present))
        else:
            shapes.update(_attention(f"{layer}.self_attn", config))
        if config.experts and index in config.experts.layers:
            shapes.update(_experts(f"{layer}.mlp", config.hidden_size, config.experts, present))
        else:
            shapes.update(_mlp(f"{layer}.mlp", config.hidden_size, config.intermediate_size, config.mlp_bias))
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _attention(prefix: str, config: ModelConfig) -> Iterator[Named]:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    gated_query = 2 * query if config.gated_attention else query
    for name, size in (("q_proj", gated_query), ("k_proj", key), ("v_proj", key)):
        yield f"{prefix}.{name}.weight", (size, config.hidden_size)
        if config.qkv_bias:
            yield f"{prefix}.{name}.bias", (size,)
    yield f"{prefix}.o_proj.weight", (config.hidden_size, query)
    if config.out_bias:
        yield f"{prefix}.o_proj.bias", (config.hidden_size,)
    if config.head_norm:
        yield f"{prefix}.q_norm.weight", (config.head_dim,)
        yield f"{prefix}.k_norm.weight", (config.head_dim,)


def _delta_net(prefix: str, hidden: int, net: DeltaNetConfig, present: Collection[str]) -> Iterator[Named]:
    inputs = {"in_proj_qkv": net.conv_size, "in_proj_z": net.value_size}
    if f"{prefix}.in_proj_qkvz.weight" in present:
        inputs = {"in_proj_qkvz": net.conv_size + net.value_size}
    if f"{prefix}.in_proj_ba.weight" in present:
        inputs["in_proj_ba"] = 2 * net.num_value_heads
    else:
        inputs |= {"in_proj_b": net.num_value_heads, "in_proj_a": net.num_value_heads}
    for name, size in inputs.items():
        yield f"{prefix}.{name}.weight", (size, hidden)
    yield f"{prefix}.conv1d.weight", (net.conv_size, 1, net.conv_kernel)
    yield f"{prefix}.dt_bias", (net.num_value_heads,)
    yield f"{prefix}.A_log", (net.num_value_heads,)
    yield f"{prefix}.norm.weight", (net.value_head_dim,)
    yield f"{prefix}.out_proj.weight", (hidden, net.value_size)


def _experts(prefix: str, hidden: int, experts: ExpertsConfig, present: Collection[str]) -> Iterator[Named]:
    inner, shared = experts.intermediate_size, experts.shared_intermediate_size
    yield f"{prefix}.gate.weight", (experts.num_experts, hidden)
    if f"{prefix}.experts.gate_up_proj" in present:
        yield f"{prefix}.experts.gate_up_proj", (experts.num_experts, 2 * inner, hidden)
        yield f"{prefix}.experts.down_proj", (experts.num_experts, hidden, inner)
    else:
        for expert in range(experts.num_experts):
            yield from _mlp(f"{prefix}.experts.{expert}", hidden, inner, False)
    if shared:
        yield from _mlp(f"{prefix}.shared_expert", hidden, shared, False)
        yield f"{prefix}.shared_expert_gate.weight", (1, hidden)


def _mlp(prefix: str, hidden: int, inner: int, bias: bool) -> Iterator[Named]:
    for name, size, inputs in (
        ("gate_proj", inner, hidden),
        ("up_proj", inner, hidden),
        ("down_proj", hidden, inner),
    ):
        yield f"{prefix}.{name}.weight", (size, inputs)
        if bias:
            yield f"{prefix}.{name}.bias", (size,)


def check_source(source: WeightSource) -> frozenset[str]:
    """Raise unless the file has every tensor that its configuration calls for, in the right shape.

    Returns the names of tensors that the model has no use for."""
    present = source.names()
    expected = expected_shapes(source.config, present)
    missing = [name for name in expected if name not in present]
    if missing:
        raise ModelFileError(f"{source.describe()}: {_some(missing)} missing")
    wrong = [
        f"{name} is {list(source.shape(name))} where its configuration says {list(shape)}"
        for name, shape in expected.items()
        if source.shape(name) != shape
    ]
    if wrong:
        raise ModelFileError(f"{source.describe()}: {_some(wrong)}")
    return present - expected.keys()


def _some(items: list[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
