"""The table of families in `docs/families.md`: what each differs in, and what was checked of it.
`python -m tests.families` writes it anew."""

from pathlib import Path

from penstock.models.gguf.config import ARCHITECTURES
from penstock.models.hf.config import family_defaults
from penstock.models.hf.families import FAMILIES, MULTIMODAL
from tests.engine.test_families import MODELS
from tests.engine.test_parity import MODELS as PLAIN
from tests.models.family_gguf import ARCHITECTURES as CHECKED_GGUF
from tests.oracle import HYBRIDS

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
_BEGIN, _END = "<!-- table -->\n", "<!-- end -->\n"
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
    "scores": "sigmoid router",
    "choice_bias": "router bias",
    "shared_gate": "shared expert without gate",
}
# What keys of a configuration mean.
_STATES = {
    "linear_num_key_heads": "delta net",
    "mamba_n_heads": "Mamba-2",
    "conv_L_cache": "short convolution",
}


def table() -> str:
    inside = {text: outer for outer, text in MULTIMODAL.items()}
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
        words += ["scaled embedding"] if family.embedding_is_scaled else []
        words += [f"window but for every {family.full_every}th layer"] if family.full_every else []
        words += ["rotary by kind of layer"] if family.rotary_by_kind else []
        words += ["rotary in windows only"] if family.rotated_in_windows else []
        words += [text for key, text in _SWITCHES.items() if key in {**family.model, **family.experts}]
        outer = inside.get(name, "")
        num_shapes = shapes.count(name) + (shapes.count(outer) if outer else 0)
        checked = f"{num_shapes} shape{'' if num_shapes == 1 else 's'}"
        checked = "`test_hybrid_parity.py`" if name in (*HYBRIDS, "qwen3_moe") else checked
        gguf = ", ".join(f"`{each}`" for each in files.get(name, []))
        rows.append(
            f"| `{name}` | {f'`{outer}`' if outer else ''} | {', '.join(words)} | {checked} | {gguf} |"
        )
    return "\n".join(rows) + "\n"


def page() -> str:
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    return before + _BEGIN + table() + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
