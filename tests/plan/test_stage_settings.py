"""Stages as they are asked for: a number, addresses, layers; what is none of these is refused."""

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SettingError
from penstock.plan.model import ModelConfig
from penstock.plan.stage_settings import MAX_STAGES, StagesSetting, resolve_stages

MODEL = ModelConfig(12, 64, 128, 4, 2, 16, 100)
TOKEN = Path("token")


def addresses(number: int) -> str:
    return ",".join(f"10.0.0.{index}:7070" for index in range(number))


@pytest.mark.parametrize("stages", [2, "2", MAX_STAGES, str(MAX_STAGES)])
def test_a_number_of_stages(stages: Any) -> None:
    setting = resolve_stages(stages)
    assert setting == StagesSetting(int(stages))
    assert (setting.timeout_s, setting.mixed, setting.token_file) == (10.0, False, None)


@pytest.mark.parametrize(
    ("stages", "layers"), [(None, None), (1, None), ("1", None), (1, [12]), (None, "12")]
)
def test_one_stage_is_none(stages: Any, layers: Any) -> None:
    assert resolve_stages(stages, layers) is None


@pytest.mark.parametrize(
    "stages",
    [
        0,
        -1,
        MAX_STAGES + 1,
        str(MAX_STAGES + 1),
        "0",
        "02",
        "",
        True,
        False,
        2.0,
        "host",
        "a:1,b",
        "a,b:1",
        ":1",
        "a:",
        "a:123456",
        "a:x",
        b"2",
        (),
        addresses(MAX_STAGES),
    ],
)
def test_other_stages_are_refused(stages: Any) -> None:
    with pytest.raises(SettingError) as error:
        resolve_stages(stages, token_file=TOKEN)
    assert error.value.setting == "stages"


@pytest.mark.parametrize("number", [1, 2, MAX_STAGES - 1])
def test_addresses_are_of_all_stages_but_the_last(number: int) -> None:
    setting = resolve_stages(
        addresses(number).replace(",", " , "), token_file="token", mixed=True, timeout_s=3
    )
    assert setting is not None
    assert (setting.num_stages, setting.addresses) == (number + 1, tuple(addresses(number).split(",")))
    assert (setting.timeout_s, setting.mixed, setting.token_file) == (3.0, True, TOKEN)
    with pytest.raises(SettingError) as error:
        resolve_stages(addresses(number))
    assert error.value.needs == ("token_file",)


@pytest.mark.parametrize("layers", ["3,9", " 3 , 9", (3, 9), [3, "9"]])
@pytest.mark.parametrize("stages", [None, 2, "2"])
def test_layers_of_each_stage(stages: Any, layers: Any) -> None:
    setting = resolve_stages(stages, layers)
    assert setting == StagesSetting(2, layers=(3, 9))
    assert setting.cut(MODEL) == (range(3), range(3, 12))


@pytest.mark.parametrize(
    "layers", ["", "3,", "0,12", "3,-9", "3,x", "x", (), [3, 9.0], [True, 11], 12, [3, None], {3}]
)
def test_other_layers_are_refused(layers: Any) -> None:
    with pytest.raises(SettingError) as error:
        resolve_stages(None, layers)
    assert error.value.setting == "layers"


@pytest.mark.parametrize("stages", [1, 3, "a:1"])
def test_layers_are_as_many_as_stages(stages: Any) -> None:
    layers = "3,4,5" if stages == "a:1" else "3,9"
    with pytest.raises(SettingError) as error:
        resolve_stages(stages, layers, token_file=TOKEN)
    assert error.value.setting == "layers"


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_without_layers_they_are_cut_by_what_they_take(num_stages: int) -> None:
    cut = StagesSetting(num_stages).cut(MODEL)
    assert [index for layers in cut for index in layers] == [*range(12)]
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


@pytest.mark.parametrize("timeout_s", [0.1, 1, 3600])
def test_seconds_after_which_a_stage_is_lost(timeout_s: float) -> None:
    setting = resolve_stages(2, timeout_s=timeout_s)
    assert setting is not None
    assert setting.timeout_s == timeout_s


@pytest.mark.parametrize("timeout_s", [0, 0.09, 3601, True, "1", -1])
def test_other_seconds_are_refused(timeout_s: Any) -> None:
    with pytest.raises(SettingError) as error:
        resolve_stages(2, timeout_s=timeout_s)
    assert error.value.setting == "stage_timeout"
    with pytest.raises(SettingError):
        resolve_stages(2, mixed=1)
