"""Measures, on the machine at hand, the facts that 'the same bits for any chunking' rests on.

Four laws are tried on random data of the model's own shapes:

* a product gives each row the same bits whatever the number of rows, from some number up (the floor), on a GPU but
  for numbers that are found and avoided; or else, with a fixed number of rows (the slab), whatever the row's place
  among them, as the output head always does (`products`);
* attention gives a query the same bits whatever the other queries of its tile hold;
* norm, rotation and activation give a row the same bits whatever the other rows;
* a delta net gives the same bits for spans that end on the grid of states (all in `laws`).

None is assumed. The result is kept in the cache folder, under a key of everything it depends on.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from penstock.files import read_plain, replace_json
from penstock.home import cache_home
from penstock.kernels.device import device_kind
from penstock.kernels.interface import Kernels
from penstock.kernels.probe.data import ProbeShapes, Random
from penstock.kernels.probe.laws import attention_holds, passes_hold, recurrence_holds
from penstock.kernels.probe.products import (
    EXPERT_SLAB,
    Tried,
    least_floor,
    other_counts,
    slab_holds,
    tried_on,
)
from penstock.plan.grids import RowLaw

_VERSION = 20
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class ProbeResult:
    """Products are row-invariant from `row_floor` rows up; or, where `row_slab` is not 0, only in slabs of that many
    (experts', of `expert_slab`). `row_floor` is None where neither is so."""

    row_floor: int | None
    row_slab: int
    attention_holds: bool
    passes_hold: bool
    head_holds: bool
    recurrence_holds: bool = True  # of models without recurrent layers too
    expert_slab: int = 0
    avoided_rows: tuple[
        int, ...
    ] = ()  # numbers above the floor that are not row-invariant, where all were tried

    def bind(self, kernels: Kernels) -> RowLaw:
        """Let the kernels obey what was found, from now on."""
        kernels.law = replace(
            kernels.law,
            row_floor=self.row_floor or 1,
            row_slab=self.row_slab,
            avoided_rows=self.avoided_rows,
            expert_slab=self.expert_slab,
        )
        return kernels.law

    @property
    def same_bits(self) -> bool:
        """Whether all the laws hold, so that a prompt's bits do not depend on its chunks."""
        laws = (self.attention_holds, self.passes_hold, self.head_holds, self.recurrence_holds)
        return self.row_floor is not None and all(laws)


def probe(kernels: Kernels, shapes: ProbeShapes, dtype: torch.dtype, device: torch.device) -> ProbeResult:
    """The stored result for this machine, kernels, dtype and shapes; measured first where there is none."""
    path = _result_path(kernels, shapes, dtype, device)
    stored = _read(path, tried_on(device))
    if stored is not None:
        return stored
    result = measure(kernels, shapes, dtype, device)
    _write(path, result)
    return result


@torch.inference_mode()
def measure(kernels: Kernels, shapes: ProbeShapes, dtype: torch.dtype, device: torch.device) -> ProbeResult:
    """Measure the laws now."""
    random, tried = Random(dtype, device), tried_on(device)
    others = [
        other_counts(kernels, shape, shapes.mlp_widths, tried, random)
        for shape in (*shapes.products, *shapes.expert_products)
    ]
    row_floor = least_floor(tried, set().union(*others))
    avoided = sorted(count for count in set().union(*others) if row_floor is not None and count > row_floor)
    row_slab = expert_slab = 0
    if row_floor is None:
        products = shapes.products
        if shapes.expert_products and slab_holds(kernels, shapes.expert_products, EXPERT_SLAB, random):
            expert_slab = EXPERT_SLAB
        else:
            products += shapes.expert_products
        slabs = [slab for slab in tried.slabs if slab_holds(kernels, products, slab, random)]
        row_floor, row_slab = (slabs[0], slabs[0]) if slabs else (None, 0)
    return ProbeResult(
        row_floor=row_floor,
        row_slab=row_slab,
        attention_holds=attention_holds(kernels, shapes, tried, random),
        passes_hold=passes_hold(kernels, shapes, random),
        head_holds=slab_holds(kernels, (shapes.head,) if shapes.head else (), kernels.head_rows, random),
        recurrence_holds=shapes.delta_net is None
        or recurrence_holds(kernels, shapes.delta_net, random.normal),
        expert_slab=expert_slab,
        avoided_rows=() if row_slab else tuple(avoided),
    )


def _result_path(kernels: Kernels, shapes: ProbeShapes, dtype: torch.dtype, device: torch.device) -> Path:
    kind = device_kind(device)
    key = {
        "version": _VERSION,
        "torch": torch.__version__,
        "kernels": kernels.name,
        "libraries": kernels.libraries,
        "tile_size": kernels.law.tile_size,
        "dtype": str(dtype),
        "machine": kind.features,
        "threads": kind.num_threads,
        "shapes": asdict(shapes),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_home() / "probe" / f"{digest}.json"


def _read(path: Path, tried: Tried) -> ProbeResult | None:
    """A stored result; None where there is none or it cannot be read (it is then measured again)."""
    try:
        stored = json.loads(read_plain(path, _MOST_BYTES))
        result = ProbeResult(**stored | {"avoided_rows": tuple(stored["avoided_rows"])})
        avoided = set(result.avoided_rows)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    floors = (result.row_slab,) if result.row_slab else (None, *tried.floors)
    answers = (result.attention_holds, result.passes_hold, result.head_holds, result.recurrence_holds)
    is_valid = (
        not isinstance(result.row_floor, bool | float)
        and result.row_floor in floors
        and result.row_slab in (0, *tried.slabs)
        and result.expert_slab in (0, EXPERT_SLAB)
        and all(type(answer) is bool for answer in answers)
        and avoided <= set(tried.counts)
    )
    return result if is_valid else None


def _write(path: Path, result: ProbeResult) -> None:
    """Keep a result; a folder that cannot be written costs only the next start's time."""
    with suppress(OSError):
        replace_json(path, asdict(result))
