"""A model's configuration: pure data, whatever file it came from. Memory is planned and weights are loaded by it.

What planning needs comes first, and can be given alone; the rest has defaults.
"""

from dataclasses import dataclass, field, replace

from penstock.errors import SettingError
from penstock.plan.checks import check_bool, check_int


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary embedding as transformers defines it: `kind` is its rope type, the rest are that type's parameters."""

    theta: float = 10_000.0
    kind: str = "default"  # default, linear, llama3, yarn; none: nothing is rotated
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
class DeltaNetConfig:
    """The gated-delta-net layers of a hybrid: a causal convolution, then a delta rule. They keep a state of fixed
    size, a matrix for each head among it, in place of keys and values."""

    num_layers: int
    num_key_heads: int  # of the queries too; each serves num_value_heads / num_key_heads value heads
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int  # taps of the convolution, the token's own among them
    layers: tuple[int, ...] = ()  # which layers of the model; empty: only their number is known

    def __post_init__(self) -> None:
        sizes = ("num_layers", "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        for name in (*sizes, "conv_kernel"):
            check_int(name, getattr(self, name), 1)
        if self.num_value_heads % self.num_key_heads:
            raise SettingError(
                "num_key_heads",
                self.num_key_heads,
                f"a divisor of {self.num_value_heads}",
                beside={"num_value_heads": self.num_value_heads},
            )

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
    """The layers whose feed-forward block is a mixture of experts."""

    num_layers: int
    num_experts: int
    intermediate_size: int  # of one expert
    shared_intermediate_size: int = 0  # of the expert that every token goes through; 0: there is none
    num_active: int = 0  # experts a token is sent to; 0: not known
    normalised: bool = True  # the weights of the active experts are scaled to a sum of 1
    layers: tuple[int, ...] = ()  # which layers of the model; empty: only their number is known
    shared_gate: bool = True  # the shared expert's output is gated
    scores: str = "softmax"  # what makes weights of the router's output; or sigmoid
    choice_bias: bool = False  # experts are chosen by score and a bias of each, and weighted by score
    num_groups: int = 1  # of experts; those of some groups alone are chosen from
    num_active_groups: int = 1
    scale: float = 1.0  # on the sum of the active experts' outputs

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "intermediate_size", "num_groups", "num_active_groups"):
            check_int(name, getattr(self, name), 1)
        check_int("shared_intermediate_size", self.shared_intermediate_size, 0)


@dataclass(frozen=True)
class WindowConfig:
    """The attention layers whose queries see the last `size` tokens alone, their own the last of them."""

    size: int
    num_layers: int
    layers: tuple[int, ...] = ()  # which layers of the model; empty: only their number is known

    def __post_init__(self) -> None:
        check_int("size", self.size, 1)
        check_int("num_layers", self.num_layers, 0)  # 0: a part of a model, of whose layers none is here


_SIZES = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
)


