"""From a row of logits to a token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import SettingError

# Below this, logits over temperature would leave the range of float32.
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen. A temperature of 0 is greedy; `seed` makes a draw repeatable."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        temperature = _number(self.temperature)
        is_ok = temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf
        _require_number("temperature", self.temperature, is_ok, f"0 (greedy), or {MIN_TEMPERATURE} and more")
        _require_int("top_k", self.top_k, "0 (all) or more")
        _require_number("top_p", self.top_p, 0 < _number(self.top_p) <= 1, "above 0, up to 1")
        _require_number("min_p", self.min_p, 0 <= _number(self.min_p) < 1, "0 or more, below 1")
        penalty = self.repetition_penalty
        _require_number("repetition_penalty", penalty, 0 < _number(penalty) < math.inf, "above 0")
        if self.seed is not None:
            _require_int("seed", self.seed, "0 or more", limit=2**63)


def _number(value: object) -> float:
    """The value, or not-a-number (which fails every comparison) where it is none."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _require_number(name: str, value: object, ok: bool, accepted: str) -> None:
    if not ok:
        raise SettingError(f"{name}={value!r} is not accepted: give a number {accepted}")


def _require_int(name: str, value: object, accepted: str, limit: int = 2**31) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise SettingError(
            f"{name}={value!r} is not accepted: give a whole number, {accepted}, below {limit}"
        )


class Sampler:
    """Draws tokens for one request, with a random state of its own."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def sample(self, logits: Tensor, previous: Sequence[int]) -> int:
        """A token from logits [vocab], float32, given all tokens of the sequence so far."""
        params = self._params
        logits = logits.cpu()
        if params.repetition_penalty != 1.0:
            logits = _penalised(logits, previous, params.repetition_penalty)
        if params.temperature == 0:
            return int(logits.argmax())
        # Scaled from the largest, so that a tiny temperature cannot overflow.
        logits = (logits - logits.max()) / params.temperature
        if 0 < params.top_k < logits.shape[0]:
            logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -math.inf)
        probabilities = logits.softmax(dim=-1)
        if params.top_p < 1:
            ordered, order = probabilities.sort(descending=True, stable=True)
            # A token stays if those before it do not reach top_p, so the first always stays.
            dropped = ordered.cumsum(dim=-1) - ordered >= params.top_p
            dropped[0] = False
            probabilities[order[dropped]] = 0
        if params.min_p > 0:
            probabilities[probabilities < params.min_p * probabilities.max()] = 0
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def _penalised(logits: Tensor, previous: Sequence[int], penalty: float) -> Tensor:
    """Tokens seen before are made less likely: positive logits divided, negative ones multiplied."""
    seen = torch.tensor(sorted(set(previous)), dtype=torch.long)
    values = logits[seen]
    logits = logits.clone()
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    return logits
