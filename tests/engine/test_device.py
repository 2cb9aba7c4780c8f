"""What a device computes in, and what is given back between steps."""

import gc
import weakref

import pytest
import torch

from penstock.engine import device as devices
from penstock.engine.device import find_devices, release_memory, resolve_dtype, use_device, wait_for
from penstock.errors import SettingError

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda:0", "mps"))


@pytest.mark.parametrize("device", [CPU, CUDA, MPS], ids=str)
def test_dtype_by_name(device: torch.device) -> None:
    assert resolve_dtype("float32", device) is torch.float32
    assert resolve_dtype("bfloat16", device) is torch.bfloat16
    with pytest.raises(SettingError, match="dtype='float16' is not accepted"):
        resolve_dtype("float16", device)


def test_auto_is_what_a_device_computes_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("auto", CPU) in (torch.float32, torch.bfloat16)
    assert resolve_dtype("auto", MPS) is torch.float32
    for has_bfloat16, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(devices, "_has_native_bfloat16", lambda device, found=has_bfloat16: found)
        assert resolve_dtype("auto", CUDA) is dtype


def test_devices_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find_devices().names == ("cpu", "cuda:0", "cuda:1")
    # A card whose driver is too old is counted, and of no use.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_devices().names == ("cpu",)


def test_a_processor_needs_no_waiting() -> None:
    use_device(CPU)
    wait_for(CPU)
    release_memory(CPU)


def test_what_an_error_s_stack_holds_is_given_back() -> None:
    class Held:
        pass

    alive: list[weakref.ref[Held]] = []

    def fail() -> None:
        held = Held()
        alive.append(weakref.ref(held))
        raise MemoryError

    try:
        fail()
    except MemoryError as error:
        assert alive[0]() is not None
        release_memory(CPU, error)
        gc.collect()
        assert alive[0]() is None
