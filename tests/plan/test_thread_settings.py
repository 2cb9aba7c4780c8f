from pathlib import Path

import pytest

from penstock.errors import SettingError
from penstock.machine import usable_cores
from penstock.plan.setting import SettingSource
from penstock.plan.settings import THREADS_VARIABLE, ThreadsSetting, resolve_threads


@pytest.mark.parametrize(
    ("argument", "environ", "count", "source"),
    [
        (3, {THREADS_VARIABLE: "nonsense", "OMP_NUM_THREADS": "5"}, 3, "argument"),
        (None, {THREADS_VARIABLE: "7", "OMP_NUM_THREADS": "5"}, 7, "environment"),
        (None, {"OMP_NUM_THREADS": "5"}, None, "environment"),
        (None, {"MKL_NUM_THREADS": "5"}, None, "environment"),
        (1024, {}, 1024, "argument"),
    ],
)
def test_resolved(
    argument: int | None, environ: dict[str, str], count: int | None, source: SettingSource
) -> None:
    setting = resolve_threads(argument, environ=environ)
    assert (setting.count, setting.source) == (count, source)


def test_the_default_is_the_cores(tmp_path: Path) -> None:
    for environ in ({}, {"OMP_NUM_THREADS": ""}):
        found = resolve_threads(environ=environ, root=tmp_path)
        assert found == ThreadsSetting(usable_cores(root=tmp_path), "default", "physical cores")
    quota = tmp_path / "sys/fs/cgroup/cpu.max"
    quota.parent.mkdir(parents=True)
    quota.write_text("100000 100000\n")
    assert resolve_threads(environ={}, root=tmp_path).count == 1


@pytest.mark.parametrize("value", [0, -1, 1025, True, 2.0, "2"])
def test_arguments_refused(value: object) -> None:
    with pytest.raises(
        SettingError, match=f"threads={value!r} is not accepted: give a whole number from 1 to 1024"
    ):
        resolve_threads(value, environ={})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["", "0", "-2", "2 ", "1025", "auto", "1e2", "02"])
def test_variables_refused(value: str) -> None:
    with pytest.raises(
        SettingError, match=f"PENSTOCK_THREADS={value!r} is not accepted: give a whole number"
    ):
        resolve_threads(environ={THREADS_VARIABLE: value})


@pytest.mark.parametrize(
    ("setting", "own", "applies"),
    [
        (ThreadsSetting(4, "default", ""), 8, 4),
        (ThreadsSetting(4, "default", ""), 2, 2),
        (ThreadsSetting(4, "argument", ""), 2, 4),
        (ThreadsSetting(None, "environment", ""), 2, 2),
    ],
)
def test_what_applies_beside_what_libraries_would_take(
    setting: ThreadsSetting, own: int, applies: int
) -> None:
    assert setting.within(own) == applies
