"""What was measured of a model on this machine, kept in the cache folder: what `chunk="auto"` starts from."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch

from penstock import __version__
from penstock.errors import SettingError
from penstock.files import read_plain, replace_json
from penstock.home import cache_home
from penstock.kernels.device import device_kind
from penstock.models.decoder import Decoder
from penstock.plan.step import StepShape
from penstock.plan.step_time import StepTimeCoefficients

# A change of what a profile holds, or of how it is measured: older files are then no longer read.
_SCHEMA = 1
_MOST_FILE_BYTES = 16 << 20

T = TypeVar("T")


class HasModel(Protocol):
    """What a profile is looked up for: an `LLM`, or anything else with a loaded model."""

    @property
    def model(self) -> Decoder: ...


@dataclass(frozen=True)
class ProfileKey:
    """All that the time of a step depends on, but for the step. `model` is a fingerprint of its shapes: the values of
    weights have no part in the time."""

    model: str
    device: str
    dtype: str
    threads: int
    kernels: str
    torch: str
    penstock: str
    activations: str


@dataclass(frozen=True)
class StepSample:
    """The median time of a step: a chunk (none: 0 tokens) after a past, with decodes beside it."""

    num_tokens: int
    past: int
    num_decodes: int
    decode_pasts: int  # tokens that the decodes see, all together
    seconds: float

    @property
    def shape(self) -> StepShape:
        return StepShape.of_chunk(
            self.num_tokens, self.past, num_decodes=self.num_decodes, decode_pasts=self.decode_pasts
        )


@dataclass(frozen=True)
class PrefillSample:
    """The median time to first token of a prompt that was read in chunks of one size."""

    chunk: int
    prompt_tokens: int
    seconds: float


@dataclass(frozen=True)
class MemorySample:
    """Activations of the last step of a prompt that is read in chunks: by arithmetic, and as a process grew (None:
    not measured)."""

    chunk: int
    prompt_tokens: int
    expected_bytes: int
    measured_bytes: int | None


@dataclass(frozen=True)
class Measurements:
    steps: tuple[StepSample, ...] = ()
    prefills: tuple[PrefillSample, ...] = ()
    memory: tuple[MemorySample, ...] = ()


@dataclass(frozen=True)
class TuneProfile:
    """A model's step times on one machine, and the chunk that reads a prompt soonest."""

    key: ProfileKey
    coefficients: StepTimeCoefficients
    best_chunk: int
    measurements: Measurements = Measurements()
    model_name: str = ""  # for people; it is no part of the key
    date: str = ""  # when it was measured, in ISO format


def profile_key(llm: HasModel) -> ProfileKey:
    model = llm.model
    shapes = [asdict(model.config), model.num_weight_bytes]
    return ProfileKey(
        model=hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest(),
        device=device_kind(model.device).product_name,
        dtype=str(model.dtype).removeprefix("torch."),
        threads=device_kind(model.device).num_threads,
        kernels=model.kernels.name,
        torch=torch.__version__,
        penstock=__version__,
        activations=model.kernels.activations,
    )


def profile_path(key: ProfileKey) -> Path:
    """Where the profile of this key lies, or would."""
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:32]
    return cache_home() / "tune" / f"{digest}.json"


def load_profile(llm: HasModel) -> TuneProfile | None:
    """The stored profile of this model, machine and software. None where there is none, or none that can be used:
    a profile is a help, so nothing about it is an error."""
    try:
        key = profile_key(llm)
        profile = _parse(json.loads(read_plain(profile_path(key), _MOST_FILE_BYTES)))
    except Exception:
        return None
    return profile if profile.key == key else None


def save_profile(profile: TuneProfile) -> Path:
    """Keep a profile in place of the one of the same key. Readers see the old one or the new one, whole."""
    path = profile_path(profile.key)
    try:
        replace_json(path, {"schema": _SCHEMA, **asdict(profile)}, indent=1)
    except OSError as error:
        raise SettingError(
            "PENSTOCK_HOME",
            str(cache_home()),
            "another folder, or make room",
            because=f"the profile cannot be kept in {path.parent}: {error.strerror or error}",
        ) from error
    return path


def _parse(plain: Any) -> TuneProfile:
    """A profile from what its file holds. Raises some error where that is not what `save_profile` writes."""
    if plain["schema"] != _SCHEMA:
        raise ValueError("another schema")
    measured = plain["measurements"]
    if not isinstance(plain["model_name"], str) or not isinstance(plain["date"], str):
        raise ValueError("no text")
    if type(plain["best_chunk"]) is not int or plain["best_chunk"] < 1:
        raise ValueError("no chunk size")
    return TuneProfile(
        key=ProfileKey(**plain["key"]),  # compared with the one that is looked for
        coefficients=_numbers(StepTimeCoefficients, plain["coefficients"]),
        best_chunk=plain["best_chunk"],
        measurements=Measurements(
            steps=tuple(_numbers(StepSample, each) for each in measured["steps"]),
            prefills=tuple(_numbers(PrefillSample, each) for each in measured["prefills"]),
            memory=tuple(_numbers(MemorySample, each) for each in measured["memory"]),
        ),
        model_name=plain["model_name"],
        date=plain["date"],
    )


def _numbers(kind: Callable[..., T], plain: Mapping[str, Any]) -> T:
    """A dataclass whose fields are all numbers of 0 or more: whole ones or None, where it says so."""
    kinds = {field.name: field.type for field in fields(cast(Any, kind))}
    for name, value in plain.items():
        accepted: Any = int | float if kinds[name] is float else kinds[name]
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise ValueError("no such number")
        if value is not None and not 0 <= value < math.inf:
            raise ValueError("no such number")
    return kind(**plain)
