"""A decoder whose layers are transformers' modules. Their attention, experts, products, activations and rotary tables
are run by Penstock's kernels, over its cache, on the rows of a `ForwardBatch`."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, replace
from math import gcd
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from penstock.cache.tensors import CacheSpec, CacheTensors, KVSpec
from penstock.errors import SettingError
from penstock.kernels.device import device_kind
from penstock.kernels.elementwise import ACTIVATIONS, ElementWise
from penstock.kernels.interface import Kernels
from penstock.kernels.probe import PLAIN, PLAIN_FLOAT32, ProbeShapes, ProductShape
from penstock.kernels.quantised import Weight
from penstock.kernels.spans import Scoring
from penstock.kernels.threads import StepThreads
from penstock.layers.forward_batch import ForwardBatch, ForwardPass
from penstock.layers.mlp import mix_experts
from penstock.models.by_transformers.trace import Trace, TracedAttention
from penstock.models.decoder import Decoder, ReadRows, check_places
from penstock.plan.grids import LANES, ROTARY_PAGE
from penstock.plan.model import ModelConfig

NAME = "penstock"  # in transformers' registries


class _Current:
    """The pass that a model's modules are in."""

    step: ForwardPass
    is_canonical = True  # whether a row's bits must not depend on how many others there are


class _Attention:
    """A layer's attention, over the cache."""

    def __init__(self, current: _Current, group: int, index: int, traced: TracedAttention) -> None:
        self._current = current
        self._group = group
        self._index = index
        self._traced = traced
        self._scoring = Scoring(traced.scale, traced.window, traced.soft_cap)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Of query [1, heads, rows, size], and key and value of the same rows, to [1, rows, heads, size]."""
        step, traced = self._current.step, self._traced
        if traced.has_sinks and self._scoring.sinks is None:
            assert sinks is not None
            self._scoring = replace(self._scoring, sinks=sinks.detach().float().contiguous())
        own = step.batch.group(self._group)
        kv = step.caches.layer(self._group, self._index)
        num_tokens = own.places.num_tokens
        keys, values = (part[0].transpose(0, 1)[:num_tokens] for part in (key, value))
        kv.write(own.places.ranges, keys, values)
        queries = query[0].transpose(0, 1).contiguous()
        attended = step.kernels.attend(queries, own.all_layers, kv, self._scoring)
        return attended.view(1, len(queries), traced.num_heads, traced.value_dim)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    return module.penstock(query, key, value, s_aux), None


class _Experts:
    """A layer's experts, each a pair of products."""

    def __init__(self, current: _Current, module: Any, pack: Callable[[Tensor], Weight]) -> None:
        self._current = current
        self._module = module
        self._gate: Callable[[Tensor], Tensor] = module._apply_gate if module.has_gate else module.act_fn
        names = ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"
        parts = [self._packed(name, pack) for name in names]
        self._experts = [(*up, *down) for up, down in zip(*parts, strict=True)]
        self._row_multiple = LANES // gcd(LANES, self._experts[0][2].shape[1])

    def _packed(self, name: str, pack: Callable[[Tensor], Weight]) -> list[tuple[Weight, Tensor | None]]:
        module = self._module
        stacked = module._parameters.pop(name).detach()
        biases = list(getattr(module, f"{name}_bias")) if module.has_bias else [None] * len(stacked)
        weights = [pack((each.t() if module.is_transposed else each).contiguous()) for each in stacked]
        return list(zip(weights, biases, strict=True))

    def shapes(self) -> Iterator[ProductShape]:
        up, up_bias, down, down_bias = self._experts[0]
        yield _shape(up, up_bias)
        yield _shape(down, down_bias)

    def tensors(self) -> Iterator[Weight]:
        for expert in self._experts:
            yield from (part for part in expert if part is not None)

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        step = self._current.step
        num_tokens = step.batch.num_tokens
        experts = [self._expert(index) for index in range(len(self._experts))]
        return mix_experts(experts, hidden, chosen[:num_tokens], weights[:num_tokens], step).to(hidden.dtype)

    def _expert(self, index: int) -> Callable[[Tensor, ForwardPass], Tensor]:
        up, up_bias, down, down_bias = self._experts[index]

        def run(x: Tensor, step: ForwardPass) -> Tensor:
            is_canonical = step.batch.is_canonical
            num_rows = len(x)
            if is_canonical:  # element-wise passes have whole vectors
                x = pad(x, (0, 0, 0, -num_rows % self._row_multiple))
            inner = self._gate(step.kernels.linear(x, up, up_bias, is_canonical=is_canonical))
            out = step.kernels.linear(inner, down, down_bias, is_canonical=is_canonical)
            if self._module.has_post_expert_norm:
                out = self._module.post_expert_norm(out)
            return out[:num_rows]

        return run


def _run_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out: Tensor = module.penstock(hidden, chosen, weights)
    return out


