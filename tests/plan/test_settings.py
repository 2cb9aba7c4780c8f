from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.plan import (
    ALIGN_VARIABLE,
    CHUNK_VARIABLE,
    STATE_GRID,
    ChunkedPrefillConfig,
    ChunkSetting,
    SettingSource,
    resolve_align,
    resolve_chunk_size,
)


def env(value: str) -> dict[str, str]:
    return {CHUNK_VARIABLE: value, "HOME": "/"}


def auto(source: SettingSource, **more: Any) -> ChunkSetting:
    return ChunkSetting("auto", 512, source, "auto", is_auto=True, **more)


@pytest.mark.parametrize(
    ("argument", "environ", "expected"),
    [
        (None, {}, auto("default")),
        (100, {}, ChunkSetting("100", 100, "argument", "set by argument")),
        ("100", {}, ChunkSetting("100", 100, "argument", "set by argument")),
        ("auto", {}, auto("argument")),
        (None, env("64"), ChunkSetting("64", 64, "environment", "set by PENSTOCK_PREFILL_CHUNK")),
        (None, env("auto"), auto("environment")),
        (100, env("64"), ChunkSetting("100", 100, "argument", "set by argument")),
        ("auto", env("64"), auto("argument")),
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
    assert (setting.requested, setting.effective, setting.grid) == ("100", 128, 64)
    assert "rounded up from 100 to 128" in setting.reason
    assert resolve_chunk_size(environ=env("1"), grid=64).source == "environment"
    assert resolve_chunk_size(environ={}, grid=STATE_GRID) == auto("default", grid=STATE_GRID)
    assert "rounded up from 512 to 600" in resolve_chunk_size(environ={}, grid=100).reason
    assert resolve_chunk_size("auto", environ={}, grid=100).effective == 600


@given(st.integers(1, 10**6), st.sampled_from([1, 16, 64]))
def test_the_grid_only_rounds_up_and_only_if_needed(size: int, grid: int) -> None:
    setting = resolve_chunk_size(size, environ={}, grid=grid)
    assert setting == resolve_chunk_size(str(size), environ={}, grid=grid)
    assert setting.effective % grid == 0
    assert size <= setting.effective < size + grid
    for said in (f"rounded up from {size} to {setting.effective}", f"--no-align keeps {size}"):
        assert (said in setting.reason) == (setting.effective != size)
    assert setting.requested == str(size)


@pytest.mark.parametrize("grid", [0, -64, 64.0, True])
def test_grid_is_checked(grid: Any) -> None:
    with pytest.raises(SettingError, match="grid="):
        resolve_chunk_size(100, environ={}, grid=grid)


def align_env(value: str) -> dict[str, str]:
    return {ALIGN_VARIABLE: value, "HOME": "/"}


@pytest.mark.parametrize(
    ("argument", "environ", "expected"),
    [
        (None, {}, (True, "default")),
        (True, {}, (True, "argument")),
        (False, {}, (False, "argument")),
        (None, align_env("0"), (False, "environment")),
        (None, align_env("1"), (True, "environment")),
        (True, align_env("0"), (True, "argument")),
        (False, align_env("1"), (False, "argument")),
        (False, align_env("nonsense"), (False, "argument")),
    ],
)
def test_alignment_precedence(
    argument: bool | None, environ: dict[str, str], expected: tuple[bool, str]
) -> None:
    setting = resolve_align(argument, environ=environ)
    assert (setting.enabled, setting.source) == expected


def test_the_process_environment_may_switch_alignment_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PREFILL_ALIGN", "0")
    assert not resolve_align().enabled
    monkeypatch.delenv("PENSTOCK_PREFILL_ALIGN")
    assert resolve_align().enabled


@pytest.mark.parametrize(
    "text", ["", " ", "2", "00", "01", "1 ", "-1", "true", "True", "yes", "on", "off", "٣"]
)
def test_alignment_text_is_0_or_1(text: str) -> None:
    with pytest.raises(SettingError, match=r"give 1 to .* or 0 to keep any size") as error:
        resolve_align(environ=align_env(text))
    assert str(error.value).startswith(f"PENSTOCK_PREFILL_ALIGN={text!r} is not accepted: ")


@pytest.mark.parametrize("value", [0, 1, "1", "yes", 1.0, [True]])
def test_alignment_arguments_are_true_or_false(value: Any) -> None:
    with pytest.raises(SettingError, match="is not accepted: give True or False") as error:
        resolve_align(value, environ=align_env("1"))
    assert str(error.value).startswith(f"align={value!r} ")


@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_alignment_changes_a_size_only_with_recurrent_state(
    size: int, enabled: bool, has_state: bool
) -> None:
    grid = resolve_align(enabled, environ={}).grid(has_state=has_state)
    setting = resolve_chunk_size(size, environ={}, grid=grid)
    if enabled and has_state:
        assert setting.effective % STATE_GRID == 0
    else:
        assert setting == resolve_chunk_size(size, environ={})
        assert setting.effective == size
