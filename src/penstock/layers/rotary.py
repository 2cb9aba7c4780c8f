"""Rotary position embedding: the frequencies of each kind of scaling, and tables of cosines and sines."""

import math

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.plan.grids import ROTARY_PAGE
from penstock.plan.model import RotaryConfig

RotaryTables = tuple[tuple[Tensor, Tensor], ...]  # cosines and sines [positions, rotary_dim], of several


def at_positions(tables: RotaryTables, positions: Tensor) -> RotaryTables:
    """The rows of each that positions [rows] have."""
    return tuple((cos[positions], sin[positions]) for cos, sin in tables)


class Rotary:
    """Cosines and signed sines by position, in the model's dtype. Where long requests have others than short ones,
    each position has two rows, the second for those."""

    def __init__(
        self, config: RotaryConfig, head_dim: int, max_position: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        choices = [False, True] if config.kind == "longrope" else [False]
        found = [rotary_frequencies(config, head_dim, max_position, is_long=choice) for choice in choices]
        self._inverse_frequencies, self._scale = torch.stack([each for each, _ in found]), found[0][1]
        self._dtype = dtype
        self._device = device
        self.num_choices, width = len(choices), 2 * self._inverse_frequencies.shape[1]
        self._cos = torch.empty(0, width, dtype=dtype, device=device)
        self._sin = torch.empty(0, width, dtype=dtype, device=device)

    def reserve(self, end: int) -> tuple[Tensor, Tensor]:
        """The whole tables, for all positions below `end` at least. Longer ones are made elsewhere."""
        while self._cos.shape[0] < end * self.num_choices:
            self._append_page()
        return self._cos, self._sin

    def _append_page(self) -> None:
        start = self._cos.shape[0] // self.num_choices
        positions = torch.arange(start, start + ROTARY_PAGE, dtype=torch.float32)
        angles = (positions[:, None, None] * self._inverse_frequencies).flatten(0, 1)
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        cos_page = torch.cat((cos, cos), dim=-1).to(self._device, self._dtype)
        sin_page = torch.cat((-sin, sin), dim=-1).to(self._device, self._dtype)
        self._cos = torch.cat((self._cos, cos_page))
        self._sin = torch.cat((self._sin, sin_page))


class QueryScale:
    """What queries are multiplied by, by position, in the model's dtype: growing with the original contexts before
    them. It is taken along as a rotary table of one column."""

    num_choices = 1

    def __init__(
        self, config: RotaryConfig, max_position: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._growth, self._context = config.query_growth, config.original_max_position or max_position
        self._table = torch.empty(0, 1, dtype=dtype, device=device)

    def reserve(self, end: int) -> tuple[Tensor, Tensor]:
        """As `Rotary.reserve`; both are the same."""
        if len(self._table) < end:
            positions = torch.arange(-(-end // ROTARY_PAGE) * ROTARY_PAGE)
            scale = 1 + self._growth * torch.log(1 + torch.floor(positions / self._context))
            self._table = scale[:, None].to(self._table)
        return self._table, self._table


def rotary_frequencies(
    config: RotaryConfig, head_dim: int, max_position: int, *, is_long: bool = False
) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2], float32, and the factor on cosines and sines. `is_long`: of requests longer
    than the original context, where that matters."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / config.theta**exponents
    if config.frequency_divisors is not None:
        frequencies = frequencies / torch.tensor(config.frequency_divisors, dtype=torch.float32)
    match config.kind:
        case "default":
            return frequencies, 1.0
        case "none":
            return torch.zeros_like(frequencies), 1.0
        case "linear":
            return frequencies / config.factor, 1.0
        case "llama3":
            return _llama3(config, frequencies, max_position), 1.0
        case "yarn":
            return _yarn(config, frequencies, head_dim, max_position)
        case "proportional":
            is_rotated = torch.arange(head_dim // 2) < int(config.share * head_dim // 2)
            return frequencies / config.factor * is_rotated, 1.0
        case "longrope":
            factors = torch.tensor(config.long_factors if is_long else config.short_factors)
            return 1.0 / (factors * config.theta**exponents), _longrope_scale(config, max_position)
    kinds = "default, linear, llama3, yarn, longrope, proportional"
    raise ModelError(f"rotary scaling {config.kind!r} is not supported; accepted: {kinds}")


def _llama3(config: RotaryConfig, frequencies: Tensor, max_position: int) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between interpolated."""
    original = config.original_max_position or max_position
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    between = (1 - smooth) * frequencies / config.factor + smooth * frequencies
    is_long = wavelengths > original / config.low_freq_factor
    is_short = wavelengths < original / config.high_freq_factor
    return torch.where(is_long, frequencies / config.factor, torch.where(is_short, frequencies, between))


def _yarn(
    config: RotaryConfig, frequencies: Tensor, head_dim: int, max_position: int
) -> tuple[Tensor, float]:
    """Waves that turn often within the original context are kept, slow ones stretched, with a ramp between."""
    original = config.original_max_position or max_position

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / config.factor * ramp, _yarn_attention_factor(config)


def _longrope_scale(config: RotaryConfig, max_position: int) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    original = config.original_max_position or max_position
    return math.sqrt(1 + math.log(config.factor) / math.log(original)) if config.factor > 1 else 1.0


def _yarn_attention_factor(config: RotaryConfig) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return magnitude(1.0)
