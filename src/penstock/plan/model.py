"""A model's configuration: pure data, whatever file it came from. Memory is planned and weights are loaded by it.

What planning needs comes first, and can be given alone; the rest has defaults.
"""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

from penstock.errors import SettingError
from penstock.plan.checks import check_bool, check_int
from penstock.plan.grids import whole_lanes


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary embedding as transformers defines it: `kind` is its rope type, the rest are that type's parameters."""

    theta: float = 10_000.0
    # default, linear, llama3, yarn, longrope, proportional; none: nothing is rotated
    kind: str = "default"
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
    # longrope: divisors of the inverse frequencies, one per pair, for requests of up to the original context and for
    # longer ones
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    share: float = 1.0  # proportional: the part of the pairs that is rotated, the first of them
    # Queries are multiplied by 1 + so much * log(1 + how many original contexts lie before them); 0: by nothing.
    query_growth: float = 0.0
    # Divisors of the inverse frequencies, one per pair, where a file carries them (GGUF's rope_freqs.weight).
    frequency_divisors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class _StateHeads:
    """Recurrent layers: a causal convolution, then a rule that writes to a matrix for each head and reads it. They
    keep a state of fixed size in place of keys and values."""

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

    @property
    def projected_size(self) -> int:
        """Columns of the input projection, but for gates of single heads: what is convolved, gates of the output."""
        return self.conv_size + self.value_size

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.num_value_heads, self.key_head_dim, self.value_head_dim


@dataclass(frozen=True)
class DeltaNetConfig(_StateHeads):
    """The gated-delta-net layers of a hybrid."""

    gates_first: ClassVar[bool] = False  # the norm is of the gated output
    num_gates: ClassVar[int] = 2  # of each head and token: beta and decay

    @property
    def num_weights(self) -> int:
        """Of a layer beside its products, in float32: taps, decay's rate and bias, the norm of a head."""
        return self.conv_kernel * self.conv_size + 2 * whole_lanes(self.num_value_heads) + self.value_head_dim


@dataclass(frozen=True)
class MambaConfig(_StateHeads):
    """The Mamba-2 layers of a model. A group of heads shares what is called B and C there: keys and queries here."""

    num_gates: ClassVar[int] = 1  # of each head and token: the length of its step

    conv_bias: bool = True
    bias: bool = False  # of the projections in and out
    norm_groups: int = 1  # parts of the output that are normed, each on its own; 0: there is no norm
    gates_first: bool = True  # the norm is of the gated output; else that is the gated norm
    least_step: float = 0.0
    most_step: float = math.inf
    beside_attention: bool = False  # these layers have attention, too, and what both give is summed
    # On rows of a file's input projection: gates, values, keys, queries, steps.
    input_scales: tuple[float, ...] = ()

    @property
    def num_weights(self) -> int:
        """Of a layer beside its products, in float32: taps, decay's rate and bias, what goes past the rule, the
        norm."""
        taps = (self.conv_kernel + self.conv_bias) * self.conv_size
        norm = self.value_size if self.norm_groups else 0
        return taps + 2 * whole_lanes(self.num_value_heads) + self.num_value_heads + norm


@dataclass(frozen=True)
class ShortConvConfig:
    """The layers of a model (LFM2) that mix tokens by a gated causal convolution alone."""

    num_gates: ClassVar[int] = 0
    matrix_shape: ClassVar[tuple[int, int, int]] = (0, 0, 0)

    num_layers: int
    conv_size: int
    conv_kernel: int
    bias: bool = False  # of the convolution, and of the projections in and out
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "conv_size", "conv_kernel"):
            check_int(name, getattr(self, name), 1)

    @property
    def value_size(self) -> int:
        return self.conv_size

    @property
    def projected_size(self) -> int:
        """Columns of the input projection: gates of the input and of the output, the input."""
        return 3 * self.conv_size

    @property
    def num_weights(self) -> int:
        return (self.conv_kernel + self.bias) * self.conv_size


RecurrentConfig = DeltaNetConfig | MambaConfig | ShortConvConfig


def input_size(net: RecurrentConfig) -> int:
    """Columns of a recurrent layer's input projection, gates of single heads in whole lanes."""
    return net.projected_size + net.num_gates * whole_lanes(net.matrix_shape[0])