class _Product:
    """In place of what a linear module does. The head, of a few rows, runs in slabs."""

    def __init__(
        self, current: _Current, kernels: Kernels, weight: Weight, bias: Tensor | None, *, is_head: bool
    ) -> None:
        self._current = current
        self._kernels = kernels
        self.packed, self.packed_bias = weight, bias
        self._is_head = is_head

    def __call__(self, x: Tensor) -> Tensor:
        rows, is_canonical = x.reshape(-1, x.shape[-1]), self._current.is_canonical
        if self._is_head and is_canonical:
            out = torch.cat([self._linear(slab, True) for slab in torch.split(rows, self._kernels.head_rows)])
        else:
            out = self._linear(rows, is_canonical)
        return out.view(*x.shape[:-1], out.shape[1])

    def _linear(self, rows: Tensor, is_canonical: bool) -> Tensor:
        return self._kernels.linear(rows, self.packed, self.packed_bias, is_canonical=is_canonical)


class _Activation:
    """In place of what an activation does, whose rows do not notice how many they are."""

    def __init__(
        self,
        current: _Current,
        kernels: Kernels,
        inner: Callable[[Tensor], Tensor],
        known: ElementWise | None,
    ) -> None:
        self._current = current
        self._kernels = kernels
        self._inner = inner
        self._function = known or (lambda x, out: out.copy_(inner(x)))

    def __call__(self, x: Tensor) -> Tensor:
        if not self._current.is_canonical or not x.is_cpu:
            return self._inner(x)
        vectors = pad(x.reshape(-1), (0, -x.numel() % LANES)).view(-1, LANES)
        return self._kernels.elementwise(self._function, vectors).view(-1)[: x.numel()].view(x.shape)


