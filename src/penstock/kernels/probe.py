"""Measures, on the machine at hand, the facts that 'the same bits for any chunking' rests on.

Four laws are tried on random data of the model's own shapes:

* a product gives each row the same bits whatever the number of rows, from some number up (the floor), on a GPU but
  for numbers that are found and avoided; or else, with a fixed number of rows (the slab), whatever the row's place
  among them, as the output head always does;
* attention gives a query the same bits whatever the other queries of its tile hold;
* norm, rotation and activation give a row the same bits whatever the other rows;
* a delta net gives the same bits for spans that end on multiples of 64 tokens (in `penstock.kernels.probe_delta`).

None is assumed. The result is kept in the cache folder, under a key of everything it depends on.
"""

import hashlib
import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.cache import TokenRange
from penstock.cache.kv import KV
from penstock.home import cache_home
from penstock.kernels.probe_delta import recurrence_holds
from penstock.kernels.protocol import FINE_ROWS, HEAD_ROWS, HeadLayout, Kernels
from penstock.kernels.quantised import BLOCK_FORMS, Weight
from penstock.kernels.spans import AttendedSpan, AttentionWork, WrittenPlaces
from penstock.plan.shape import DeltaNetShape

_VERSION = 19
_EXPERT_SLAB = 32
_PASS_ROWS = 512
# If more than this share of counts is to be avoided, there is no rule in what the library does.
_MOST_AVOIDED = 0.25
# Where the queries of a chunk may begin and end in a tile.
_EDGES = (1, 7, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300)


@dataclass(frozen=True)
class _Tried:
    """The numbers of rows that products are tried with on a kind of device."""

    reference: int  # what all others are compared with
    counts: tuple[int, ...]  # in ascending order
    # A floor that is not among these is not believed: a library that changes its ways at such sizes may do so again
    # beyond.
    floors: tuple[int, ...]
    slabs: tuple[int, ...]  # the preferred one first
    edges: tuple[int, ...]  # of chunks in a tile
    are_all: bool = False  # no other counts are run than those: one that has other bits is avoided


_ON_CPU = _Tried(
    reference=512,
    counts=(
        *(*range(1, 21), *range(23, 26), *range(31, 34), *range(47, 50), *range(63, 66), 100),
        *(*range(127, 130), 200, 256, 257, 384, 513, 1000, 2048),
    ),
    floors=tuple(range(1, 33)),
    slabs=(128, 256, 64, 512),
    edges=_EDGES,
)
# Where there are too few rows to keep a GPU's multiprocessors busy, libraries share a sum among them: some products
# do up to a few hundred rows, and at some numbers beyond. A pass of a few hundred takes hardly longer than one of a
# single row, and every number on the grid of `padded_rows` is tried (but for those beyond the last).
_ON_GPU = _Tried(
    reference=2048,
    counts=(*range(64, FINE_ROWS + 1, 64), *range(3072, 8193, 512)),
    floors=tuple(range(64, 513, 64)),
    slabs=(512, 256, 128, 64),
    edges=(*_EDGES, 511, 512, 513, 700),
    are_all=True,
)


@dataclass(frozen=True)
class ProductShape:
    """A weight [num_out, num_in], with a bias or without; of blocks, where there is a form."""

    num_out: int
    num_in: int
    bias: bool = False
    form: str = ""


@dataclass(frozen=True)
class ProbeShapes:
    """What is probed: the model's distinct products, its attention's heads, the widths of its other passes."""

    products: tuple[ProductShape, ...]  # but for experts' and the head
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    mlp_widths: tuple[int, ...]
    rotary_dim: int
    head: ProductShape
    delta_net: DeltaNetShape | None = None
    num_experts: int = 0
    expert_products: tuple[ProductShape, ...] = ()


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

    @property
    def same_bits(self) -> bool:
        """Whether all the laws hold, so that a prompt's bits do not depend on its chunks."""
        laws = (self.attention_holds, self.passes_hold, self.head_holds, self.recurrence_holds)
        return self.row_floor is not None and all(laws)


def probe(kernels: Kernels, shapes: ProbeShapes, dtype: torch.dtype, device: torch.device) -> ProbeResult:
    """The stored result for this machine, kernels, dtype and shapes; measured first where there is none."""
    path = _result_path(kernels, shapes, dtype, device)
    stored = _read(path, _tried_on(device))
    if stored is not None:
        return stored
    result = measure(kernels, shapes, dtype, device)
    _write(path, result)
    return result


