"""Which device a setting comes to, of those that there are."""

import pytest

from penstock.errors import SettingError
from penstock.plan.setting import SettingSource
from penstock.plan.settings import DEVICE_VARIABLE, DeviceSetting, DevicesFound, resolve_device, settle_device

NONE = DevicesFound()
ONE = DevicesFound(num_cuda=1)
TWO = DevicesFound(num_cuda=2)
APPLE = DevicesFound(has_mps=True)


@pytest.mark.parametrize(
    ("argument", "variable", "name", "source"),
    [
        (None, None, "auto", "default"),
        ("cpu", "nonsense", "cpu", "argument"),
        ("auto", "cpu", "auto", "argument"),
        (None, "mps", "mps", "environment"),
        (None, "cuda:1", "cuda:1", "environment"),
        ("cuda", None, "cuda", "argument"),
    ],
)
def test_resolved(argument: str | None, variable: str | None, name: str, source: SettingSource) -> None:
    environ = {} if variable is None else {DEVICE_VARIABLE: variable}
    reason = {"argument": "set by argument", "environment": "set by PENSTOCK_DEVICE"}.get(source, "")
    assert resolve_device(argument, environ=environ) == DeviceSetting(name, source, reason)


@pytest.mark.parametrize(
    "value", ["", "gpu", "CUDA", "cuda:", "cuda:01", "cuda:-1", "cuda:1 ", "mps:0", 0, True]
)
def test_refused(value: object) -> None:
    with pytest.raises(SettingError, match=f"device={value!r} is not accepted: give auto, cpu, cuda"):
        resolve_device(value, environ={})  # type: ignore[arg-type]
    if isinstance(value, str):
        with pytest.raises(SettingError, match=f"PENSTOCK_DEVICE={value!r} is not accepted"):
            resolve_device(environ={DEVICE_VARIABLE: value})


@pytest.mark.parametrize(
    ("asked", "found", "name"),
    [
        ("auto", NONE, "cpu"),
        ("auto", ONE, "cuda:0"),
        ("auto", TWO, "cuda:0"),
        ("auto", APPLE, "cpu"),  # untested there, so only where it is asked for
        ("cpu", TWO, "cpu"),
        ("cuda", ONE, "cuda:0"),
        ("cuda:0", ONE, "cuda:0"),
        ("cuda:1", TWO, "cuda:1"),
        ("mps", APPLE, "mps"),
    ],
)
def test_settled(asked: str, found: DevicesFound, name: str) -> None:
    settled = settle_device(resolve_device(asked, environ={}), found)
    assert (settled.name, settled.source) == (name, "argument")
    assert settled.reason.startswith("auto: " if asked == "auto" else "set by argument")
    assert settle_device(settled, found) == settled or asked == "auto"


def test_the_default_is_auto() -> None:
    settled = settle_device(resolve_device(environ={}), ONE)
    assert settled == DeviceSetting("cuda:0", "default", "auto: the first GPU that torch sees")


@pytest.mark.parametrize(
    ("asked", "found", "there_are"),
    [
        ("cuda", NONE, "cpu"),
        ("cuda:1", ONE, "cpu, cuda:0"),
        ("mps", TWO, "cpu, cuda:0, cuda:1"),
        ("cuda:7", APPLE, "cpu, mps"),
    ],
)
def test_an_absent_device_is_an_error_that_says_what_there_is(
    asked: str, found: DevicesFound, there_are: str
) -> None:
    with pytest.raises(SettingError, match=f"device='{asked}' is not accepted here: torch sees {there_are};"):
        settle_device(resolve_device(asked, environ={}), found)
    with pytest.raises(SettingError, match=f"PENSTOCK_DEVICE='{asked}' is not accepted here"):
        settle_device(resolve_device(environ={DEVICE_VARIABLE: asked}), found)


def test_the_reason_names_the_variable() -> None:
    setting = settle_device(resolve_device(environ={DEVICE_VARIABLE: "cuda"}), ONE)
    assert (setting.name, setting.reason) == ("cuda:0", "set by PENSTOCK_DEVICE")


def test_auto_is_the_processor_where_nothing_else_has_what_was_asked_for() -> None:
    found = DevicesFound(1)
    settled = settle_device(resolve_device(environ={}), found, only_cpu="int4 weights")
    assert (settled.name, settled.reason) == ("cpu", "auto: no GPU has int4 weights")
    assert settle_device(resolve_device("cuda", environ={}), found, only_cpu="int4 weights").name == "cuda:0"
