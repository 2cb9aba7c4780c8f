"""How long a step takes: a small model of its time, fitted to the steps that ran."""

import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from math import inf, isfinite
from operator import mul

from penstock.errors import SettingError
from penstock.plan.step import StepShape

# Samples are kept by the kind of step that they are of, so that many of one kind push out none of another.
MOST_KINDS = 64
SAMPLES_PER_KIND = 5
# A kind that was not seen for so many records counts half; never less than the least.
HALF_LIFE = 128
LEAST_WEIGHT = 0.02
# A fit takes a few hundred microseconds: past the first few samples it waits for so many new ones, unless the last
# was not as predicted.
REFIT_EVERY = 4
SURPRISE = 0.2
# What is known beforehand counts so much where the samples say nothing, as a share of what they say.
PRIOR_SHARE = 1e-4
LEAST_S = 1e-6
# An unknown is let into a solution where it gains more than rounding does.
LEAST_GAIN = 1e-12


@dataclass(frozen=True, slots=True)
class StepTimeCoefficients:
    """Seconds = constant + per_token * prompt tokens + per_token_past * (prompt tokens times their past)
    + per_decode * decodes + per_decode_past * (pasts of the decodes). None is negative."""

    constant: float = 0.0
    per_token: float = 0.0
    per_token_past: float = 0.0
    per_decode: float = 0.0
    per_decode_past: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not isfinite(value) or value < 0:
                raise SettingError(field.name, value, "a number of seconds, 0 or more")

    def seconds(self, step: StepShape) -> float:
        return _dot(_values(self), _features(step))


@dataclass(frozen=True, slots=True)
class _Sample:
    features: tuple[float, ...]
    seconds: float


class _Kind:
    """The last samples of steps alike, or the fastest; the one in the middle, and when the last of them came."""

    __slots__ = ("last_record", "middle", "samples")

    def __init__(self, first: _Sample) -> None:
        self.samples: list[_Sample] = []
        self.middle = first
        self.last_record = 0

    @property
    def slowest_s(self) -> float:
        """Of as many as there may be; infinite where there are fewer."""
        is_full = len(self.samples) == SAMPLES_PER_KIND
        return max(sample.seconds for sample in self.samples) if is_full else inf


