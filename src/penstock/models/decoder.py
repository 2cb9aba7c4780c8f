"""The decoder that all families share. What differs between them is in `ModelConfig`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.cache.kv import KVCache, KVSpec
from penstock.kernels.probe import ProbeShapes, ProductShape
from penstock.kernels.protocol import Kernels
from penstock.kernels.shares import LANES
from penstock.layers.attention import Attention
from penstock.layers.batch import ForwardBatch
from penstock.layers.mlp import GatedMLP
from penstock.layers.rotary import Rotary
from penstock.models.config import ModelConfig
from penstock.models.expected import check_source
from penstock.models.source import WeightSource


@dataclass(frozen=True)
class DecoderLayer:
    attention_norm: Tensor  # [hidden]
    attention: Attention
    mlp_norm: Tensor  # [hidden]
    mlp: GatedMLP


class Decoder:
    """Weights and the pass through them. It keeps no state of a request: that lies in the cache."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        embedding: Tensor,
        layers: list[DecoderLayer],
        final_norm: Tensor,
        head: Tensor,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding  # [vocab, hidden]
        self._layers = layers
        self._final_norm = final_norm  # [hidden]
        self._head = head  # [vocab, hidden], packed: where it is tied to the embedding, a copy of it
        self._rotary = Rotary(
            config.rotary, config.head_dim, config.max_position, embedding.dtype, embedding.device
        )

    @property
    def kv_spec(self) -> KVSpec:
        """What the model caches for each token."""
        return KVSpec(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim, self.dtype)

    @property
    def probe_shapes(self) -> ProbeShapes:
        """The products and heads whose bits must not depend on the number of rows."""
        config, layer = self.config, self._layers[0]
        pairs = [
            (layer.attention.qkv_weight, layer.attention.qkv_bias),
            (layer.attention.out_weight, layer.attention.out_bias),
            (layer.mlp.gate_up_weight, layer.mlp.gate_up_bias),
            (layer.mlp.down_weight, layer.mlp.down_bias),
        ]
        products = {
            ProductShape(weight.shape[0], weight.shape[1], bias is not None) for weight, bias in pairs
        }
        return ProbeShapes(
            tuple(sorted(products, key=lambda p: (p.num_out, p.num_in, p.bias))),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.hidden_size,
            padded_width(config.intermediate_size),
        )

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        tensors = {self._embedding, self._head, self._final_norm}
        for layer in self._layers:
            parts = (vars(layer.attention), vars(layer.mlp), vars(layer))
            tensors |= {value for part in parts for value in part.values() if isinstance(value, Tensor)}
        return sum(tensor.nbytes for tensor in tensors)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor | None:
        """Run a batch: its keys and values go into the cache. Returns logits [num_logits, vocab] in float32, or
        None where none are wanted."""
        kernels, eps = self.kernels, self.config.norm_eps
        x = self._embedding[batch.token_ids]
        cos, sin = self._rotary.tables(batch.positions, batch.end_position)
        for layer in self._layers:
            is_last = layer is self._layers[-1]
            normed = kernels.rms_norm(x, layer.attention_norm, eps)
            queries = layer.attention.project(normed, cos, sin, batch, cache, kernels)
            if is_last:
                if batch.num_logits == 0:
                    return None
                x, queries = x[batch.logit_rows], queries[batch.logit_rows]
            work = batch.last_layer if is_last else batch.all_layers
            x = x + layer.attention.attend(queries, work, cache, kernels)
            x = x + layer.mlp(kernels.rms_norm(x, layer.mlp_norm, eps), kernels)
        x = kernels.rms_norm(x, self._final_norm, eps)[: batch.num_logits]
        return kernels.linear(x, self._head).float()


def padded_width(intermediate_size: int) -> int:
    """The feed-forward width in whole vectors; the columns added are zero and change nothing."""
    return -(-intermediate_size // LANES) * LANES


def load_decoder(source: WeightSource, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build a model from a file, one tensor at a time, each straight into its place."""
    check_source(source)
    config = source.config

    def tensor(name: str, *shape: int) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=device)
        source.load_into(name, out)
        return out

    def optional(wanted: bool, name: str, *shape: int) -> Tensor | None:
        return tensor(name, *shape) if wanted else None

    def stacked(names: list[str], heights: list[int], places: list[int], height: int, *rest: int) -> Tensor:
        """Several tensors as one [height, *rest], each at its place; zeros between."""
        out = torch.zeros(height, *rest, dtype=dtype, device=device)
        for name, rows, place in zip(names, heights, places, strict=True):
            source.load_into(name, out[place : place + rows])
        return out

    hidden, inner, width = (
        config.hidden_size,
        config.intermediate_size,
        padded_width(config.intermediate_size),
    )
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def attention(index: int) -> Attention:
        prefix = f"model.layers.{index}.self_attn"

        def qkv(kind: str, *rest: int) -> Tensor:
            names = [f"{prefix}.{part}_proj.{kind}" for part in "qkv"]
            return stacked(names, [query, key, key], [0, query, query + key], query + 2 * key, *rest)

        return Attention(
            index=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            qkv_weight=kernels.pack(qkv("weight", hidden)),
            qkv_bias=qkv("bias") if config.qkv_bias else None,
            out_weight=kernels.pack(tensor(f"{prefix}.o_proj.weight", hidden, query)),
            out_bias=optional(config.out_bias, f"{prefix}.o_proj.bias", hidden),
            query_norm=optional(config.head_norm, f"{prefix}.q_norm.weight", config.head_dim),
            key_norm=optional(config.head_norm, f"{prefix}.k_norm.weight", config.head_dim),
        )

    def mlp(index: int) -> GatedMLP:
        prefix = f"model.layers.{index}.mlp"

        def gate_up(kind: str, *rest: int) -> Tensor:
            names = [f"{prefix}.gate_proj.{kind}", f"{prefix}.up_proj.{kind}"]
            return stacked(names, [inner, inner], [0, width], 2 * width, *rest)

        down = torch.zeros(hidden, width, dtype=dtype, device=device)
        source.load_into(f"{prefix}.down_proj.weight", down[:, :inner])
        return GatedMLP(
            gate_up_weight=kernels.pack(gate_up("weight", hidden)),
            gate_up_bias=gate_up("bias") if config.mlp_bias else None,
            down_weight=kernels.pack(down),
            down_bias=optional(config.mlp_bias, f"{prefix}.down_proj.bias", hidden),
        )

    def layer(index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}"
        return DecoderLayer(
            attention_norm=tensor(f"{prefix}.input_layernorm.weight", hidden),
            attention=attention(index),
            mlp_norm=tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            mlp=mlp(index),
        )

    embedding = tensor("model.embed_tokens.weight", config.vocab_size, hidden)
    return Decoder(
        config,
        kernels,
        embedding,
        [layer(index) for index in range(config.num_layers)],
        tensor("model.norm.weight", hidden),
        kernels.pack(embedding if config.tied_head else tensor("lm_head.weight", config.vocab_size, hidden)),
    )
