"""The back ends that there are, and which of them a device has."""

from dataclasses import dataclass
from importlib import import_module

import torch

from penstock.errors import PenstockError, SettingError
from penstock.kernels.device import DEVICE_KINDS, device_kind
from penstock.kernels.reference.kernels import TorchKernels
from penstock.plan.model import ModelConfig
from penstock.plan.settings import KERNELS, KERNELS_VARIABLE
from penstock.plan.step import KernelKind
from penstock.plan.weight_settings import ActivationsName, WeightsSetting

# What a device must be able to compute: the reference says it, and other back ends are subclasses of it.
Kernels = TorchKernels


class KernelsUnavailableError(PenstockError):
    """Why a back end cannot be had here."""


@dataclass(frozen=True)
class BackEnd:
    """Kernels that are imported when they are chosen."""

    place: str  # module:class
    package: str = ""  # that it needs beside torch
    falls_back: bool = False  # to the reference, where `auto` chose it and it cannot be had


REFERENCE: KernelKind = "torch"
# Which of them is a device's, its `DeviceKind` says.
BACK_ENDS: dict[KernelKind, BackEnd] = {
    "native": BackEnd("penstock.kernels.native.kernels:NativeKernels", falls_back=True),
    "cuda": BackEnd("penstock.kernels.cuda.kernels:CudaKernels", package="triton"),
    REFERENCE: BackEnd("penstock.kernels.reference.kernels:TorchKernels"),
}


def select_kernels(
    device: torch.device, choice: str | None = None, activations: ActivationsName = "plain"
) -> Kernels:
    """The kernels for a device; a device without any, or without such products, is an error.

    `choice`, without it `PENSTOCK_KERNELS`, may be `torch`, which is the reference on every device, `auto`, which is
    the device's own, or one that `auto` may fall back from (`native`, on a CPU): then it is an error where it cannot
    be had."""
    kernels = _chosen(device, KERNELS.resolve().effective if choice is None else choice)
    if activations == "int8" and not kernels.round_rows():
        why = f": {kernels.slower}" if kernels.slower else ""
        raise SettingError(
            "activations",
            activations,
            "plain",
            where=f"on {device_kind(device).name}",
            because=f"only native kernels, on a processor, have 8-bit products, not {kernels.name}'s{why}",
        )
    return kernels


def _chosen(device: torch.device, choice: str) -> Kernels:
    own, optional = device_kind(device).kernels, [name for name, end in BACK_ENDS.items() if end.falls_back]
    if choice not in ("auto", REFERENCE, *optional):
        raise SettingError(KERNELS_VARIABLE, choice, f"auto, {', '.join(optional)} or {REFERENCE}")
    name = next((name for name in (REFERENCE, *optional) if name == choice), own)
    if name not in (REFERENCE, own):
        accepted, where = f"auto or {REFERENCE}", f"on {device_kind(device).name}"
        owner = next(kind.name for kind in DEVICE_KINDS.values() if kind.kernels == name)
        because = f"they are a {owner.upper()}'s"
        raise SettingError(KERNELS_VARIABLE, choice, accepted, where=where, because=because)
    try:
        made = _made(name, device)
    except KernelsUnavailableError as error:
        if choice == "auto":
            made = _made(REFERENCE, device)
            made.slower = f"there are no {name} kernels here: {error}"
            return made
        raise SettingError(KERNELS_VARIABLE, choice, where="here", because=str(error)) from error
    if name != own:
        made.slower = f"{KERNELS_VARIABLE}={choice} says so: without it, there may be {own} kernels"
    return made


@dataclass(frozen=True)
class KernelsReport:
    """Which kernels run a model. Where faster ones do not, `slower` says why, and what would help."""

    name: str
    instructions: str | None
    slower: str | None

    @classmethod
    def of(
        cls, kernels: Kernels, dtype: torch.dtype, config: ModelConfig, weights: WeightsSetting
    ) -> "KernelsReport":
        name = str(dtype).removeprefix("torch.")
        reasons = []
        if kernels.slower:
            reasons.append(f"{kernels.name} kernels run, since {kernels.slower}")
        if config.by_transformers:
            reasons.append(f"transformers' own code runs {config.family}, for which Penstock has none")
        elif (
            config.num_attention_layers
            and kernels.memory_kind(dtype, config.head_dim) == "torch" != kernels.name
        ):
            reasons.append(
                f"torch computes attention: {kernels.name} kernels have none for {name}, heads of {config.head_dim}"
            )
        if weights.is_unpacked:
            reasons.append(f"quantised weights became {name}: {weights.reason}")
        return cls(kernels.name, kernels.instructions, "; ".join(reasons) or None)


def _made(name: KernelKind, device: torch.device) -> Kernels:
    end = BACK_ENDS[name]
    module, _, kernels = end.place.partition(":")
    try:
        made: Kernels = getattr(import_module(module), kernels)()
    except ModuleNotFoundError as error:
        if error.name != end.package:
            raise
        raise SettingError(
            "device",
            device_kind(device).name,
            f"{KERNELS_VARIABLE}={REFERENCE} for the reference kernels",
            because=f"it needs {end.package}, which is not installed: pip install {end.package}",
        ) from error
    return made
