"""How weights lie in memory, and where that setting came from."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.errors import SettingError
from penstock.plan.settings import SettingSource

WEIGHTS_VARIABLE = "PENSTOCK_WEIGHTS"
WeightsName = Literal["auto", "bf16", "int8", "int4", "f32"]
WEIGHTS: tuple[WeightsName, ...] = get_args(WeightsName)
QUANTISED_WEIGHTS: tuple[WeightsName, ...] = ("int8", "int4")


@dataclass(frozen=True)
class WeightsSetting:
    """How matrices lie in memory: `auto` is as quantised as the file has them where that can be computed with."""

    name: WeightsName
    source: SettingSource

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
            f"{name}={value!r} contradicts dtype={dtype!r}: such weights compute in {setting.dtype}; leave one of "
            "them out"
        )
    return setting


def _setting(name: str, value: str, source: SettingSource) -> WeightsSetting:
    for known in WEIGHTS:
        if known == value:
            return WeightsSetting(known, source)
    raise SettingError(f"{name}={value!r} is not accepted: give one of {', '.join(WEIGHTS)}")
