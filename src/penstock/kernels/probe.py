"""Measures, on the machine at hand, the facts that 'the same bits for any chunking' rests on.

Two laws are tried on random data of the model's own shapes:

* a product gives each row the same bits whatever the number of rows, from some number up (the floor);
* attention gives a query the same bits whatever the other queries of its tile hold.

Neither is assumed. The result is kept in the cache folder, under a key of everything it depends on.
"""

import hashlib
import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from penstock.cache.kv import KV
from penstock.home import cache_home
from penstock.kernels.protocol import Kernels

_VERSION = 5
_REFERENCE_ROWS = 512
_ROW_COUNTS = (
    *range(1, 21),
    23,
    24,
    25,
    31,
    32,
    33,
    47,
    48,
    49,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    200,
    256,
    257,
    384,
)


@dataclass(frozen=True)
class ProductShape:
    """A weight [num_out, num_in], with a bias or without."""

    num_out: int
    num_in: int
    bias: bool = False


@dataclass(frozen=True)
class ProbeShapes:
    """What is probed: the model's distinct products and its attention's heads."""

    products: tuple[ProductShape, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class ProbeResult:
    """`row_floor` is None where no number of rows up to 512 was enough."""

    row_floor: int | None
    tiles_hold: bool

    @property
    def same_bits(self) -> bool:
        """Whether both laws hold, so that a prompt's bits do not depend on its chunks."""
        return self.row_floor is not None and self.tiles_hold


def probe(kernels: Kernels, shapes: ProbeShapes, dtype: torch.dtype, device: torch.device) -> ProbeResult:
    """The stored result for this machine, kernels, dtype and shapes; measured first where there is none."""
    path = _result_path(kernels, shapes, dtype, device)
    stored = _read(path)
    if stored is not None:
        return stored
    result = measure(kernels, shapes, dtype, device)
    _write(path, result)
    return result


def measure(kernels: Kernels, shapes: ProbeShapes, dtype: torch.dtype, device: torch.device) -> ProbeResult:
    """Measure both laws now."""
    generator = torch.Generator().manual_seed(0)
    floors = [_row_floor(kernels, shape, dtype, device, generator) for shape in shapes.products]
    known = [floor for floor in floors if floor is not None]
    return ProbeResult(
        row_floor=max(known, default=1) if len(known) == len(floors) else None,
        tiles_hold=_tiles_hold(kernels, shapes, dtype, device, generator),
    )


def _row_floor(
    kernels: Kernels,
    shape: ProductShape,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> int | None:
    weight = _cancelling(shape.num_out, shape.num_in, generator, sign=1).to(device, dtype)
    weight = kernels.pack(weight)
    bias = torch.zeros(shape.num_out, dtype=dtype, device=device) if shape.bias else None
    x = _cancelling(_REFERENCE_ROWS, shape.num_in, generator, sign=-1).to(device, dtype)
    reference = kernels.linear(x, weight, bias)
    floor = 1
    for num_rows in _ROW_COUNTS:
        for start in (0, (_REFERENCE_ROWS - num_rows) // 2):
            rows = slice(start, start + num_rows)
            if not torch.equal(kernels.linear(x[rows].clone(), weight, bias), reference[rows]):
                floor = num_rows + 1
    return floor if floor < _REFERENCE_ROWS // 2 else None


def _cancelling(num_rows: int, width: int, generator: torch.Generator, *, sign: int) -> torch.Tensor:
    """Random rows whose second half repeats the first in another order, with a sign.

    The product of two such matrices of opposite sign is zero but for rounding, so that every difference in the
    order of summing shows: on plain random data the rounding of the result hides most of them in bfloat16.
    """
    half = width // 2
    order = torch.randperm(half, generator=torch.Generator().manual_seed(width))
    first = torch.randn(num_rows, half, generator=generator)
    return torch.cat((first, sign * first[:, order], torch.zeros(num_rows, width - 2 * half)), dim=1)


def _tiles_hold(
    kernels: Kernels,
    shapes: ProbeShapes,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> bool:
    tile = kernels.tile_size

    def random(num_tokens: int, num_heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, shapes.head_dim, generator=generator).to(device, dtype)

    def random_kv(num_tokens: int) -> KV:
        # Pairs of tokens, 32 apart, with equal keys and opposite values, for the reason given at `_cancelling`.
        shape = (-1, 2, 32, shapes.num_kv_heads, shapes.head_dim)
        keys, values = (random(num_tokens, shapes.num_kv_heads).view(shape) for _ in range(2))
        keys[:, 1] = keys[:, 0]
        values[:, 1] = -values[:, 0]
        return KV(keys.flatten(0, 2), values.flatten(0, 2))

    scale = shapes.head_dim**-0.5
    queries, own = random(tile, shapes.num_heads), random_kv(tile)
    edges = sorted({1, 7, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300, tile - 1, tile})
    ends = [end for end in edges if end <= tile]
    cuts = [(start, end) for end in ends for start in {0, end // 2, end - 1}]
    for past in (None, random_kv(tile), random_kv(5 * tile)):
        whole = kernels.attend_tile(queries, 0, past, own, scale)
        for start, end in cuts:
            # Keys after the last query are not there yet when a chunk ends inside the tile.
            unseen = KV(own.keys.clone(), own.values.clone())
            unseen.keys[end:] = 0
            unseen.values[end:] = 0
            part = kernels.attend_tile(queries[start:end], start, past, unseen, scale)
            if not torch.equal(part, whole[start:end]):
                return False
    return True


def _result_path(kernels: Kernels, shapes: ProbeShapes, dtype: torch.dtype, device: torch.device) -> Path:
    key = {
        "version": _VERSION,
        "torch": torch.__version__,
        "kernels": kernels.name,
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
        return torch.cuda.get_device_name(device)
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


def _read(path: Path) -> ProbeResult | None:
    """A stored result; None where there is none or it cannot be read (it is then measured again)."""
    try:
        stored = json.loads(path.read_text())
        floor, tiles_hold = stored["row_floor"], stored["tiles_hold"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if (
        not (floor is None or (type(floor) is int and 1 <= floor <= _REFERENCE_ROWS))
        or type(tiles_hold) is not bool
    ):
        return None
    return ProbeResult(floor, tiles_hold)


def _write(path: Path, result: ProbeResult) -> None:
    """Keep a result; a folder that cannot be written costs only the next start's time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(asdict(result), file)
        os.replace(file.name, path)
    except OSError:
        pass
