"""Which device computes, and where that setting came from."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.errors import SettingError
from penstock.plan.settings import SettingSource

DEVICE_VARIABLE = "PENSTOCK_DEVICE"
ACCEPTED_DEVICES = "auto, cpu, cuda, cuda:1 (and so on) or mps"
_NAME = re.compile(r"auto|cpu|mps|cuda(:(0|[1-9][0-9]{0,2}))?", re.ASCII)


@dataclass(frozen=True)
class DevicesFound:
    """What there is to compute on beside the processor."""

    num_cuda: int = 0
    has_mps: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        cuda = tuple(f"cuda:{index}" for index in range(self.num_cuda))
        return ("cpu", *cuda, *(("mps",) if self.has_mps else ()))


@dataclass(frozen=True)
class DeviceSetting:
    """A device by torch's name for it; `auto`, or `cuda` without a number, until it is settled. `reason` says why,
    once it is."""

    name: str
    source: SettingSource
    reason: str = ""


def resolve_device(argument: str | None = None, *, environ: Mapping[str, str] | None = None) -> DeviceSetting:
    """The device from the argument, else from `PENSTOCK_DEVICE`, else `auto`. Whether it is there, `settle_device`
    says."""
    environ = os.environ if environ is None else environ
    if argument is not None:
        return DeviceSetting(_checked("device", argument), "argument")
    if DEVICE_VARIABLE in environ:
        return DeviceSetting(_checked(DEVICE_VARIABLE, environ[DEVICE_VARIABLE]), "environment")
    return DeviceSetting("auto", "default")


def settle_device(setting: DeviceSetting, found: DevicesFound, *, only_cpu: str = "") -> DeviceSetting:
    """The one device that it comes to, of those that were found: `auto` is the first of CUDA's, else the processor;
    or that at once, where `only_cpu` says what else was asked for that no other device has. One that is absent is an
    error."""
    if setting.name == "auto":
        if found.num_cuda and only_cpu:
            return replace(setting, name="cpu", reason=f"auto: no GPU has {only_cpu}")
        if found.num_cuda:
            return replace(setting, name="cuda:0", reason="auto: the first GPU that torch sees")
        return replace(setting, name="cpu", reason="auto: torch sees no GPU of NVIDIA's")
    name = "cuda:0" if setting.name == "cuda" else setting.name
    given_by = DEVICE_VARIABLE if setting.source == "environment" else "device"
    if name not in found.names:
        raise SettingError(
            given_by,
            setting.name,
            "one of these, or auto",
            where="here",
            because=f"torch sees {', '.join(found.names)}",
        )
    by = setting.source if setting.source == "argument" else DEVICE_VARIABLE
    return replace(setting, name=name, reason=f"set by {by}")


def _checked(name: str, value: object) -> str:
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    raise SettingError(name, value, ACCEPTED_DEVICES)
