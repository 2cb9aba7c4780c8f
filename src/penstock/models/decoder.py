"""The decoder that all families share. What differs between them is in `ModelConfig`."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, is_dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.cache.kv import KVSpec
from penstock.cache.recurrent import RecurrentSpec
from penstock.cache.tensors import CacheSpec, CacheTensors
from penstock.kernels.device import device_kind
from penstock.kernels.interface import DenseHeads, DenseLayer, DenseLayers, DenseProduct, Kernels
from penstock.kernels.probe.probe import ProbeShapes, ProductShape
from penstock.kernels.quantised import QuantisedWeight, Weight
from penstock.layers.attention import Attention
from penstock.layers.delta_net import DeltaNet
from penstock.layers.experts import ExpertMLP
from penstock.layers.forward_batch import ForwardBatch
from penstock.layers.fused_weight import FusedWeight, JoinedWeight
from penstock.layers.mlp import GatedMLP
from penstock.layers.rotary import Rotary
from penstock.models.config import ModelConfig
from penstock.models.graphs import PassGraphs
from penstock.models.shape import model_shape


@dataclass(frozen=True)
class DecoderLayer:
    """Tokens are mixed by the first block, each on its own by the second."""

    mixer_norm: Tensor  # [hidden]
    mixer: Attention | DeltaNet
    mlp_norm: Tensor  # [hidden]
    mlp: GatedMLP | ExpertMLP


class Decoder:
    """Layers of a model and the pass through them. It keeps no state of a request: that lies in the cache.

    A decoder may have any range of the model's layers. What crosses from one such stage to the next is the residual
    x [rows, hidden], whose norm the next one takes again: `add_norm` norms the rounded sum, so both are the same to
    the bit. The first stage has the embedding, the last one the head; every stage has caches of its own layers alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        layers: list[DecoderLayer],
        exit_norm: Tensor,
        embedding: Weight | None,
        head: Weight | None,
        dtype: torch.dtype,
        first_layer: int = 0,
    ) -> None:
        self.config = config  # the whole model's
        self.part = config.of_layers(first_layer, first_layer + len(layers))
        self.first_layer = first_layer
        self.kernels = kernels
        self.dtype = dtype
        self.device = exit_norm.device
        self._embedding = embedding  # [vocab, hidden]; None: another stage begins the model
        self.layers = layers
        self._exit_norm = exit_norm  # [hidden], the next layer's or the model's last
        # [vocab, hidden], packed; a tied one is a copy of the embedding unless quantised. None: another stage has it.
        self._head = head
        self.rotary = Rotary(
            config.rotary,
            config.rotary_dim or config.head_dim,
            config.max_position,
            self.dtype,
            self.device,
        )
        self.dense_layers = self._as_one_call()  # for decodes, where there is such a call
        self._graphs = PassGraphs(self) if self.can_record else None

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the model, from tokens to logits."""
        return self._embedding is not None and self._head is not None

    def _as_one_call(self) -> DenseLayers | None:
        """The layers for decodes, where all are dense and quantised."""
        dense = [_dense_layer(layer, norm) for layer, norm in zip(self.layers, self._next_norms, strict=True)]
        layers = [layer for layer in dense if layer is not None]
        if len(layers) < len(dense):
            return None
        config = self.config
        heads = DenseHeads(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.norm_eps,
            self._exit_norm.dtype == torch.float32,
        )
        return self.kernels.dense_layers(layers, heads)

    @cached_property
    def _next_norms(self) -> list[Tensor]:
        """The norm that follows each layer."""
        return [*(layer.mixer_norm for layer in self.layers[1:]), self._exit_norm]

    @property
    def cache_spec(self) -> CacheSpec:
        """What these layers cache."""
        config, net = self.part, self.part.delta_net
        kv = KVSpec(len(config.attention_layers), config.num_kv_heads, config.head_dim, self.dtype)
        if net is None:
            return CacheSpec(kv)
        return CacheSpec(
            kv,
            RecurrentSpec(
                num_layers=len(net.layers),
                conv_tail=net.conv_kernel - 1,
                conv_size=net.conv_size,
                num_heads=net.num_value_heads,
                key_dim=net.key_head_dim,
                value_dim=net.value_head_dim,
                dtype=self.dtype,
            ),
        )

    @property
    def probe_shapes(self) -> ProbeShapes:
        """The products, heads and passes whose bits must not depend on the number of rows."""
        config = self.part
        return ProbeShapes(
            products=_in_order(self._products()),
            head=None if self._head is None else _product(self._head),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            mlp_widths=tuple(sorted({block.gate_up_weight.shape[0] // 2 for block in self._blocks()})),
            rotary_dim=config.rotary_dim or config.head_dim,
            delta_net=model_shape(config).delta_net,
            num_experts=config.experts.num_experts if config.experts else 0,
            expert_products=_in_order(
                {shape for layer in self.layers for shape in _expert_products(layer.mlp)}
            ),
        )

    def _products(self) -> set[ProductShape]:
        pairs: list[tuple[FusedWeight, Tensor | None]] = []
        for layer in self.layers:
            mixer = layer.mixer
            if isinstance(mixer, Attention):
                pairs += [(mixer.qkv_weight, mixer.qkv_bias), (mixer.out_weight, mixer.out_bias)]
            else:
                pairs += [(mixer.in_weight, None), (mixer.out_weight, None)]
            if isinstance(layer.mlp, ExpertMLP):
                pairs.append((layer.mlp.router_weight, None))
            block = layer.mlp.shared if isinstance(layer.mlp, ExpertMLP) else layer.mlp
            if block is not None:
                pairs += [(block.gate_up_weight, block.gate_up_bias), (block.down_weight, block.down_bias)]
        return {product for weight, bias in pairs for product in _products_of(weight, bias)}

    def _blocks(self) -> Iterator[GatedMLP]:
        """The feed-forward blocks, one of each layer's experts for all of them."""
        for layer in self.layers:
            if isinstance(layer.mlp, GatedMLP):
                yield layer.mlp
            else:
                yield layer.mlp.experts[0]
                if layer.mlp.shared is not None:
                    yield layer.mlp.shared

    @property
    def can_record(self) -> bool:
        """Whether passes are recorded. How many rows an expert has, the host must know before it is launched."""
        is_dense = all(isinstance(layer.mlp, GatedMLP) for layer in self.layers)
        return self.kernels.can_capture and self.is_whole and is_dense

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        parts = (self._embedding, self._head, self._exit_norm, *self.layers)
        return sum(tensor.nbytes for tensor in {tensor for part in parts for tensor in _tensors(part)})

    @torch.inference_mode()
    def preparations(self, caches: CacheTensors, num_rows: int) -> Iterator[None]:
        """What first chunks of so many tokens would wait for, done in advance: a piece at each step. Nothing is
        written to the caches. Those who never ask for it have the same answers, some of them later."""
        mixers = (layer.mixer for layer in self.layers)
        attention = next((mixer for mixer in mixers if isinstance(mixer, Attention)), None)
        if attention is None:
            return
        kv = caches.kv.layer(attention.index)
        longest = kv.first(self.config.max_position)
        yield from self.kernels.preparations(num_rows, self.config.num_heads, longest, attention.scale)

    @torch.inference_mode()
    def prepare(self, batch: ForwardBatch, caches: CacheTensors) -> None:
        """Do what can be done of a pass over decodes before their tokens are known, which may still be changed in
        `batch`. Nothing is launched."""
        if self._graphs is not None:
            self._graphs.prepare(batch, caches)

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, caches: CacheTensors, residual: Tensor | None = None
    ) -> Tensor | None:
        """Run a batch: what later tokens need of it goes into the caches. Returns logits [num_logits, vocab] in
        float32, or None where none are wanted; of a stage without the head, the residual [rows, hidden].

        A stage without the embedding takes the `residual` of the stage before it, which it may write over."""
        works = {id(work): work for work in (batch.all_layers, batch.last_layer)}
        for work in works.values():
            caches.kv.check_places(place for span in work.spans for place in span.places)
        caches.kv.check_places(batch.places.ranges)
        if self._graphs is not None and (graph := self._graphs.find(batch, caches)) is not None:
            return graph.run(batch, self, caches)
        numbers = (batch.token_ids, batch.positions, batch.logit_rows)
        token_ids, positions, logit_rows = device_kind(self.device).all_copied(numbers)
        # No name for it here: it would live as long as the pass.
        return self.run_layers(
            self.embed(token_ids) if residual is None else residual, batch, caches, positions, logit_rows
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """What enters the first layer [rows, hidden]."""
        assert self._embedding is not None, "the stage that begins the model has the embedding"
        return self.kernels.embed(token_ids, self._embedding)

    def enter(self, x: Tensor) -> Tensor:
        """The first layer's norm of what enters it [rows, hidden]."""
        return self.kernels.rms_norm(x, self.layers[0].mixer_norm, self.config.norm_eps)

    def run_layers(
        self,
        x: Tensor,
        batch: ForwardBatch,
        caches: CacheTensors,
        positions: Tensor,
        logit_rows: Tensor | None,
    ) -> Tensor | None:
        """`forward` from x [rows, hidden] on, with the batch's numbers on the device; without `logit_rows`, logits of
        all rows are wanted. x may be written over."""
        kernels = self.kernels
        normed = self.enter(x)
        cos, sin = self.rotary.tables(positions, batch.end_position)
        if self.dense_layers and not batch.is_canonical and batch.num_logits == len(x):
            kvs = [caches.kv.layer(index) for index in range(len(self.layers))]
            normed = self.dense_layers.run(x, normed, cos, sin, kvs, batch.places, batch.all_layers)
            return x if self._head is None else self._logits(normed, batch)
        # What a layer's second block has at a time; none: all rows.
        slabs = kernels.law.slabs(len(x), kernels.feed_rows) if 0 < kernels.feed_rows < len(x) else []
        for index, layer in enumerate(self.layers):
            rows = layer.mixer.take_in(normed, cos, sin, batch, caches, kernels)
            del normed  # what is not needed any more is not held at the next high-water mark
            if self._head is not None and index == len(self.layers) - 1:
                return self.end(x, rows, logit_rows, batch, caches)
            mixed = layer.mixer.give_out(rows, batch.all_layers, batch, caches, kernels)
            del rows
            if slabs and isinstance(layer.mlp, GatedMLP):
                x, normed = self._feed_in_slabs(index, x, mixed, slabs, batch)
                del mixed
                continue
            x, normed = kernels.add_norm(x, mixed, layer.mlp_norm, self.config.norm_eps)
            del mixed
            x, normed = self.feed(index, x, normed, batch.num_tokens, batch)
        return x

    def feed(
        self, index: int, x: Tensor, normed: Tensor, num_rows: int, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """A layer's second block. Returns what leaves the layer, and its norm for the next."""
        out = self.layers[index].mlp(normed, num_rows, batch, self.kernels)
        return self.kernels.add_norm(x, out, self._next_norms[index], self.config.norm_eps)

    def _feed_in_slabs(
        self, index: int, x: Tensor, mixed: Tensor, slabs: list[slice], batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Add `mixed` to x, and go on to the end of the layer; what leaves it is written over both. What a few rows
        take is still in the device's own cache when it is read again."""
        kernels, eps = self.kernels, self.config.norm_eps
        for slab in slabs:
            total, normed = kernels.add_norm(x[slab], mixed[slab], self.layers[index].mlp_norm, eps)
            out = self.layers[index].mlp(normed, len(normed), batch, kernels)
            kernels.add_norm(total, out, self._next_norms[index], eps, into=(x[slab], mixed[slab]))
            del total, normed, out  # before the next are made
        return x, mixed

    def end(
        self,
        x: Tensor,
        rows: tuple[Tensor, ...],
        logit_rows: Tensor | None,
        batch: ForwardBatch,
        caches: CacheTensors,
    ) -> Tensor | None:
        """From what the last layer took in to the logits, of the rows that they are wanted of."""
        if batch.num_logits == 0:
            return None
        if logit_rows is not None:
            x, rows = x[logit_rows], tuple(part[logit_rows] for part in rows)
        index, last = len(self.layers) - 1, self.layers[-1]
        mixed = last.mixer.give_out(rows, batch.last_layer, batch, caches, self.kernels)
        x, normed = self.kernels.add_norm(x, mixed, last.mlp_norm, self.config.norm_eps)
        _, normed = self.feed(index, x, normed, batch.num_logits, batch)
        return self._logits(normed[: batch.num_logits], batch)

    def _logits(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Of x [num_logits, hidden], in float32. How many rows there are must not matter to any of them: they run in
        slabs."""
        assert self._head is not None
        if not batch.is_canonical:
            return self.kernels.linear(x, self._head, is_canonical=False).float()
        num_rows = self.kernels.head_rows
        padded = pad(x, (0, 0, 0, -len(x) % num_rows))
        slabs = [self.kernels.linear(slab, self._head) for slab in torch.split(padded, num_rows)]
        return (slabs[0] if len(slabs) == 1 else torch.cat(slabs))[: len(x)].float()


def _dense_layer(layer: DecoderLayer, next_norm: Tensor) -> DenseLayer | None:
    """None where it is a layer of another kind, or has matrices that are not quantised."""
    mixer, mlp = layer.mixer, layer.mlp
    if not isinstance(mixer, Attention) or mixer.is_gated or not isinstance(mlp, GatedMLP):
        return None
    qkv = _dense_product(mixer.qkv_weight, mixer.qkv_bias)
    out = _dense_product(mixer.out_weight, mixer.out_bias)
    gate_up = _dense_product(mlp.gate_up_weight, mlp.gate_up_bias)
    down = _dense_product(mlp.down_weight, mlp.down_bias)
    if qkv is None or out is None or gate_up is None or down is None:
        return None
    return DenseLayer(
        qkv,
        out,
        gate_up,
        down,
        query_norm=mixer.query_norm,
        key_norm=mixer.key_norm,
        mlp_norm=layer.mlp_norm,
        next_norm=next_norm,
    )


def _dense_product(weight: FusedWeight, bias: Tensor | None) -> DenseProduct | None:
    """None where some of it is not quantised."""
    parts = weight.parts if isinstance(weight, JoinedWeight) else (weight,)
    quantised = tuple(part for part in parts if isinstance(part, QuantisedWeight))
    return DenseProduct(quantised, bias) if len(quantised) == len(parts) else None


def _expert_products(mlp: GatedMLP | ExpertMLP) -> Iterator[ProductShape]:
    """Those of one expert, which are those of all."""
    if isinstance(mlp, ExpertMLP):
        for weight in (mlp.experts[0].gate_up_weight, mlp.experts[0].down_weight):
            yield from _products_of(weight)


def _products_of(weight: FusedWeight, bias: Tensor | None = None) -> Iterator[ProductShape]:
    parts = weight.with_biases(bias) if isinstance(weight, JoinedWeight) else [(weight, bias)]
    for part, own_bias in parts:
        yield _product(part, own_bias)


def _product(weight: Weight, bias: Tensor | None = None) -> ProductShape:
    form = weight.form.name if isinstance(weight, QuantisedWeight) else ""
    return ProductShape(weight.shape[0], weight.shape[1], bias is not None, form)


def _in_order(shapes: set[ProductShape]) -> tuple[ProductShape, ...]:
    return tuple(sorted(shapes, key=astuple))


def _tensors(part: object) -> Iterator[Tensor]:
    """All tensors of a layer and of what it is made of."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _tensors(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
