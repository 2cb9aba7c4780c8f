"""Measures, on the machine at hand, the facts that 'the same bits for any chunking' rests on.

Seven laws are tried on random data of the model's own shapes:

* a product gives each row the same bits whatever the number of rows, from some number up (the floor), on a GPU but
  for numbers that are found and avoided; or else, with a fixed number of rows (the slab), whatever the row's place
  among them, as the output head always does;
* attention gives a query the same bits whatever the other queries of its tile hold;
* norm, rotation and activation give a row the same bits whatever the other rows;
* a delta net gives the same bits for spans that end on the grid of states;
* experts that are run as one give a row the same bits whatever the other rows;
* decodes that are not padded have the bits that each has alone, up to some number of them;
* products of a few rows have the bits of those of many, where kernels have them in one order of sums.

None is assumed. Where neither of the last two holds, strict decodes are padded as prompts are. On a GPU products with
weights in blocks are tried, too: whether they come out right. The result is kept in the cache folder, under a key of
everything it depends on.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.cache.tensors import KV
from penstock.errors import ModelError
from penstock.files import read_plain, replace_json
from penstock.home import cache_home
from penstock.kernels.device import device_kind
from penstock.kernels.elementwise import ACTIVATIONS, ElementWise
from penstock.kernels.experts import Router
from penstock.kernels.interface import Kernels
from penstock.kernels.pass_laws import attention_holds, passes_hold, recurrence_holds
from penstock.kernels.quantised import ALL_FORMS, QuantisedWeight, Weight
from penstock.plan.grids import (
    COARSER,
    FINE_ROWS,
    GPU_FEW_ROWS,
    GPU_ROW_GRID,
    RowLaw,
)
from penstock.plan.model import (
    ExpertsConfig,
    LatentConfig,
    RecurrentConfig,
)

# A device may just hold a weight: what is made beside one is for so many of its rows at a time.
ROWS_TOGETHER = 2048


# Forms of weights that are not packed, whose products are others than the kernels': in the model's dtype, or float32.
PLAIN, PLAIN_FLOAT32 = "plain", "plain float32"
# That of the weights of experts which kernels have as one, and the form of their blocks after it.
GROUPED = "grouped"


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
    head: ProductShape | None  # None: these layers are followed by others
    recurrent: RecurrentConfig | None = None
    latent: LatentConfig | None = None
    num_experts: int = 0
    expert_products: tuple[ProductShape, ...] = ()
    activation: str = "silu"
    layer_norm: bool = False
    joined: tuple[tuple[ProductShape, ...], ...] = ()  # of weights that lie in several forms, side by side
    # Those between products; other code's may be torch's, whose vectors end where rows do.
    passes_are_known: bool = True


class Random:
    """Random tensors, the same in every probe on a device, which draws them itself."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._dtype = dtype
        self.device = device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, generator=self._generator, device=self.device)

    def cancelling(self, num_rows: int, width: int, sign: int, block: int = 1) -> Tensor:
        """Rows whose second half repeats the first in another order of blocks, with a sign.

        The product of two such matrices of opposite sign is zero but for rounding, so that every difference in
        the order of summing shows. In bfloat16 the rounding of the result would hide most of them."""
        rows = self.normal(num_rows, width // block, block)
        self._repeat_half(rows, sign)
        flat = rows.flatten(1)
        return torch.nn.functional.pad(flat, (0, width % block)) if width % block else flat

    def cancelling_blocks(self, num_rows: int, num_blocks: int, block_bytes: int) -> Tensor:
        """The same for rows of quantised blocks of any form: no byte of theirs makes a scale below 0 or above 2."""
        rows = torch.randint(
            64,
            (num_rows, num_blocks, block_bytes),
            dtype=torch.uint8,
            generator=self._generator,
            device=self.device,
        )
        self._repeat_half(rows, 1)
        return rows.flatten(1)

    def _repeat_half(self, rows: Tensor, sign: int) -> None:
        """In rows [rows, blocks, values], write the first half of the blocks over the second."""
        num_blocks = rows.shape[1]
        half = num_blocks // 2
        order = torch.randperm(half, generator=torch.Generator().manual_seed(num_blocks)).to(self.device)
        for part in torch.split(rows, ROWS_TOGETHER):
            part[:, half : 2 * half] = part[:, order].mul_(sign)
        rows[:, 2 * half :] = 0

    def cancelling_kv(self, num_tokens: int, num_heads: int, head_dim: int) -> KV:
        """Pairs of tokens, 32 apart, with equal keys and opposite values, for the same reason."""
        shape = (-1, 2, 32, num_heads, head_dim)
        keys, values = (self.normal(num_tokens, num_heads, head_dim).view(shape) for _ in range(2))
        keys[:, 1] = keys[:, 0]
        values[:, 1] = -values[:, 0]
        return KV(keys.flatten(0, 2), values.flatten(0, 2))


# Products

EXPERT_SLAB = 32
_NUM_EXPERTS, _EXPERT_ROWS = 4, (1, 2, 7, 16, 64, 150, 333, 700)
# Numbers of decodes, and the least that strict ones are run at a time.
_DECODES, _LEAST_DECODES = (*range(1, 17), 20, 24, 28, 32), 4
# Numbers of rows that are few: they share what a program has in other ways.
_FEW_ROWS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64)
# A processor's products with weights in blocks sum each output by itself: so many stand for all of a vocabulary's.
_BLOCK_OUTPUTS = 4096
# Numbers of rows, of each way that blocks are multiplied; and how far they may be off, by the root of all squares.
_BLOCK_ROWS, _BLOCK_ERROR = (1, 2, 3, 4, 5, 16, 17, 32, 64), 0.02
# If more than this share of counts is to be avoided, there is no rule in what the library does.
_MOST_AVOIDED = 0.25
# Where the queries of a chunk may begin and end in a tile.
_EDGES = (1, 7, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300)