@torch.inference_mode()
def measure(kernels: Kernels, shapes: ProbeShapes, dtype: torch.dtype, device: torch.device) -> ProbeResult:
    """Measure the laws now."""
    random, tried = _Random(dtype, device), _tried_on(device)
    others = [
        _other_counts(kernels, shape, shapes.mlp_widths, tried, random)
        for shape in (*shapes.products, *shapes.expert_products)
    ]
    row_floor = _row_floor(tried, set().union(*others))
    avoided = sorted(count for count in set().union(*others) if row_floor is not None and count > row_floor)
    row_slab = expert_slab = 0
    if row_floor is None:
        products = shapes.products
        if shapes.expert_products and _slab_holds(kernels, shapes.expert_products, _EXPERT_SLAB, random):
            expert_slab = _EXPERT_SLAB
        else:
            products += shapes.expert_products
        slabs = [slab for slab in tried.slabs if _slab_holds(kernels, products, slab, random)]
        row_floor, row_slab = (slabs[0], slabs[0]) if slabs else (None, 0)
    return ProbeResult(
        row_floor=row_floor,
        row_slab=row_slab,
        attention_holds=_attention_holds(kernels, shapes, tried, random),
        passes_hold=_passes_hold(kernels, shapes, random),
        head_holds=_slab_holds(kernels, (shapes.head,), HEAD_ROWS, random),
        recurrence_holds=shapes.delta_net is None
        or recurrence_holds(kernels, shapes.delta_net, random.normal),
        expert_slab=expert_slab,
        avoided_rows=() if row_slab else tuple(avoided),
    )


def _tried_on(device: torch.device) -> _Tried:
    return _ON_GPU if device.type == "cuda" else _ON_CPU


