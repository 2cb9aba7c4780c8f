"""All settings that a chunk's size follows from: the size itself, a memory budget, latency targets."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from penstock.errors import SettingError
from penstock.plan.config import DEFAULT_CHUNK_SIZE
from penstock.plan.policy import ScheduleConfig, SchedulePolicy
from penstock.plan.settings import CHUNK_VARIABLE, ChunkSetting, resolve_chunk_size
from penstock.plan.sizing import SizeRules
from penstock.plan.units import parse_bytes

MAX_ACTIVATION_VARIABLE = "PENSTOCK_MAX_ACTIVATION"
TARGET_ITL_VARIABLE = "PENSTOCK_TARGET_ITL"
TARGET_TTFT_VARIABLE = "PENSTOCK_TARGET_TTFT"

# Digits, with a decimal point at most: no sign, space or exponent.
_DECIMAL = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?", re.ASCII)


@dataclass(frozen=True)
class SizeSettings:
    """A resolved chunk size, and the bounds that it keeps to."""

    chunk: ChunkSetting
    max_activation_bytes: int | None = None
    target_itl_s: float | None = None
    target_ttft_s: float | None = None

    def rules(
        self,
        *,
        free_bytes: int | None = None,
        tuned: int | None = None,
        default: int = DEFAULT_CHUNK_SIZE,
    ) -> SizeRules:
        """The rules for a chunk's size on a machine with so much memory free, and a profile of its best chunk;
        `default` is for want of one."""
        return SizeRules(
            fixed=None if self.chunk.is_auto else self.chunk.effective,
            max_activation_bytes=self.max_activation_bytes,
            free_bytes=free_bytes,
            target_itl_s=self.target_itl_s,
            target_ttft_s=self.target_ttft_s,
            grid=self.chunk.grid,
            tuned=tuned,
            default=default,
        )


def resolve_size(
    chunk: int | str | None = None,
    *,
    max_activation: int | str | None = None,
    target_itl_ms: float | str | None = None,
    target_ttft_ms: float | str | None = None,
    environ: Mapping[str, str] | None = None,
    grid: int = 1,
) -> SizeSettings:
    """Each setting from its argument, else from the environment (`PENSTOCK_PREFILL_CHUNK`, `PENSTOCK_MAX_ACTIVATION`
    in bytes or with a unit, `PENSTOCK_TARGET_ITL` and `PENSTOCK_TARGET_TTFT` in milliseconds), else none.

    A fixed chunk follows no latency target, so the two contradict each other, wherever they come from.
    """
    environ = os.environ if environ is None else environ
    setting = resolve_chunk_size(chunk, environ=environ, grid=grid)
    activation = _given("max_activation", max_activation, MAX_ACTIVATION_VARIABLE, environ)
    targets: list[float | None] = []
    for name, argument, variable in (
        ("target_itl_ms", target_itl_ms, TARGET_ITL_VARIABLE),
        ("target_ttft_ms", target_ttft_ms, TARGET_TTFT_VARIABLE),
    ):
        given = _given(name, argument, variable, environ)
        targets.append(None if given is None else _milliseconds(given) / 1000)
        if given is not None and not setting.is_auto:
            fixed_by = CHUNK_VARIABLE if setting.source == "environment" else "chunk_size"
            raise SettingError(
                given.name,
                given.value,
                "auto as the chunk",
                contradicts={fixed_by: setting.effective},
                because="a fixed chunk follows no target",
            )
    return SizeSettings(
        setting, None if activation is None else parse_bytes(activation.value, activation.name), *targets
    )


def check_schedule(size: SizeSettings, schedule: ScheduleConfig) -> None:
    """Refuse a schedule that follows no target where there is one, or that keeps tokens waiting for many chunks."""
    if size.target_itl_s is not None and schedule.policy is SchedulePolicy.PREFILL_FIRST:
        raise SettingError(
            "target_itl_ms",
            round(1000 * size.target_itl_s, 6),
            "mixed, interleaved or decode-priority",
            contradicts={"policy": schedule.policy.value},
            because=f"by this policy a token may wait for {schedule.max_chunk_steps} chunks",
        )
    for name, target in (("target_itl_ms", size.target_itl_s), ("target_ttft_ms", size.target_ttft_s)):
        if target is not None and not schedule.auto_chunk:
            raise SettingError(
                name,
                round(1000 * target, 6),
                "a schedule with auto_chunk=True",
                contradicts={"chunk_size": schedule.chunk_size},
                because="a schedule with a fixed chunk follows no target",
            )
    if schedule.auto_chunk and not size.chunk.is_auto:
        raise SettingError(
            "auto_chunk", True, "auto as the chunk", contradicts={"chunk_size": size.chunk.effective}
        )


@dataclass(frozen=True)
class _Given:
    """A value, and what the user knows it by."""

    name: str
    value: object


def _given(name: str, argument: object, variable: str, environ: Mapping[str, str]) -> _Given | None:
    if argument is not None:
        return _Given(name, argument)
    return _Given(variable, environ[variable]) if variable in environ else None


def _milliseconds(given: _Given) -> float:
    value = given.value
    number = float(value) if isinstance(value, str) and _DECIMAL.fullmatch(value) else value
    if isinstance(number, int | float) and not isinstance(number, bool) and isfinite(number) and number > 0:
        return float(number)
    raise SettingError(given.name, value, "a number of milliseconds above 0, such as 200")