@dataclass(frozen=True)
class ModelConfig:
    """Everything that is known of a decoder, apart from its weights.

    Layers that are not delta-net layers are attention layers. `intermediate_size` is that of the layers that are
    no mixture of experts, if there are any.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    gated_attention: bool = False  # each head's query is followed by a gate of its output (Qwen3-Next)
    delta_net: DeltaNetConfig | None = None
    experts: ExpertsConfig | None = None
    window: WindowConfig | None = None
    family: str = ""  # transformers' model_type: llama, qwen3, qwen3_5_text, ...
    max_position: int = 1 << 20
    norm_eps: float = 1e-6
    tied_head: bool = False
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    rotary_dim: int | None = None  # the first so many elements of each head are rotated; None: all
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # RMS norm on each head of the queries and keys (Qwen3)
    norm_all_heads: bool = False  # that norm is of all heads together (OLMo 2)
    norm_after_rotary: bool = False  # that norm follows the rotation (Hunyuan)
    zero_centred_norm: bool = False  # norms multiply by 1 + weight, but for the delta net's own
    pre_norm: bool = True  # what enters a block is normed
    post_norm: bool = False  # what leaves a block is normed before it is added
    layer_norm: bool = False  # norms subtract the mean, all but those of heads
    norm_bias: bool = False
    activation: str = "silu"
    gated_mlp: bool = True  # down(activation(gate) * up), else down(activation(up))
    parallel_blocks: bool = False  # both blocks of a layer have one input, and one norm of it (Cohere)
    interleaved_rotary: bool = False  # files have the two elements of a rotated pair side by side
    other_rotary: RotaryConfig | None = None  # that of `other_rotary_layers`, in place of `rotary`
    other_rotary_layers: tuple[int, ...] = ()
    attention_scale: float | None = None  # on scores; None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None  # scores are cap * tanh(scores / cap)
    sinks: bool = False  # each head has a score beside those of its keys, and no value for it (gpt-oss)
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # on what a block adds
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # logits are cap * tanh(logits / cap)
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _SIZES:
            check_int(name, getattr(self, name), 1)
        check_bool("gated_attention", self.gated_attention)
        if self.num_heads % self.num_kv_heads:
            raise SettingError(
                "num_kv_heads",
                self.num_kv_heads,
                f"a divisor of {self.num_heads}",
                beside={"num_heads": self.num_heads},
            )
        _check_part("delta_net", self.delta_net, DeltaNetConfig, self.num_layers)
        _check_part("experts", self.experts, ExpertsConfig, self.num_layers)
        _check_part("window", self.window, WindowConfig, self.num_attention_layers)

    @property
    def num_attention_layers(self) -> int:
        """Layers with keys and values to cache."""
        return self.num_layers - (self.delta_net.num_layers if self.delta_net else 0)

    @property
    def num_full_layers(self) -> int:
        """Those of them whose queries see everything before them."""
        return self.num_attention_layers - (self.window.num_layers if self.window else 0)

    @property
    def num_dense_layers(self) -> int:
        """Layers with one feed-forward block for every token."""
        return self.num_layers - (self.experts.num_layers if self.experts else 0)

    @property
    def has_state(self) -> bool:
        """Whether the model carries a recurrent state from token to token."""
        return self.delta_net is not None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with keys and values to cache."""
        linear = frozenset(self.delta_net.layers if self.delta_net else ())
        return tuple(index for index in range(self.num_layers) if index not in linear)

    def of_layers(self, first: int, last: int) -> "ModelConfig":
        """A model of the layers [first, last) alone, numbered from 0. All of them: the model itself."""
        if (first, last) == (0, self.num_layers):
            return self

        def within(layers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(index - first for index in layers if first <= index < last)

        net, experts, window = self.delta_net, self.experts, self.window
        windowed = within(window.layers if window else ())
        nets, mixtures = within(net.layers if net else ()), within(experts.layers if experts else ())
        return replace(
            self,
            num_layers=last - first,
            other_rotary_layers=within(self.other_rotary_layers),
            window=replace(window, num_layers=len(windowed), layers=windowed) if window else None,
            delta_net=replace(net, num_layers=len(nets), layers=nets) if net and nets else None,
            experts=replace(experts, num_layers=len(mixtures), layers=mixtures)
            if experts and mixtures
            else None,
        )


def _check_part(
    name: str, part: object, kind: type[DeltaNetConfig | ExpertsConfig | WindowConfig], num_layers: int
) -> None:
    if part is None:
        return
    if not isinstance(part, kind):
        raise SettingError(name, part, f"{kind.__name__} or None")
    if part.num_layers > num_layers:
        raise SettingError(
            f"{name}.num_layers", part.num_layers, f"1 to {num_layers}", beside={"num_layers": num_layers}
        )


# What planning alone calls them.
ModelShape = ModelConfig
DeltaNetShape = DeltaNetConfig
ExpertsShape = ExpertsConfig
WindowShape = WindowConfig