class StepTimeModel:
    """Predicts a step's seconds, and learns from each that ran.

    Steps of about the same shape are of one kind, and each kind speaks through one of its last samples, the one that
    is in the middle as far as its time goes: a few outliers of any size change nothing. A fit over the kinds gives
    those that do not agree with the others less weight. What was measured long ago counts less, so that a machine
    whose speed changes is followed within a few steps of a kind. Or not: `of_fastest` steps of each kind, it tells
    how fast the machine can be.
    """

    def __init__(self, prior: StepTimeCoefficients | None = None, *, of_fastest: bool = False) -> None:
        """`prior` is what a profile knows; it holds wherever no sample says otherwise."""
        self._of_fastest = of_fastest
        self._prior = _values(prior) if prior else (0.0,) * 5
        self._values = self._prior
        self._is_known = prior is not None
        self._kinds: dict[tuple[int, ...], _Kind] = {}  # the one seen last is the last
        self._num_records = 0
        self._num_unfitted = 0
        self._is_surprised = False
        self._most_prompt_tokens = 0

    @classmethod
    def from_coefficients(cls, coefficients: StepTimeCoefficients) -> "StepTimeModel":
        """What `StepTimeModel(coefficients)` was called."""
        message = "StepTimeModel.from_coefficients(c) is now StepTimeModel(c)"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return cls(coefficients)

    @property
    def has_prior(self) -> bool:
        return any(self._prior)

    @property
    def num_records(self) -> int:
        return self._num_records

    @property
    def most_prompt_tokens(self) -> int:
        """The most prompt tokens of a step that was recorded."""
        return self._most_prompt_tokens

    @property
    def coefficients(self) -> StepTimeCoefficients:
        self._fit_if_due()
        return StepTimeCoefficients(*self._values)

    def record(self, step: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        if not isfinite(seconds) or seconds < 0 or step.num_rows == 0:
            return
        key = _kind(step)
        if self._of_fastest and (known := self._kinds.get(key)) and seconds >= known.slowest_s:
            return
        sample = _Sample(_features(step), max(seconds, LEAST_S))
        expected = _dot(self._values, sample.features)
        self._is_surprised |= abs(sample.seconds - expected) > SURPRISE * expected
        self._num_records += 1
        self._num_unfitted += 1
        self._most_prompt_tokens = max(self._most_prompt_tokens, step.num_prompt_tokens)
        kind = self._kinds.pop(key, None) or _Kind(sample)
        kind.samples.append(sample)
        if len(kind.samples) > SAMPLES_PER_KIND:
            slowest = partial(_excess, values=self._values)
            kind.samples.remove(max(kind.samples, key=slowest) if self._of_fastest else kind.samples[0])
        kind.middle = _middle(kind.samples, self._values)
        kind.last_record = self._num_records
        self._kinds[key] = kind
        if len(self._kinds) > MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]

    def predict(self, step: StepShape) -> float | None:
        """Seconds, never negative; None before anything is known."""
        self._fit_if_due()
        return _dot(self._values, _features(step)) if self._is_known else None

    def _fit_if_due(self) -> None:
        is_due = (
            self._is_surprised or self._num_unfitted >= REFIT_EVERY or self._num_records <= 2 * REFIT_EVERY
        )
        if self._num_unfitted and is_due:
            self._values = self._fit()
            self._is_known = True
            self._num_unfitted, self._is_surprised = 0, False

    def _fit(self) -> tuple[float, ...]:
        """Weighted least squares over a sample of each kind, twice: the second time what is far off counts less."""
        kinds = list(self._kinds.values())
        samples = [kind.middle for kind in kinds]
        ages = [self._num_records - kind.last_record for kind in kinds]
        trust = [
            max(0.5 ** (age / HALF_LIFE), LEAST_WEIGHT) * len(kind.samples)
            for age, kind in zip(ages, kinds, strict=True)
        ]
        # Errors are relative: a tenth of a decode weighs as much as a tenth of a chunk.
        weights = [share / sample.seconds**2 for share, sample in zip(trust, samples, strict=True)]
        values = _solve(samples, weights, self._prior)
        expected = [max(_dot(values, sample.features), LEAST_S) for sample in samples]
        errors = [abs(s.seconds - e) / e for s, e in zip(samples, expected, strict=True)]
        usual = max(2.0 * sorted(errors)[len(errors) // 2], 0.05)
        if max(errors) <= usual:
            return values
        weights = [
            share / e**2 * min(1.0, usual / max(error, LEAST_S))
            for share, e, error in zip(trust, expected, errors, strict=True)
        ]
        return _solve(samples, weights, self._prior)


def _kind(step: StepShape) -> tuple[int, ...]:
    """Powers of two that the step's numbers lie under."""
    past = step.token_pasts // max(step.num_prompt_tokens, 1)
    decode_past = step.decode_pasts // max(step.num_decodes, 1)
    numbers = (step.num_prompt_tokens, past // 256, step.num_decodes, decode_past // 256)
    return tuple(number.bit_length() for number in numbers)


def _middle(samples: list[_Sample], values: tuple[float, ...]) -> _Sample:
    """The sample whose time, over what was to be expected, is in the middle. Of two, the shorter."""
    if len(samples) == 1:
        return samples[0]
    return sorted(samples, key=partial(_excess, values=values))[(len(samples) - 1) // 2]


def _excess(sample: _Sample, values: tuple[float, ...]) -> float:
    return sample.seconds / max(_dot(values, sample.features), LEAST_S * sum(sample.features))


def _features(step: StepShape) -> tuple[float, ...]:
    return (
        1.0,
        float(step.num_prompt_tokens),
        float(step.token_pasts),
        float(step.num_decodes),
        float(step.decode_pasts),
    )


def _values(coefficients: StepTimeCoefficients) -> tuple[float, ...]:
    return tuple(float(value) for value in astuple(coefficients))


def _dot(values: tuple[float, ...], features: tuple[float, ...]) -> float:
    a, b, c, d, e = values
    v, w, x, y, z = features
    return a * v + b * w + c * x + d * y + e * z


def _solve(samples: list[_Sample], weights: list[float], prior: tuple[float, ...]) -> tuple[float, ...]:
    """Normal equations, in units in which every column that samples speak of has length 1."""
    size = len(prior)
    columns = list(zip(*(sample.features for sample in samples), strict=True))
    seconds = [sample.seconds for sample in samples]
    matrix = [[0.0] * size for _ in range(size)]
    vector = [0.0] * size
    for row, values in enumerate(columns):
        if any(values):
            weighted = list(map(mul, weights, values))
            vector[row] = sum(map(mul, weighted, seconds))
            for column in range(row + 1):
                matrix[row][column] = sum(map(mul, weighted, columns[column]))
    units = [matrix[row][row] ** 0.5 or 1.0 for row in range(size)]
    for row in range(size):
        for column in range(row + 1):
            scaled = matrix[row][column] / (units[row] * units[column])
            matrix[row][column] = matrix[column][row] = scaled
        vector[row] = vector[row] / units[row] + PRIOR_SHARE * prior[row] * units[row]
        matrix[row][row] += PRIOR_SHARE
    found = solve_non_negative(matrix, vector)
    return tuple(value / unit for value, unit in zip(found, units, strict=True))


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
        rest = [row for row in range(size) if row not in free and gains[row] > LEAST_GAIN]
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
