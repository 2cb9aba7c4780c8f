from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.plan import CHUNK_VARIABLE, ChunkedPrefillConfig, ChunkSetting, resolve_chunk_size


def env(value: str) -> dict[str, str]:
    return {CHUNK_VARIABLE: value, "HOME": "/"}


AUTO = "auto: 512 for now, no measurements are used yet"


@pytest.mark.parametrize(
    ("argument", "environ", "expected"),
    [
        (None, {}, ChunkSetting("default", 512, "default", "default")),
        (100, {}, ChunkSetting("100", 100, "argument", "set by argument")),
        ("100", {}, ChunkSetting("100", 100, "argument", "set by argument")),
        ("auto", {}, ChunkSetting("auto", 512, "argument", AUTO)),
        (None, env("64"), ChunkSetting("64", 64, "environment", "set by PENSTOCK_PREFILL_CHUNK")),
        (None, env("auto"), ChunkSetting("auto", 512, "environment", AUTO)),
        (100, env("64"), ChunkSetting("100", 100, "argument", "set by argument")),
        ("auto", env("64"), ChunkSetting("auto", 512, "argument", AUTO)),
        (1, env("nonsense"), ChunkSetting("1", 1, "argument", "set by argument")),
    ],
)
def test_precedence(argument: int | str | None, environ: dict[str, str], expected: ChunkSetting) -> None:
    assert resolve_chunk_size(argument, environ=environ) == expected


@pytest.mark.parametrize(
    ("argument", "environ", "source"),
    [(0, {}, "argument"), ("0", {}, "argument"), (0, env("64"), "argument"), (None, env("0"), "environment")],
)
@pytest.mark.parametrize("grid", [1, 64])
def test_zero_is_off_and_never_rounded(
    argument: int | str | None, environ: dict[str, str], source: str, grid: int
) -> None:
    setting = resolve_chunk_size(argument, environ=environ, grid=grid)
    assert (setting.requested, setting.effective, setting.source) == ("0", 0, source)
    name = CHUNK_VARIABLE if source == "environment" else source
    assert setting.reason == f"set by {name}: off, the whole prompt in one chunk"


def test_the_default_is_the_config_default() -> None:
    assert resolve_chunk_size(environ={}).effective == ChunkedPrefillConfig().chunk_size


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PREFILL_CHUNK", "7")
    assert resolve_chunk_size() == ChunkSetting("7", 7, "environment", "set by PENSTOCK_PREFILL_CHUNK")
    monkeypatch.delenv("PENSTOCK_PREFILL_CHUNK")
    assert resolve_chunk_size().source == "default"


BAD_NUMBERS = ["", " ", "12x", "-5", "+5", "1.5", "1e3", " 512 ", "512\n", "1_000", "007", "00", "0x10", "٣"]
BAD_WORDS = ["AUTO", "Auto", " auto", "off", "none", "None", "true", "9" * 5000]


@pytest.mark.parametrize("text", BAD_NUMBERS + BAD_WORDS)
def test_anything_else_is_an_error_that_names_its_source(text: str) -> None:
    with pytest.raises(SettingError, match=r"0 \(off.* or auto") as error:
        resolve_chunk_size(environ=env(text))
    assert str(error.value).startswith(f"PENSTOCK_PREFILL_CHUNK={text!r} ")
    with pytest.raises(SettingError) as error:
        resolve_chunk_size(text, environ={})
    assert str(error.value).startswith(f"chunk_size={text!r} ")


@pytest.mark.parametrize("value", [-1, -512, 1.5, 512.0, True, False, [512], b"512"])
def test_arguments_that_are_no_counts(value: Any) -> None:
    with pytest.raises(SettingError, match="chunk_size="):
        resolve_chunk_size(value, environ=env("64"))


def test_rounding_is_reported() -> None:
    setting = resolve_chunk_size(100, environ={}, grid=64)
    assert (setting.requested, setting.effective) == ("100", 128)
    assert "rounded up from 100 to 128 on the 64-token grid" in setting.reason
    assert "rounded up from 512 to 600" in resolve_chunk_size(environ={}, grid=100).reason
    assert resolve_chunk_size("auto", environ={}, grid=100).effective == 600


@given(st.integers(1, 10**6), st.sampled_from([1, 16, 64]))
def test_the_grid_only_rounds_up_and_only_if_needed(size: int, grid: int) -> None:
    setting = resolve_chunk_size(size, environ={}, grid=grid)
    assert setting == resolve_chunk_size(str(size), environ={}, grid=grid)
    assert setting.effective % grid == 0
    assert size <= setting.effective < size + grid
    assert ("rounded" in setting.reason) == (setting.effective != size)
    assert setting.requested == str(size)


@pytest.mark.parametrize("grid", [0, -64, 64.0, True])
def test_grid_is_checked(grid: Any) -> None:
    with pytest.raises(SettingError, match="grid="):
        resolve_chunk_size(100, environ={}, grid=grid)