class _Rotary:
    """In place of what a rotary embedding does: rows of tables, which are made in pages, up to the last position."""

    def __init__(self, current: _Current, inner: Callable[..., Any]) -> None:
        self._current = current
        self._inner = inner
        self._tables: dict[Any, tuple[Tensor, ...]] = {}

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if position_ids.dim() != 2:  # grids of positions, all alike in text
            return self._inner(x, position_ids, *args, **kwargs)
        key = (x.dtype, *args, *kwargs.items())
        end = self._current.step.batch.end_position
        tables = self._tables.get(key, ())
        num_pages = -(-end // ROTARY_PAGE)
        if not tables or tables[0].shape[0] < num_pages * ROTARY_PAGE:
            tables = self._tables[key] = self._longer(x, tables, num_pages, args, kwargs)
        found = [table[position_ids] for table in tables]
        return found[0] if len(found) == 1 else tuple(found)

    def _longer(
        self, x: Tensor, tables: tuple[Tensor, ...], num_pages: int, args: Any, kwargs: Any
    ) -> tuple[Tensor, ...]:
        pages = [tables] if tables else []
        for start in range(len(tables[0]) if tables else 0, num_pages * ROTARY_PAGE, ROTARY_PAGE):
            positions = torch.arange(start, start + ROTARY_PAGE, device=x.device)[None]
            made = self._inner(x[:, :1], positions, *args, **kwargs)
            pages.append(tuple(part[0] for part in ((made,) if isinstance(made, Tensor) else made)))
        return tuple(torch.cat(parts) for parts in zip(*pages, strict=True))


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
ALL_EXPERTS_FUNCTIONS.register(NAME, _run_experts)
_KNOWN = {type(ACT2FN[name]): function for name, function in ACTIVATIONS.items() if name != "xielu"}


class TransformersDecoder(Decoder):
    """transformers' model, with its weights, as a decoder. Its modules are changed for good."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        model: Any,
        traced: Trace,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Of a decoder, what is not its layers: those are modules here.
        self.config = self.part = config
        self.first_layer = 0
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self.layers = []
        self.dense_layers = None
        self.recorded = None
        self.threads = StepThreads(is_host=device_kind(device).is_host, torch_multiplies=True, dtype=dtype)
        self._model = model
        self._trace = traced
        self._current = _Current()
        self._experts: list[_Experts] = []
        self._products: list[_Product] = []
        self._heads: list[_Product] = []  # one, where it is a linear module
        self._groups = self._take_attention()
        self._take_modules()

    @property
    def is_whole(self) -> bool:
        return True

    @property
    def can_record(self) -> bool:
        return False

    @property
    def cache_spec(self) -> CacheSpec:
        return CacheSpec(self._groups)

    @property
    def num_weight_bytes(self) -> int:
        parts = [
            *(each for each in self._model.parameters() if not each.is_meta),
            *(each for experts in self._experts for each in experts.tensors()),
        ]
        for product in (*self._products, *self._heads):
            parts += [part for part in (product.packed, product.packed_bias) if part is not None]
        return sum(part.nbytes for part in {id(part): part for part in parts}.values())

    @property
    def probe_shapes(self) -> ProbeShapes:
        config = self.config
        return ProbeShapes(
            products=_distinct(
                [
                    *(_shape(each.packed, each.packed_bias) for each in self._products),
                    *(
                        ProductShape(
                            each.num_out,
                            each.num_in,
                            each.has_bias,
                            PLAIN_FLOAT32 if each.is_float32 else PLAIN,
                        )
                        for each in self._trace.products
                    ),
                ]
            ),
            head=next((_shape(head.packed, head.packed_bias) for head in self._heads), None),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            mlp_widths=(config.intermediate_size,),
            rotary_dim=config.head_dim,
            num_experts=config.experts.num_experts if config.experts else 0,
            expert_products=_distinct(shape for experts in self._experts for shape in experts.shapes()),
        )

    def preparations(self, caches: CacheTensors, num_rows: int) -> Iterator[None]:
        return iter(())

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        caches: CacheTensors,
        residual: Tensor | None = None,
        read: ReadRows | None = None,
    ) -> Tensor | None:
        if read is not None:
            because = "what is between the last layer and the logits is transformers' own here"
            raise SettingError("prompt_logprobs", ..., because=because)
        check_places(batch, caches)
        if batch.is_canonical:  # whole vectors, whatever the widths of element-wise passes
            batch = replace(
                batch,
                token_ids=_padded(batch.token_ids, LANES),
                positions=_padded(batch.positions, LANES),
                logit_rows=_padded(batch.logit_rows, self.kernels.head_rows),
            )
        numbers = (batch.token_ids, batch.positions, batch.logit_rows)
        token_ids, positions, logit_rows = device_kind(self.device).all_copied(numbers)
        current, kernels = self._current, self.kernels
        current.step = ForwardPass(kernels.prepare(batch, self.device), caches, kernels, ())
        current.is_canonical = batch.is_canonical
        inputs = {"input_ids": token_ids[None], "position_ids": positions[None], "use_cache": False}
        try:
            with self.threads:
                if batch.num_logits == 0:
                    self._model.base_model(**inputs)
                    return None
                if self._trace.keeps_logits:
                    logits = self._model(**inputs, logits_to_keep=logit_rows).logits[0]
                else:
                    logits = self._model(**inputs).logits[0][logit_rows]
                wanted: Tensor = logits[: batch.num_logits].float()
                return wanted
        finally:
            del current.step

    # Modules

    def _take_attention(self) -> tuple[KVSpec, ...]:
        """Let layers attend over the cache. Returns its groups."""
        groups: dict[KVSpec, None] = {}
        specs = []
        for layer in self._trace.layers:
            window = layer.window if self.config.window else 0
            spec = KVSpec(1, layer.num_kv_heads, layer.head_dim, self.dtype, window, layer.value_dim)
            specs.append(spec)
        # The first has no window, though perhaps no layers.
        for spec in sorted(specs, key=lambda spec: bool(spec.window)):
            groups.setdefault(spec)
        if next(iter(groups)).window:
            groups = {replace(next(iter(groups)), num_layers=0, window=0): None, **groups}
        order, counts = list(groups), Counter[int]()
        for layer, spec in zip(self._trace.layers, specs, strict=True):
            group = order.index(spec)
            traced = replace(layer, window=spec.window)
            self._model.get_submodule(layer.module).penstock = _Attention(
                self._current, group, counts[group], traced
            )
            counts[group] += 1
        return tuple(replace(spec, num_layers=counts[index]) for index, spec in enumerate(order))

    def _take_modules(self) -> None:
        """Let our kernels run what they can of a module. One weight at a time is there twice."""
        current, kernels = self._current, self.kernels
        experts = {each.module for each in self._trace.experts}
        head = self._model.get_output_embeddings()
        for name, module in self._model.named_modules():
            if name in experts:
                module.penstock = _Experts(current, module, kernels.pack)
                self._experts.append(module.penstock)
            elif type(module) in (nn.Linear, Conv1D):
                weight = module._parameters.pop("weight").detach()
                module.weight = nn.Parameter(
                    weight.to("meta"), requires_grad=False
                )  # for code that looks at its dtype
                weight = weight.t().contiguous() if type(module) is Conv1D else weight
                bias = None if module.bias is None else module.bias.detach()
                module.forward = _Product(
                    current, kernels, kernels.pack(weight), bias, is_head=module is head
                )
                (self._heads if module is head else self._products).append(module.forward)
            elif type(module).__module__ in _ACTIVATION_MODULES:
                module.forward = _Activation(current, kernels, module.forward, _KNOWN.get(type(module)))
            elif type(module).__name__.endswith("RotaryEmbedding") and "position_ids" in _parameters(module):
                module.forward = _Rotary(current, module.forward)


_ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")


def _padded(numbers: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    return np.pad(numbers, (0, -len(numbers) % multiple))


def _parameters(module: nn.Module) -> Iterable[str]:
    return inspect.signature(module.forward).parameters


def _shape(weight: Weight, bias: Tensor | None) -> ProductShape:
    return ProductShape(weight.shape[0], weight.shape[1], bias is not None)


def _distinct(shapes: Iterable[ProductShape]) -> tuple[ProductShape, ...]:
    return tuple(sorted(set(shapes), key=astuple))
