"""Budgets and targets are taken strictly, from an argument or the environment, and never ignored in silence."""

from typing import Any

import pytest

from penstock.errors import SettingError
from penstock.plan import (
    MAX_ACTIVATION_VARIABLE,
    TARGET_ITL_VARIABLE,
    TARGET_TTFT_VARIABLE,
    ScheduleConfig,
    SchedulePolicy,
    SizeSettings,
    resolve_chunk_size,
    resolve_size,
)
from penstock.plan.settings import check_schedule

ENVIRON = {
    MAX_ACTIVATION_VARIABLE: "512MiB",
    TARGET_ITL_VARIABLE: "200",
    TARGET_TTFT_VARIABLE: "1500.5",
}


def test_nothing_is_set_by_default() -> None:
    assert resolve_size(environ={}) == SizeSettings(resolve_chunk_size(environ={}))
    assert resolve_size(environ={}).rules().is_auto


def test_without_a_latency_target_decodes_wait_for_half_a_second_at_most() -> None:
    gap = resolve_size(environ={}).decode_gap
    assert (gap.effective, gap.source, gap.reason) == (0.5, "default", "no latency target is given")
    assert resolve_size(environ={}).rules().decode_gap_s == 0.5
    reasons = {"target_itl_ms": "target", "target_ttft_ms": "target", "chunk": "fixed"}
    for given, reason in reasons.items():
        size = resolve_size(environ={}, **{given: 64})
        assert size.decode_gap.effective is size.rules().decode_gap_s is None
        assert reason in size.decode_gap.reason


def test_each_is_taken_from_the_environment_unless_there_is_an_argument() -> None:
    found = resolve_size(environ=ENVIRON)
    assert (found.max_activation_bytes, found.target_itl_s, found.target_ttft_s) == (512 << 20, 0.2, 1.5005)
    found = resolve_size(
        max_activation=4096, target_itl_ms=50, target_ttft_ms="75", environ=dict.fromkeys(ENVIRON, "nonsense")
    )
    assert (found.max_activation_bytes, found.target_itl_s, found.target_ttft_s) == (4096, 0.05, 0.075)
    rules = found.rules(free_bytes=9, tuned=256)
    assert (rules.fixed, rules.max_activation_bytes, rules.target_itl_s) == (None, 4096, 0.05)
    assert (rules.target_ttft_s, rules.free_bytes, rules.tuned) == (0.075, 9, 256)
    assert resolve_size(300, max_activation="1GiB", environ={}, grid=64).rules().fixed == 320


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TARGET_ITL", "125")
    assert resolve_size().target_itl_s == 0.125


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "+5", "1e3", "100ms", " 100", "1_000", "nan", "inf", ".5", "٣"]
)
@pytest.mark.parametrize("name", ["target_itl_ms", "target_ttft_ms"])
def test_a_target_is_a_number_of_milliseconds(name: str, text: str) -> None:
    arguments: dict[str, Any] = {name: text}
    with pytest.raises(SettingError, match="give a number of milliseconds above 0") as error:
        resolve_size(**arguments, environ={})
    assert str(error.value).startswith(f"{name}={text!r} ")
    variable = TARGET_ITL_VARIABLE if name == "target_itl_ms" else TARGET_TTFT_VARIABLE
    with pytest.raises(SettingError) as error:
        resolve_size(environ={variable: text})
    assert str(error.value).startswith(f"{variable}={text!r} ")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, [100]])
def test_targets_that_are_no_times(value: Any) -> None:
    with pytest.raises(SettingError, match="target_itl_ms="):
        resolve_size(target_itl_ms=value, environ={})


@pytest.mark.parametrize("text", ["", "0", "many", "8GB", "-1", "1.5.5MiB"])
def test_a_budget_is_a_number_of_bytes(text: str) -> None:
    with pytest.raises(SettingError, match="max_activation="):
        resolve_size(max_activation=text, environ={})
    with pytest.raises(SettingError, match=MAX_ACTIVATION_VARIABLE):
        resolve_size(environ={MAX_ACTIVATION_VARIABLE: text})


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ({"chunk": 256, "target_itl_ms": 100}, {}, "target_itl_ms=100 contradicts chunk_size=256"),
        ({"chunk": 0, "target_ttft_ms": "9"}, {}, "target_ttft_ms='9' contradicts chunk_size=0"),
        ({"chunk": 256}, ENVIRON, "PENSTOCK_TARGET_ITL='200' contradicts chunk_size=256"),
        (
            {"target_itl_ms": 100},
            {"PENSTOCK_PREFILL_CHUNK": "64"},
            "target_itl_ms=100 contradicts PENSTOCK_PREFILL_CHUNK=64",
        ),
    ],
)
def test_a_fixed_chunk_contradicts_a_target(
    arguments: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        resolve_size(**arguments, environ=environ)


def test_a_schedule_must_be_able_to_follow_a_target() -> None:
    target = resolve_size(target_itl_ms=100, environ={})
    check_schedule(target, ScheduleConfig(auto_chunk=True))
    check_schedule(resolve_size(environ={}), ScheduleConfig(SchedulePolicy.PREFILL_FIRST))
    with pytest.raises(SettingError) as policy:
        check_schedule(target, ScheduleConfig(SchedulePolicy.PREFILL_FIRST, auto_chunk=True))
    assert (policy.value.setting, policy.value.value) == ("target_itl_ms", 100)
    assert policy.value.contradicts == {"policy": "prefill-first"}
    with pytest.raises(SettingError) as fixed:
        check_schedule(target, ScheduleConfig(chunk_size=128))
    assert (fixed.value.setting, fixed.value.contradicts) == ("target_itl_ms", {"chunk_size": 128})
    with pytest.raises(SettingError) as auto:
        check_schedule(resolve_size(64, environ={}), ScheduleConfig(auto_chunk=True))
    assert (auto.value.setting, auto.value.contradicts) == ("auto_chunk", {"chunk_size": 64})
    with pytest.raises(SettingError) as whole:
        ScheduleConfig(chunk_size=0, auto_chunk=True)
    assert (whole.value.setting, whole.value.contradicts) == ("auto_chunk", {"chunk_size": 0})
