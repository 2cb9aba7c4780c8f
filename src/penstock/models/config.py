"""A model's shape, whatever file it came from."""

from dataclasses import dataclass, field, replace

from penstock.layers.rotary import RotaryConfig as RotaryConfig


@dataclass(frozen=True)
class DeltaNetConfig:
    """The gated-delta-net layers of a hybrid: a causal convolution, then a delta rule with a matrix of state for each
    head."""

    num_key_heads: int  # of the queries too; each serves num_value_heads / num_key_heads value heads
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int  # taps of the convolution, the token's own among them
    layers: tuple[int, ...]  # which layers of the model; all others are full attention

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values of every head."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True)
class ExpertsConfig:
    """The feed-forward layers that are a mixture of experts."""

    num_experts: int
    num_active: int  # experts a token is sent to
    intermediate_size: int
    shared_intermediate_size: int  # of the expert that every token goes through; 0: there is none
    normalised: bool  # the weights of the active experts are scaled to a sum of 1
    layers: tuple[int, ...]  # which layers of the model; all others have one dense feed-forward block


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder needs to know about a model, apart from its weights."""

    family: str  # transformers' model_type: llama, mistral, qwen2, qwen3, qwen3_moe, qwen3_next, qwen3_5_text, ...
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
    rotary_dim: int | None = None  # the first so many elements of each head are rotated; None: all
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # RMS norm on each head of the queries and keys (Qwen3)
    gated_attention: bool = False  # each head's query is followed by a gate of its output (Qwen3-Next)
    zero_centred_norm: bool = False  # norms multiply by 1 + weight, but for the delta net's own
    delta_net: DeltaNetConfig | None = None
    experts: ExpertsConfig | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def has_state(self) -> bool:
        """Whether the model carries a recurrent state from token to token."""
        return self.delta_net is not None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with full attention, which are those with keys and values to cache."""
        linear = frozenset(self.delta_net.layers if self.delta_net else ())
        return tuple(index for index in range(self.num_layers) if index not in linear)

    def of_layers(self, first: int, last: int) -> "ModelConfig":
        """A model of the layers [first, last) alone, numbered from 0. All of them: the model itself."""
        if (first, last) == (0, self.num_layers):
            return self

        def within(layers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(index - first for index in layers if first <= index < last)

        net, experts = self.delta_net, self.experts
        nets, mixtures = within(net.layers if net else ()), within(experts.layers if experts else ())
        return replace(
            self,
            num_layers=last - first,
            delta_net=replace(net, layers=nets) if net and nets else None,
            experts=replace(experts, layers=mixtures) if experts and mixtures else None,
        )
