"""What transformers' code does with a configuration, seen before any weight is read: its model is made on torch's
meta device and run once there. Attention, experts and masks come to functions of ours by transformers' registries.

A mask is a function of two positions, so it can be asked what it hides: what it says is what its layer is run with.
Whatever is not plain (another mask, a layer that does not call, one that calls twice) is refused here."""

import inspect
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.errors import ModelError
from penstock.models.reading import first_line

_NAME = "penstock_trace"
_NUM_ROWS = 8
_META = torch.device("meta")
# Positions at which a mask is asked, beside those around its window.
_ASKED = (0, 1, 5, 700)


@dataclass(frozen=True)
class TracedAttention:
    """A layer's attention, as its code calls it."""

    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False


@dataclass(frozen=True)
class TracedExperts:
    """A layer's experts."""

    module: str
    num_experts: int
    num_active: int
    width: int  # what enters their second product


@dataclass(frozen=True)
class TracedProduct:
    """A product with a parameter that is no linear module's, such as a router's."""

    num_out: int
    num_in: int
    has_bias: bool
    is_float32: bool  # whatever the model's dtype


@dataclass(frozen=True)
class Trace:
    """What a pass through a model called, in order, and sizes of the model."""

    layers: tuple[TracedAttention, ...]
    experts: tuple[TracedExperts, ...]
    products: tuple[TracedProduct, ...]
    joined: tuple[tuple[str, ...], ...]  # linear modules of one module that multiply the same rows
    keeps_logits: bool  # whether the head can be run on some rows alone
    hidden_size: int
    vocab_size: int
    widest: int  # of the outputs of its linear modules, but for the head's


class _RefusedError(Exception):
    """Why a model cannot be run."""


@dataclass(frozen=True)
class _Mask:
    """What stands for a mask until attention is called."""

    hides: Callable[..., Tensor]
    local_size: int | None


def _mask(*args: Any, mask_function: Any, local_size: int | None = None, **more: Any) -> _Mask:
    return _Mask(mask_function, local_size)


class _Seen(TorchFunctionMode):
    """What a pass does."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}  # of modules
        self.linears: dict[int, str] = {}  # names of linear modules, by their weights
        # Of those within one module: what each multiplied. Inputs stay, so that none has another's number.
        self.multiplied: dict[tuple[str, int], list[str]] = {}
        self.inputs: list[Tensor] = []
        self.layers: dict[str, TracedAttention] = {}
        self.experts: list[TracedExperts] = []
        self.products: set[TracedProduct] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear and (name := self.linears.get(id(args[1]))) is not None:
            self.inputs.append(args[0])
            self.multiplied.setdefault((name.rpartition(".")[0], id(args[0])), []).append(name)
        elif func is linear:
            _, weight, *bias = args
            has_bias = any(each is not None for each in (*bias, (kwargs or {}).get("bias")))
            num_out, num_in = weight.shape
            self.products.add(TracedProduct(num_out, num_in, has_bias, weight.dtype == torch.float32))
        return func(*args, **(kwargs or {}))

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        name = self.names[id(module)]
        if name in self.layers:
            raise _RefusedError(f"{name} attends twice in a pass")
        (num, num_heads, num_rows, head_dim), value_dim = query.shape, value.shape[3]
        if (num, num_rows) != (1, _NUM_ROWS) or key.shape[2] != num_rows or key.shape[:3] != value.shape[:3]:
            raise _RefusedError(f"{name} attends to other tokens than those of its pass")
        if num_heads % key.shape[1]:
            raise _RefusedError(f"{name} has {num_heads} heads for {key.shape[1]} of keys")
        if not isinstance(attention_mask, _Mask):
            raise _RefusedError(f"{name} has a mask of its own")
        if more.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise _RefusedError(f"{name} is not causal")
        if more.get("position_bias") is not None:
            raise _RefusedError(f"{name} adds a bias to its scores")
        self.layers[name] = TracedAttention(
            module=name,
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
            value_dim=value_dim,
            scale=head_dim**-0.5 if scaling is None else float(scaling),
            window=_window(name, attention_mask),
            soft_cap=float(softcap or 0.0),
            has_sinks=s_aux is not None,
        )
        return query.new_empty((1, num_rows, num_heads, value_dim)), None

    def run_experts(self, module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        down = module.down_proj
        width = down.shape[1] if module.is_transposed else down.shape[2]
        self.experts.append(TracedExperts(self.names[id(module)], down.shape[0], chosen.shape[-1], width))
        return torch.empty_like(hidden)


def _window(name: str, mask: _Mask) -> int:
    """How many tokens a query sees, 0 for all before it."""
    local = mask.local_size or 0
    asked = {*_ASKED, *(near for near in (local - 1, local, local + 1, 3 * local + 7) if near > 0)}
    window, zero = 0, torch.tensor(0)
    for query in sorted(asked, reverse=True):
        keys = torch.arange(query + 3)
        seen = mask.hides(zero, zero, torch.tensor(query), keys).expand(len(keys))
        if query == max(asked):
            count = int(seen.sum())
            window = count if count <= query else 0
        if not torch.equal(seen, (keys <= query) & (keys > (query - window if window else -1))):
            raise _RefusedError(f"{name} hides other tokens than those behind a window")
    return window


def trace(origin: str, model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Trace:
    """Run such a model without weights. ModelError where it cannot be run over a cache of ours."""
    seen = _Seen()
    ALL_ATTENTION_FUNCTIONS.register(_NAME, seen.attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, _mask)
    ALL_EXPERTS_FUNCTIONS.register(_NAME, seen.run_experts)
    try:
        with _META:
            # In bfloat16, a product that is computed in float32 all the same shows.
            model = model_class._from_config(
                config, dtype=torch.bfloat16, attn_implementation=_NAME, experts_implementation=_NAME
            ).eval()
        return _trace(model, seen)
    except _RefusedError as refusal:
        why = str(refusal)
    except Exception as error:  # whatever code of many families does with a configuration of a stranger
        why = f"it fails with {first_line(error)}"
    raise ModelError(f"{origin}: transformers' code of {config.model_type} cannot be run here: {why}")


@torch.no_grad()
def _trace(model: Any, seen: _Seen) -> Trace:
    if model._is_stateful:
        raise _RefusedError("its layers carry a recurrent state")
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        raise _RefusedError("it cannot be told the positions of its tokens")
    head = model.get_output_embeddings()
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    seen.names = {id(module): name for name, module in model.named_modules()}
    seen.linears = {id(module.weight): seen.names[id(module)] for module in linears}
    tokens = torch.zeros((1, _NUM_ROWS), dtype=torch.long, device=_META)
    with seen:
        logits = model(
            input_ids=tokens,
            position_ids=torch.arange(_NUM_ROWS, device=_META)[None],
            attention_mask=torch.ones_like(tokens),  # without it, positions are searched for packed sequences
            use_cache=False,
        ).logits
    num_layers = model.config.get_text_config().num_hidden_layers
    if len(seen.layers) != num_layers:
        raise _RefusedError(
            f"{len(seen.layers)} of its {num_layers} layers leave attention to a registered function"
        )
    return Trace(
        layers=tuple(seen.layers.values()),
        experts=tuple(seen.experts),
        products=tuple(sorted(seen.products, key=astuple)),
        joined=tuple(tuple(names) for names in seen.multiplied.values() if 1 < len(names) == len({*names})),
        keeps_logits="logits_to_keep" in parameters,
        hidden_size=model.get_input_embeddings().weight.shape[1],
        vocab_size=logits.shape[-1],
        widest=max((module.out_features for module in linears if module is not head), default=1),
    )
