"""What a device computes in, what is given back between steps, and that nobody else asks which kind it is."""

import ast
import gc
import weakref
from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import SettingError
from penstock.kernels.device import DEVICE_KINDS, device_kind, find_devices

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda:0", "mps"))
ROOT = Path(penstock.__file__).parent


@pytest.mark.parametrize("device", [CPU, CUDA, MPS], ids=str)
def test_dtype_by_name(device: torch.device) -> None:
    kind = device_kind(device)
    assert kind.dtype("float32") is torch.float32
    assert kind.dtype("bfloat16") is torch.bfloat16
    with pytest.raises(SettingError, match="dtype='float16' is not accepted"):
        kind.dtype("float16")


def test_auto_is_what_a_device_computes_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_kind(CPU).dtype("auto") in (torch.float32, torch.bfloat16)
    assert device_kind(MPS).dtype("auto") is torch.float32
    for has_bfloat16, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(
            DEVICE_KINDS["cuda"], "_has_native_bfloat16", lambda kind, found=has_bfloat16: found
        )
        assert device_kind(CUDA).dtype("auto") is dtype


def test_devices_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find_devices().names == ("cpu", "cuda:0", "cuda:1")
    # A card whose driver is too old is counted, and of no use.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_devices().names == ("cpu",)


def test_another_kind_of_device_is_an_error() -> None:
    with pytest.raises(
        SettingError,
        match="device='meta' is not accepted: there are no kernels",
    ):
        device_kind(torch.device("meta"))


def test_only_a_gpu_of_nvidia_s_runs_behind_the_host() -> None:
    assert [device_kind(device).steps_in_flight for device in (CPU, CUDA, MPS)] == [1, 2, 1]
    assert [device_kind(device).draws for device in (CPU, CUDA, MPS)] == [False, True, False]
    assert [device_kind(device).is_host for device in (CPU, CUDA, MPS)] == [True, False, False]


def test_a_processor_needs_no_waiting() -> None:
    kind = device_kind(CPU)
    kind.use()
    kind.synchronize()
    kind.release()


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
        device_kind(CPU).release(error)
        gc.collect()
        assert alive[0]() is None


def asks_for_a_kind(node: ast.AST) -> bool:
    """Whether a device's type is looked at: `device.type`, `x.device.type`."""
    if not isinstance(node, ast.Attribute) or node.attr != "type":
        return False
    owner = node.value
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return name.endswith("device")


def test_no_other_file_asks_which_kind_a_device_is_of() -> None:
    asking = {
        path.relative_to(ROOT)
        for path in ROOT.rglob("*.py")
        if any(map(asks_for_a_kind, ast.walk(ast.parse(path.read_text()))))
    }
    assert asking == {Path("kernels/device.py")}
