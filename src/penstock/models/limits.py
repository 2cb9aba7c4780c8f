"""Sizes that no model has. A file that claims more is damaged or hostile."""

from penstock.errors import ModelFileError

MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 14
MAX_LAYERS = 1 << 12
MAX_VOCABULARY = 1 << 24
MAX_POSITIONS = 1 << 28

# Of rotary embeddings: what scales them, either way, and the base, of which yarn takes the logarithm.
MIN_SCALE, MAX_SCALE = 1e-9, 1e9
MIN_THETA, MAX_THETA = 1.0, 1e15


def check_heads(origin: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads:
        raise ModelFileError(f"{origin}: {num_heads} heads cannot share {num_kv_heads} key and value heads")
    if head_dim < 2 or head_dim % 2:
        raise ModelFileError(f"{origin}: a head size of {head_dim} cannot be rotated in pairs")
