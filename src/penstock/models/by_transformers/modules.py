"""What is put in place of transformers' modules: the same functions, by Penstock's kernels and over its cache."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.kernels.elementwise import ACTIVATIONS, ElementWise
from penstock.kernels.interface import Kernels
from penstock.kernels.probe import ProductShape
from penstock.kernels.quantised import Weight
from penstock.kernels.spans import Scoring
from penstock.layers.forward_batch import ForwardPass
from penstock.layers.mlp import mix_experts
from penstock.models.by_transformers.trace import TracedAttention
from penstock.plan.grids import LANES, ROTARY_PAGE

NAME = "penstock"  # in transformers' registries


class Current:
    """The pass that a model's modules are in."""

    step: ForwardPass
    is_canonical = True  # whether a row's bits must not depend on how many others there are


class Attention:
    """A layer's attention, over the cache."""

    def __init__(self, current: Current, group: int, index: int, traced: TracedAttention) -> None:
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


class Experts:
    """A layer's experts, each a pair of products."""

    def __init__(self, current: Current, module: Any, pack: Callable[[Tensor], Weight]) -> None:
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
        yield shape_of(up, up_bias)
        yield shape_of(down, down_bias)

    def tensors(self) -> Iterator[Weight]:
        for expert in self._experts:
            yield from (part for part in expert if part is not None)

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        step = self._current.step
        num_tokens = step.batch.num_tokens
        experts = [self._expert(index) for index in range(len(self._experts))]
        weights = weights[:num_tokens].float()  # some routers round them
        return mix_experts(experts, hidden, chosen[:num_tokens], weights, step).to(hidden.dtype)

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


class Product:
    """In place of what a linear module does. The head, of a few rows, runs in slabs."""

    def __init__(
        self,
        current: Current,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None,
        *,
        is_head: bool = False,
    ) -> None:
        self._current = current
        self._kernels = kernels
        self.packed, self.packed_bias = kernels.pack(weight), bias
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


class Joined:
    """Products of the same rows as one: whichever is asked for first computes all of them."""

    def __init__(self, product: Product, sizes: Sequence[int]) -> None:
        self._product = product
        self._sizes = list(sizes)
        self._rows: Tensor | None = None
        self._parts: dict[int, Tensor] = {}  # that nobody has asked for yet

    def part(self, index: int, x: Tensor) -> Tensor:
        if x is not self._rows or index not in self._parts:
            self._rows = x
            self._parts = dict(enumerate(torch.split(self._product(x), self._sizes, dim=-1)))
        found = self._parts.pop(index)
        if not self._parts:
            self._rows = None
        return found


class GatedBlock:
    """In place of what a gated feed-forward block does, with the products of its input as one."""

    def __init__(self, kernels: Kernels, gate_up: Product, down: Product, activation: nn.Module) -> None:
        self._kernels = kernels
        self._gate_up, self._down = gate_up, down
        self._activation = KNOWN_ACTIVATIONS[type(activation)]

    def __call__(self, x: Tensor) -> Tensor:
        inner = self._gate_up(x.reshape(-1, x.shape[-1]))
        if self._activation is ACTIVATIONS["silu"]:
            inner = self._kernels.silu_and_mul(inner)
        else:
            inner = self._kernels.activate(inner, self._activation, is_gated=True)
        return self._down(inner).view(x.shape)


class RmsNorm:
    """In place of what a root-mean-square norm does."""

    def __init__(self, kernels: Kernels, weight: Tensor, eps: float) -> None:
        self._kernels = kernels
        self._weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        # Heads stay where they lie.
        rows = x[0] if x.dim() == 4 and len(x) == 1 else x.reshape(-1, x.shape[-1])
        return self._kernels.rms_norm(rows, self._weight, self._eps).view(x.shape)


def as_rms_norm(module: Any, kernels: Kernels) -> RmsNorm | None:
    """A module that is such a norm, as ours. What it does is tried, on rows of any size: the weight may be applied
    before its output is rounded or after, or be counted from 1."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    tensors = {**module._parameters, **module._buffers, **module._modules}
    if (
        not type(module).__name__.endswith("RMSNorm")
        or {*tensors} != {"weight"}
        or not isinstance(eps, float)
    ):
        return None
    weight = tensors["weight"].detach()
    x = _random_rows(weight, weight.shape[-1]) * torch.logspace(-4, 3, LANES).to(weight)[:, None]
    expected = module.forward(x)
    found = [RmsNorm(kernels, each, eps) for each in (weight, weight.float(), 1 + weight.float())]
    errors = [_error(each(x), expected) for each in found]
    return found[errors.index(min(errors))] if min(errors) <= _MOST_ERROR[x.dtype] else None


def is_gated_block(module: Any, tried: dict[type, bool]) -> bool:
    """Whether a module is down(activation(gate(x)) * up(x)) and nothing else, which is tried once for each class."""
    if {*module._modules} != {"gate_proj", "up_proj", "down_proj", "act_fn"} or module._parameters:
        return False
    gate, up, down, activation = module.gate_proj, module.up_proj, module.down_proj, module.act_fn
    are_plain = all(type(each) is nn.Linear for each in (gate, up, down))
    if not are_plain or type(activation) not in KNOWN_ACTIVATIONS or (gate.bias is None) != (up.bias is None):
        return False
    if gate.weight.shape != up.weight.shape:
        return False
    if (kind := type(module)) not in tried:
        x = _random_rows(gate.weight, gate.in_features)
        error = _error(module.forward(x), down(activation(gate(x)) * up(x)))
        tried[kind] = error <= _MOST_ERROR[x.dtype]
    return tried[kind]


# Of the largest element.
_MOST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def _random_rows(like: Tensor, size: int) -> Tensor:
    rows = torch.randn(LANES, size, generator=torch.Generator().manual_seed(0))
    return rows.to(like.device, like.dtype)


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a row, over what is largest in it."""
    expected = expected.float()
    return float(((found.float() - expected).abs().amax(-1) / expected.abs().amax(-1)).max())


