"""The device that a model runs on: which there are, what each computes in, and what happens between steps."""

import traceback

import torch

from penstock.errors import SettingError
from penstock.plan.device_settings import DevicesFound, resolve_device, settle_device

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def find_devices() -> DevicesFound:
    """What torch sees, and can use."""
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return DevicesFound(num_cuda, torch.backends.mps.is_available())


def chosen_device(argument: str | None = None) -> torch.device:
    """What the argument, else `PENSTOCK_DEVICE`, else `auto` comes to here."""
    return torch.device(settle_device(resolve_device(argument), find_devices()).name)


def use_device(device: torch.device) -> None:
    """Let the calling thread launch its work there: each thread has a GPU of its own, the first one until it says
    otherwise."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def wait_for(device: torch.device) -> None:
    """Return once all that was launched is done. A processor is done already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def release_memory(device: torch.device, error: BaseException | None = None) -> None:
    """Give back what nobody holds any more, and what an error's stack holds, so that other sizes find room."""
    if error is not None:
        traceback.clear_frames(error.__traceback__)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a name; `auto` is bfloat16 on processors and GPUs of NVIDIA's that compute it natively, else
    float32."""
    if name == "auto":
        return torch.bfloat16 if _has_native_bfloat16(device) else torch.float32
    if name not in _DTYPES:
        raise SettingError(f"dtype={name!r} is not accepted: give one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _has_native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
