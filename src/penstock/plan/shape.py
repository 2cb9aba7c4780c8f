"""The sizes of a model that decide its memory."""

from dataclasses import dataclass, fields

from penstock.errors import SettingError
from penstock.plan.checks import check_bool, check_int


@dataclass(frozen=True)
class DeltaNetShape:
    """The gated-delta-net layers of a hybrid, which keep a state of fixed size in place of keys and values."""

    num_layers: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int  # taps, the token's own among them

    def __post_init__(self) -> None:
        for field in fields(self):
            check_int(field.name, getattr(self, field.name), 1)
        if self.num_value_heads % self.num_key_heads:
            raise SettingError(
                "num_key_heads",
                self.num_key_heads,
                f"a divisor of {self.num_value_heads}",
                beside={"num_value_heads": self.num_value_heads},
            )

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values of every head."""
        return 2 * self.num_key_heads * self.key_head_dim + self.value_size


@dataclass(frozen=True)
class ExpertsShape:
    """The layers whose feed-forward block is a mixture of experts."""

    num_layers: int
    num_experts: int
    intermediate_size: int  # of one expert
    shared_intermediate_size: int = 0  # of the expert that every token goes through; 0: there is none

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "intermediate_size"):
            check_int(name, getattr(self, name), 1)
        check_int("shared_intermediate_size", self.shared_intermediate_size, 0)


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
class ModelShape:
    """The sizes of a decoder that decide its memory.

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
    gated_attention: bool = False  # each head's query comes with a gate of its output
    delta_net: DeltaNetShape | None = None
    experts: ExpertsShape | None = None

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
        _check_part("delta_net", self.delta_net, DeltaNetShape, self.num_layers)
        _check_part("experts", self.experts, ExpertsShape, self.num_layers)

    @property
    def num_attention_layers(self) -> int:
        """Layers with keys and values to cache."""
        return self.num_layers - (self.delta_net.num_layers if self.delta_net else 0)

    @property
    def num_dense_layers(self) -> int:
        """Layers with one feed-forward block for every token."""
        return self.num_layers - (self.experts.num_layers if self.experts else 0)


def _check_part(name: str, part: object, kind: type[DeltaNetShape | ExpertsShape], num_layers: int) -> None:
    if part is None:
        return
    if not isinstance(part, kind):
        raise SettingError(name, part, f"{kind.__name__} or None")
    if part.num_layers > num_layers:
        raise SettingError(
            f"{name}.num_layers", part.num_layers, f"1 to {num_layers}", beside={"num_layers": num_layers}
        )
