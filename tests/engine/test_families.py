"""Every family's answer is transformers', in whatever chunks its prompt is read."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.errors import ModelFileError
from penstock.kernels.interface import select_kernels
from penstock.kernels.quantised import MXFP4, QuantisedWeight, mxfp4_values
from penstock.layers.mlp import ExpertMLP
from penstock.models.gguf.file import GgufFile
from penstock.models.loading import load_decoder
from penstock.plan.grids import STATE_GRID
from tests.engine.test_parity import relative_error
from tests.models.builders import write_gguf
from tests.models.family_gguf import ARCHITECTURES, write_family_gguf
from tests.oracle import LONGROPE, NUM_GREEDY, Oracle, load_model, make_oracle, random_prompt, run_prompt

NUM_TOKENS, SHORT = 170, 29  # several windows, and less than one
CHUNKS: tuple[dict[str, Any], ...] = (
    {"chunk_size": 0},
    {"chunk_size": 1},
    {"chunk_size": 7},
    {"chunk_size": 64},
    {"chunk_size": 100},
    {"chunk_ends": (3, 64, 65, 131, NUM_TOKENS)},
)

SCALED = (
    ("full_attention", (("rope_type", "linear"), ("factor", 4.0), ("rope_theta", 1e5))),
    ("sliding_attention", (("rope_type", "default"), ("rope_theta", 2e4))),
)
_GROWTH = (("llama_4_scaling_beta", 0.1), ("original_max_position_embeddings", 60))
_PLAIN_ROPE = (("rope_type", "default"),)
_LATENT_YARN = (("rope_type", "yarn"), ("factor", 4.0), ("mscale", 1.0), ("mscale_all_dim", 0.8))
# By transformers' name, with what differs from `tests.oracle`.
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {}),
    ("qwen2_moe", {}),
    ("qwen2_moe", {"qkv_bias": False, "num_hidden_layers": 3, "mlp_only_layers": (1,)}),
    ("qwen2_vl", {}),
    ("qwen2_vl", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    ("qwen2_5_vl", {}),
    ("qwen2_5_vl", {"num_key_value_heads": 1, "intermediate_size": 100}),
    ("qwen3_vl", {"num_key_value_heads": 3}),
    ("qwen3_vl", {"head_dim": 32, "tie_word_embeddings": True}),
    ("qwen3_vl_moe", {}),
    ("qwen3_vl_moe", {"num_experts_per_tok": 1, "num_hidden_layers": 3, "mlp_only_layers": (1,)}),
    ("mistral3", {}),
    ("ministral", {}),
    ("ministral", {"layer_types": ("full_attention", "sliding_attention"), "num_key_value_heads": 6}),
    ("ministral3", {}),
    ("ministral3", {"sliding_window": 40, "rope": (("rope_type", "default"), *_GROWTH)}),
    ("seed_oss", {}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("phi3", {}),
    ("phi3", {"rope": (("rope_type", "default"), ("partial_rotary_factor", 0.5)), "intermediate_size": 100}),
    ("phi3", {"rope": LONGROPE, "original_max_position_embeddings": 64}),
    ("phi3", {"rope": (*LONGROPE, ("factor", 3.0))}),
    ("smollm3", {}),
    ("smollm3", {"no_rope_layers": (0, 1, 1, 0), "tie_word_embeddings": True}),
    ("olmo2", {}),
    ("olmo2", {"num_key_value_heads": 6, "attention_bias": True}),
    ("olmoe", {}),
    ("olmoe", {"norm_topk_prob": True, "num_key_value_heads": 6}),
    ("granite", {}),
    ("granite", {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True}),
    ("granitemoe", {}),
    ("granitemoe", {"attention_bias": True, "tie_word_embeddings": True, "num_experts_per_tok": 1}),
    ("granitemoeshared", {}),
    ("granitemoeshared", {"shared_intermediate_size": 0}),
    ("glm", {}),
    ("glm", {"attention_bias": True, "rope": (("rope_type", "default"), ("partial_rotary_factor", 1.0))}),
    ("glm4", {}),
    ("glm4", {"attention_bias": False, "rope": (("rope_type", "default"), ("partial_rotary_factor", 1.0))}),
    ("glm4_moe", {}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": True, "n_group": 1, "topk_group": 1}),
    ("dots1", {}),
    ("dots1", {"attention_bias": True, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    ("starcoder2", {}),
    ("starcoder2", {"use_bias": False, "hidden_act": "gelu", "intermediate_size": 100}),
    ("ernie4_5", {}),
    ("ernie4_5", {"use_bias": True}),
    ("ernie4_5_moe", {}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "moe_layer_start_index": 0}),
    ("hunyuan_v1_dense", {}),
    ("hunyuan_v1_dense", {"rope": (("rope_type", "dynamic"), ("alpha", 50.0), ("factor", 1.0))}),
    ("hunyuan_v1_moe", {}),
    ("hunyuan_v1_moe", {"moe_topk": (2, 2)}),
    ("apertus", {}),
    ("apertus", {"attention_bias": True, "num_key_value_heads": 6}),
    ("arcee", {}),
    ("arcee", {"mlp_bias": True}),
    ("gemma", {}),
    ("gemma", {"hidden_act": "gelu", "tie_word_embeddings": True}),
    ("gemma2", {}),
    ("gemma2", {"sliding_window": 200, "layer_types": ("full_attention", "sliding_attention")}),
    ("gemma3_text", {}),
    ("gemma3_text", {"rope": SCALED, "sliding_window": 64, "final_logit_softcapping": 5.0}),
    ("gemma3", {"head_dim": 32}),
    ("gemma4_text", {}),
    ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True}),
    ("gemma4_text", {"global_head_dim": 16, "rope": SCALED, "final_logit_softcapping": 5.0}),
    ("cohere2", {}),
    ("cohere2", {"sliding_window": 4096, "tie_word_embeddings": True, "attention_bias": True}),
    ("olmo3", {}),
    ("olmo3", {"rope": SCALED, "num_key_value_heads": 6, "sliding_window": 3}),
    ("exaone4", {}),
    ("exaone4", {"sliding_window": None, "layer_types": ("full_attention",) * 3}),
    ("gpt_oss", {}),
    (
        "gpt_oss",
        {"swiglu_limit": 7.0, "intermediate_size": 40, "num_experts_per_tok": 1, "rope": _PLAIN_ROPE},
    ),
    ("cohere", {}),
    ("cohere", {"tie_word_embeddings": True, "attention_bias": True}),
    ("helium", {}),
    ("helium", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    ("nemotron", {}),
    ("nemotron", {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 1.0}),
    ("stablelm", {}),
    ("stablelm", {"use_qkv_bias": True}),
    ("deepseek_v2", {"n_group": None, "topk_method": "greedy", "q_lora_rank": None}),
    ("deepseek_v2", {}),
    ("deepseek_v3", {}),
    (
        "deepseek_v3",
        {"rope_interleave": False, "attention_bias": True, "rope": _LATENT_YARN, "v_head_dim": 8},
    ),
    ("glm4_moe_lite", {"mlp_layer_types": ("dense", "sparse", "dense")}),
    ("glm4_moe_lite", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    ("mistral4", {}),
    ("mistral4", {"q_lora_rank": None, "first_k_dense_replace": 2, "rope": (*_LATENT_YARN, *_GROWTH)}),
    ("glm4v", {}),
    ("glm4v", {"num_key_value_heads": 1, "rope": (("rope_type", "default"), ("mrope_section", (4, 2, 2)))}),
    ("glm4v_moe", {}),
    ("glm4v_moe", {"attention_bias": False, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    ("lfm2", {}),
    ("lfm2", {"conv_bias": True, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False}),
    ("lfm2_moe", {}),
    ("lfm2_moe", {"use_expert_bias": False, "layer_types": ("full_attention", "conv", "conv", "conv")}),
    ("bamba", {}),
    ("bamba", {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_n_groups": 1, "mlp_bias": True}),
    ("falcon_h1", {}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    ("nemotron_h", {}),
    ("nemotron_h", {"layers_block_type": ("mlp", "full_attention", "linear_attention"), "use_bias": True}),
    ("granitemoehybrid", {}),
    ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
]


# One family for each mechanism.
MECHANISMS = (
    *("olmo2", "granite", "smollm3", "glm4", "glm4_moe", "starcoder2", "hunyuan_v1_moe", "apertus"),
    *("gemma", "cohere", "nemotron", "gemma2", "gemma3_text", "cohere2", "olmo3", "gpt_oss"),
)


@pytest.mark.parametrize(("family", "changes"), MODELS, ids=lambda value: str(value))
def test_a_family_is_transformers(family: str, changes: dict[str, Any]) -> None:
    oracle, prompt = make_oracle(family, **changes), random_prompt(NUM_TOKENS)
    logits, tokens = oracle.logits(prompt), oracle.greedy(prompt, NUM_GREEDY)
    model = load_model(oracle.folder)
    whole = run_prompt(model, prompt).logits
    assert whole is not None
    assert relative_error(whole, logits) < 1e-4
    short = prompt[:SHORT]
    for chunk_size in (0, 7):
        found = run_prompt(model, short, chunk_size=chunk_size).logits
        assert found is not None
        assert relative_error(found, oracle.logits(short)) < 1e-4
    for chunks in CHUNKS:
        run = run_prompt(model, prompt, **chunks, max_tokens=NUM_GREEDY)
        assert run.logits is not None
        if model.config.mamba is None or chunks.get("chunk_size", 1) % STATE_GRID == 0:
            assert torch.equal(run.logits, whole), chunks
        else:  # off the grid of states
            assert relative_error(run.logits, logits) < 1e-4, chunks
        while run.finish_reason is None:
            run.step()
        assert run.generated == tokens, chunks


@pytest.mark.parametrize("family", MECHANISMS)
def test_a_family_keeps_its_bits_in_bfloat16(family: str) -> None:
    model, prompt = load_model(make_oracle(family).folder, torch.bfloat16), random_prompt(NUM_TOKENS)
    whole = run_prompt(model, prompt).logits
    assert whole is not None
    for chunks in CHUNKS[2:]:
        logits = run_prompt(model, prompt, **chunks).logits
        assert logits is not None
        assert torch.equal(logits, whole), chunks


def test_experts_in_published_blocks(tmp_path: Path) -> None:
    """gpt-oss as it is published: floats of 4 bits, which stay so where kernels multiply with blocks."""
    oracle = make_oracle("gpt_oss", intermediate_size=64)
    shutil.copytree(oracle.folder, tmp_path, dirs_exist_ok=True)
    saved, model = load_file(tmp_path / "model.safetensors"), copy.deepcopy(oracle.model)
    generator = torch.Generator().manual_seed(3)
    for name, values in list(saved.items()):
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            count, size, outputs = values.shape
            shape = (count, outputs, size // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 125, shape, dtype=torch.uint8, generator=generator)
            saved |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            del saved[name]
            theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            model.get_parameter(name).data.copy_(theirs)
    save_file(saved, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    prompt = random_prompt(90)
    logits = Oracle(model, tmp_path).logits(prompt)
    ours = run_prompt(load_model(tmp_path), prompt).logits
    assert ours is not None
    assert relative_error(ours, logits) < 1e-4
    kept = load_model(tmp_path, torch.bfloat16)
    rounded = run_prompt(kept, prompt, chunk_size=64).logits
    assert rounded is not None
    assert relative_error(rounded, logits) < 0.1
    mlp = kept.layers[0].mlp
    assert isinstance(mlp, ExpertMLP)
    assert isinstance(mlp.experts, tuple)
    blocks_are_kept = kept.kernels.quantised is not None
    assert isinstance(mlp.experts[0].down.parts[0], QuantisedWeight) == blocks_are_kept


_ORIGINAL = ("original_max_position_embeddings", 1024)
# What files do not say.
KNOWN_TO_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layer_interval": 4},
    "gemma": {"tie_word_embeddings": True},
    "cohere": {"tie_word_embeddings": True},
    "phi3": {"rope": LONGROPE, "original_max_position_embeddings": 60},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 6,
        "sliding_window_pattern": 6,
        "rope": (SCALED[0], ("sliding_attention", (("rope_type", "default"), ("rope_theta", 1e4)))),
    },
    "cohere2": {"tie_word_embeddings": True, "num_hidden_layers": 4, "sliding_window_pattern": 4},
    "olmo3": {
        "rope": (
            ("full_attention", (("rope_type", "yarn"), ("factor", 4.0), ("rope_theta", 1e5), _ORIGINAL)),
            ("sliding_attention", (("rope_type", "default"), ("rope_theta", 1e5))),
        )
    },
    "exaone4": {"num_hidden_layers": 4, "sliding_window_pattern": 4},
    "gpt_oss": {"swiglu_limit": 7.0},
    "ministral3": {
        "rope": (("rope_type", "yarn"), ("factor", 4.0), ("mscale", 1.0), ("mscale_all_dim", 1.0), *_GROWTH)
    },
    "deepseek_v3": {"rope": (*_LATENT_YARN[:2], ("mscale", 0.8), ("mscale_all_dim", 0.8), _ORIGINAL)},
    "mistral4": {"rope": (*_LATENT_YARN[:2], ("mscale", 0.8), ("mscale_all_dim", 0.8), *_GROWTH)},
    "lfm2_moe": {"routed_scaling_factor": 1.0, "tie_word_embeddings": True},
    "granitemoehybrid": {"mamba_n_groups": 1},
    "nemotron_h": {"layers_block_type": ("linear_attention", "moe", "linear_attention", "full_attention")},
}


# Whose files say of single layers what they are.
OTHER_LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True}),
    ("olmo3", {**KNOWN_TO_LLAMA_CPP["olmo3"], "layer_types": ("full_attention", "sliding_attention") * 2}),
    ("exaone4", {"layer_types": ("full_attention", "sliding_attention", "sliding_attention")}),
]


_OLDER_LATENT = {
    "attention.key_length_mla": None,
    "attention.value_length_mla": None,
    "attention.key_length": 24,
    "attention.value_length": 24,
    "attention.head_count_kv": 6,
}
_YARN = (("rope_type", "yarn"), ("factor", 4.0), ("attention_factor", 1.3), _ORIGINAL)
# Families, what differs of the model, and of the metadata of its file, as older converters or others left it.
OTHER_METADATA: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("deepseek_v2", {}, _OLDER_LATENT),
    ("deepseek_v3", KNOWN_TO_LLAMA_CPP["deepseek_v3"], {"expert_gating_func": None}),
    (
        "gemma2",
        {**KNOWN_TO_LLAMA_CPP["gemma2"], "attn_logit_softcapping": 50.0},
        dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping")),
    ),
    ("mistral", {"rope": _YARN}, {"rope.scaling.yarn_attn_factor": 1.3}),
    (
        "granitemoehybrid",
        {"mamba_n_groups": 1, "position_embedding_type": "rope"},
        {"rope.scaling.finetuned": None},
    ),
    ("gemma3_text", KNOWN_TO_LLAMA_CPP["gemma3_text"], {"attention.sliding_window_pattern": 6}),
    ("glm4_moe", {}, {"expert_gating_func": None}),
    ("mistral4", KNOWN_TO_LLAMA_CPP["mistral4"], {"attention.temperature_scale": None}),
]


@pytest.mark.parametrize(("family", "changes", "metadata"), OTHER_METADATA, ids=lambda value: str(value)[:40])
def test_a_gguf_file_with_other_metadata_is_its_folder(
    family: str, changes: dict[str, Any], metadata: dict[str, Any], tmp_path: Path
) -> None:
    _compare(make_oracle(family, **changes), tmp_path, **metadata)


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, KNOWN_TO_LLAMA_CPP.get(family, {})) for family in ARCHITECTURES), *OTHER_LAYERS],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gguf_file_is_its_folder(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    _compare(make_oracle(family, **changes), tmp_path)


def _compare(oracle: Oracle, tmp_path: Path, **metadata: Any) -> None:
    file = GgufFile(write_family_gguf(oracle.model, oracle.folder, tmp_path / "model.gguf", **metadata))
    cpu, prompt = torch.device("cpu"), random_prompt(90)
    model = load_decoder(file, select_kernels(cpu), torch.float32, cpu)
    ours, theirs = run_prompt(model, prompt).logits, run_prompt(load_model(oracle.folder), prompt).logits
    assert ours is not None
    assert theirs is not None
    assert relative_error(ours, theirs) < 1e-5


def test_experts_of_a_gguf_file_in_blocks_of_floats(tmp_path: Path) -> None:
    oracle = make_oracle("gpt_oss", swiglu_limit=7.0, intermediate_size=64)
    file = GgufFile(write_family_gguf(oracle.model, oracle.folder, tmp_path / "model.gguf", Kind.MXFP4))
    cpu, prompt = torch.device("cpu"), random_prompt(90)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    assert file.block_form(name) is MXFP4
    values = torch.empty(file.shape(name))
    file.load_into(name, values)
    assert torch.equal(values, torch.cat([mxfp4_values(blocks) for blocks in file.blocks(name)]))
    model = load_decoder(file, select_kernels(cpu), torch.float32, cpu)
    ours, theirs = run_prompt(model, prompt).logits, oracle.logits(prompt)
    assert ours is not None
    assert relative_error(ours, theirs) < 0.2


def test_experts_with_scales_of_their_own_stay_in_blocks(tmp_path: Path) -> None:
    """Gemma 4: what an expert's output is multiplied by does not touch its weights."""
    oracle = make_oracle("gemma4_text", enable_moe_block=True, moe_intermediate_size=64)
    file = GgufFile(write_family_gguf(oracle.model, oracle.folder, tmp_path / "model.gguf", Kind.Q8_0))
    cpu, prompt, kernels = torch.device("cpu"), random_prompt(90), select_kernels(torch.device("cpu"))
    exact = run_prompt(load_decoder(file, kernels, torch.float32, cpu), prompt).logits
    kept = load_decoder(file, kernels, torch.bfloat16, cpu)
    rounded = run_prompt(kept, prompt, chunk_size=64).logits
    assert exact is not None
    assert rounded is not None
    assert relative_error(exact, oracle.logits(prompt)) < 0.05
    assert relative_error(rounded, exact) < 0.1
    mlp = kept.layers[0].mlp
    assert isinstance(mlp, ExpertMLP)
    assert isinstance(mlp.experts, tuple)
    assert isinstance(mlp.experts[0].down.parts[0], QuantisedWeight) == (kernels.quantised is not None)


def test_scales_of_weights_that_a_family_has_none_of_are_refused(tmp_path: Path) -> None:
    oracle = make_oracle("mixtral")
    path = write_family_gguf(oracle.model, oracle.folder, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(path)
    stored = {each.name: (each.data, each.tensor_type) for each in reader.tensors}
    stored["blk.0.ffn_down_exps.scale"] = (np.ones(6, dtype=np.float32), Kind.F32)
    values = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    with pytest.raises(ModelFileError, match=r"ffn_down_exps\.scale"):
        GgufFile(write_gguf(tmp_path / "scaled.gguf", values, stored, "llama"))
