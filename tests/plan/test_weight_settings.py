import pytest

from penstock.errors import SettingError
from penstock.plan import WEIGHTS_VARIABLE, SettingSource, WeightsName, WeightsSetting, resolve_weights
from penstock.plan.weight_settings import settle_weights, settle_without_blocks


def env(value: str) -> dict[str, str]:
    return {WEIGHTS_VARIABLE: value, "HOME": "/"}


@pytest.mark.parametrize(
    ("argument", "environ", "name", "source", "dtype"),
    [
        (None, {}, "auto", "default", "auto"),
        ("auto", env("int8"), "auto", "argument", "auto"),
        ("int4", {}, "int4", "argument", "bfloat16"),
        (None, env("int8"), "int8", "environment", "bfloat16"),
        ("bf16", env("nonsense"), "bf16", "argument", "bfloat16"),
        ("f32", {}, "f32", "argument", "float32"),
    ],
)
def test_resolved(
    argument: str | None, environ: dict[str, str], name: WeightsName, source: SettingSource, dtype: str
) -> None:
    setting = resolve_weights(argument, environ=environ)
    assert setting == WeightsSetting(name, source)
    assert setting.dtype == dtype


@pytest.mark.parametrize("value", ["", "INT8", "q4", "int8 ", "bfloat16"])
def test_refused(value: str) -> None:
    accepted = "give one of auto, bf16, fp8, int8, int4, f32"
    with pytest.raises(SettingError, match=f"weights={value!r} is not accepted: {accepted}"):
        resolve_weights(value, environ={})
    with pytest.raises(SettingError, match=f"PENSTOCK_WEIGHTS={value!r} is not accepted: {accepted}"):
        resolve_weights(environ=env(value))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [("f32", "bfloat16"), ("bf16", "float32"), ("int8", "float32"), ("int4", "float32")],
)
def test_contradiction(value: str, dtype: str) -> None:
    with pytest.raises(SettingError, match=f"weights='{value}' contradicts dtype='{dtype}'"):
        resolve_weights(value, dtype=dtype, environ={})
    with pytest.raises(SettingError, match=f"{WEIGHTS_VARIABLE}='{value}' contradicts dtype='{dtype}'"):
        resolve_weights(dtype=dtype, environ=env(value))


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_auto_goes_with_any_dtype(dtype: str) -> None:
    assert resolve_weights("auto", dtype=dtype, environ={}).name == "auto"


def test_auto_is_what_the_file_has() -> None:
    settled = settle_weights(WeightsSetting("auto"))
    assert (settled.name, settled.source) == ("auto", "default")
    assert settled.reason


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "f32"])
def test_what_was_asked_for_stays(name: WeightsName) -> None:
    assert settle_weights(WeightsSetting(name, "default")) == WeightsSetting(name, "default")


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "bf16"), ("float32", "f32")])
def test_without_kernels_for_blocks_auto_is_the_dtype(dtype: str, name: WeightsName) -> None:
    auto = WeightsSetting("auto")
    settled = settle_without_blocks(auto, dtype)
    assert (settled.effective, settled.is_unpacked, settled.source) == (name, True, "default")
    assert "float16" not in settled.reason.removeprefix(f"auto: {dtype}")
    assert "in float16 they do" in settle_without_blocks(auto, dtype, "float16").reason
    for asked in ("int8", "bf16", "f32"):
        setting = WeightsSetting(asked)
        assert settle_without_blocks(setting, dtype) is setting
