"""The table of families in `docs/families.md`: what each differs in, and what was checked of it.
`python -m tests.families` writes it anew."""

from pathlib import Path

import transformers

from penstock.models.gguf.config import ARCHITECTURES
from penstock.models.hf.config import family_defaults
from penstock.models.hf.families import FAMILIES, MULTIMODAL, NO_LAYER
from tests.engine.test_families import MODELS
from tests.engine.test_parity import MODELS as PLAIN
from tests.models.family_gguf import ARCHITECTURES as CHECKED_GGUF
from tests.models.sweep import families, runner
from tests.oracle import HYBRIDS

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
_BEGIN, _OTHERS, _END = "<!-- table -->\n", "<!-- others -->\n", "<!-- end -->\n"
# What switches of the decoder mean.
_SWITCHES = {
    "norm_all_heads": "q/k norm of all heads",
    "norm_after_rotary": "q/k norm after rotation",
    "post_norm": "norms after blocks",
    "layer_norm": "layer norms",
    "gated_mlp": "no gate",
    "parallel_blocks": "parallel blocks",
    "interleaved_rotary": "pairs side by side",
    "zero_centred_norm": "norms 1 + weight",
    "value_norm": "norms of values",
    "layer_scale": "layers scaled",
    "sinks": "sinks",
    "bias": "biased experts",
    "interleaved": "MXFP4",
    "scores": "sigmoid router",
    "choice_bias": "router bias",
    "shared_gate": "shared expert without gate",
}
# What keys of a configuration mean.
_STATES = {
    "linear_num_key_heads": "delta net",
    "mamba_n_heads": "Mamba-2",
    "layers_block_type": "Mamba-2, one block a layer",
    "conv_L_cache": "short convolution",
    "kv_lora_rank": "latent attention",
    "no_rope_layer_interval": "layers without rotation",
    "embedding_multiplier": "multipliers",
}


def table() -> str:
    inside: dict[str, list[str]] = {}
    for outer, text in MULTIMODAL.items():
        inside.setdefault(text, []).append(outer)
    files: dict[str, list[str]] = {}
    for name, architecture in ARCHITECTURES.items():
        files.setdefault(architecture.family, []).append(name)
    for name, architecture_name in CHECKED_GGUF.items():
        files.setdefault(MULTIMODAL.get(name, name), [architecture_name])
    shapes = [name for name, _ in [*PLAIN.values(), *MODELS]]
    rows = ["| family | within | differs in | float32 beside transformers | GGUF |", "|---|---|---|---|---|"]
    for name, family in FAMILIES.items():
        words = ["q/k norm"] if family.head_norm and not family.model.get("norm_all_heads") else []
        words += ["part of a head rotated"] if family.partial_rotary is not None else []
        words += [text for key, text in _STATES.items() if key in family_defaults(name)]
        words += ["biases of q, k and v"] if family.qkv_bias else []
        has_experts = family.keys.get("num_experts", "num_experts") in family_defaults(name)
        words += ["experts"] if has_experts else []
        words += ["soft caps"] if family_defaults(name).get("final_logit_softcapping") else []
        words += ["scaled embedding"] if family.embedding_is_scaled else []
        every = "all" if family.full_every == NO_LAYER else f"all but one of {family.full_every}"
        words += [f"window in {every} layers"] if family.full_every else []
        words += ["queries that grow with their position"] if family.growth_key else []
        words += ["longrope"] if "longrope" in family.rope_kinds.values() else []
        words += ["rotary by kind of layer"] if family.rotary_by_kind else []
        words += ["rotary in windows only"] if family.rotated_in_windows else []
        words += [text for key, text in _SWITCHES.items() if key in {**family.model, **family.experts}]
        outers = inside.get(name, [])
        num_shapes = sum(map(shapes.count, (name, *outers)))
        checked = f"{num_shapes} shape{'' if num_shapes == 1 else 's'}"
        checked = "`test_hybrid_parity.py`" if name in (*HYBRIDS, "qwen3_moe") else checked
        gguf = ", ".join(f"`{each}`" for each in files.get(name, []))
        rows.append(f"| `{name}` | {_listed(outers)} | {', '.join(words)} | {checked} | {gguf} |")
    return "\n".join(rows) + "\n"


def others() -> str:
    """Families that are no rows of the table, and how many there are of all."""
    by_transformers: list[str] = []
    refused: dict[str, list[str]] = {}
    for name in (name for name in families() if name not in FAMILIES and name not in MULTIMODAL):
        if (by := runner(name)) == "transformers":
            by_transformers.append(name)
        else:
            refused.setdefault(by, []).append(name)
    num_rows = sum(name in FAMILIES for name in families())
    lines = [
        f"Of the {len(families())} decoders of text that transformers {transformers.__version__} has, {num_rows} are "
        f"rows of the table above, {len(by_transformers)} run by transformers' code:",
        "",
        _listed(by_transformers) + ".",
        "",
        "Within multimodal ones: "
        + _listed([outer for outer, text in MULTIMODAL.items() if text not in FAMILIES])
        + ".",
        "",
        "| refused, since | families |",
        "|---|---|",
        *(f"| {why} | {_listed(names)} |" for why, names in sorted(refused.items())),
    ]
    return "\n".join(lines) + "\n"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page() -> str:
    text = PAGE.read_text()
    for begin, content in ((_BEGIN, table()), (_OTHERS, others())):
        before, _, rest = text.partition(begin)
        text = before + begin + content + _END + rest.partition(_END)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
