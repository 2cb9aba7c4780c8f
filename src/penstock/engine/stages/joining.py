"""What a worker must have in common with its driver, part by part, so that a model in stages has the bits of one
machine; and the law of rows that all of them obey, measured of the products of all."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from penstock.cache import BLOCK_TOKENS
from penstock.engine.fingerprint import code_digest, processor_features, weights_digest, weights_state
from penstock.errors import StageRefusedError
from penstock.kernels.device import device_kind
from penstock.kernels.probe import ProbeShapes, ProductShape
from penstock.models.decoder import Decoder
from penstock.plan.grids import RowLaw

# Parts that may differ where stages are mixed: other bits may come of them, nothing else.
BITS_ALONE = frozenset(("kernels", "libraries", "processor", "threads"))
_SHORT = 60


def common_parts(path: Path, model: Decoder, form: str, *, same_machine: bool) -> dict[str, str]:
    """What the bits of a stage depend on. On one machine weights are the same where they are the same files; else
    their bytes are compared, which are read whole for that, once."""
    kind, kernels = device_kind(model.device), model.kernels
    processor = {
        "name": kind.product_name,
        "capability": torch.backends.cpu.get_cpu_capability(),
        **processor_features(),
    }
    return {
        "code": code_digest("engine/stages"),
        "weights": weights_state(path) if same_machine else weights_digest(path).hex(),
        "form of weights": form,
        "activations": model.kernels.activations,
        "configuration": _digest(asdict(model.config)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": kernels.name,
        "libraries": _digest({"torch": torch.__version__, "kernels": kernels.libraries}),
        "processor": f"{kind.product_name} {_digest(processor)[:8]}",
        # Products of float32 may have other bits with another number of threads.
        "threads": str(kind.num_threads) if model.dtype == torch.float32 else "any",
        "blocks": str(BLOCK_TOKENS),
    }


def check_parts(
    stage: int, address: str, ours: Mapping[str, str], theirs: Mapping[str, object], *, mixed: bool
) -> tuple[str, ...]:
    """The parts that differ. Raises `StageRefusedError`, which names them, unless stages may be mixed and nothing but
    bits comes of it."""
    differ = tuple(name for name in ours if theirs.get(name) != ours[name])
    if differ and not (mixed and BITS_ALONE.issuperset(differ)):
        told = ", ".join(
            f"{name} ({_shown(theirs.get(name))}, the driver's {_shown(ours[name])})" for name in differ
        )
        advice = "" if mixed or not BITS_ALONE.issuperset(differ) else "; --mixed accepts it, with other bits"
        raise StageRefusedError(stage, address, f"other {told}{advice}")
    return differ


def join_laws(laws: Sequence[RowLaw]) -> RowLaw:
    """A law that the products of all these stages hold to: the largest floor, all numbers of rows that one of them
    avoids. Raises `ValueError` where there is none."""
    first = laws[0]
    if any((law.tile_size, law.row_grid) != (first.tile_size, first.row_grid) for law in laws):
        raise ValueError("tiles of attention or grids of rows differ")
    slabs, expert_slabs = (
        {size for size in sizes if size} for sizes in zip(*map(_slabs_of, laws), strict=True)
    )
    if len(slabs) > 1 or len(expert_slabs) > 1:
        raise ValueError(
            f"products hold in slabs of {sorted(slabs | expert_slabs)} rows, and in no common one"
        )
    slab, expert_slab = max(slabs, default=0), max(expert_slabs, default=0)
    floor = max(law.row_floor for law in laws)
    avoided = frozenset().union(*(law.avoided_rows for law in laws))
    for size in filter(None, (slab, expert_slab)):
        # A slab is a number of rows as any other to those that need none.
        if any(size < law.row_floor or size in law.avoided_rows for law in laws if not law.row_slab):
            raise ValueError(f"products hold in slabs of {size} rows on one stage, and not on another")
    return replace(
        first,
        row_floor=floor,
        row_slab=slab,
        expert_slab=expert_slab,
        free_decodes=min(law.free_decodes for law in laws),
        few_rows=min(law.few_rows for law in laws),
        avoided_rows=() if slab else tuple(sorted(avoided)),
    )


def read_law(about: Mapping[str, Any]) -> RowLaw:
    """A law out of a message."""
    return RowLaw(**{**about, "avoided_rows": tuple(about["avoided_rows"])})


def joined_shapes(parts: Sequence[ProbeShapes], model: Decoder) -> ProbeShapes:
    """What is probed of a whole model, from what is of its stages; the first is the last stage's, which has the
    head."""

    def union(name: str) -> tuple[Any, ...]:
        return tuple(sorted({each for part in parts for each in getattr(part, name)}, key=_by_fields))

    config = model.config
    return replace(
        parts[0],
        products=union("products"),
        mlp_widths=union("mlp_widths"),
        expert_products=union("expert_products"),
        recurrent=config.recurrent,
        num_experts=config.experts.num_experts if config.experts else 0,
    )


def _by_fields(item: Any) -> Any:
    return item if isinstance(item, int) else tuple(asdict(item).values())


def tell_shapes(shapes: ProbeShapes) -> dict[str, object]:
    """What a worker says of its products."""
    told = asdict(shapes)
    return {name: told[name] for name in ("products", "mlp_widths", "expert_products")}


def read_shapes(about: Mapping[str, Any], model: Decoder) -> ProbeShapes:
    """What a worker said of its products; all else is the model's."""
    return replace(
        model.probe_shapes,
        products=tuple(ProductShape(**each) for each in about["products"]),
        mlp_widths=tuple(int(width) for width in about["mlp_widths"]),
        expert_products=tuple(ProductShape(**each) for each in about["expert_products"]),
    )


def _slabs_of(law: RowLaw) -> tuple[int, int]:
    return law.row_slab, law.expert_slab


def _digest(value: object) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _shown(value: object) -> str:
    text = "none" if value is None else str(value)
    return f"{text[:8]}..." if len(text) == 64 else text[:_SHORT]
