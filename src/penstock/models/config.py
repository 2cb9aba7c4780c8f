"""A model's shape, whatever file it came from."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary embedding as transformers defines it: `kind` is its rope type, the rest are that type's parameters."""

    theta: float = 10_000.0
    kind: str = "default"  # default, linear, llama3, yarn
    factor: float = 1.0
    original_max_position: int | None = None
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # Divisors of the inverse frequencies, one per pair, where a file carries them (GGUF's rope_freqs.weight).
    frequency_divisors: tuple[float, ...] | None = None


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
    bos_token_id: int | None = None
