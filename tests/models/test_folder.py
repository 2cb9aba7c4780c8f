"""A saved folder gives back its model's weights, and a bad one gives an error."""

import contextlib
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.errors import ModelError, ModelFileError
from penstock.models import bytefile
from penstock.models.hf.folder import HfFolder
from penstock.models.source import check_source
from penstock.models.weights import expected_shapes
from tests.models.builders import hf_model, load_tensor

EMBEDDING = "model.embed_tokens.weight"
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "head_dim": 24}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    ("mistral", {"head_dim": 32}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 12, "attention_bias": True, "num_key_value_heads": 1}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
def test_loaded_weights_equal_saved_ones(
    tmp_path: Path, family: str, changes: dict[str, Any], shard_size: str
) -> None:
    model = hf_model(family, **changes)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    source = HfFolder(tmp_path)
    assert check_source(source) == frozenset()
    state = model.state_dict()
    expected = expected_shapes(source.config)
    tied = {"lm_head.weight"} if source.config.tied_head else set()
    assert expected.keys() | tied == state.keys()
    for name in expected:
        assert torch.equal(load_tensor(source, name), state[name])
    source.close()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_load_into_converts_in_slices_and_into_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, wanted: torch.dtype
) -> None:
    monkeypatch.setattr(bytefile, "SLICE_BYTES", 1000)  # a few rows at a time, and not a whole number of them
    model = hf_model("llama").to(stored)
    model.save_pretrained(tmp_path)
    source = HfFolder(tmp_path)
    query, key = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk")
    fused = torch.zeros(64 + 32, 64, dtype=wanted)
    source.load_into(query, fused[:64])
    source.load_into(key, fused[64:])
    state = model.state_dict()
    assert torch.equal(fused, torch.cat([state[query], state[key]]).to(wanted))
    transposed = torch.zeros(64, 32, dtype=wanted)
    source.load_into(key, transposed.T)
    assert torch.equal(transposed, state[key].T.to(wanted))


def test_a_wrong_shape_is_an_error_with_both_shapes(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    source = HfFolder(tmp_path)
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight has shape \[64\] .* \[65\]"):
        source.load_into("model.norm.weight", torch.empty(65))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", 1 << 19, "model.embed_tokens.weight is \\[96, 64\\]"),
        ("vocab_size", 1 << 23, "model.embed_tokens.weight is \\[96, 64\\]"),
        ("num_hidden_layers", 4000, "model.layers.2.input_layernorm.weight.* more missing"),
        ("tie_word_embeddings", False, "lm_head.weight missing"),
    ],
)
def test_a_configuration_that_does_not_fit_the_file_is_found_before_loading(
    tmp_path: Path, key: str, value: object, words: str
) -> None:
    hf_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value, "head_dim": 16}))
    with pytest.raises(ModelFileError, match=words):
        check_source(HfFolder(tmp_path))


@pytest.mark.parametrize("kind", ["alike", "another", "the only one", "another type", "another shape"])
def test_a_head_that_is_to_be_tied_and_is_stored_all_the_same(tmp_path: Path, kind: str) -> None:
    model = hf_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    state = dict(load_file(tmp_path / "model.safetensors"))
    head = state[EMBEDDING].clone()
    head[-1, -1] += kind == "another"
    state["lm_head.weight"] = head.double() if kind == "another type" else head
    if kind == "the only one":
        del state[EMBEDDING]
    if kind == "another shape":
        state["lm_head.weight"] = head[:-1].clone()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})

    source = HfFolder(tmp_path)
    if kind == "another shape":
        with pytest.raises(ModelFileError, match=r"lm_head\.weight"):
            check_source(source)
        return
    assert source.config.tied_head == (kind in ("alike", "the only one"))
    assert check_source(source) == ({"lm_head.weight"} if source.config.tied_head else frozenset())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(load_tensor(source, EMBEDDING), theirs.model.embed_tokens.weight)
    used = EMBEDDING if source.config.tied_head else "lm_head.weight"
    assert torch.equal(load_tensor(source, used), theirs.lm_head.weight)


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt", "pkl"])
def test_pickles_are_refused_with_the_reason(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / f"pytorch_model.{suffix}").write_bytes(b"\x80\x04.")
    with pytest.raises(
        ModelFileError, match=r"pickle runs whatever code it contains; convert .* safetensors"
    ):
        HfFolder(tmp_path)


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="no weights"):
        HfFolder(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelFileError, match=shard.name):
        HfFolder(tmp_path)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/model.safetensors", "a/b.safetensors", 7, [], "x.bin", ""]
)
def test_an_index_that_leaves_the_folder_is_refused(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "folder"
    hf_model("llama").save_pretrained(folder)
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": name}})
    )
    with pytest.raises(ModelFileError, match="weight_map"):
        HfFolder(folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{"])
def test_a_damaged_index_is_an_error(tmp_path: Path, index: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelFileError, match=r"index\.json"):
        HfFolder(tmp_path)


def safetensors_bytes(table: object, num_data_bytes: int) -> bytes:
    header = json.dumps(table).encode()
    return struct.pack("<Q", len(header)) + header + bytes(num_data_bytes)


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        b"\xff" * 8,
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 50) + b"{}",
        struct.pack("<Q", 17 << 20) + b"{}" + b" " * ((17 << 20) - 2),
        struct.pack("<Q", 8) + b"not json",
        safetensors_bytes({"a": entry(0, 16, [4])}, 8),
        safetensors_bytes({"a": entry(0, 16, [4]), "b": entry(8, 24, [4])}, 24),
        safetensors_bytes({"a": entry(0, 16, [5])}, 16),
        safetensors_bytes({"a": entry(0, 16, [1 << 62, 1 << 62])}, 16),
        safetensors_bytes({"a": entry(0, 16, [-4])}, 16),
        safetensors_bytes({"a": entry(16, 0, [4])}, 16),
        safetensors_bytes({"a": entry(0, 16, [4], "PICKLE")}, 16),
        safetensors_bytes([1, 2], 0),
    ],
)
def test_damaged_safetensors_are_errors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        HfFolder(tmp_path)


def test_truncation_anywhere_is_an_error(tmp_path: Path) -> None:
    hf_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for end in range(0, len(whole), 997):
        file.write_bytes(whole[:end])
        with pytest.raises(ModelFileError):
            HfFolder(tmp_path)


def test_flipped_bytes_give_an_error_or_weights(tmp_path: Path) -> None:
    hf_model("llama", num_hidden_layers=1, hidden_size=8).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    (header_bytes,) = struct.unpack("<Q", whole[:8])
    rng = random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 4])):
            damaged[rng.randrange(8 + header_bytes)] = rng.choice([*b'0123456789[]{},:"', rng.randrange(256)])
        file.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            source = HfFolder(tmp_path)
            check_source(source)
            for name in source.names():
                load_tensor(source, name)
            source.close()


def test_a_file_cut_short_while_open_is_an_error(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    source = HfFolder(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as stream:
        stream.truncate(20_000)
    last = max(source.names(), key=lambda name: source._tensors[name].start)
    with pytest.raises(ModelFileError, match="ends early"):
        load_tensor(source, last)


def test_integer_weights_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    content = safetensors_bytes({"model.norm.weight": entry(0, 16, [4], "I32")}, 16)
    (tmp_path / "model.safetensors").write_bytes(content)
    source = HfFolder(tmp_path)
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight is I32"):
        load_tensor(source, "model.norm.weight")
