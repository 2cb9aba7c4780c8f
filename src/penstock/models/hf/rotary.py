"""Rotary embedding as a Hugging Face config.json states it."""

from penstock.errors import ModelError, ModelFileError
from penstock.models.fields import Fields
from penstock.models.limits import MAX_POSITIONS, MAX_SCALE, MAX_THETA, MIN_SCALE, MIN_THETA
from penstock.plan.model import RotaryConfig

_KINDS = ("default", "linear", "llama3", "yarn")


def hf_rotary_dim(config: Fields, head_dim: int, default_factor: float | None) -> int | None:
    """The rotated elements of each head, None for all. `default_factor` is the family's part of a head where the
    file is silent, None for a family that always rotates whole heads."""
    rope = _rope(config)
    # transformers takes a null beside the other keys as a whole head, whatever the family.
    absent = "partial_rotary_factor" not in config.values
    default = default_factor if absent and default_factor is not None else 1.0
    default = config.number("partial_rotary_factor", default, high=1.0)
    factor = rope.number("partial_rotary_factor", default, high=1.0)
    if default_factor is None:
        if factor != 1.0:
            raise ModelError(f"{rope.origin}: rotating only a part of each head is not supported")
        return None
    rotated = int(head_dim * factor)
    if rotated < 2 or rotated % 2:
        raise ModelFileError(
            f"{rope.origin}: a partial_rotary_factor of {factor:g} leaves {rotated} of a head's {head_dim} "
            "elements to be rotated in pairs"
        )
    return rotated if rotated < head_dim else None


def hf_rotary(config: Fields, max_position: int) -> RotaryConfig:
    """From `rope_parameters`, or `rope_scaling` and `rope_theta` as older files have them.

    A multimodal model's `mrope_section` is of no consequence: it divides the angles among three grids of
    positions, and in text a token has the same position in all three."""
    rope = _rope(config)

    def scale(key: str, default: float | None = None) -> float:
        return rope.number(key, default, above=MIN_SCALE, high=MAX_SCALE)

    def optional_scale(key: str) -> float | None:
        return scale(key) if rope.has(key) else None

    theta = config.number("rope_theta", 10_000.0, above=MIN_THETA, high=MAX_THETA)
    theta = rope.number("rope_theta", theta, above=MIN_THETA, high=MAX_THETA)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _KINDS:
        raise ModelError(
            f"{rope.origin}: the rope type {kind!r} is not supported; supported are {', '.join(_KINDS)}"
        )
    if kind == "default":
        return RotaryConfig(theta=theta)
    if kind == "linear":
        return RotaryConfig(theta=theta, kind=kind, factor=scale("factor"))
    original = config.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", max_position, low=1, high=MAX_POSITIONS),
        low=1,
        high=MAX_POSITIONS,
    )
    if kind == "llama3":
        low, high = scale("low_freq_factor"), scale("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", high, f"more than low_freq_factor ({low:g})")
        return RotaryConfig(
            theta=theta,
            kind=kind,
            factor=scale("factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RotaryConfig(
        theta=theta,
        kind=kind,
        factor=scale("factor", max_position / original),
        original_max_position=original,
        beta_fast=scale("beta_fast", 32.0),
        beta_slow=scale("beta_slow", 1.0),
        attention_factor=optional_scale("attention_factor"),
        mscale=optional_scale("mscale"),
        mscale_all_dim=optional_scale("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )


def _rope(config: Fields) -> Fields:
    scaling = config.nested("rope_scaling")
    return scaling if scaling.values else config.nested("rope_parameters")
