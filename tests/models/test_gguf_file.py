"""A GGUF file gives the weights of the model that it was made of, in transformers' layout."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from penstock.engine.fingerprint import weights_digest
from penstock.errors import ModelError, ModelFileError
from penstock.models.bytefile import parts_of
from penstock.models.gguf import file as gguf_file
from penstock.models.gguf.file import ACCEPTED_KINDS, UNPACKED, GgufFile
from penstock.models.opened import open_model
from penstock.models.source import check_source
from penstock.plan.model import ModelConfig, RotaryConfig
from tests.models.builders import (
    SHAPE,
    TOKENIZER,
    gguf_metadata,
    gguf_name,
    hf_config,
    hf_model,
    load_tensor,
    permute,
    write_gguf,
)

Tensors = dict[str, tuple[np.ndarray[Any, Any], Kind]]


def float_tensors(model: Any, architecture: str) -> Tensors:
    """A model's weights in F32, as llama.cpp's converter orders them."""
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    tensors: Tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        data = value.numpy()
        module = name.split(".")[-2]
        if architecture == "llama" and module in heads:
            data = permute(data, heads[module])
        tensors[gguf_name(name)] = (data, Kind.F32)
    return tensors


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "hidden_size": 48}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 24}),
    ],
)
def test_weights_and_shape_equal_those_of_the_model(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    model = hf_model(family, **changes)
    config = model.config
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    metadata = gguf_metadata(config, family, **{f"{family}.attention.key_length": head_dim})
    path = write_gguf(tmp_path / "model.gguf", metadata, float_tensors(model, family), family)
    source = GgufFile(path)
    assert check_source(source) == frozenset()
    for name in source.names():
        assert torch.equal(load_tensor(source, name), model.state_dict()[name])
    assert source.config == ModelConfig(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=2,
        num_heads=4,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        max_position=256,
        norm_eps=float(np.float32(config.rms_norm_eps)),
        tied_head=config.tie_word_embeddings,
        qkv_bias=family == "qwen2" or "attention_bias" in changes,
        out_bias="attention_bias" in changes,
        mlp_bias="mlp_bias" in changes,
        head_norm=family == "qwen3",
    )


def quantised(values: np.ndarray[Any, Any], kind: Kind, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Blocks of a kind: of these values where gguf can quantise, else random ones with finite scales."""
    blocks: np.ndarray[Any, Any]
    try:
        blocks = gguf.quants.quantize(values, kind)
        return blocks
    except NotImplementedError:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (values.size // block, block_bytes), dtype=np.uint8)
        scales = rng.normal(0, 0.01, (len(blocks), 2)).astype(np.float16).view(np.uint8)
        if kind in (Kind.Q6_K, Kind.Q3_K):
            blocks[:, -2:] = scales[:, :2]
        elif kind in (Kind.Q2_K, Kind.TQ1_0):
            blocks[:, -4:] = scales
        elif kind is Kind.IQ1_M:  # its scale's highest bits are those of the last
            blocks[:, -1] &= 0x2F
        else:
            blocks[:, :4] = scales
        return blocks.reshape(values.shape[0], -1)


@pytest.mark.parametrize("kind", ACCEPTED_KINDS)
@pytest.mark.parametrize("slice_elements", [1, 5000, 1 << 18])
def test_every_kind_is_dequantised_as_gguf_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, slice_elements: int
) -> None:
    monkeypatch.setattr(gguf_file, "_SLICE_ELEMENTS", slice_elements)
    rng = np.random.default_rng(1)
    config = hf_config("llama", hidden_size=512, num_attention_heads=8, num_key_value_heads=2)
    names = {"token_embd.weight": 96, "blk.0.attn_q.weight": 512, "blk.0.attn_k.weight": 128}
    tensors: Tensors = {}
    wholes = {}
    for name, rows in names.items():
        data = quantised(rng.normal(0, 1, (rows, 512)).astype(np.float32), kind, rng)
        tensors[name] = (data, kind)
        wholes[name] = gguf.quants.dequantize(data, kind)
    source = GgufFile(write_gguf(tmp_path / "model.gguf", gguf_metadata(config), tensors))
    for name, hf_name in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight"),
    ):
        whole = wholes[name]
        if name != "token_embd.weight":  # back from llama.cpp's order, one row at a time
            back = np.argsort(permute(np.arange(len(whole)), len(whole) // 64))
            whole = whole[back]
        assert np.isfinite(whole).all()
        for dtype in (torch.float32, torch.bfloat16):
            loaded = load_tensor(source, hf_name, dtype)
            assert torch.equal(loaded, torch.from_numpy(whole.copy()).to(dtype))
        fused = torch.zeros(len(whole) + 8, 520)
        source.load_into(hf_name, fused[4:-4, 3:-5])
        assert torch.equal(fused[4:-4, 3:-5], torch.from_numpy(whole.copy()))


@pytest.mark.parametrize("kind", UNPACKED)
def test_blocks_that_no_form_has_are_plain_numbers(tmp_path: Path, kind: Kind) -> None:
    rng = np.random.default_rng(2)
    config = hf_config("llama", hidden_size=512, num_attention_heads=8, num_key_value_heads=2)
    data = quantised(rng.normal(0, 1, (96, 512)).astype(np.float32), kind, rng)
    source = GgufFile(
        write_gguf(tmp_path / "model.gguf", gguf_metadata(config), {"token_embd.weight": (data, kind)})
    )
    assert source.block_form("model.embed_tokens.weight") is None
    assert source.unpacked == (kind.name,)


@pytest.mark.parametrize("kind", [Kind.Q8_K, Kind.I8, Kind.F64])
def test_other_kinds_are_refused_with_the_tensor_and_what_is_accepted(tmp_path: Path, kind: Kind) -> None:
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    data = np.zeros((4, block_bytes), dtype=np.uint8)
    metadata = gguf_metadata(hf_config("llama"))
    tensors = {"token_embd.weight": (np.zeros((96, 64), dtype=np.float32), Kind.F32)}
    tensors["output.weight"] = (data, kind)
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    with pytest.raises(ModelFileError, match=rf"output\.weight is {kind.name}; accepted are F32, .*Q6_K"):
        GgufFile(path)


def config_of(tmp_path: Path, **changes: Any) -> ModelConfig:
    tensors: Tensors = {"token_embd.weight": (np.zeros((96, 64), dtype=np.float32), Kind.F32)}
    if "divisors" in changes:
        tensors["rope_freqs.weight"] = (np.array(changes.pop("divisors"), dtype=np.float32), Kind.F32)
    metadata = gguf_metadata(hf_config("llama"), **changes)
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return GgufFile(write_gguf(tmp_path / "model.gguf", metadata, tensors)).config


YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "rotary"),
    [
        ({}, RotaryConfig()),
        ({"llama.rope.freq_base": 500_000.0}, RotaryConfig(theta=500_000.0)),
        ({"llama.rope.scaling.factor": 2.0}, RotaryConfig(kind="linear", factor=2.0)),
        ({"llama.rope.scale_linear": 4.0}, RotaryConfig(kind="linear", factor=4.0)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}, RotaryConfig()),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            RotaryConfig(kind="yarn", factor=4.0, original_max_position=64),
        ),
        ({"divisors": [1, 2, 4, 8, 8, 8, 8, 8]}, RotaryConfig(frequency_divisors=(1, 2, 4, 8, 8, 8, 8, 8))),
    ],
)
def test_rotary_metadata(tmp_path: Path, changes: dict[str, Any], rotary: RotaryConfig) -> None:
    assert config_of(tmp_path, **changes).rotary == rotary


