"""What of a model is probed."""

from dataclasses import dataclass

from penstock.plan.model import DeltaNetShape


@dataclass(frozen=True)
class ProductShape:
    """A weight [num_out, num_in], with a bias or without; of blocks, where there is a form."""

    num_out: int
    num_in: int
    bias: bool = False
    form: str = ""


@dataclass(frozen=True)
class ProbeShapes:
    """What is probed: the model's distinct products, its attention's heads, the widths of its other passes."""

    products: tuple[ProductShape, ...]  # but for experts' and the head
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    mlp_widths: tuple[int, ...]
    rotary_dim: int
    head: ProductShape | None  # None: these layers are followed by others
    delta_net: DeltaNetShape | None = None
    num_experts: int = 0
    expert_products: tuple[ProductShape, ...] = ()