class _Random:
    """Random tensors, the same in every probe on a device, which draws them itself."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._dtype = dtype
        self._device = device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, generator=self._generator, device=self._device)

    def cancelling(self, num_rows: int, width: int, sign: int, block: int = 1) -> Tensor:
        """Rows whose second half repeats the first in another order of blocks, with a sign.

        The product of two such matrices of opposite sign is zero but for rounding, so that every difference in
        the order of summing shows. In bfloat16 the rounding of the result would hide most of them."""
        half, order = self._order_of_half(width // block)
        rows = self.normal(num_rows, width // block, block)
        rows[:, half : 2 * half] = sign * rows[:, order]
        rows[:, 2 * half :] = 0
        flat = rows.flatten(1)
        return torch.nn.functional.pad(flat, (0, width % block)) if width % block else flat

    def cancelling_blocks(self, num_rows: int, num_blocks: int, block_bytes: int) -> Tensor:
        """The same for rows of quantised blocks of any form: no byte of theirs makes a scale below 0 or above 2."""
        half, order = self._order_of_half(num_blocks)
        rows = torch.randint(
            64, (num_rows, num_blocks, block_bytes), dtype=torch.uint8, generator=self._generator
        )
        rows[:, half : 2 * half] = rows[:, order]
        rows[:, 2 * half :] = 0
        return rows.flatten(1)

    def _order_of_half(self, size: int) -> tuple[int, Tensor]:
        half = size // 2
        order = torch.randperm(half, generator=torch.Generator().manual_seed(size))
        return half, order.to(self._device)

    def cancelling_kv(self, num_tokens: int, num_heads: int, head_dim: int) -> KV:
        """Pairs of tokens, 32 apart, with equal keys and opposite values, for the same reason."""
        shape = (-1, 2, 32, num_heads, head_dim)
        keys, values = (self.normal(num_tokens, num_heads, head_dim).view(shape) for _ in range(2))
        keys[:, 1] = keys[:, 0]
        values[:, 1] = -values[:, 0]
        return KV(keys.flatten(0, 2), values.flatten(0, 2))


def _factors(kernels: Kernels, shape: ProductShape, num_rows: int, random: _Random) -> tuple[Weight, Tensor]:
    """A weight of that shape and rows to multiply with it, whose product is zero but for rounding."""
    if not shape.form:
        weight = kernels.pack(random.cancelling(shape.num_out, shape.num_in, 1))
        return weight, random.cancelling(num_rows, shape.num_in, -1)
    assert kernels.quantised is not None
    form = BLOCK_FORMS[shape.form]
    blocks = random.cancelling_blocks(shape.num_out, shape.num_in // form.block_size, form.block_bytes)
    quantised = kernels.quantised.zeros(form, shape.num_out, shape.num_in)
    kernels.quantised.place(quantised, torch.arange(shape.num_out), blocks)
    return quantised, random.cancelling(num_rows, shape.num_in, -1, form.block_size)


def _other_counts(
    kernels: Kernels, shape: ProductShape, mlp_widths: tuple[int, ...], tried: _Tried, random: _Random
) -> set[int]:
    """The numbers of rows that give other bits than the one which all are compared with."""
    weight, x = _factors(kernels, shape, tried.counts[-1], random)
    bias = torch.zeros(shape.num_out, dtype=x.dtype, device=x.device) if shape.bias else None
    stride = kernels.activation_stride if shape.num_in in mlp_widths else 1

    def product(start: int, end: int) -> Tensor:
        rows = x[start:end].repeat(1, stride)[:, : shape.num_in]  # as far apart as those of a pass
        return kernels.linear(rows, weight, bias)

    reference = product(0, tried.reference)
    others: set[int] = set()
    for num_rows in tried.counts:
        for start in {0, max(tried.reference - num_rows, 0) // 2}:
            end = min(start + num_rows, tried.reference)
            if not torch.equal(product(start, start + num_rows)[: end - start], reference[start:end]):
                others.add(num_rows)
    return others


def _row_floor(tried: _Tried, others: set[int]) -> int | None:
    """The least number of rows from which on all give the same bits, or all but those to be avoided; None where there
    is none to be believed."""
    if not tried.are_all:
        return min((floor for floor in tried.floors if floor > max(others, default=0)), default=None)
    floor = min((floor for floor in tried.floors if floor not in others), default=None)
    if floor is None or tried.counts[-1] in others:
        return None
    num_avoided = sum(count > floor for count in others)
    return floor if _MOST_AVOIDED * len(tried.counts) >= num_avoided else None


def _slab_holds(kernels: Kernels, products: tuple[ProductShape, ...], slab: int, random: _Random) -> bool:
    """Whether products of exactly `slab` rows give a row the same bits wherever it stands among them."""
    for shape in products:
        weight, x = _factors(kernels, shape, 2 * slab, random)
        bias = torch.zeros(shape.num_out, dtype=x.dtype, device=x.device) if shape.bias else None
        reference = kernels.linear(x[:slab], weight, bias)
        for start in {start for start in (1, 2, 7, 16, 31, slab // 2, slab - 1) if start < slab}:
            moved = kernels.linear(x[start : start + slab].clone(), weight, bias)
            if not torch.equal(moved[: slab - start], reference[start:]):
                return False
    return True


def _attention_holds(kernels: Kernels, shapes: ProbeShapes, tried: _Tried, random: _Random) -> bool:
    tile, kv_shape = kernels.tile_size, (shapes.num_kv_heads, shapes.head_dim)
    scale = shapes.head_dim**-0.5
    queries = random.normal(tile, shapes.num_heads, shapes.head_dim)
    cuts = [
        (start, end)
        for end in (*tried.edges, tile - 1, tile)
        for start in {0, end // 2, end - 1}
        if end <= tile
    ]
    for past in (0, tile, 5 * tile):
        kv = random.cancelling_kv(past + tile, *kv_shape)

        def attended(start: int, end: int, past: int = past, kv: KV = kv) -> Tensor:
            # Keys after the last query are not there yet when a chunk ends inside the tile.
            known = KV(kv.keys.clone(), kv.values.clone())
            known.keys[past + end :] = 0
            known.values[past + end :] = 0
            places = (TokenRange(0, past + end),)
            span = AttendedSpan(
                0, end - start, past + start, places, is_prompt=True, tile_size=tile, origin=past
            )
            return kernels.attend(queries[start:end], AttentionWork((span,)), known, scale)

        whole = attended(0, tile)
        if not all(torch.equal(attended(start, end), whole[start:end]) for start, end in cuts):
            return False
    return True


def _passes_hold(kernels: Kernels, shapes: ProbeShapes, random: _Random) -> bool:
    hidden = random.normal(_PASS_ROWS, shapes.hidden_size)
    heads = random.normal(_PASS_ROWS, shapes.num_heads, shapes.head_dim)
    projected = random.normal(_PASS_ROWS, (shapes.num_heads + 2 * shapes.num_kv_heads) * shapes.head_dim)
    gate_ups = [random.normal(_PASS_ROWS, 2 * width) for width in shapes.mlp_widths]
    angles = random.normal(_PASS_ROWS, shapes.rotary_dim)
    weight, head_weight = random.normal(shapes.hidden_size), random.normal(shapes.head_dim)
    scores = random.normal(_PASS_ROWS, max(shapes.num_experts, 1)).float()

    def placed(rows: slice) -> list[Tensor]:
        num_rows = rows.stop - rows.start
        found = []
        for norm in (None, head_weight, head_weight.float()):
            layout = HeadLayout(shapes.num_heads, shapes.num_kv_heads, shapes.head_dim, norm, norm, 1e-5)
            kept = hidden.new_zeros(num_rows, shapes.num_kv_heads, shapes.head_dim)
            kv = KV(kept, kept.clone())
            places = WrittenPlaces((TokenRange(0, num_rows),))
            queries = kernels.place_heads(projected[rows], layout, angles[rows], angles[rows], kv, places)
            found += [queries, kv.keys, kv.values]
        return found

    def passes(rows: slice) -> list[Tensor]:
        return [
            kernels.rms_norm(hidden[rows], weight, 1e-5),
            kernels.rms_norm(hidden[rows], weight.float(), 1e-5),
            *kernels.add_norm(hidden[rows], hidden[rows].flip(1), weight, 1e-5),
            kernels.rms_norm(heads[rows], head_weight, 1e-5),
            kernels.rms_norm(heads[rows], head_weight.float(), 1e-5),
            *placed(rows),
            kernels.sigmoid(heads[rows].flatten(1)),
            torch.softmax(scores[rows], dim=-1),
            *(kernels.silu_and_mul(gate_up[rows].clone()) for gate_up in gate_ups),
        ]

    whole = passes(slice(0, _PASS_ROWS))
    for num_rows in (1, 2, 3, 7, 61, 100, 333):
        rows = slice(_PASS_ROWS - num_rows, _PASS_ROWS)
        if not all(
            torch.equal(ours, all_rows[rows]) for ours, all_rows in zip(passes(rows), whole, strict=True)
        ):
            return False
    return True


def _result_path(kernels: Kernels, shapes: ProbeShapes, dtype: torch.dtype, device: torch.device) -> Path:
    key = {
        "version": _VERSION,
        "torch": torch.__version__,
        "kernels": kernels.name,
        "libraries": kernels.libraries,
        "tile_size": kernels.tile_size,
        "dtype": str(dtype),
        "machine": _machine(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "shapes": asdict(shapes),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_home() / "probe" / f"{digest}.json"


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        size = f"{about.multi_processor_count} multiprocessors, {about.total_memory} bytes"
        return f"{about.name}, {size}, CUDA {torch.version.cuda}, cuDNN {cudnn}"
    if device.type != "cpu":
        return f"{device.type}, {platform.platform()}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = sorted(
        {line for line in lines if line.startswith(("model name", "model\t", "flags", "Features"))}
    )
    return "|".join(
        [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability(), *facts]
    )


def _read(path: Path, tried: _Tried) -> ProbeResult | None:
    """A stored result; None where there is none or it cannot be read (it is then measured again)."""
    try:
        stored = json.loads(path.read_text())
        result = ProbeResult(**stored | {"avoided_rows": tuple(stored["avoided_rows"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    floors = (result.row_slab,) if result.row_slab else (None, *tried.floors)
    answers = (result.attention_holds, result.passes_hold, result.head_holds, result.recurrence_holds)
    is_valid = (
        not isinstance(result.row_floor, bool | float)
        and result.row_floor in floors
        and result.row_slab in (0, *tried.slabs)
        and result.expert_slab in (0, _EXPERT_SLAB)
        and all(type(answer) is bool for answer in answers)
        and set(result.avoided_rows) <= set(tried.counts)
    )
    return result if is_valid else None


def _write(path: Path, result: ProbeResult) -> None:
    """Keep a result; a folder that cannot be written costs only the next start's time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(asdict(result), file)
        os.replace(file.name, path)
    except OSError:
        pass
