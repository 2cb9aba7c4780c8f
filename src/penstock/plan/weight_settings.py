"""How weights lie in memory and what goes into products with them, as a user asks for it and as a file and a machine
settle it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from penstock.errors import SettingError
from penstock.plan.setting import Environment, Resolved, Setting, one_of

WEIGHTS_VARIABLE = "PENSTOCK_WEIGHTS"
ACTIVATIONS_VARIABLE = "PENSTOCK_ACTIVATIONS"

WeightsName = Literal["auto", "bf16", "fp8", "int8", "int4", "f32"]
ActivationsName = Literal["plain", "int8"]
WEIGHTS: tuple[WeightsName, ...] = get_args(WeightsName)
QUANTISED_WEIGHTS: tuple[WeightsName, ...] = ("fp8", "int8", "int4")
WEIGHTS_SETTING: Setting[WeightsName] = Setting("weights", WEIGHTS_VARIABLE, "auto", one_of(*WEIGHTS))
ACTIVATIONS: Setting[ActivationsName] = Setting(
    "activations", ACTIVATIONS_VARIABLE, "plain", one_of(*get_args(ActivationsName))
)
PLAIN_ACTIVATIONS: Resolved[ActivationsName] = Resolved("plain")


@dataclass(frozen=True)
class WeightsSetting(Resolved[WeightsName]):
    """How matrices lie in memory: `auto` is as quantised as the file has them where that can be computed with.
    `reason` says why, once that is settled."""

    is_unpacked: bool = (
        False  # plain values were made of a file's blocks, since there are no kernels for them
    )

    @property
    def name(self) -> WeightsName:
        return self.effective

    @property
    def dtype(self) -> str:
        """What they compute in; `auto` where anything does."""
        return {"auto": "auto", "f32": "float32"}.get(self.effective, "bfloat16")


def resolve_weights(
    argument: str | None = None, *, dtype: str = "auto", environ: Environment = None
) -> WeightsSetting:
    """How weights are kept, from the argument, else from `PENSTOCK_WEIGHTS`, else `auto`. `dtype` is what to compute
    in, as far as that was named."""
    setting = WeightsSetting(**vars(WEIGHTS_SETTING.resolve(argument, environ)))
    if "auto" not in (dtype, setting.dtype) and dtype != setting.dtype:
        raise SettingError(
            WEIGHTS_SETTING.called(setting.source),
            setting.requested,
            contradicts={"dtype": dtype},
            because=f"such weights compute in {setting.dtype}",
        )
    return replace(setting, reason="")


def resolve_activations(
    argument: str | None = None,
    *,
    weights: WeightsSetting,
    dtype: str = "auto",
    environ: Environment = None,
) -> Resolved[ActivationsName]:
    """How activations go into products with quantised weights, from the argument, else from `PENSTOCK_ACTIVATIONS`,
    else `plain`, in the model's dtype. `int8` is refused beside weights or a dtype without such products."""
    found = ACTIVATIONS.resolve(argument, environ)
    contradicts: dict[str, object] = {}
    if weights.effective not in ("auto", "int8", "int4"):
        contradicts[WEIGHTS_SETTING.called(weights.source)] = weights.effective
    if dtype == "float32":
        contradicts["dtype"] = dtype
    if found.effective == "int8" and contradicts:
        raise SettingError(
            ACTIVATIONS.called(found.source),
            found.requested,
            contradicts=contradicts,
            because="they are rounded for products with weights in blocks, which compute in bfloat16",
        )
    return found


def settle_weights(setting: WeightsSetting, unpacked: Sequence[str] = ()) -> WeightsSetting:
    """What `auto` is for a model whose file is quantised, where kernels compute with its blocks, but for those of the
    `unpacked` kinds."""
    if setting.effective != "auto":
        return setting
    but = (
        f", but {' and '.join(unpacked)} as bfloat16: no kernels compute with such blocks" if unpacked else ""
    )
    return replace(setting, reason=f"auto: as the file has them{but}", is_unpacked=bool(unpacked))


def settle_without_blocks(setting: WeightsSetting, dtype: str, other_dtype: str = "") -> WeightsSetting:
    """What `auto` is for a model whose file is quantised, on a device that does not compute with blocks, or only in
    another dtype."""
    if setting.effective != "auto":
        return setting
    name: WeightsName = "bf16" if dtype == "bfloat16" else "f32"
    reason = f"auto: {dtype}, made of the file's blocks, with which these kernels do not compute"
    if other_dtype:
        reason += f" in it: in {other_dtype} they do"
    return replace(setting, effective=name, reason=reason, is_unpacked=True)
