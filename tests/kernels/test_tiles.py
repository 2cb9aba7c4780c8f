"""A span is cut at the grid of tiles, and nowhere else."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels.spans import AttendedSpan, TilePiece


def span(start: int, end: int, *, row: int = 0, origin: int = 0) -> AttendedSpan:
    """Tokens [start, end) of a sequence, in the rows from `row` on."""
    return AttendedSpan(row, row + end - start, start, (), is_prompt=True, origin=origin)


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 300))
def test_pieces_cover_the_span_and_each_lies_in_its_own_tile(start: int, length: int, size: int) -> None:
    pieces = span(start, start + length, row=7).tiles(size)
    assert (pieces[0].start, pieces[-1].end) == (start, start + length)
    assert all(before.end == after.start for before, after in pairwise(pieces))
    for piece in pieces:
        assert piece.tile_start % size == 0
        assert piece.rows == slice(7 + piece.start - start, 7 + piece.end - start)
        assert piece.tile_start <= piece.start < piece.end <= piece.tile_start + size
    assert [piece.tile_start for piece in pieces] == list(range(start // size * size, start + length, size))


def test_without_a_grid_a_span_is_a_tile() -> None:
    assert span(100, 600, origin=64).tiles(0) == [TilePiece(64, 100, 600, slice(0, 500))]


def test_the_picture() -> None:
    assert span(100, 600).tiles(256) == [
        TilePiece(0, 100, 256, slice(0, 156)),
        TilePiece(256, 256, 512, slice(156, 412)),
        TilePiece(512, 512, 600, slice(412, 500)),
    ]
