"""Least squares with no negative part, for a handful of unknowns."""

from collections.abc import Sequence

_TOLERANCE = 1e-12


def solve_non_negative(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    """The x >= 0 with the smallest x'Ax/2 - b'x, for a positive definite A: one unknown after the other is let in
    where that helps, and those that would become negative are taken out again."""
    size = len(vector)
    whole = _solve_some(matrix, vector, range(size))
    if min(whole.values()) >= 0:
        return list(whole.values())
    found = [0.0] * size
    free: set[int] = set()
    for _ in range(3 * size):  # an end for rounding's sake; it takes no more than a few
        gains = [
            vector[row] - sum(matrix[row][column] * found[column] for column in free) for row in range(size)
        ]
        rest = [row for row in range(size) if row not in free and gains[row] > _TOLERANCE]
        if not rest:
            break
        free.add(max(rest, key=gains.__getitem__))
        wanted = _solve_some(matrix, vector, sorted(free))
        while min(wanted.values()) < 0:
            # As far towards it as nothing is negative; what becomes zero there is taken out.
            step, leaving = min(
                (found[row] / (found[row] - value), row) for row, value in wanted.items() if value < 0
            )
            for row, value in wanted.items():
                found[row] += step * (value - found[row])
            found[leaving] = 0.0
            free.discard(leaving)
            if not free:
                wanted = {}
                break
            wanted = _solve_some(matrix, vector, sorted(free))
        for row in range(size):
            found[row] = wanted.get(row, 0.0)
    return found


def _solve_some(
    matrix: Sequence[Sequence[float]], vector: Sequence[float], rows: Sequence[int]
) -> dict[int, float]:
    """The unknowns of these rows, the others being 0: elimination, without pivots in a positive definite matrix."""
    lines = [[matrix[row][column] for column in rows] + [vector[row]] for row in rows]
    size = len(rows)
    for place in range(size):
        for below in range(place + 1, size):
            factor = lines[below][place] / lines[place][place]
            for column in range(place, size + 1):
                lines[below][column] -= factor * lines[place][column]
    found = [0.0] * size
    for place in reversed(range(size)):
        known = sum(lines[place][column] * found[column] for column in range(place + 1, size))
        found[place] = (lines[place][size] - known) / lines[place][place]
    return dict(zip(rows, found, strict=True))