class Activation:
    """In place of what an activation does, whose rows do not notice how many they are."""

    def __init__(
        self,
        current: Current,
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


class Rotary:
    """In place of what a rotary embedding does: rows of tables, which are made in pages, up to the last position."""

    def __init__(self, current: Current, inner: Callable[..., Any]) -> None:
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


class Rotation:
    """In place of what a model's attention rotates queries and keys with, [1, heads, rows, size] each."""

    def __init__(self, kernels: Kernels, inner: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._kernels = kernels
        self._inner = inner
        self._sin: Tensor | None = None  # all layers of a pass have the same
        self._signed = torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        is_plain = q.dim() == k.dim() == 4 and cos.dim() == 3 and len(q) == len(k) == len(cos) == 1
        if more or named or not is_plain or q.dtype != cos.dtype:
            return self._inner(q, k, cos, sin, *more, **named)
        if sin is not self._sin:
            first, second = sin[0].chunk(2, dim=-1)
            self._sin, self._signed = sin, torch.cat((-first, second), dim=-1)
        rows = [part[0].transpose(0, 1) for part in (q, k)]
        both = _side_by_side(*rows)
        rotated = [
            self._kernels.rotate(part, cos[0], self._signed) for part in (rows if both is None else [both])
        ]
        if both is not None:
            rotated = list(torch.split(rotated[0], [part.shape[1] for part in rows], dim=1))
        return tuple(part.transpose(0, 1)[None] for part in rotated)


def _side_by_side(first: Tensor, second: Tensor) -> Tensor | None:
    """Heads [rows, heads, size] that lie in the same rows, one behind the other, as one tensor."""
    num_rows, num_heads, size = first.shape
    start = first.storage_offset()
    if (
        first.stride() != second.stride()
        or first.stride()[1:] != (size, 1)
        or second.storage_offset() != start + num_heads * size
        or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    ):
        return None
    return first.as_strided((num_rows, num_heads + second.shape[1], size), first.stride(), start)


_ROTATE = "apply_rotary_pos_emb"  # in the modules of transformers' models


class Rotations:
    """Attention modules' forward functions with ours in place of what rotates, where that is tried and the same."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        self._kernels = kernels
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._found: dict[type, FunctionType | None] = {}

    def put_into(self, module: nn.Module) -> None:
        kind = type(module)
        if kind not in self._found:
            self._found[kind] = self._function(kind.forward)
        if (function := self._found[kind]) is not None:
            module.forward = MethodType(function, module)

    def _function(self, forward: object) -> FunctionType | None:
        if not isinstance(forward, FunctionType) or _ROTATE not in forward.__code__.co_names:
            return None
        rotate = forward.__globals__.get(_ROTATE)
        if not callable(rotate) or not self._is_rotation(rotate):
            return None
        ours = {**forward.__globals__, _ROTATE: Rotation(self._kernels, rotate)}
        made = FunctionType(
            forward.__code__, ours, forward.__name__, forward.__defaults__, forward.__closure__
        )
        made.__kwdefaults__ = forward.__kwdefaults__
        return made

    def _is_rotation(self, rotate: Callable[..., Any]) -> bool:
        """With heads that are rotated whole, and in part if the function takes such."""
        size, matches = 2 * LANES, []
        q, k = (
            _random_rows(self._like, num * size).view(1, LANES, num, size).transpose(1, 2) for num in (4, 2)
        )
        for rotated in (size, size // 2):
            tables = [_random_rows(self._like, rotated)[None].roll(shift, -1) for shift in (0, 1)]
            try:
                expected = rotate(q, k, *tables)
            except Exception:  # it takes others
                continue
            found = Rotation(self._kernels, rotate)(q, k, *tables)
            matches += [_error(*pair) <= _MOST_ERROR[q.dtype] for pair in zip(found, expected, strict=True)]
        return len(matches) >= 2 and all(matches)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
ALL_EXPERTS_FUNCTIONS.register(NAME, _run_experts)
KNOWN_ACTIVATIONS = {
    type(ACT2FN[name]): function for name, function in ACTIVATIONS.items() if name != "xielu"
}


def shape_of(weight: Weight, bias: Tensor | None) -> ProductShape:
    return ProductShape(weight.shape[0], weight.shape[1], bias is not None)
