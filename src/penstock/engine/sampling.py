"""From the logits of a step to a token for each of its rows. Rows that can be chosen from on the device are, all
together, and come to the host in one copy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.engine.sampler import Sampler, TokenLogprobs, require_finite
from penstock.kernels.device import device_kind

# How a row is chosen from: its largest logit, a draw from all tokens or from the likeliest, or one row at a time, on
# the host.
_Way = Literal["largest", "drawn", "nucleus", "alone"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A token that was sampled and is not yet the request's: that comes with the step's commit."""

    token: int
    logprobs: TokenLogprobs | None


class SampledRow(Protocol):
    """Whoever wants a token."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def needs_logits(self) -> bool:
        """Whether its choice takes more than a sampler without memory, such as a constraint."""
        ...

    def choose(self, logits: Tensor) -> Choice:
        """Its token out of logits [vocab] on the host."""
        ...


@dataclass(frozen=True, slots=True)
class PlainRow:
    """A sampler, and the tokens so far."""

    sampler: Sampler
    tokens: Sequence[int] = ()
    needs_logits = False

    def choose(self, logits: Tensor) -> Choice:
        return Choice(self.sampler.sample(logits, self.tokens), None)


class Sampling:
    """A choice for each row of logits [rows, vocab], float32. What the device can choose it does at once, and the
    host learns of it in one copy."""

    def __init__(self, logits: Tensor, rows: Sequence[SampledRow]) -> None:
        self._logits = logits
        self._rows = rows
        self._device = device_kind(logits.device)
        ways: dict[_Way, list[int]] = {}
        for place, row in enumerate(rows):
            ways.setdefault(_way_of(row, self._device.draws), []).append(place)
        self._places: list[int] = []
        found: list[Tensor] = []
        for way, choose in _TOGETHER.items():
            if own := ways.get(way):
                self._places += own
                found.append(choose(_rows_of(logits, own), [rows[place].sampler for place in own]))
        self._alone = ways.get("alone", [])
        self._found = (torch.cat(found, dim=1) if len(found) > 1 else found[0]) if found else None
        self._fetch = None if self._found is None else self._device.fetched(self._found)

    def tokens(self) -> Tensor | None:
        """[rows] as the device has chosen them; None where the host chooses some."""
        if self._found is None or self._alone:
            return None
        if self._places == sorted(self._places):
            return self._found[0]
        return self._found[0][self._device.copied(np.argsort(self._places))]

    def choices(self) -> list[Choice | Exception]:
        """Waits for all of them; of a row that has none, the error that there was in making it."""
        choices: dict[int, Choice | Exception] = {}
        if self._fetch is not None:
            on_host = self._fetch()
            largest = on_host[1].view(torch.float32).tolist()
            for place, token, value in zip(self._places, on_host[0].tolist(), largest, strict=True):
                choices[place] = Choice(token, None) if isfinite(value) else _none_of(value)
        is_on_host = self._logits.is_cpu
        copied = self._logits if is_on_host or not self._alone else self._logits[self._alone].cpu()
        for index, place in enumerate(self._alone):
            try:
                choices[place] = self._rows[place].choose(copied[place if is_on_host else index])
            except Exception as error:
                choices[place] = error
        return [choices[place] for place in range(len(self._rows))]


def sample_rows(logits: Tensor, rows: Sequence[SampledRow]) -> list[Choice | Exception]:
    """A choice for each row, waited for."""
    return Sampling(logits, rows).choices()


def _way_of(row: SampledRow, can_draw: bool) -> _Way:
    sampler = row.sampler
    if row.needs_logits or sampler.is_adjusted:
        return "alone"
    if sampler.params.temperature == 0:
        return "largest"
    if not can_draw:
        return "alone"
    return "nucleus" if sampler.params.top_p < 1 else "drawn"


def _rows_of(logits: Tensor, places: list[int]) -> Tensor:
    return logits if len(places) == len(logits) else logits[places]


def _none_of(largest: float) -> Exception:
    """Why no token was chosen from a row."""
    try:
        require_finite(largest)
    except Exception as error:
        return error
    raise AssertionError(f"a token can be chosen where the largest logit is {largest}")


# Each way gives [2, rows] in int32: the token, and the bits of the row's largest logit.


def _largest(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """The first of the largest; of a row with not-a-number in it, that."""
    if logits.is_cpu:  # where numpy looks at a vector at a time
        tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))[:, None]
        return _with_largest(tokens, logits.gather(1, tokens))
    largest = logits.max(dim=-1, keepdim=True)
    return _with_largest(largest.indices, largest.values)


def _drawn(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    largest = logits.max(dim=-1, keepdim=True).values
    probabilities = _probabilities(logits - largest, samplers)
    return _with_largest(_draw(probabilities, samplers), largest)


def _nucleus(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    largest = logits.max(dim=-1, keepdim=True).values
    ordered, order = _probabilities(logits - largest, samplers).sort(dim=-1, descending=True)
    # A token stays if those before it do not reach top_p, so the first always stays.
    before = ordered.cumsum(dim=-1) - ordered
    before[:, 0] = 0
    top_p = _column([sampler.params.top_p for sampler in samplers], ordered)
    kept = ordered.masked_fill(before >= top_p, 0)
    return _with_largest(order.gather(1, _draw(kept, samplers)), largest)


_TOGETHER: dict[_Way, Callable[[Tensor, Sequence[Sampler]], Tensor]] = {
    "largest": _largest,
    "drawn": _drawn,
    "nucleus": _nucleus,
}


def _probabilities(below: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """[rows, vocab] of what each logit lies below the largest."""
    scaled = below / _column([sampler.params.temperature for sampler in samplers], below)
    vocab_size = scaled.shape[1]
    sizes = [sampler.params.top_k if 0 < sampler.params.top_k < vocab_size else 0 for sampler in samplers]
    if any(sizes):
        values = scaled.topk(max(sizes)).values
        last = torch.tensor([max(size, 1) - 1 for size in sizes]).to(scaled.device, non_blocking=True)
        limits = _column([0.0 if size else -torch.inf for size in sizes], scaled)
        # Of equal ones none is left out.
        scaled = scaled.masked_fill(scaled < values.gather(1, last[:, None]) + limits, -torch.inf)
    return scaled.softmax(dim=-1)


def _draw(probabilities: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """An index [rows, 1], as likely as its probability, of which a row's sum may be any. The numbers that decide are
    the samplers' own, so that a seed gives the same on every device."""
    least = _column([sampler.params.min_p for sampler in samplers], probabilities)
    likeliest = probabilities.max(dim=-1, keepdim=True).values
    sums = probabilities.masked_fill(probabilities < least * likeliest, 0).cumsum(dim=-1, dtype=torch.float64)
    points = _column([sampler.random_number() for sampler in samplers], sums) * sums[:, -1:]
    # The first whose sum is above the point: never one of probability 0.
    index = torch.searchsorted(sums, points, right=True)
    index = torch.minimum(index, torch.searchsorted(sums, sums[:, -1:].contiguous()))
    return index.clamp(max=sums.shape[1] - 1)  # of a row whose sums are not numbers


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """[rows, 1], without waiting for the device."""
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)[:, None]


def _with_largest(tokens: Tensor, largest: Tensor) -> Tensor:
    return torch.stack((tokens[:, 0].int(), largest[:, 0].view(torch.int32)))