def test_token_ids(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        **{
            "tokenizer.ggml.eos_token_id": 5,
            "tokenizer.ggml.eot_token_id": 6,
            "tokenizer.ggml.eom_token_id": 0xFFFFFFFF,
        },
    )
    assert config.eos_token_ids == (5, 6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"llama.attention.sliding_window": 128}, "sliding window of 128"),
        ({"llama.attention.causal": False}, "attention.causal of false is not supported"),
        ({"llama.expert_count": 8}, "expert_used_count is missing"),
        ({"llama.rope.dimension_count": 8}, "only a part of each head"),
        ({"llama.attention.value_length": 8}, "values of another size"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.attention.temperature_scale": 0.1}, "temperature_scale is 0.1"),
        ({"llama.embedding_length_per_layer_input": 256}, "per_layer_input is 256"),
        ({"split.count": 3}, "open the first, -00001-of-00003.gguf"),
        ({"llama.embedding_length": 0}, "embedding_length is 0"),
        ({"llama.embedding_length": None}, "embedding_length is missing"),
        ({"llama.block_count": -5}, "block_count is -5"),
        ({"llama.block_count": 1 << 30}, "block_count"),
        ({"llama.context_length": "long"}, "context_length is 'long'"),
        ({"llama.attention.head_count": [1, 2]}, "head_count"),
        ({"llama.attention.head_count_kv": 3}, "4 heads cannot share 3"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
        ({"llama.rope.freq_base": 1.0}, "freq_base is 1.0"),
        ({"llama.rope.scaling.factor": float("inf")}, "scaling.factor is inf"),
        ({"llama.rope.scaling.factor": 1e38}, "scaling.factor is"),
        ({**YARN, "llama.rope.scaling.yarn_beta_fast": 0.0}, "beta_fast is 0.0"),
        ({**YARN, "llama.rope.scaling.yarn_beta_slow": 1e38}, "beta_slow is"),
        ({**YARN, "llama.rope.scaling.attn_factor": float("nan")}, "attn_factor is nan"),
        ({"llama.attention.key_length": 5}, "head size of 5"),
        ({"divisors": [1e-30] * 8}, "rope_freqs"),
        ({"divisors": [1.0, 2.0]}, "rope_freqs"),
        ({"divisors": [0.0] * 8}, "rope_freqs"),
        ({"divisors": [[1.0] * 8] * 8}, "rope_freqs"),
    ],
)
def test_metadata_that_cannot_be_used_is_an_error(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        config_of(tmp_path, **changes)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {}, {}, "mamba")
    with pytest.raises(ModelError, match="'mamba'; supported in GGUF are llama, qwen2, qwen3"):
        GgufFile(path)


