"""The tensors that a configuration calls for, checked against a file before anything is allocated."""

from penstock.errors import ModelFileError
from penstock.models.config import ModelConfig
from penstock.models.source import WeightSource

_SHOWN = 4


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, by its Hugging Face name."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        for name, size in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            shapes[f"{attention}.{name}.weight"] = (size, hidden)
            if config.qkv_bias:
                shapes[f"{attention}.{name}.bias"] = (size,)
        shapes[f"{attention}.o_proj.weight"] = (hidden, query)
        if config.out_bias:
            shapes[f"{attention}.o_proj.bias"] = (hidden,)
        if config.head_norm:
            shapes[f"{attention}.q_norm.weight"] = (head_dim,)
            shapes[f"{attention}.k_norm.weight"] = (head_dim,)
        for name, size, inputs in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            shapes[f"{mlp}.{name}.weight"] = (size, inputs)
            if config.mlp_bias:
                shapes[f"{mlp}.{name}.bias"] = (size,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_source(source: WeightSource) -> frozenset[str]:
    """Raise unless the file has every tensor that its configuration calls for, in the right shape.

    Returns the names of tensors that the model has no use for."""
    expected = expected_shapes(source.config)
    present = source.names()
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