@dataclass(frozen=True)
class Tried:
    """The numbers of rows that products are tried with on a kind of device."""

    reference: int  # what all others are compared with
    counts: tuple[int, ...]  # in ascending order
    # A floor that is not among these is not believed: a library that changes its ways at such sizes may do so again
    # beyond.
    floors: tuple[int, ...]
    slabs: tuple[int, ...]  # the preferred one first
    edges: tuple[int, ...]  # of chunks in a tile
    are_all: bool = False  # no other counts are run than those: one that has other bits is avoided


ON_CPU = Tried(
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
# single row, and every number on the grid of `RowLaw.padded_rows` is tried (but for those beyond the last).
ON_GPU = Tried(
    reference=2048,
    counts=(
        *range(GPU_ROW_GRID, FINE_ROWS + 1, GPU_ROW_GRID),
        *range(FINE_ROWS + COARSER * GPU_ROW_GRID, 8193, COARSER * GPU_ROW_GRID),
    ),
    floors=tuple(range(GPU_ROW_GRID, 513, GPU_ROW_GRID)),
    slabs=(512, 256, 128, 64),
    edges=(*_EDGES, 511, 512, 513, 700),
    are_all=True,
)


def tried_on(device: torch.device) -> Tried:
    return ON_GPU if device_kind(device).probes_every_count else ON_CPU


def _factors(kernels: Kernels, shape: ProductShape, num_rows: int, random: Random) -> tuple[Weight, Tensor]:
    """A weight of that shape and rows to multiply with it, whose product is zero but for rounding."""
    if shape.form in ("", PLAIN, PLAIN_FLOAT32):
        weight, x = (
            random.cancelling(shape.num_out, shape.num_in, 1),
            random.cancelling(num_rows, shape.num_in, -1),
        )
        if shape.form == PLAIN_FLOAT32:
            weight, x = weight.float(), x.float()
        return weight if shape.form else kernels.pack(weight), x
    assert kernels.quantised is not None
    form = ALL_FORMS[shape.form]
    quantised = kernels.quantised.zeros(form, shape.num_out, shape.num_in, random.device)
    for outputs in torch.split(torch.arange(shape.num_out), ROWS_TOGETHER):
        blocks = random.cancelling_blocks(len(outputs), shape.num_in // form.block_size, form.block_bytes)
        kernels.quantised.place(quantised, outputs, blocks)
    return quantised, random.cancelling(num_rows, shape.num_in, -1, form.block_size)


def other_counts(
    kernels: Kernels, shape: ProductShape, mlp_widths: tuple[int, ...], tried: Tried, random: Random
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


def least_floor(tried: Tried, others: set[int]) -> int | None:
    """The least number of rows from which on all give the same bits, or all but those to be avoided; None where there
    is none to be believed."""
    if not tried.are_all:
        return min((floor for floor in tried.floors if floor > max(others, default=0)), default=None)
    floor = min((floor for floor in tried.floors if floor not in others), default=None)
    if floor is None or tried.counts[-1] in others:
        return None
    num_avoided = sum(count > floor for count in others)
    return floor if _MOST_AVOIDED * len(tried.counts) >= num_avoided else None


def check_blocks(kernels: Kernels, shapes: ProbeShapes, random: Random) -> None:
    """Products of a few rows with weights in blocks, against the values that another kernel makes of those. Compilers
    have made wrong kernels of right sources: then nothing is run."""
    products = (*shapes.products, *shapes.expert_products, *([shapes.head] if shapes.head else []))
    found = [(replace(shape, bias=False),) for shape in products] + [*shapes.joined]
    for parts in dict.fromkeys(parts for parts in found if all(part.form in ALL_FORMS for part in parts)):
        if wrong := _wrong_counts(kernels, parts, random):
            weights = " and ".join(f"[{part.num_out}, {part.num_in}] in {part.form}" for part in parts)
            raise ModelError(
                f"products of {', '.join(map(str, wrong))} rows with weights {weights} "
                f"come out wrong on this device ({kernels.libraries}): `--weights bf16` does without"
            )


def _wrong_counts(kernels: Kernels, shapes: tuple[ProductShape, ...], random: Random) -> list[int]:
    """Of rows that come out wrong, times weights side by side."""
    weights = [_factors(kernels, shape, 1, random)[0] for shape in shapes]
    assert kernels.quantised is not None
    x = random.normal(_BLOCK_ROWS[-1], shapes[0].num_in)
    nones = (None,) * len(weights)
    found = [kernels.linear_parts(x[:count], weights, nones, is_canonical=False) for count in _BLOCK_ROWS]
    error, size = (torch.zeros(len(found), device=x.device) for _ in range(2))
    start = 0
    for weight in weights:
        assert isinstance(weight, QuantisedWeight)
        for outputs in torch.split(torch.arange(weight.shape[0], device=x.device), ROWS_TOGETHER):
            exact = x.float() @ kernels.quantised.rows(weight, outputs, torch.float32).T
            for index, ours in enumerate(found):
                error[index] += (ours[:, start + outputs].float() - exact[: len(ours)]).square().sum()
                size[index] += exact[: len(ours)].square().sum()
        start += weight.shape[0]
    # What is not a number is wrong, too.
    holds = error <= size * _BLOCK_ERROR**2
    return [count for count, is_right in zip(_BLOCK_ROWS, holds.tolist(), strict=True) if not is_right]


def slab_holds(kernels: Kernels, products: tuple[ProductShape, ...], slab: int, random: Random) -> bool:
    """Whether products of exactly `slab` rows give a row the same bits wherever it stands among them."""
    return all(_place_is_free(kernels, shape, slab, random) for shape in products)


def _place_is_free(kernels: Kernels, shape: ProductShape, slab: int, random: Random) -> bool:
    weight, x = _factors(kernels, shape, 2 * slab, random)
    bias = torch.zeros(shape.num_out, dtype=x.dtype, device=x.device) if shape.bias else None
    reference = kernels.linear(x[:slab], weight, bias)
    for start in {start for start in (1, 2, 7, 16, 31, slab // 2, slab - 1) if start < slab}:
        moved = kernels.linear(x[start : start + slab].clone(), weight, bias)
        if not torch.equal(moved[: slab - start], reference[start:]):
            return False
    return True


def _of_gates(shapes: ProbeShapes) -> ElementWise | None:
    """None: silu."""
    function = ACTIVATIONS[shapes.activation]
    return None if function is ACTIVATIONS["silu"] else function


def free_decodes(kernels: Kernels, shapes: ProbeShapes, random: Random) -> int:
    """Up to how many decodes give each the bits that it has alone; 0 where that is too few to be of use. Recurrent
    layers, latents and experts that are run as one are not tried: they have products of other kinds. Nor is other
    code, nor GPUs, where several passes take longer than padding."""
    is_tried = shapes.passes_are_known and device_kind(random.device).is_host
    is_tried = is_tried and shapes.recurrent is None and shapes.latent is None
    products = (*shapes.products, *shapes.expert_products, *([shapes.head] if shapes.head else []))
    if not is_tried or any(shape.form.startswith(GROUPED) for shape in products):
        return 0
    most = _DECODES[-1]
    for shape in products:
        weight, x = _factors(kernels, shape, _DECODES[-1], random)
        bias = torch.zeros(shape.num_out, dtype=x.dtype, device=x.device) if shape.bias else None
        alone = [
            digest
            for row in torch.split(x, 1)
            for digest in _digests(kernels.linear(row, weight, bias, is_canonical=False))
        ]
        for count in _DECODES:
            together = _digests(kernels.linear(x[:count], weight, bias, is_canonical=False))
            if together != alone[:count]:
                most = min(most, count - 1)
                break
    # Numbers between those that were tried are believed to be as both of them.
    return max((count for count in _DECODES if _LEAST_DECODES <= count <= most), default=0)


def few_rows(kernels: Kernels, shapes: ProbeShapes, tried: Tried, random: Random) -> int:
    """Up to how many rows products have the bits of those of many: as many as kernels promise, or 0. The head's are
    never many."""
    products = (*shapes.products, *shapes.expert_products, *([shapes.head] if shapes.head else []))
    plain = [shape for shape in products if not shape.form.startswith(GROUPED)]
    if not kernels.few_rows or any(shape.form in ALL_FORMS for shape in plain):
        return 0
    for shape in plain:
        most = kernels.few_rows if shape is shapes.head else tried.reference
        weight, x = _factors(kernels, shape, most, random)
        # Of sums that are zero but for rounding, a bias would hide the rounding.
        biases = [random.normal(shape.num_out), x.new_zeros(shape.num_out)] if shape.bias else [None]
        for bias in biases:
            whole = kernels.linear(x, weight, bias)
            for count in _FEW_ROWS:
                for start in {0, kernels.few_rows - count}:
                    rows = slice(start, start + count)
                    if not torch.equal(kernels.linear(x[rows], weight, bias), whole[rows]):
                        return 0
    return kernels.few_rows


def _digests(rows: Tensor) -> list[bytes]:
    """Of each row: a head's may be as large as its weight."""
    return [hashlib.sha256(row.contiguous().view(torch.uint8).numpy()).digest() for row in rows]


def _expert_factors(
    kernels: Kernels, shape: ProductShape, num_rows: int, random: Random
) -> tuple[Weight, Tensor]:
    """The same of some experts, one after the other."""
    form = shape.form.removeprefix(GROUPED).strip()
    stack = ProductShape(
        _NUM_EXPERTS * shape.num_out, shape.num_in, form=form if form in ALL_FORMS else PLAIN
    )
    weight, x = _factors(kernels, stack, num_rows, random)
    return weight.view(_NUM_EXPERTS, -1, shape.num_in) if isinstance(weight, Tensor) else weight, x


def experts_hold(kernels: Kernels, shapes: ProbeShapes, random: Random) -> bool:
    """Experts that are run as one give a row the same bits whatever other rows there are. Few of them have few rows
    and many, as many have in a model's passes."""
    hidden = shapes.hidden_size
    grouped = [shape for shape in shapes.expert_products if shape.form.startswith(GROUPED)]
    pairs = [
        (gate_up, down)
        for gate_up in grouped
        for down in grouped
        if down.num_out == gate_up.num_in == hidden and gate_up.num_out == 2 * down.num_in
    ]
    for gate_up, down in pairs:
        config = ExpertsConfig(1, _NUM_EXPERTS, down.num_in, num_active=2)
        inner, x = _expert_factors(kernels, gate_up, _EXPERT_ROWS[-1], random)
        outer, _ = _expert_factors(kernels, down, 1, random)
        experts = kernels.stacked_experts(Router(config), inner, outer, _of_gates(shapes))
        scores = random.normal(len(x), _NUM_EXPERTS)
        whole = experts.run(x, scores, None)
        for num_rows in _EXPERT_ROWS:
            for start in {0, len(x) - num_rows}:
                rows = slice(start, start + num_rows)
                if not torch.equal(experts.run(x[rows], scores[rows], None), whole[rows]):
                    return False
    return True


# All of them

_VERSION = 26
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
    experts_hold: bool = True  # as one; of models whose experts are run one by one too
    free_decodes: int = 0  # as in `RowLaw`
    few_rows: int = 0  # as in `RowLaw`
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
            free_decodes=self.free_decodes,
            few_rows=self.few_rows,
        )
        return kernels.law

    @property
    def same_bits(self) -> bool:
        """Whether all the laws hold, so that a prompt's bits do not depend on its chunks."""
        return self.row_floor is not None and all(self.answers)

    @property
    def answers(self) -> tuple[bool, ...]:
        """To the laws that hold or do not."""
        passes = (self.attention_holds, self.passes_hold, self.recurrence_holds)
        return (*passes, self.head_holds, self.experts_hold)


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
    if device_kind(device).is_host:
        products = tuple(dict.fromkeys(map(_short, shapes.products)))
        shapes = replace(shapes, products=products, head=shapes.head and _short(shapes.head))
    else:
        check_blocks(kernels, shapes, random)
    rest = tuple(shape for shape in shapes.expert_products if not shape.form.startswith(GROUPED))
    others = [
        other_counts(kernels, shape, shapes.mlp_widths, tried, random) for shape in (*shapes.products, *rest)
    ]
    row_floor = least_floor(tried, set().union(*others))
    avoided = sorted(count for count in set().union(*others) if row_floor is not None and count > row_floor)
    row_slab = expert_slab = 0
    if row_floor is None:
        products = shapes.products
        if rest and slab_holds(kernels, rest, EXPERT_SLAB, random):
            expert_slab = EXPERT_SLAB
        else:
            products += rest
        slabs = [slab for slab in tried.slabs if slab_holds(kernels, products, slab, random)]
        row_floor, row_slab = (slabs[0], slabs[0]) if slabs else (None, 0)
    return ProbeResult(
        row_floor=row_floor,
        row_slab=row_slab,
        attention_holds=attention_holds(kernels, shapes, tried, random),
        passes_hold=passes_hold(kernels, shapes, random),
        head_holds=slab_holds(kernels, (shapes.head,) if shapes.head else (), kernels.head_rows, random),
        recurrence_holds=shapes.recurrent is None or recurrence_holds(kernels, shapes.recurrent, random),
        experts_hold=experts_hold(kernels, shapes, random),
        free_decodes=free_decodes(kernels, shapes, random),
        few_rows=few_rows(kernels, shapes, tried, random) if row_floor and not row_slab else 0,
        expert_slab=expert_slab,
        avoided_rows=() if row_slab else tuple(avoided),
    )


def _short(shape: ProductShape) -> ProductShape:
    return replace(shape, num_out=min(shape.num_out, _BLOCK_OUTPUTS)) if shape.form in ALL_FORMS else shape


def _result_path(kernels: Kernels, shapes: ProbeShapes, dtype: torch.dtype, device: torch.device) -> Path:
    kind = device_kind(device)
    key = {
        "version": _VERSION,
        "torch": torch.__version__,
        "kernels": kernels.name,
        "activations": kernels.activations,
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
    is_valid = (
        not isinstance(result.row_floor, bool | float)
        and result.row_floor in floors
        and result.row_slab in (0, *tried.slabs)
        and result.expert_slab in (0, EXPERT_SLAB)
        and all(type(answer) is bool for answer in result.answers)
        and result.free_decodes in (0, *_DECODES[_LEAST_DECODES - 1 :])
        and result.few_rows in (0, GPU_FEW_ROWS)
        and avoided <= set(tried.counts)
    )
    return result if is_valid else None


def _write(path: Path, result: ProbeResult) -> None:
    """Keep a result; a folder that cannot be written costs only the next start's time."""
    with suppress(OSError):
        replace_json(path, asdict(result))
