"""`penstock plan --stages`: machines, links and speeds as they are typed, and a plan of stages as text and JSON."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import typer

from penstock.errors import SettingError
from penstock.files import read_plain
from penstock.plan import format_bytes
from penstock.plan.model import ModelConfig
from penstock.plan.pipeline import Machine, coefficients_of_speed
from penstock.plan.stage_plan import StagePlan
from penstock.plan.step_time import StepTimeCoefficients
from penstock.plan.units import format_rate, parse_bytes

MOST_STAGES = 1024
_MOST_PROFILE_BYTES = 16 << 20
T = TypeVar("T")


def parse_stages(stages: int | None, layers: str | None) -> tuple[int, tuple[int, ...] | None]:
    """How many stages there are, and the layers of each where they are given."""
    if stages is not None and not 1 <= stages <= MOST_STAGES:
        raise SettingError("stages", stages, f"a number from 1 to {MOST_STAGES}")
    if layers is None:
        assert stages is not None
        return stages, None
    counts = tuple(_each("layers", layers, None, _layer_count))
    if stages is not None and stages != len(counts):
        raise SettingError("layers", layers, f"{stages} numbers", beside={"stages": stages})
    return len(counts), counts


def parse_machines(num_stages: int, memory: str | None, speeds: list[float] | None) -> tuple[Machine, ...]:
    """One for each stage; speeds are shares of the fastest one's."""
    sizes: list[int | None] = [None] * num_stages
    if memory is not None:
        sizes = list(_each("memory", memory, num_stages, lambda text: parse_bytes(text, "memory")))
    rates = speeds or [1.0] * num_stages
    return tuple(Machine(size, rate / max(rates)) for size, rate in zip(sizes, rates, strict=True))


def parse_speeds(speed: str | None, num_stages: int) -> list[float] | None:
    """Tokens a second of each machine alone."""
    return None if speed is None else _each("speed", speed, num_stages, lambda text: _speed(speed, text))


def step_times(
    config: ModelConfig, prompt_tokens: int, speeds: list[float] | None, profile: Path | None
) -> StepTimeCoefficients | None:
    """Of the fastest machine: by a profile, or by its speed; None where neither is given."""
    if profile is not None:
        if speeds is not None:
            raise SettingError("profile", str(profile), contradicts={"speed": ...})
        return _read_profile(profile)
    if speeds is None:
        return None
    return coefficients_of_speed(config, max(speeds), prompt_tokens)


def _each(name: str, text: str, number: int | None, read: Callable[[str], T]) -> list[T]:
    """What is written with commas between: one for all stages, or one for each."""
    values = [read(part.strip()) for part in text.split(",")]
    if number is not None and len(values) == 1:
        return values * number
    if number not in (None, len(values)):
        raise SettingError(name, text, f"one value for all stages, or {number} with commas between")
    return values


def _layer_count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:7]) <= 1 << 20):
        raise SettingError("layers", text, "numbers of layers with commas between, such as 10,20")
    return int(text)


def _speed(given: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise SettingError("speed", given, "tokens a second, such as 650, or one for each stage: 60,120")
    return value


def _read_profile(path: Path) -> StepTimeCoefficients:
    accepted = "a file that `penstock tune --json` wrote"
    try:
        plain = json.loads(read_plain(path, _MOST_PROFILE_BYTES))
        return StepTimeCoefficients(**plain["coefficients"])
    except OSError as error:
        raise SettingError("profile", str(path), accepted, because=error.strerror or str(error)) from error
    except (ValueError, TypeError, KeyError) as error:
        raise SettingError("profile", str(path), accepted, because="it holds no step times") from error


def to_json(made: StagePlan) -> dict[str, object]:
    """Everything in bytes and seconds."""
    return asdict(made) | {
        "stages": [
            {**asdict(stage), "total_bytes": stage.total_bytes, "fits": stage.fits} for stage in made.stages
        ]
    }


def stage_table(made: StagePlan) -> list[list[str]]:
    """Titles, then a row for each stage."""
    has_states = any(stage.recurrent_bytes for stage in made.stages)
    has_memory = any(stage.memory_bytes is not None for stage in made.stages)
    titles = ["stage", "layers", "weights", "K/V cache", *(["states"] * has_states), "activations", "total"]
    rows = [[*titles, "time", *(["fits"] * has_memory)]]
    for index, stage in enumerate(made.stages):
        states = [format_bytes(stage.recurrent_bytes)] * has_states
        fits = {None: "-", True: "yes", False: "no"}[stage.fits]
        rows.append(
            [
                str(index),
                f"{stage.start} to {stage.end - 1}" if stage.end - stage.start > 1 else str(stage.start),
                format_bytes(stage.weights_bytes),
                format_bytes(stage.kv_cache_bytes),
                *states,
                format_bytes(stage.activation_bytes),
                format_bytes(stage.total_bytes),
                f"{stage.share:.1%}",
                *([fits] * has_memory),
            ]
        )
    return rows


def time_table(made: StagePlan) -> list[list[str]]:
    """Titles, then a row for each number of stages."""
    rows = [["stages", "chunk", "first token", "speed-up", "slowest stage computes", "bound by"]]
    for row in made.times:
        rows.append(
            [
                f"{row.num_stages:,}",
                "whole" if row.chunk == made.prompt_tokens else f"{row.chunk:,}",
                f"{row.first_token_s:.4g} s",
                f"{row.speed_up:.2f}x",
                f"{row.busy:.0%}",
                "link" if row.is_link_bound else "stages",
            ]
        )
    return rows


def show(made: StagePlan) -> None:
    from penstock.tables import make_table, show_table

    beside = f", {made.num_decodes} answers of as many tokens beside it" if made.num_decodes else ""
    rate = made.link_bytes_per_s
    link = "" if rate is None else f", {format_rate(rate)} between them"
    stages = "1 stage" if len(made.stages) == 1 else f"{len(made.stages)} stages{link}"
    typer.echo(
        f"{made.model}: a prompt of {made.prompt_tokens:,} tokens{beside} in chunks of {made.chunk:,}, {stages}, "
        f"{made.dtype}, {made.kernels} kernels\n"
    )
    for titles, *rows in (stage_table(made), time_table(made)):
        if rows:
            show_table(make_table(titles, rows))
            typer.echo("")
    if not made.times:
        typer.echo("Times need a speed: --speed TOKENS/S, or --profile FILE of penstock tune --json FILE.")
    else:
        typer.echo("Times are by the pipeline's clock, and an upper bound of what machines bring.")
    for note in made.notes:
        typer.echo(f"{note[0].upper()}{note[1:]}.")
