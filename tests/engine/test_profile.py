"""A profile is found by what it was made for, and by nothing else; a file that is no profile is none."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock.engine.profile as profiles
from penstock.engine.profile import (
    Measurements,
    MemorySample,
    PrefillSample,
    ProfileKey,
    StepSample,
    TuneProfile,
    load_profile,
    profile_key,
    profile_path,
    save_profile,
)
from penstock.errors import SettingError
from penstock.kernels.device import DeviceKind
from penstock.models.decoder import Decoder
from penstock.plan.step_time import StepTimeCoefficients
from tests.odd_files import ODD_FILES
from tests.oracle import load_model, make_oracle


@dataclass(frozen=True)
class Loaded:
    model: Decoder


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def llm() -> Loaded:
    return Loaded(load_model(make_oracle("llama").folder))


@pytest.fixture
def profile(llm: Loaded) -> TuneProfile:
    return TuneProfile(
        key=profile_key(llm),
        coefficients=StepTimeCoefficients(0.001, 2e-5, 3e-9, 1e-4, 2e-8),
        best_chunk=256,
        measurements=Measurements(
            steps=(StepSample(128, 960, 4, 512, 0.25), StepSample(0, 0, 1, 64, 0.01)),
            prefills=(PrefillSample(256, 1024, 1.5),),
            memory=(MemorySample(256, 1024, 1 << 20, None), MemorySample(512, 1024, 2 << 20, 3 << 20)),
        ),
        model_name="a model",
        date="2025-01-01T00:00:00+00:00",
    )


def test_what_is_saved_is_loaded(llm: Loaded, profile: TuneProfile, home: Path) -> None:
    assert load_profile(llm) is None
    path = save_profile(profile)
    assert load_profile(llm) == profile
    assert path == profile_path(profile.key)
    assert home in path.parents
    better = replace(profile, best_chunk=512)
    save_profile(better)
    assert load_profile(llm) == better
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing else is left behind


@pytest.fixture
def one_more_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    yield
    torch.set_num_threads(before)


def test_another_model_or_dtype_does_not_find_it(llm: Loaded, profile: TuneProfile) -> None:
    save_profile(profile)
    assert load_profile(Loaded(load_model(make_oracle("qwen3").folder))) is None
    assert load_profile(Loaded(load_model(make_oracle("llama", num_hidden_layers=3).folder))) is None
    assert load_profile(Loaded(load_model(make_oracle("llama").folder, torch.bfloat16))) is None
    assert load_profile(llm) == profile


def test_other_threads_do_not_find_it(
    llm: Loaded, profile: TuneProfile, request: pytest.FixtureRequest
) -> None:
    save_profile(profile)
    request.getfixturevalue("one_more_thread")
    assert load_profile(llm) is None


@pytest.mark.parametrize("name", ["__version__", "torch", "kernels", "device"])
def test_another_version_kernel_or_device_does_not_find_it(
    llm: Loaded, profile: TuneProfile, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_profile(profile)
    match name:
        case "__version__":
            monkeypatch.setattr(profiles, "__version__", "0.0.0")
        case "torch":
            monkeypatch.setattr(torch, "__version__", "0.0.0")
        case "kernels":
            monkeypatch.setattr(llm.model.kernels, "name", "another", raising=False)
        case "device":
            monkeypatch.setattr(DeviceKind, "product_name", "cpu: another")
    assert load_profile(llm) is None


@pytest.mark.parametrize("field", ["model", "device", "dtype", "threads", "kernels", "torch", "penstock"])
def test_every_part_of_the_key_has_its_own_file(profile: TuneProfile, field: str) -> None:
    other = ProfileKey(**{**asdict(profile.key), field: 99 if field == "threads" else "another"})
    assert profile_path(other) != profile_path(profile.key)


def test_a_file_of_another_key_is_none(llm: Loaded, profile: TuneProfile) -> None:
    path = save_profile(profile)
    plain = json.loads(path.read_text())
    plain["key"]["dtype"] = "float64"
    path.write_text(json.dumps(plain))
    assert load_profile(llm) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "7",
        "{}",
        '{"schema": 1}',
        '{"schema": 1, "key": 3}',
        "[" * 5000,
        "\x00",
        "\udcff",
    ],
)
def test_a_damaged_file_is_none(llm: Loaded, profile: TuneProfile, text: str) -> None:
    path = save_profile(profile)
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert load_profile(llm) is None


@pytest.mark.parametrize("put", ODD_FILES)
def test_what_is_no_file_is_none(llm: Loaded, profile: TuneProfile, put: Callable[[Path], object]) -> None:
    path = save_profile(profile)
    path.unlink()
    put(path)
    assert load_profile(llm) is None
    assert save_profile(profile) == path
    assert load_profile(llm) == profile


def test_half_a_file_is_none(llm: Loaded, profile: TuneProfile) -> None:
    path = save_profile(profile)
    whole = path.read_bytes()
    for cut in range(0, len(whole) - 2, 37):
        path.write_bytes(whole[:cut])
        assert load_profile(llm) is None


DAMAGE: list[tuple[list[Any], Any]] = [
    (["schema"], 0),
    (["schema"], None),
    (["best_chunk"], 0),
    (["best_chunk"], 1.5),
    (["best_chunk"], "512"),
    (["best_chunk"], True),
    (["model_name"], None),
    (["coefficients", "per_token"], -1.0),
    (["coefficients", "per_token"], None),
    (["coefficients", "per_token"], float("nan")),
    (["coefficients", "constant"], float("inf")),
    (["coefficients", "constant"], "1"),
    (["coefficients", "of_another_kind"], 1.0),
    (["measurements", "steps"], None),
    (["measurements", "steps", 0], {}),
    (["measurements", "steps", 0, "seconds"], None),
    (["measurements", "prefills", 0, "chunk"], 1.5),
    (["measurements", "memory", 0, "expected_bytes"], None),
    (["key", "dtype"], ["float32"]),
    (["key", "another"], 1),
]


@pytest.mark.parametrize(("place", "value"), DAMAGE)
def test_a_file_with_a_wrong_value_is_none(
    llm: Loaded, profile: TuneProfile, place: list[Any], value: Any
) -> None:
    path = save_profile(profile)
    plain = json.loads(path.read_text())
    target = plain
    for part in place[:-1]:
        target = target[part]
    target[place[-1]] = value
    path.write_text(json.dumps(plain))
    assert load_profile(llm) is None


def test_a_folder_in_its_place_is_none_and_cannot_be_replaced(llm: Loaded, profile: TuneProfile) -> None:
    path = profile_path(profile.key)
    path.mkdir(parents=True)
    assert load_profile(llm) is None
    with pytest.raises(SettingError, match="PENSTOCK_HOME"):
        save_profile(profile)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_no_home_folder_is_no_profile(llm: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", "~nobody-of-this-name/x")
    assert load_profile(llm) is None


def test_the_file_says_what_it_is_of(profile: TuneProfile) -> None:
    plain = json.loads(save_profile(profile).read_text())
    assert plain["key"] == asdict(profile.key)
    assert plain["model_name"] == "a model"
