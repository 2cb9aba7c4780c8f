"""Weights in a GGUF file: dequantised a slice at a time into transformers' layout."""

import re
from pathlib import Path

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from penstock.errors import ModelError, ModelFileError
from penstock.models.bytefile import ByteFile, copy_plain
from penstock.models.config import ModelConfig
from penstock.models.fields import Fields
from penstock.models.gguf_config import gguf_model_config
from penstock.models.gguf_header import GgufTensor, GgufValue, read_header
from penstock.models.source import require_shape

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_QUANTISED = (
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)
ACCEPTED_KINDS = (*_PLAIN, *_QUANTISED)

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GLOBAL = re.compile(r"(\w+)\.(weight|bias)")
_ROTARY_DIVISORS = "rope_freqs.weight"

# Elements that are dequantised at once: the temporaries of a slice stay in a CPU's cache.
_SLICE_ELEMENTS = 1 << 18


class GgufFile:
    """A `WeightSource` over one GGUF file; `metadata` holds the tokenizer too."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.metadata: dict[str, GgufValue] = header.metadata
        if Fields(str(path), header.metadata).integer("split.count", 1) > 1:
            raise ModelError(
                f"{path} is a part of a split model; join the parts with llama-gguf-split --merge"
            )
        self._path = path
        self._tensors: dict[str, GgufTensor] = {}
        for name, tensor in header.tensors.items():
            known = _hugging_face_name(name)
            if known is not None:
                self._require_accepted(tensor)
            if name != _ROTARY_DIVISORS:
                self._tensors[known or name] = tensor
        self._file = ByteFile(path)
        try:
            divisors = header.tensors.get(_ROTARY_DIVISORS)
            self._config = gguf_model_config(
                header, str(path), None if divisors is None else self._read_divisors(divisors)
            )
        except BaseException:
            self.close()
            raise
        self._num_heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}

    @property
    def config(self) -> ModelConfig:
        return self._config

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    @torch.no_grad()
    def load_into(self, name: str, out: torch.Tensor) -> None:
        tensor = self._tensors[name]
        require_shape(name, tensor.shape, out)
        self._require_accepted(tensor)
        module = name.rpartition(".")[0].rpartition(".")[2]
        if self._config.family == "llama" and module in self._num_heads:
            # GGUF interleaves the two halves of each head in Llama's queries and keys: (head, pair, half).
            half = self._config.head_dim // 2
            if out.shape[0] != 2 * half * self._num_heads[module]:
                raise ModelFileError(f"tensor {name} has {out.shape[0]} rows, not whole heads")
            out = out.view(self._num_heads[module], 2, half, *out.shape[1:]).transpose(1, 2)
        if tensor.kind in _PLAIN:
            copy_plain(self._file, tensor.start, _PLAIN[tensor.kind], out)
        else:
            self._copy_quantised(tensor, out)

    def describe(self) -> str:
        kinds = [tensor.kind for tensor in self._tensors.values()]
        common = max(set(kinds), key=kinds.count).name if kinds else "empty"
        return f"{self._path.name} (GGUF, {self._config.family}, {common})"

    def close(self) -> None:
        self._file.close()

    def _copy_quantised(self, tensor: GgufTensor, out: torch.Tensor) -> None:
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        row_elements = out[0].numel()
        row_bytes = row_elements // block * block_bytes
        num_rows = max(1, _SLICE_ELEMENTS // row_elements)
        buffer = torch.empty(min(num_rows, out.shape[0]) * row_bytes, dtype=torch.uint8)
        for first in range(0, out.shape[0], num_rows):
            part = out[first : first + num_rows]
            raw = buffer[: part.shape[0] * row_bytes]
            self._file.read_into(tensor.start + first * row_bytes, raw)
            # As one row: gguf works in groups of rows, and this way the slice is the group.
            values = dequantize(raw.numpy().reshape(1, -1), tensor.kind)
            part.copy_(torch.from_numpy(values).view(part.shape))

    def _read_divisors(self, tensor: GgufTensor) -> tuple[float, ...]:
        if tensor.kind is not GGMLQuantizationType.F32 or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 16:
            raise ModelFileError(f"{self._path}: {_ROTARY_DIVISORS} is not a short row of F32")
        values = torch.empty(tensor.shape)
        copy_plain(self._file, tensor.start, torch.float32, values)
        return tuple(values.tolist())

    def _require_accepted(self, tensor: GgufTensor) -> None:
        if tensor.kind not in ACCEPTED_KINDS:
            accepted = ", ".join(kind.name for kind in ACCEPTED_KINDS)
            raise ModelFileError(
                f"{self._path}: tensor {tensor.name} is {tensor.kind.name}; accepted are {accepted}"
            )


def _hugging_face_name(name: str) -> str | None:
    """The tensor's name in transformers, where it has one."""
    if (match := _LAYER.fullmatch(name)) and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    if (match := _GLOBAL.fullmatch(name)) and match[1] in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[match[1]]}.{match[2]}"
    return None
