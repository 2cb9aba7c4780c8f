"""The fixed grid on which attention runs, so that a token's result does not depend on how its prompt was cut.

A query in tile t sees the past [0, t*size) as one unmasked piece and its own tile as one square-causal piece.
Chunks are cut anywhere; tiles never move:

    tokens   0        256       512       768
    tiles    [---0----)[---1----)[---2----)
    chunk          [ 100 ...... 600 )
    pieces         [100,256) [256,512) [512,600)     pasts: [0,0)  [0,256)  [0,512)
"""

from dataclasses import dataclass

from penstock.plan.step import Span


@dataclass(frozen=True)
class TilePiece:
    """The tokens [start, end) of one span that lie in the tile beginning at `tile_start`."""

    tile_start: int
    start: int
    end: int


def cut_into_tiles(span: Span, tile_size: int) -> list[TilePiece]:
    """Cut a span at the tile grid. A tile size of 0 means no grid: the span is one tile of its own."""
    if tile_size == 0:
        return [TilePiece(span.start, span.start, span.end)]
    pieces = []
    start = span.start
    while start < span.end:
        tile_start = start // tile_size * tile_size
        end = min(tile_start + tile_size, span.end)
        pieces.append(TilePiece(tile_start, start, end))
        start = end
    return pieces