def test_a_sliding_window_as_wide_as_the_context_is_none(tmp_path: Path) -> None:
    assert config_of(tmp_path, **{"llama.attention.sliding_window": 256}).max_position == 256


def split(tmp_path: Path, changes: dict[int, dict[str, Any]]) -> tuple[Path, Path]:
    """A model as one file and as three; `changes` are of the metadata of some."""
    model = hf_model("llama")
    metadata, tensors = gguf_metadata(model.config) | TOKENIZER, float_tensors(model, "llama")
    whole, names = write_gguf(tmp_path / "whole.gguf", metadata, tensors), list(tensors)
    first = tmp_path / "m-00001-of-00003.gguf"
    for index, path in enumerate(parts_of(first)):
        own = {
            "split.no": index,
            "split.count": 3,
            "split.tensors.count": len(names),
            **changes.get(index, {}),
        }
        write_gguf(
            path, (metadata if not index else {}) | own, {name: tensors[name] for name in names[index::3]}
        )
    return whole, first


def test_a_model_in_several_files_is_that_in_one(tmp_path: Path) -> None:
    whole, first = (open_model(path).source for path in split(tmp_path, {}))
    assert whole.names() == first.names()
    for name in whole.names():
        assert torch.equal(load_tensor(whole, name), load_tensor(first, name))
    digest = weights_digest(first_path := tmp_path / "m-00001-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").write_bytes(b"GGUF")
    assert weights_digest(first_path) != digest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({1: {"split.no": 2}}, "00002-of-00003.gguf is not part 2 of"),
        ({0: {"split.tensors.count": 9000}}, "have .* tensors, not 9000"),
        ({0: {"split.count": 4}}, "one of 4 parts; open the first, -00001-of-00004.gguf"),
        ({0: {"split.no": 1}}, "open the first"),
    ],
)
def test_parts_that_are_not_of_one_model_are_an_error(
    tmp_path: Path, changes: dict[int, dict[str, Any]], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        GgufFile(split(tmp_path, changes)[1])


def test_a_part_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    _, first = split(tmp_path, {})
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf"):
        GgufFile(first)


def test_open_model_checks_every_tensor(tmp_path: Path) -> None:
    model = hf_model("llama")
    tensors = float_tensors(model, "llama")
    metadata = gguf_metadata(model.config) | TOKENIZER
    opened = open_model(write_gguf(tmp_path / "whole.gguf", metadata, tensors))
    assert opened.source.shape("model.norm.weight") == (SHAPE["hidden_size"],)
    assert opened.tokenizer.encode("ab", add_special_tokens=True)[0] == 1
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.up_proj\.weight missing"):
        open_model(write_gguf(tmp_path / "part.gguf", metadata, tensors))


def test_the_default_model(smollm2_path: Path) -> None:
    """Every tensor equals what gguf's own reader and dequantiser make of it."""
    source = open_model(smollm2_path).source
    config = source.config
    assert (config.family, config.num_layers, config.hidden_size, config.vocab_size) == (
        "llama",
        30,
        576,
        49152,
    )
    assert config.tied_head
    assert config.rotary == RotaryConfig(theta=100_000.0)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_path).tensors}
    assert len(source.names()) == len(tensors)
    for name in (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.7.self_attn.k_proj.weight",
        "model.layers.15.self_attn.v_proj.weight",
        "model.layers.29.mlp.down_proj.weight",
    ):
        tensor = tensors[gguf_name(name)]
        whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if "q_proj" in name or "k_proj" in name:
            whole = whole[np.argsort(permute(np.arange(len(whole)), len(whole) // 64))]
        assert torch.equal(load_tensor(source, name), torch.from_numpy(whole.copy()))
