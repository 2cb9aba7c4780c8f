"""A decoder whose layers are transformers' modules. What those have in common with other models' (`modules`) is run
by Penstock's kernels, over its cache, on the rows of a `ForwardBatch`."""

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from penstock.cache.tensors import CacheSpec, CacheTensors, KVSpec
from penstock.errors import SettingError
from penstock.kernels.device import device_kind
from penstock.kernels.interface import Kernels
from penstock.kernels.probe import PLAIN, PLAIN_FLOAT32, ProbeShapes, ProductShape
from penstock.kernels.threads import StepThreads
from penstock.layers.forward_batch import NO_OVERLAP, ForwardBatch, ForwardPass, Overlap
from penstock.models.by_transformers.modules import (
    KNOWN_ACTIVATIONS,
    Activation,
    Attention,
    Current,
    Experts,
    GatedBlock,
    Joined,
    Product,
    Rotary,
    Rotations,
    as_rms_norm,
    is_gated_block,
    shape_of,
)
from penstock.models.by_transformers.trace import Trace
from penstock.models.decoder import Decoder, ReadRows, check_places
from penstock.plan.grids import LANES, whole_lanes
from penstock.plan.model import ModelConfig


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
        self._current = Current()
        self._experts: list[Experts] = []
        self._products: list[Product] = []
        self._heads: list[Product] = []  # one, where it is a linear module
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
                    *(shape_of(each.packed, each.packed_bias) for each in self._products),
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
            head=next((shape_of(head.packed, head.packed_bias) for head in self._heads), None),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            mlp_widths=(config.intermediate_size,),
            rotary_dim=config.head_dim,
            num_experts=config.experts.num_experts if config.experts else 0,
            expert_products=_distinct(shape for experts in self._experts for shape in experts.shapes()),
            passes_are_known=False,
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
        overlap: Overlap = NO_OVERLAP,
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
        if overlap.late is not None:
            overlap.late.put_into(token_ids)
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
            self._model.get_submodule(layer.module).penstock = Attention(
                self._current, group, counts[group], traced
            )
            counts[group] += 1
        return tuple(replace(spec, num_layers=counts[index]) for index, spec in enumerate(order))

    @torch.no_grad()
    def _take_modules(self) -> None:
        """Let our kernels run what they can of a module. One weight at a time is there twice."""
        current, kernels, model = self._current, self.kernels, self._model
        experts = {each.module for each in self._trace.experts}
        head = model.get_output_embeddings()
        gated: dict[type, bool] = {}
        for name, module in model.named_modules():
            if name in experts:
                module.penstock = Experts(current, module, kernels.pack)
                self._experts.append(module.penstock)
            elif is_gated_block(module, gated):
                width = whole_lanes(module.gate_proj.out_features)
                gate_up = self._product([module.gate_proj, module.up_proj], num_out=width)
                down = self._product([module.down_proj], num_in=width)
                module.forward = GatedBlock(kernels, gate_up, down, module.act_fn)
            elif (norm := as_rms_norm(module, kernels)) is not None:
                module.forward = norm
            elif type(module).__module__ in _ACTIVATION_MODULES:
                module.forward = Activation(
                    current, kernels, module.forward, KNOWN_ACTIVATIONS.get(type(module))
                )
            elif type(module).__name__.endswith("RotaryEmbedding") and "position_ids" in _parameters(module):
                module.forward = Rotary(current, module.forward)
        rotations = Rotations(kernels, self.dtype, self.device)
        for layer in self._trace.layers:
            rotations.put_into(model.get_submodule(layer.module))
        for names in self._trace.joined:
            self._join([model.get_submodule(name) for name in names])
        for module in model.modules():
            if type(module) in (nn.Linear, Conv1D) and not module.weight.is_meta:
                module.forward = self._product([module], is_head=module is head)

    def _join(self, linears: list[Any]) -> None:
        """Products of the same rows, as one."""
        if any(type(each) is not nn.Linear or each.weight.is_meta for each in linears):
            return
        if len({(each.bias is None, each.weight.dtype) for each in linears}) > 1:
            return
        joined = Joined(self._product(linears), [each.out_features for each in linears])
        for index, module in enumerate(linears):
            module.forward = partial(joined.part, index)

    def _product(
        self, linears: list[Any], *, is_head: bool = False, num_out: int = 0, num_in: int = 0
    ) -> Product:
        """Of linear modules, one behind the other, whose weights it takes, with zeros up to so many outputs of each
        and so many inputs."""
        weights = [module._parameters.pop("weight").detach() for module in linears]
        for module, weight in zip(linears, weights, strict=True):  # for code that looks at its dtype
            module.weight = nn.Parameter(weight.to("meta"), requires_grad=False)
        if type(linears[0]) is Conv1D:
            weights = [each.t().contiguous() for each in weights]
        missing = max(num_out - len(weights[0]), 0)
        if missing or num_in > weights[0].shape[1]:
            weights = [pad(each, (0, max(num_in - each.shape[1], 0), 0, missing)) for each in weights]
        biases = [pad(module.bias.detach(), (0, missing)) for module in linears if module.bias is not None]
        product = Product(
            self._current,
            self.kernels,
            torch.cat(weights) if len(weights) > 1 else weights[0],
            torch.cat(biases) if biases else None,
            is_head=is_head,
        )
        (self._heads if is_head else self._products).append(product)
        return product


_ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")


def _padded(numbers: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    return np.pad(numbers, (0, -len(numbers) % multiple))


def _parameters(module: nn.Module) -> Iterable[str]:
    return inspect.signature(module.forward).parameters


def _distinct(shapes: Iterable[ProductShape]) -> tuple[ProductShape, ...]:
    return tuple(sorted(set(shapes), key=astuple))
