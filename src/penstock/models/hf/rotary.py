"""Rotary embeddings, as config.json has them: of all layers, or of each kind; scaled, in part, or in none."""

from dataclasses import replace

from penstock.errors import ModelError, ModelFileError
from penstock.models.hf.families import FULL, SLIDING, Family
from penstock.models.reading import MAX_SCALE, Fields, Most, shortened
from penstock.plan.model import RotaryConfig

_KINDS = ("default", "linear", "llama3", "yarn")


def other_rotary_of(
    config: Fields,
    family: Family,
    kinds: tuple[str, ...],
    num_layers: int,
    max_position: int,
    head_dim: int,
) -> tuple[RotaryConfig | None, tuple[int, ...]]:
    """The rotary embedding of some layers, where that is another than the others', or none; and these layers."""

    def of_kind(kind: str) -> tuple[int, ...]:
        return tuple(index for index, each in enumerate(kinds) if each == kind)

    if family.rotary_by_kind:
        rope = rope_of(config, family, SLIDING)
        rotary_dim_of(config, rope, head_dim, family.partial_rotary)  # as the others'
        return rotary_of(config, family, rope, max_position, head_dim, SLIDING), of_kind(SLIDING)
    unrotated = _unrotated_layers(config, num_layers)
    if family.rotated_in_windows and config.or_default("sliding_window") is not None:
        unrotated = of_kind(FULL)
    return (RotaryConfig(kind="none"), unrotated) if unrotated else (None, ())


