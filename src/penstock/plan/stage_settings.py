"""Stages as a user asks for them: how many, where their workers are, and which layers each has."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SettingError
from penstock.plan.checks import check_bool
from penstock.plan.model import ModelConfig
from penstock.plan.pipeline import Machine, PartCosts, cut_layers, stages_of

DEFAULT_STAGE_TIMEOUT_S = 10.0
MAX_STAGES = 256
_TIMEOUTS_S = (0.1, 3600.0)
_NUMBER = re.compile(r"[1-9][0-9]{0,5}", re.ASCII)


@dataclass(frozen=True)
class StagesSetting:
    """A model in stages, of which the last is the process itself: the others are children of it, or workers that
    listen at `addresses`."""

    num_stages: int
    addresses: tuple[str | Callable[[], str], ...] = ()  # a function is asked at each connection
    layers: tuple[int, ...] | None = None  # of each stage; None: by what they take
    timeout_s: float = DEFAULT_STAGE_TIMEOUT_S
    mixed: bool = False  # workers with other bits are let in
    token_file: Path | None = None

    def cut(self, config: ModelConfig, *, dtype_bytes: int = 2) -> tuple[range, ...]:
        """The layers of each stage."""
        costs = PartCosts.of_model(config, dtype_bytes=dtype_bytes, past=_USUAL_PAST)
        machines = [Machine()] * self.num_stages
        stages = (
            cut_layers(costs, machines) if self.layers is None else stages_of(costs, self.layers, machines)
        )
        return tuple(stage.layers for stage in stages)


# What tokens of a prompt see on average, where nothing is known of prompts.
_USUAL_PAST = 4096


def resolve_stages(
    stages: object = None,
    layers: object = None,
    *,
    timeout_s: object = None,
    mixed: object = False,
    token_file: str | Path | None = None,
) -> StagesSetting | None:
    """None where one process has the whole model."""
    counts = None if layers is None else _layers(layers)
    num_stages, addresses = _stages(stages) if stages is not None else (len(counts or (0,)), ())
    if counts is not None and len(counts) != num_stages:
        raise SettingError(
            "layers", _text(counts), f"{num_stages} numbers, one for each stage", beside={"stages": stages}
        )
    if addresses and token_file is None:
        raise SettingError("stages", str(stages), needs=("token_file",))
    if num_stages == 1:
        return None
    return StagesSetting(
        num_stages,
        addresses,
        counts,
        DEFAULT_STAGE_TIMEOUT_S if timeout_s is None else _seconds(timeout_s),
        check_bool("mixed", mixed),
        None if token_file is None else Path(token_file),
    )


def _stages(value: object) -> tuple[int, tuple[str, ...]]:
    """A number, or the addresses of all stages but the last."""
    accepted = (
        f"a number from 1 to {MAX_STAGES}, or the addresses of workers, such as 10.0.0.2:7070,10.0.0.3:7070"
    )
    number = int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    if isinstance(number, int) and not isinstance(number, bool):
        if 1 <= number <= MAX_STAGES:
            return number, ()
        raise SettingError("stages", value, accepted)
    if not isinstance(value, str) or not value:
        raise SettingError("stages", value, accepted)
    addresses = tuple(part.strip() for part in value.split(","))
    if (
        not all(re.fullmatch(r".+:[0-9]{1,5}", address) for address in addresses)
        or len(addresses) >= MAX_STAGES
    ):
        raise SettingError("stages", value, accepted)
    return len(addresses) + 1, addresses


def _layers(value: object) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if isinstance(parts, Sequence):
        numbers = [
            int(part) if isinstance(part, str) and _NUMBER.fullmatch(part.strip()) else part for part in parts
        ]
        counts = tuple(part for part in numbers if isinstance(part, int) and not isinstance(part, bool))
        if counts and len(counts) == len(numbers) and min(counts) >= 1:
            return counts
    raise SettingError("layers", value, "the number of layers of each stage, such as 10,20")


def _seconds(value: object) -> float:
    least, most = _TIMEOUTS_S
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
        return float(value)
    raise SettingError("stage_timeout", value, f"a number of seconds from {least:g} to {most:g}")


def _text(counts: Sequence[int]) -> str:
    return ",".join(map(str, counts))
