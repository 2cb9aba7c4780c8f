"""Sizes that no model has. A file that claims more is damaged or hostile."""

from penstock.errors import ModelFileError
from penstock.plan.model import DeltaNetConfig, ExpertsConfig

MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 14
MAX_LAYERS = 1 << 12
MAX_VOCABULARY = 1 << 24
MAX_POSITIONS = 1 << 28

# Of delta nets: a head's state is a matrix of its key size by its value size.
MAX_DELTA_HEAD = 1 << 10
MAX_CONV_KERNEL = 64
# Elements of a delta net's matrices of all heads: 256 MiB a layer and state.
MAX_STATE = 1 << 26

# Of mixtures of experts: in one layer, and in all of them, since each may have tensors of its own.
MAX_EXPERTS = 1 << 12
MAX_EXPERTS_IN_ALL = 1 << 17

# Of rotary embeddings: what scales them, either way, and the base, of which yarn takes the logarithm.
MIN_SCALE, MAX_SCALE = 1e-9, 1e9
MIN_THETA, MAX_THETA = 1.0, 1e15


def check_heads(origin: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads:
        raise ModelFileError(f"{origin}: {num_heads} heads cannot share {num_kv_heads} key and value heads")
    if head_dim < 2 or head_dim % 2:
        raise ModelFileError(f"{origin}: a head size of {head_dim} cannot be rotated in pairs")


def delta_net_of(origin: str, layers: tuple[int, ...], **sizes: int) -> DeltaNetConfig:
    """A delta net of sizes that a file has."""
    key_heads, value_heads = sizes["num_key_heads"], sizes["num_value_heads"]
    if value_heads % key_heads:
        raise ModelFileError(
            f"{origin}: {value_heads} value heads of a delta net cannot share {key_heads} key heads"
        )
    net = DeltaNetConfig(num_layers=len(layers), layers=layers, **sizes)
    if (size := max(net.key_size, net.value_size)) > MAX_WIDTH:
        raise ModelFileError(f"{origin}: a delta net's heads of {size} elements in all exceed {MAX_WIDTH}")
    if (size := net.num_value_heads * net.key_head_dim * net.value_head_dim) > MAX_STATE:
        raise ModelFileError(f"{origin}: a delta net's state of {size} elements exceeds {MAX_STATE}")
    return net


def check_experts(origin: str, experts: ExpertsConfig) -> None:
    if experts.num_active > experts.num_experts:
        raise ModelFileError(
            f"{origin}: a token cannot go to {experts.num_active} experts where there are {experts.num_experts}"
        )
    if (num := experts.num_experts * len(experts.layers)) > MAX_EXPERTS_IN_ALL:
        raise ModelFileError(f"{origin}: {num} experts in all layers together exceed {MAX_EXPERTS_IN_ALL}")