_Net = TypeVar("_Net", DeltaNetConfig, MambaConfig, ShortConvConfig)


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
    group_best: int = 2  # a group is as good as its best so many experts together
    scale: float = 1.0  # on the sum of the active experts' outputs
    bias: bool = False  # the router and each expert have biases
    # Files have rows of gates and of what they gate side by side, of all experts as one.
    interleaved: bool = False
    # The shared expert and the others have norms of their own before and after them, and so has the router (Gemma 4).
    normed_apart: bool = False
    # Gates are at most this, what they gate lies within it and counts 1 more; 0: they stay.
    clamp: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "intermediate_size", "num_groups", "num_active_groups"):
            check_int(name, getattr(self, name), 1)
        check_int("shared_intermediate_size", self.shared_intermediate_size, 0)


@dataclass(frozen=True)
class LatentConfig:
    """Attention whose keys and values are products of a latent, which is cached in their place, beside the part of
    the key that is rotated: `ModelConfig.head_dim` is the size of both, of one KV head. Queries are multiplied with
    what makes keys of the latent, and what they attend to with what makes values of it."""

    rank: int  # of the latent
    rotary_dim: int
    key_dim: int  # of a head's key without its rotated part
    value_dim: int  # of a head
    query_rank: int = 0  # of the latent that queries are made of; 0: of what enters the layer
    norm_eps: float = 1e-6  # of both latents

    def __post_init__(self) -> None:
        for name in ("rank", "rotary_dim", "key_dim", "value_dim"):
            check_int(name, getattr(self, name), 1)
        check_int("query_rank", self.query_rank, 0)

    def query_size(self, num_heads: int) -> int:
        return num_heads * (self.key_dim + self.rotary_dim)

    def input_size(self, num_heads: int) -> int:
        """Columns of the first projection: queries or their latent, the latent, the rotated part of the key."""
        return (self.query_rank or self.query_size(num_heads)) + self.rank + self.rotary_dim


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

    Layers that are not recurrent are attention layers. `intermediate_size` is that of the layers that are no mixture
    of experts, if there are any.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    gated_attention: bool = False  # each head's query is followed by a gate of its output (Qwen3-Next)
    delta_net: DeltaNetConfig | None = None  # of this and the next two, one at most
    mamba: MambaConfig | None = None
    short_conv: ShortConvConfig | None = None
    experts: ExpertsConfig | None = None
    window: WindowConfig | None = None
    latent: LatentConfig | None = None  # of all attention layers
    # KV heads and elements of a head in layers without a window, where those with one have the numbers above alone.
    full_heads: tuple[int, int] | None = None
    # The layers that have a feed-forward block alone, where all others have none (Nemotron-H). None: all have one.
    feeding_layers: tuple[int, ...] | None = None
    family: str = ""  # transformers' model_type: llama, qwen3, qwen3_5_text, ...
    by_transformers: str = ""  # a hash of transformers' configuration, where its code runs the model
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
    value_norm: bool = False  # values are normed, head by head, without a weight (Gemma 4)
    values_are_keys: bool = False  # in layers without a window: before either is normed
    layer_scale: bool = False  # what leaves a layer is multiplied by a number of its own
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # on what a block adds
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # logits are cap * tanh(logits / cap)
    weight_scales: tuple[tuple[str, float], ...] = ()  # on a file's matrices, by what their names end with
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
        _check_part("mamba", self.mamba, MambaConfig, self.num_layers)
        _check_part("short_conv", self.short_conv, ShortConvConfig, self.num_layers)
        _check_part("experts", self.experts, ExpertsConfig, self.num_layers)
        _check_part("window", self.window, WindowConfig, self.num_attention_layers)

    @property
    def recurrent(self) -> RecurrentConfig | None:
        """The layers that carry a state from token to token."""
        return self.delta_net or self.mamba or self.short_conv

    @property
    def _instead_of_attention(self) -> RecurrentConfig | None:
        return None if self.mamba and self.mamba.beside_attention else self.recurrent

    @property
    def num_attention_layers(self) -> int:
        """Layers with keys and values to cache."""
        net = self._instead_of_attention
        return self.num_layers - (net.num_layers if net else 0) - len(self.feeding_layers or ())

    @property
    def num_full_layers(self) -> int:
        """Those of them whose queries see everything before them."""
        return self.num_attention_layers - (self.window.num_layers if self.window else 0)

    def is_long(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens, those to be generated among them, has another rotary embedding than
        shorter ones."""
        original = self.rotary.original_max_position or self.max_position
        return self.rotary.kind == "longrope" and num_tokens > original

    @property
    def num_dense_layers(self) -> int:
        """Layers with one feed-forward block for every token."""
        num_feeding = self.num_layers if self.feeding_layers is None else len(self.feeding_layers)
        return num_feeding - (self.experts.num_layers if self.experts else 0)

    @property
    def num_kv_parts(self) -> int:
        """Keys and values, or latents that are both."""
        return 1 if self.latent else 2

    def kv_heads(self, *, windowed: bool) -> tuple[int, int]:
        """KV heads and elements of a head, of layers with a window or without."""
        own = (self.num_kv_heads, self.head_dim)
        return own if windowed or self.full_heads is None else self.full_heads

    @property
    def largest_head(self) -> int:
        """Elements of a head, in whichever layers have more."""
        return max(self.head_dim, self.kv_heads(windowed=False)[1])

    @property
    def num_projected(self) -> int:
        """Columns of an attention layer's first projection, of whichever layers have more."""
        if self.latent:
            return self.latent.input_size(self.num_heads)
        return max(self._num_projected(windowed=windowed) for windowed in (False, True))

    def _num_projected(self, *, windowed: bool) -> int:
        num_kv_heads, head_dim = self.kv_heads(windowed=windowed)
        return ((2 if self.gated_attention else 1) * self.num_heads + 2 * num_kv_heads) * head_dim

    @property
    def num_attention_weights(self) -> int:
        """Elements of the matrices of all attention layers."""
        if (latent := self.latent) is None:
            num_windowed = self.window.num_layers if self.window else 0
            return sum(
                num_layers
                * (
                    self._num_projected(windowed=windowed)
                    + self.num_heads * self.kv_heads(windowed=windowed)[1]
                )
                * self.hidden_size
                for windowed, num_layers in ((True, num_windowed), (False, self.num_full_layers))
            )
        projected = self.num_projected * self.hidden_size
        queries = latent.query_rank * latent.query_size(self.num_heads)
        of_latent = self.num_heads * (latent.key_dim + latent.value_dim) * latent.rank
        out = self.num_heads * latent.value_dim * self.hidden_size
        return self.num_attention_layers * (projected + queries + of_latent + out)

    @property
    def has_state(self) -> bool:
        """Whether the model carries a recurrent state from token to token."""
        return self.recurrent is not None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with keys and values to cache."""
        others = {*(net.layers if (net := self._instead_of_attention) else ()), *(self.feeding_layers or ())}
        return tuple(index for index in range(self.num_layers) if index not in others)

    def of_layers(self, first: int, last: int) -> "ModelConfig":
        """A model of the layers [first, last) alone, numbered from 0. All of them: the model itself."""
        if (first, last) == (0, self.num_layers):
            return self

        def within(layers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(index - first for index in layers if first <= index < last)

        experts, window = self.experts, self.window
        windowed = within(window.layers if window else ())
        mixtures = within(experts.layers if experts else ())

        def of_net(net: _Net | None) -> _Net | None:
            layers = within(net.layers if net else ())
            return replace(net, num_layers=len(layers), layers=layers) if net and layers else None

        return replace(
            self,
            num_layers=last - first,
            other_rotary_layers=within(self.other_rotary_layers),
            feeding_layers=None if self.feeding_layers is None else within(self.feeding_layers),
            window=replace(window, num_layers=len(windowed), layers=windowed) if window else None,
            delta_net=of_net(self.delta_net),
            mamba=of_net(self.mamba),
            short_conv=of_net(self.short_conv),
            experts=replace(experts, num_layers=len(mixtures), layers=mixtures)
            if experts and mixtures
            else None,
        )


def _check_part(
    name: str, part: object, kind: type[RecurrentConfig | ExpertsConfig | WindowConfig], num_layers: int
) -> None:
    if part is None:
        return
    if not isinstance(part, kind):
        raise SettingError(name, part, f"{kind.__name__} or None")
    if part.num_layers > num_layers:
        raise SettingError(
            f"{name}.num_layers", part.num_layers, f"1 to {num_layers}", beside={"num_layers": num_layers}
        )


# Other names that these had in planning.
ModelShape = ModelConfig
DeltaNetShape = DeltaNetConfig
ExpertsShape = ExpertsConfig
