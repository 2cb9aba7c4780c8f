"""A span is cut at the grid of tiles, and nowhere else."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.plan import Span
from penstock.plan.tiles import TilePiece, cut_into_tiles


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 300))
def test_pieces_cover_the_span_and_each_lies_in_its_own_tile(start: int, length: int, size: int) -> None:
    pieces = cut_into_tiles(Span(start, start + length), size)
    assert (pieces[0].start, pieces[-1].end) == (start, start + length)
    assert all(before.end == after.start for before, after in pairwise(pieces))
    for piece in pieces:
        assert piece.tile_start % size == 0
        assert piece.tile_start <= piece.start < piece.end <= piece.tile_start + size
    assert [piece.tile_start for piece in pieces] == list(range(start // size * size, start + length, size))


def test_without_a_grid_a_span_is_a_tile() -> None:
    assert cut_into_tiles(Span(100, 600), 0) == [TilePiece(100, 100, 600)]


def test_the_picture() -> None:
    assert cut_into_tiles(Span(100, 600), 256) == [
        TilePiece(0, 100, 256),
        TilePiece(256, 256, 512),
        TilePiece(512, 512, 600),
    ]
