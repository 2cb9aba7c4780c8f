"""A model's shape, whatever file it came from."""

from dataclasses import dataclass, field

from penstock.layers.rotary import RotaryConfig as RotaryConfig


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder needs to know about a model, apart from its weights."""

    family: str  # transformers' model_type: llama, mistral, qwen2, qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    tied_head: bool
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # RMS norm on each head of the queries and keys (Qwen3)
    eos_token_ids: tuple[int, ...] = ()
