"""How weights lie in memory, and where that setting came from."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from penstock.errors import SettingError
from penstock.plan.settings import SettingSource
from penstock.plan.units import format_bytes

WEIGHTS_VARIABLE = "PENSTOCK_WEIGHTS"
WeightsName = Literal["auto", "bf16", "int8", "int4", "f32"]
WEIGHTS: tuple[WeightsName, ...] = get_args(WeightsName)
QUANTISED_WEIGHTS: tuple[WeightsName, ...] = ("int8", "int4")
# Of the machine's memory: the rest is for the cache, for activations, and for others.
_SHARE = 0.7


@dataclass(frozen=True)
class WeightsSetting:
    """How matrices lie in memory: `auto` is as quantised as the file has them where that can be computed with.
    `reason` says why, once that is settled."""

    name: WeightsName
    source: SettingSource
    reason: str = ""

    @property
    def dtype(self) -> str:
        """What they compute in; `auto` where anything does."""
        return {"auto": "auto", "f32": "float32"}.get(self.name, "bfloat16")


def resolve_weights(
    argument: str | None = None, *, dtype: str = "auto", environ: Mapping[str, str] | None = None
) -> WeightsSetting:
    """How weights are kept, from the argument, else from `PENSTOCK_WEIGHTS`, else `auto`. `dtype` is what to compute
    in, as far as that was named."""
    environ = os.environ if environ is None else environ
    if argument is not None:
        name, value = "weights", argument
        setting = _setting(name, value, "argument")
    elif WEIGHTS_VARIABLE in environ:
        name, value = WEIGHTS_VARIABLE, environ[WEIGHTS_VARIABLE]
        setting = _setting(name, value, "environment")
    else:
        return WeightsSetting("auto", "default")
    if "auto" not in (dtype, setting.dtype) and dtype != setting.dtype:
        raise SettingError(
            name, value, contradicts={"dtype": dtype}, because=f"such weights compute in {setting.dtype}"
        )
    return setting


def settle_weights(
    setting: WeightsSetting, *, fast_bfloat16: bool, bfloat16_bytes: int, memory_bytes: int | None
) -> WeightsSetting:
    """What `auto` is for a model whose file is quantised and whose weights take so much in bfloat16: that, where the
    processor multiplies it much faster than it unpacks blocks (`fast_bfloat16`) and the machine has the memory."""
    if setting.name != "auto":
        return setting
    if not fast_bfloat16:
        return replace(setting, reason="auto: as the file has them")
    if memory_bytes is not None and bfloat16_bytes > _SHARE * memory_bytes:
        return replace(
            setting,
            reason=f"auto: as the file has them, since {format_bytes(bfloat16_bytes)} of bfloat16 are too much for "
            f"{format_bytes(memory_bytes)} of memory",
        )
    return replace(
        setting, name="bf16", reason="auto: bfloat16, which this processor multiplies fastest (AMX)"
    )


def settle_without_blocks(setting: WeightsSetting, dtype: str) -> WeightsSetting:
    """What `auto` is for a model whose file is quantised, on a device that does not compute with blocks."""
    if setting.name != "auto":
        return setting
    name: WeightsName = "bf16" if dtype == "bfloat16" else "f32"
    reason = f"auto: {dtype}, made of the file's blocks, with which only a CPU computes"
    return replace(setting, name=name, reason=reason)


def _setting(name: str, value: str, source: SettingSource) -> WeightsSetting:
    for known in WEIGHTS:
        if known == value:
            return WeightsSetting(known, source)
    raise SettingError(name, value, f"one of {', '.join(WEIGHTS)}")
