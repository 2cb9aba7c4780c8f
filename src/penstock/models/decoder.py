"""The decoder that all families share. What differs between them is in `ModelConfig`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.cache import SequenceBlocks
from penstock.cache.tensors import CacheSpec, CacheTensors, KVSpec, RecurrentSpec
from penstock.kernels.device import device_kind
from penstock.kernels.interface import Kernels
from penstock.kernels.native.layers import NativeLayers
from penstock.kernels.probe import GROUPED, ProbeShapes, ProductShape
from penstock.kernels.quantised import DenseLayer, DenseProduct, QuantisedWeight, Weight
from penstock.kernels.threads import StepThreads, num_threads
from penstock.layers.attention import Attention
from penstock.layers.forward_batch import NO_OVERLAP, ForwardBatch, ForwardPass, LateTokens, Overlap
from penstock.layers.latent import LatentAttention
from penstock.layers.linear import Linear
from penstock.layers.mlp import MLP, ExpertMLP, NoBlock
from penstock.layers.norm import Norm
from penstock.layers.recurrent import Recurrent, SideBySide
from penstock.layers.rotary import QueryScale, Rotary, RotaryTables, at_positions
from penstock.plan.memory import ActivationModel
from penstock.plan.model import ModelConfig
from penstock.plan.step import Workspace

Mixer = Attention | LatentAttention | Recurrent | SideBySide | NoBlock


@dataclass(frozen=True)
class DecoderLayer:
    """Tokens are mixed by the first block, each on its own by the second."""

    mixer_norm: Norm
    mixer: Mixer
    mlp_norm: Norm
    mlp: MLP | ExpertMLP | NoBlock
    mixer_exit: Norm  # of what a block adds to the residual
    mlp_exit: Norm
    scale: float = 1.0  # on what leaves it

    def products(self) -> tuple[Linear, ...]:
        """Those that every row goes through."""
        return self.mixer.products() + self.mlp.products()

    def dense(self, next_norm: Norm) -> DenseLayer | None:
        """The layer for `Kernels.dense_layers`; None where it is of another kind, or has matrices that are not
        quantised."""
        mlp_norm, following = self.mlp_norm.rms_weight, next_norm.rms_weight
        mixture = self.mlp if isinstance(self.mlp, ExpertMLP) else None
        block = self.mlp if mixture is None else mixture.shared
        if mixture and (mixture.waits_for_host or mixture.norms is not None):
            return None
        match self.mixer, block:
            case Attention(is_gated=False, rotary=0, norms=None) as attention, MLP(activation=None) | None:
                inner = (block.gate_up, block.down) if block else (None, None)
                scoring, experts = (mixture.scoring, mixture.experts) if mixture else (None, None)
                wanted = (*attention.products(), *inner, scoring)
                qkv, out, gate_up, down, gates = found = [_dense_product(product) for product in wanted]
                has_all = sum(map(bool, found)) == sum(map(bool, wanted))
                is_plain = has_all and attention.scoring.is_plain_for(attention.heads.head_dim)
                if is_plain and qkv and out and mlp_norm is not None and following is not None:
                    products = (qkv, out, gate_up, down, gates)
                    return DenseLayer(attention.heads, *products, experts, mlp_norm, following)
        return None


# What is made of the last layer's rows [num_logits, hidden], behind the last norm, where that is not their logits.
ReadRows = Callable[[Tensor], Tensor | None]


class RecordedPass(Protocol):
    """A pass that a device has recorded."""

    def run(
        self, batch: ForwardBatch, model: "Decoder", caches: CacheTensors, overlap: Overlap = NO_OVERLAP
    ) -> Tensor | None:
        """What `Decoder.forward` gives."""


class FollowingPasses(Protocol):
    """Passes over the same decodes, each a token further than the one before."""

    def advance(self) -> bool:
        """Make the next one ready, for which there is room in the cache. False: it is not one of them any more."""

    def launch(self, tokens: Sequence[int] | LateTokens) -> Tensor | None:
        """Start it, with its tokens: its logits. None where it could not be."""


class RecordedPasses(Protocol):
    """Passes of a decoder that run in another way than layer by layer."""

    def find(self, batch: ForwardBatch, caches: CacheTensors) -> RecordedPass | None:
        """What runs a batch; None where its layers are to be run."""

    def prepare(self, batch: ForwardBatch, caches: CacheTensors) -> None:
        """Make what is recorded ready for a batch of decodes, whose tokens may still change."""

    def must_record(self, batch: ForwardBatch, caches: CacheTensors) -> bool:
        """Whether something is recorded first for a batch, which takes as long as many passes."""

    def follow(
        self, batch: ForwardBatch, caches: CacheTensors, blocks: Sequence[tuple[SequenceBlocks, ...]]
    ) -> FollowingPasses | None:
        """The passes after this one over decodes, of sequences with these blocks; None where it is not recorded."""

    def record_decodes(self, most: int, caches: CacheTensors, *, is_canonical: bool) -> Iterator[None]:
        """Record decodes of up to so many sequences in advance, one pass at each step."""


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
        exit_norm: Norm,
        embedding: Weight | None,
        head: Weight | None,
        dtype: torch.dtype,
        device: torch.device,
        first_layer: int = 0,
    ) -> None:
        self.config = config  # the whole model's
        self.part = config.of_layers(first_layer, first_layer + len(layers))
        self.first_layer = first_layer
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self._embedding = embedding  # [vocab, hidden]; None: another stage begins the model
        self.layers = layers
        self._exit_norm = exit_norm  # the next layer's or the model's last
        # [vocab, hidden], packed; a tied one is a copy of the embedding unless quantised. None: another stage has it.
        self._head = head
        sizes = [config.rotary_dim or size for size in (config.kv_heads(windowed=False)[1], config.head_dim)]
        self._rotaries: list[Rotary | QueryScale] = [
            Rotary(rotary, size, config.max_position, dtype, device)
            for rotary, size in zip((config.rotary, config.other_rotary), sizes, strict=True)
            if rotary is not None
        ]
        if config.rotary.query_growth:
            self._rotaries.append(QueryScale(config.rotary, config.max_position, dtype, device))
        self.dense_layers = self._as_one_call()  # for decodes, where there is such a call
        self.threads = StepThreads(
            is_host=device_kind(self.device).is_host,
            torch_multiplies=self.dense_layers is None or not isinstance(head, QuantisedWeight | None),
            dtype=dtype,
        )
        self.recorded: RecordedPasses | None = None  # of the engine, where it records passes

    @property
    def _has_long_rows(self) -> bool:
        """Whether long requests are rotated otherwise than short ones."""
        return self._rotaries[0].num_choices > 1

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the model, from tokens to logits."""
        return self._embedding is not None and self._head is not None

    def _as_one_call(self) -> NativeLayers | None:
        """The layers for decodes, where all are quantised and plain, with experts or not: as Llama's or Qwen's."""
        config = self.config
        if (
            config.post_norm
            or config.parallel_blocks
            or config.residual_scale != 1.0
            or config.attention_scale is not None
            or config.layer_scale
            or config.rotary.query_growth
        ):
            return None
        dense = [layer.dense(norm) for layer, norm in zip(self.layers, self._next_norms, strict=True)]
        layers = [layer for layer in dense if layer is not None]
        if len(layers) < len(dense):
            return None
        return self.kernels.dense_layers(layers)

    @cached_property
    def _next_norms(self) -> list[Norm]:
        """The norm that follows each layer."""
        return [*(layer.mixer_norm for layer in self.layers[1:]), self._exit_norm]

    @property
    def cache_spec(self) -> CacheSpec:
        """What these layers cache."""
        return cache_spec_of(self.part, self.dtype)

    @property
    def has_state(self) -> bool:
        """Whether the model has recurrent layers, here or in another stage."""
        return self.config.has_state

    @property
    def probe_shapes(self) -> ProbeShapes:
        """The products, heads and passes whose bits must not depend on the number of rows."""
        config = self.part
        return ProbeShapes(
            products=_shapes(product for layer in self.layers for product in layer.products()),
            head=None if self._head is None else _shape(self._head),
            num_heads=config.num_heads,
            num_kv_heads=config.kv_heads(windowed=False)[0],
            head_dim=config.kv_heads(windowed=False)[1],
            hidden_size=config.hidden_size,
            mlp_widths=tuple(sorted({width for layer in self.layers for width in layer.mlp.widths})),
            rotary_dim=config.rotary_dim or config.kv_heads(windowed=False)[1],
            recurrent=config.recurrent,
            latent=config.latent,
            num_experts=config.experts.num_experts if config.experts else 0,
            activation=config.activation,
            layer_norm=config.layer_norm,
            expert_products=tuple(
                sorted({shape for layer in self.layers for shape in _expert_shapes(layer.mlp)}, key=astuple)
            ),
            joined=_joined(product for layer in self.layers for product in layer.products()),
        )

    @property
    def can_record(self) -> bool:
        """Whether passes can be recorded: without the host, and with plain layers."""
        config = self.config
        waits = any(layer.mlp.waits_for_host for layer in self.layers) or config.parallel_blocks
        is_plain = config.recurrent is config.delta_net and not config.latent and not self._has_long_rows
        is_plain = is_plain and config.full_heads is None
        return self.kernels.can_capture and self.is_whole and is_plain and not waits

    def weights(self) -> Iterator[Weight]:
        """Of all products but the head's and those of experts that are run as one."""
        for layer in self.layers:
            experts = layer.mlp.expert_products() if layer.mlp.waits_for_host else ()
            for product in (*layer.products(), *experts):
                yield from product.parts

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
        attention = next(
            (mixer for mixer in mixers if isinstance(mixer, Attention) and not mixer.group), None
        )
        if attention is None:
            return
        kv = caches.layer(attention.group, attention.index)
        longest = kv.first(self.config.max_position)
        yield from self.kernels.preparations(
            num_rows, self.config.num_heads, longest, attention.scoring.scale
        )

    @torch.inference_mode()
    def prepare(self, batch: ForwardBatch, caches: CacheTensors) -> None:
        """Do what can be done of a pass over decodes before their tokens are known, which may still be changed in
        `batch`. Nothing is launched."""
        if self.recorded is not None:
            self.recorded.prepare(batch, caches)

    def follow(
        self, batch: ForwardBatch, caches: CacheTensors, blocks: Sequence[tuple[SequenceBlocks, ...]]
    ) -> FollowingPasses | None:
        """The passes that follow one over decodes of sequences with these blocks, each a token further, where they
        are recorded."""
        return None if self.recorded is None else self.recorded.follow(batch, caches, blocks)

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        caches: CacheTensors,
        residual: Tensor | None = None,
        read: ReadRows | None = None,
        overlap: Overlap = NO_OVERLAP,
    ) -> Tensor | None:
        """Run a batch: what later tokens need of it goes into the caches. Returns logits [num_logits, vocab] in
        float32, or None where none are wanted; of a stage without the head, the residual [rows, hidden]. With `read`,
        that has the rows in place of the head, and its answer is returned.

        A stage without the embedding takes the `residual` of the stage before it, which it may write over."""
        check_places(batch, caches)
        recorded = self.recorded if read is None else None
        if recorded is not None and (found := recorded.find(batch, caches)) is not None:
            return found.run(batch, self, caches, overlap)
        rows = batch.positions  # of rotary tables
        if self._has_long_rows:
            rows = 2 * rows + (batch.long_rows if len(batch.long_rows) else 0)
        numbers = (batch.token_ids, rows, batch.logit_rows)
        token_ids, positions, logit_rows = device_kind(self.device).all_copied(numbers)
        if overlap.late is not None:
            overlap.late.put_into(token_ids)
        with self.threads:
            # No name for what enters: it would live as long as the pass.
            return self.run_layers(
                self.embed(token_ids) if residual is None else residual,
                self.begin_pass(batch, caches, positions),
                logit_rows,
                read,
                overlap.nearly,
            )

    @property
    def first_of_last(self) -> int:
        """The layer at which a pass is nearly over: the host has time left to launch another."""
        return max(len(self.layers) - max(len(self.layers) // 8, 2), 0)

    def begin_pass(self, batch: ForwardBatch, caches: CacheTensors, positions: Tensor) -> ForwardPass:
        """What the layers are told of a batch whose positions [rows], as rows of rotary tables, are on the device."""
        tables = at_positions(self.rotary_tables(batch.end_position), positions)
        return ForwardPass(self.kernels.prepare(batch, self.device), caches, self.kernels, tables)

    def rotary_tables(self, end: int) -> RotaryTables:
        """Those of all positions below `end` at least. Longer ones are made elsewhere."""
        return tuple(rotary.reserve(end) for rotary in self._rotaries)

    def embed(self, token_ids: Tensor) -> Tensor:
        """What enters the first layer [rows, hidden]."""
        assert self._embedding is not None, "the stage that begins the model has the embedding"
        x = self.kernels.embed(token_ids, self._embedding)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x.mul_(torch.tensor(scale, dtype=x.dtype))  # rounded to the dtype first

    def first_norm(self, x: Tensor) -> Tensor:
        """The first layer's norm of what enters it [rows, hidden]."""
        return self.layers[0].mixer_norm(x, self.kernels)

    def run_layers(
        self,
        x: Tensor,
        step: ForwardPass,
        logit_rows: Tensor | None,
        read: ReadRows | None = None,
        nearly: Callable[[], None] | None = None,
    ) -> Tensor | None:
        """`forward` from x [rows, hidden] on, which may be written over; without `logit_rows`, logits of all rows are
        wanted. `nearly` is called before the last layers."""
        kernels, batch = self.kernels, step.batch
        normed = self.first_norm(x)
        if self.dense_layers and not batch.is_canonical and batch.num_logits == len(x):
            kvs = step.caches.kv.layers  # all layers are attention, of one shape
            normed = self.dense_layers.run(x, normed, *step.rotary[0], kvs, batch.places, batch.all_layers)
            return x if self._head is None else self.logits(normed, is_canonical=False)
        # What a layer's second block has at a time; none: all rows.
        slabs = kernels.law.slabs(len(x), kernels.feed_rows) if 0 < kernels.feed_rows < len(x) else []
        for index, layer in enumerate(self.layers):
            self.threads.look()
            if nearly is not None and index == self.first_of_last:
                nearly()
            rows = layer.mixer.read_in(normed, step)
            fed = normed if self.config.parallel_blocks else None
            del normed  # what is not needed any more is not held at the next high-water mark
            if self._head is not None and index == len(self.layers) - 1:
                return self.finish(x, rows, step, logit_rows, fed, read)
            mixed = layer.mixer.mix(rows, step)
            del rows
            if slabs and not layer.mlp.waits_for_host and fed is None:
                x, normed = self._run_mlp_in_slabs(index, x, mixed, slabs, step)
                del mixed
                continue
            self.threads.look()
            x, normed = self.add_mixed(index, x, mixed, fed)
            del mixed, fed
            x, normed = self.run_mlp(index, x, normed, step, batch.num_tokens)
        return x

    def add_mixed(
        self, index: int, x: Tensor, mixed: Tensor, fed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add what a layer's first block gave. Returns the residual, and what its second block is fed with: `fed`,
        where that is known already."""
        layer = self.layers[index]
        total, normed = self._add(x, mixed, layer.mixer_exit, layer.mlp_norm)
        return total, normed if fed is None else fed

    def _add(
        self,
        x: Tensor,
        delta: Tensor,
        exit_norm: Norm,
        next_norm: Norm,
        into: tuple[Tensor, Tensor] | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """The residual with what a block gave, times `scale`, and the norm of it; `into` as in `Kernels.add_norm`."""
        delta = exit_norm(delta, self.kernels)
        if scale != 1.0:
            total = (x + delta).mul_(scale)
            normed = next_norm(total, self.kernels)
            return (total, normed) if into is None else (into[0].copy_(total), into[1].copy_(normed))
        if self.config.residual_scale != 1.0:
            delta = delta * self.config.residual_scale
        return next_norm.of_sum(x, delta, self.kernels, into)

    def run_mlp(
        self, index: int, x: Tensor, normed: Tensor, step: ForwardPass, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        """A layer's second block, of whose rows the first `num_rows` are no padding. Returns what leaves the layer,
        and its norm for the next."""
        layer = self.layers[index]
        out = layer.mlp(normed, step, num_rows)
        return self._add(x, out, layer.mlp_exit, self._next_norms[index], scale=layer.scale)

    def _run_mlp_in_slabs(
        self, index: int, x: Tensor, mixed: Tensor, slabs: list[slice], step: ForwardPass
    ) -> tuple[Tensor, Tensor]:
        """Add `mixed` to x, and go on to the end of the layer; what leaves it is written over both. What a few rows
        take is still in the device's own cache when it is read again."""
        layer, next_norm = self.layers[index], self._next_norms[index]
        for slab in slabs:
            total, normed = self.add_mixed(index, x[slab], mixed[slab])
            out = layer.mlp(normed, step)
            self._add(total, out, layer.mlp_exit, next_norm, (x[slab], mixed[slab]), layer.scale)
            del total, normed, out  # before the next are made
        return x, mixed

    def finish(
        self,
        x: Tensor,
        rows: tuple[Tensor, ...],
        step: ForwardPass,
        logit_rows: Tensor | None,
        fed: Tensor | None = None,
        read: ReadRows | None = None,
    ) -> Tensor | None:
        """From what the last layer read in to the logits, of the rows that they are wanted of. `fed` as in
        `add_mixed`, `read` as in `forward`."""
        batch = step.batch
        if batch.num_logits == 0:
            return None
        if logit_rows is not None:
            x, rows = x[logit_rows], tuple(part[logit_rows] for part in rows)
            fed = None if fed is None else fed[logit_rows]
        index, last = len(self.layers) - 1, self.layers[-1]
        mixed = last.mixer.mix(rows, step, is_last=True)
        x, normed = self.add_mixed(index, x, mixed, fed)
        _, normed = self.run_mlp(index, x, normed, step, batch.num_logits)
        normed = normed[: batch.num_logits]
        return self.logits(normed, is_canonical=batch.is_canonical) if read is None else read(normed)

    def logits(self, x: Tensor, *, is_canonical: bool = True) -> Tensor:
        """Of x [num_logits, hidden], in float32."""
        logits, cap = self._head_product(x, is_canonical).float(), self.config.logit_softcap
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        if cap is not None:
            return self.kernels.elementwise(torch.ops.aten.tanh.out, logits.div_(cap)).mul_(cap)
        return logits

    def _head_product(self, x: Tensor, is_canonical: bool) -> Tensor:
        """How many rows there are must not matter to any of them: they run in slabs."""
        assert self._head is not None
        few_rows = self.kernels.law.few_rows
        if not is_canonical or len(x) <= few_rows:
            return self.kernels.linear(x, self._head, is_canonical=is_canonical)
        num_rows = few_rows or self.kernels.head_rows
        padded = x if few_rows else pad(x, (0, 0, 0, -len(x) % num_rows))
        slabs = [self.kernels.linear(slab, self._head) for slab in torch.split(padded, num_rows)]
        return (slabs[0] if len(slabs) == 1 else torch.cat(slabs))[: len(x)]


def check_places(batch: ForwardBatch, caches: CacheTensors) -> None:
    """ValueError where a batch reads or writes outside of the caches."""
    for group, own in zip(caches.kv_groups, batch.groups, strict=True):
        works = {id(work): work for work in (own.all_layers, own.last_layer)}
        for work in works.values():
            group.check_places(place for span in work.spans for place in span.places)
        group.check_places(own.places.ranges)


def cache_spec_of(config: ModelConfig, dtype: torch.dtype) -> CacheSpec:
    """What layers of such a configuration cache. Parts of a model have the same K/V groups, some without layers."""
    net, sizes = config.recurrent, config.kv_heads(windowed=False)
    kv = KVSpec(config.num_full_layers, *sizes, dtype, is_latent=config.latent is not None)
    groups: tuple[KVSpec, ...] = (kv,)
    if (window := config.window) is not None:
        sizes = config.kv_heads(windowed=True)
        groups += (KVSpec(window.num_layers, *sizes, dtype, window.size, is_latent=kv.is_latent),)
    return CacheSpec(groups, RecurrentSpec.of(net, dtype) if net else None)


# What a step's memory follows from


def workspace_for(config: ModelConfig, workspace: Workspace) -> Workspace:
    """The work space of such a model, on kernels that are known from elsewhere."""
    return replace(
        workspace,
        head_norm=config.head_norm,
        float32_norm=config.zero_centred_norm,
        rotary_dim=config.rotary_dim or 0,
        num_active_experts=config.experts.num_active if config.experts else 0,
    )


def workspace_of(model: Decoder) -> Workspace:
    """The work space of a loaded model, on its own kernels as they are set up."""
    kernels = model.kernels
    workspace = Workspace(
        # transformers' code has no passes that are fused.
        "torch" if model.config.by_transformers else kernels.memory_kind(model.dtype, model.config.head_dim),
        num_threads=num_threads(),
        head_rows=kernels.head_rows,
        feed_rows=kernels.feed_rows,
        library_bytes=device_kind(model.device).library_bytes,
        unpacked_bytes=max(map(kernels.unpacked_bytes, model.weights()), default=0),
        expert_places=kernels.expert_places if _groups_experts(model) else 0,
        rounds_rows=kernels.activations != "plain",
        **asdict(kernels.law),
    )
    return workspace_for(model.config, workspace)


def activation_model(model: Decoder, *, joins_past: bool = False) -> ActivationModel:
    """What the steps of a loaded model need, by arithmetic. `joins_past` says that a sequence may lie in several
    places of the cache, as those of a service do."""
    workspace = replace(workspace_of(model), joins_past=joins_past)
    return ActivationModel(model.part, model.dtype.itemsize, workspace)


# Parts


def _groups_experts(model: Decoder) -> bool:
    return any(isinstance(layer.mlp, ExpertMLP) and not layer.mlp.waits_for_host for layer in model.layers)


def _dense_product(product: Linear | None) -> DenseProduct | None:
    """None where there is none, or some of it is not quantised."""
    if product is None:
        return None
    quantised = tuple(part for part in product.parts if isinstance(part, QuantisedWeight))
    return DenseProduct(quantised, product.bias) if len(quantised) == len(product.parts) else None


def _shapes(products: Iterable[Linear]) -> tuple[ProductShape, ...]:
    """The distinct ones."""
    shapes = {
        _shape(part, bias)
        for product in products
        for part, bias in zip(product.parts, product.biases, strict=True)
    }
    return tuple(sorted(shapes, key=astuple))


def _joined(products: Iterable[Linear]) -> tuple[tuple[ProductShape, ...], ...]:
    """Of those whose weights lie in several forms, the distinct ones."""
    found = {tuple(map(_shape, product.parts)) for product in products if len(product.parts) > 1}
    return tuple(sorted(found, key=lambda parts: tuple(map(astuple, parts))))


def _expert_shapes(block: MLP | ExpertMLP | NoBlock) -> tuple[ProductShape, ...]:
    shapes = _shapes(block.expert_products())
    if not isinstance(block, ExpertMLP) or isinstance(block.experts, tuple) or not block.experts.has_own_law:
        return shapes
    return tuple(replace(shape, form=f"{GROUPED} {shape.form}".strip()) for shape in shapes)


def _shape(weight: Weight, bias: Tensor | None = None) -> ProductShape:
    form = weight.form.name if isinstance(weight, QuantisedWeight) else ""
    return ProductShape(weight.shape[0], weight.shape[1], bias is not None, form)


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