def _unrotated_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers without rotary embedding: every so many, or those that a file has a 0 for."""
    if not config.knows("no_rope_layer_interval"):
        return ()
    interval = config.size("no_rope_layer_interval", Most.LAYERS)
    rotated = config.integers("no_rope_layers", high=1)
    if not rotated:
        rotated = tuple(int((index + 1) % interval > 0) for index in range(num_layers))
    if len(rotated) != num_layers:
        raise config.error("no_rope_layers", list(rotated), f"a 0 or a 1 for each of the {num_layers} layers")
    return tuple(index for index in range(num_layers) if not rotated[index])


def rotary_dim_of(config: Fields, rope: Fields, head_dim: int, default_factor: float | None) -> int | None:
    """The rotated elements of each head, None for all. `default_factor` is the family's part of a head where the
    file is silent, None for a family that always rotates whole heads."""
    # transformers takes a null beside the other keys as a whole head, whatever the family.
    absent = "partial_rotary_factor" not in config.values
    default = default_factor if absent and default_factor is not None else 1.0
    default = config.number("partial_rotary_factor", default, high=1.0)
    factor = rope.number("partial_rotary_factor", default, high=1.0)
    if default_factor is None:
        if factor != 1.0 and rope.values.get("rope_type") != "proportional":
            raise ModelError(f"{rope.origin}: rotating only a part of each head is not supported")
        return None
    rotated = int(head_dim * factor)
    if rotated < 2 or rotated % 2:
        raise ModelFileError(
            f"{rope.origin}: a partial_rotary_factor of {factor:g} leaves {rotated} of a head's {head_dim} "
            "elements to be rotated in pairs"
        )
    return rotated if rotated < head_dim else None


def rotary_of(
    config: Fields, family: Family, rope: Fields, max_position: int, head_dim: int, kind_of_layer: str = FULL
) -> RotaryConfig:
    """From `rope_parameters`, or `rope_scaling` and `rope_theta` as older files have them: what `rope_of` gives.

    A multimodal model's `mrope_section` is of no consequence: it divides the angles among three grids of
    positions, and in text a token has the same position in all three."""
    is_absent = (
        config.knows("position_embedding_type") and config.values.get("position_embedding_type") != "rope"
    )
    if is_absent or config.knows("layers_block_type"):
        return RotaryConfig(kind="none")
    if not rope.values and kind_of_layer == FULL:
        rope = replace(rope, values=family.rope)

    def optional_scale(key: str) -> float | None:
        return rope.scale(key) if rope.has(key) else None

    theta = rope.theta("rope_theta", _default_theta(config, kind_of_layer))
    kind = rope.text("rope_type", rope.text("type", "default"))
    kind = family.rope_kinds.get(kind, kind)
    if kind == "ntk_alpha" and rope.has("alpha") and head_dim > 2:  # the base alone is stretched
        return RotaryConfig(theta=theta * rope.scale("alpha") ** (head_dim / (head_dim - 2)))
    known = (*_KINDS, *dict.fromkeys(family.rope_kinds.values()))
    if kind not in known:
        raise ModelError(
            f"{rope.origin}: the rope type {shortened(repr(kind))} is not supported; supported are "
            f"{', '.join(known)}"
        )
    if kind == "default":
        return RotaryConfig(theta=theta)
    if kind == "proportional":
        share = rope.number("partial_rotary_factor", 1.0, high=1.0)
        return RotaryConfig(theta=theta, kind=kind, factor=rope.scale("factor", 1.0), share=share)
    if kind == "linear":
        return RotaryConfig(theta=theta, kind=kind, factor=rope.scale("factor"))
    original = config.size(
        "original_max_position_embeddings",
        Most.POSITIONS,
        rope.size("original_max_position_embeddings", Most.POSITIONS, max_position),
    )
    if kind == "longrope":
        num_pairs = (rotary_dim_of(config, rope, head_dim, family.partial_rotary) or head_dim) // 2
        return RotaryConfig(
            theta=theta,
            kind=kind,
            factor=rope.scale("factor", max_position / original),
            original_max_position=original,
            attention_factor=optional_scale("attention_factor"),
            short_factors=rope.scales("short_factor", num_pairs),
            long_factors=rope.scales("long_factor", num_pairs),
        )
    if kind == "llama3":
        low, high = rope.scale("low_freq_factor"), rope.scale("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", high, f"more than low_freq_factor ({low:g})")
        return RotaryConfig(
            theta=theta,
            kind=kind,
            factor=rope.scale("factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RotaryConfig(
        theta=theta,
        kind=kind,
        factor=rope.scale("factor", max_position / original),
        original_max_position=original,
        beta_fast=rope.scale("beta_fast", 32.0),
        beta_slow=rope.scale("beta_slow", 1.0),
        attention_factor=optional_scale("attention_factor"),
        mscale=optional_scale("mscale"),
        mscale_all_dim=optional_scale("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )


def growing(family: Family, rope: Fields, rotary: RotaryConfig) -> RotaryConfig:
    """With what queries grow by, in families where they do."""
    if not (key := family.growth_key):
        return rotary
    rope = rope if rope.values else replace(rope, values=family.rope)
    context = "original_max_position_embeddings"
    return replace(
        rotary,
        query_growth=rope.number(key, above=-MAX_SCALE, high=MAX_SCALE),
        original_max_position=rotary.original_max_position or rope.size(context, Most.POSITIONS),
    )


def _default_theta(config: Fields, kind: str) -> float:
    """The base of layers of a kind, where their rotary embedding does not say it."""
    default = config.defaults["default_theta"]
    if kind == FULL:
        return config.theta("rope_theta", default["global"] if isinstance(default, dict) else default)
    if isinstance(default, dict):
        return config.theta("rope_local_base_freq", default["local"])
    return float(default)


def rope_of(config: Fields, family: Family, kind: str) -> Fields:
    """What a file has of the rotary embedding of layers of a kind."""
    scaling, parameters = config.nested("rope_scaling"), config.nested("rope_parameters")
    if family.rotary_by_kind:
        for key in parameters.values:
            if key not in (FULL, SLIDING):
                raise parameters.unsupported(key, f"{FULL} and {SLIDING} are")
        own = parameters.nested(kind)  # older files scale that of layers without a window alone
        if not own.boolean(
            "truncate", True
        ):  # which transformers' models read beside the kinds, where no file has it
            raise own.unsupported("truncate", "only true is, by kind of layer")
        return replace(own, values={**own.values, **scaling.values}) if kind == FULL else own
    rope = scaling if scaling.values else parameters
    for key, value in rope.values.items():
        if isinstance(value, dict):
            raise rope.unsupported(key, "one rotary embedding for all layers is")
    return rope
