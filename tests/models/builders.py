"""Small models on disk, for tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from penstock.models.source import WeightSource

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def hf_config(family: str, **changes: Any) -> Any:
    extra = {"sliding_window": None} if family == "mistral" else {}
    return CLASSES[family][0](**{**SHAPE, **extra, **changes})


def hf_model(family: str, **changes: Any) -> Any:
    """A random model of a family, with biases and norms that are not all the same."""
    torch.manual_seed(0)
    model = CLASSES[family][1](hf_config(family, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]],
    architecture: str = "llama",
) -> Path:
    """`tensors` holds raw data: floats for F32 and F16, bytes for every other type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_int32(key, value) if value < 0 else writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load_tensor(source: WeightSource, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of a file, in memory of its own."""
    out = torch.empty(source.shape(name), dtype=dtype)
    source.load_into(name, out)
    return out


def gguf_metadata(config: Any, architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes for a configuration, without the tokenizer."""
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 10_000.0,
    }
    return {f"{architecture}.{key}": value for key, value in values.items()} | changes


TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "a",
    "b",
    "▁a",
    "▁ab",
    "ab",
]
SCORES = [0.0] * 259 + [-9.0, -9.0, -9.0, -2.0, -3.0, -1.0]
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}

_NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    parts = name.split(".")
    if name == "model.norm.weight":
        return "output_norm.weight"
    short = f"{_NAMES[parts[-2]]}.{parts[-1]}"
    return f"blk.{parts[2]}.{short}" if parts[1] == "layers" else short


def permute(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's order of Llama's query and key rows: the two halves of each head interleaved."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
