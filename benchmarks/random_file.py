"""`python -m benchmarks.random_file SHAPES FILE`: a GGUF file of a published model's shapes, with random weights in
Q4_K_M and a small model's tokens, as many as the shapes have: what speed is measured with."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

from benchmarks.models import SHAPES, tied
from penstock.measure.random_weights import MIXTURES, RandomBlocks
from penstock.models.gguf.header import GgufValue, read_header
from penstock.models.hub import DEFAULT_MODEL, resolve_model

_MIXTURE = "Q4_K_M"
_UNUSED = int(gguf.TokenType.UNUSED)


def write(shapes: str, path: Path) -> None:
    settings = SHAPES[shapes]
    weights = RandomBlocks(shapes, settings, "cpu", tied(MIXTURES[_MIXTURE]))
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name(f"{shapes} (random weights)")
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_key_length(settings["head_dim"])
    writer.add_value_length(settings["head_dim"])
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_rope_freq_base(settings["rope_theta"])
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_K_M))
    _add_tokens(writer, read_header(resolve_model(DEFAULT_MODEL)).metadata, settings["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, settings["num_hidden_layers"])
    torch.manual_seed(0)
    for name, shape in weights.shapes.items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        if form := weights.block_form(name):
            blocks = torch.cat(list(weights.blocks(name)))
            writer.add_tensor(stored, blocks.numpy(), raw_dtype=gguf.GGMLQuantizationType[form.name])
        else:
            values = torch.empty(shape)
            weights.load_into(name, values)
            writer.add_tensor(stored, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokens(writer: gguf.GGUFWriter, metadata: Mapping[str, GgufValue], count: int) -> None:
    """The tokenizer of another file, with tokens that no text has after its own."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list) and isinstance(merges, list) and isinstance(kinds, np.ndarray)  # noqa: PT018
    missing = count - len(tokens)
    writer.add_tokenizer_model(str(metadata["tokenizer.ggml.model"]))
    writer.add_tokenizer_pre(str(metadata["tokenizer.ggml.pre"]))
    writer.add_token_list([*tokens, *(f"<unused {index}>" for index in range(missing))])
    writer.add_token_types([*map(int, kinds), *[_UNUSED] * missing])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(int(str(metadata["tokenizer.ggml.eos_token_id"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", choices=sorted(SHAPES))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    write(options.shapes, options.file)


if __name__ == "__main__":
    main()
