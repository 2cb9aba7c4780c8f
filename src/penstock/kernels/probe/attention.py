"""The law of attention: a query gets the same bits whatever the other queries of its tile hold."""

import torch
from torch import Tensor

from penstock.cache import TokenRange
from penstock.cache.kv import KV
from penstock.kernels.interface import Kernels
from penstock.kernels.probe.random import Random
from penstock.kernels.probe.rows import Tried
from penstock.kernels.probe.shapes import ProbeShapes
from penstock.kernels.spans import AttendedSpan, AttentionWork


def attention_holds(kernels: Kernels, shapes: ProbeShapes, tried: Tried, random: Random) -> bool:
    tile, kv_shape = kernels.law.tile_size, (shapes.num_kv_heads, shapes.head_dim)
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
