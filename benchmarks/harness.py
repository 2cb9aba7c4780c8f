"""What all suites share: figures, facts and bars; turns, ratios by round and noise; results to JSON and back."""

import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

from penstock.errors import SettingError
from penstock.files import readable_json

T = TypeVar("T")
Series = dict[str, dict[Any, tuple[float, ...]]]  # for pictures: values by label and x

SCHEMA = 2
OURS = "Penstock"
RATIOS = "ratios, round by round"
# Quartiles further apart than this share of the median: the middle is not worth quoting by itself.
NOISY_SHARE = 0.15
# Fewer values than this have no spread to speak of.
MIN_VALUES = 3
MISSED, UNUSABLE, NOISY = 1, 2, 3  # exit statuses beside 0


@dataclass(frozen=True)
class Figure:
    """Repeated measurements of one thing: a case (`name`) of a section, by one system. There is one value or more."""

    section: str
    name: str
    unit: str
    values: tuple[float, ...]
    system: str = OURS
    rounds: tuple[int, ...] = ()  # of the values; empty: the first ones
    most_spread: float | None = None  # quartiles further apart than this share of the median: it is not given

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third; between measured values they are interpolated."""
        if len(self.values) == 1:
            return self.values[0], self.values[0]
        first, _, third = quantiles(self.values, n=4, method="inclusive")
        return first, third

    @property
    def relative_spread(self) -> float:
        """How far the quartiles lie apart, as a share of the median."""
        first, third = self.quartiles
        if third == first:
            return 0.0
        return (third - first) / abs(self.median) if self.median else inf

    @property
    def noise(self) -> str:
        """Why the median should not be trusted by itself; empty where nothing speaks against it."""
        if len(self.values) < MIN_VALUES:
            return "too few"
        return "noisy" if self.relative_spread > NOISY_SHARE else ""

    @property
    def is_noisy(self) -> bool:
        """Too noisy to be given. A few values have no spread to judge by."""
        if self.most_spread is None or len(self.values) < MIN_VALUES:
            return False
        return self.relative_spread > self.most_spread

    @property
    def by_round(self) -> dict[int, float]:
        return dict(zip(self.rounds or range(len(self.values)), self.values, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """A noisy one has its values, and no median."""
        if self.is_noisy:
            return asdict(self)
        first, third = self.quartiles
        return {
            **asdict(self),
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "first_quartile": first,
            "third_quartile": third,
            "noise": self.noise,
        }


@dataclass(frozen=True)
class Fact:
    """Something that must be so. Where it is not, the run fails, whether bars are checked or not."""

    section: str
    name: str
    holds: bool


@dataclass(frozen=True)
class Bar:
    """A value and the limit it must keep. A value that was not measured is None, and its bar is not met."""

    name: str
    value: float | None
    limit: float
    is_lower_limit: bool
    noise: str = ""  # why the value should be taken with care, or why there is none

    @property
    def is_met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.is_lower_limit else self.value <= self.limit


@dataclass(frozen=True)
class SectionRun:
    """How a section went. What failed in it left what else was measured."""

    section: str
    seconds: float
    error: str = ""


@dataclass
class Results:
    """All that a run measured, and what follows from it. It grows from turn to turn."""

    suite: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was left out or is to be known
    sections: list[SectionRun] = field(default_factory=list)
    traces: dict[str, Any] = field(default_factory=dict)  # for pictures: times of single tokens and the like
    duration_s: float = 0.0

    def add(
        self,
        section: str,
        name: str,
        unit: str,
        *values: float,
        system: str = OURS,
        round_index: int | None = None,
        most_spread: float | None = None,
    ) -> Figure:
        """Values to a figure, which is a new one if need be; those of a round have its index."""
        found = self.figure(name, system, section)
        place = self.figures.index(found) if found else len(self.figures)
        before = found or Figure(section, name, unit, (), system, (), most_spread)
        rounds = () if round_index is None else (*before.rounds, *[round_index] * len(values))
        grown = replace(before, values=(*before.values, *map(float, values)), rounds=rounds)
        self.figures[place : place + 1] = [grown]
        return grown

    def add_row(
        self,
        section: str,
        values: Mapping[str, tuple[str, float | None]],
        system: str,
        round_index: int,
        most_spread: float | None = None,
    ) -> None:
        """By case its unit and value, of one turn of a system. What is None was not measured."""
        how: dict[str, Any] = {"system": system, "round_index": round_index, "most_spread": most_spread}
        for name, (unit, value) in values.items():
            if value is not None:
                self.add(section, name, unit, value, **how)

    def figure(self, name: str, system: str = OURS, section: str | None = None) -> Figure | None:
        """The last of that name."""
        for each in reversed(self.figures):
            if (each.name, each.system) == (name, system) and section in (None, each.section):
                return each
        return None

    def of(self, section: str) -> list[Figure]:
        return [each for each in self.figures if each.section == section]

    def by_case(self, section: str) -> Series:
        """Values of each system, by case, that are not too noisy to be given."""
        found: Series = {}
        for each in self.of(section):
            if not each.is_noisy:
                found.setdefault(each.system, {})[each.name] = each.values
        return found

    def add_ratio(
        self,
        label: str,
        section: str,
        name: str,
        over: str,
        under: str,
        *,
        as_name: str | None = None,
        inverse: bool = False,
        most_spread: float | None = None,
    ) -> None:
        """A case by one system over the same by another, in every round that has both; nothing where none has.
        The inverse is that of times, where speeds were measured."""
        systems = (under, over) if inverse else (over, under)
        figures = [self.figure(name, system, section) for system in systems]
        first, second = (figure.by_round if figure else {} for figure in figures)
        values = [first[index] / second[index] for index in sorted(first.keys() & second.keys())]
        if values:
            self.add(RATIOS, as_name or name, "x", *values, system=label, most_spread=most_spread)

    def ratio_bars(self, limits: Mapping[str, tuple[float, bool]]) -> list[Bar]:
        """For ratios by label: the limit, and whether it is a lower one."""
        return [
            bar_of(label, self.figure("ratio", label, RATIOS), limit, is_lower_limit=is_lower)
            for label, (limit, is_lower) in limits.items()
        ]

    def arrange(self, systems: Sequence[str]) -> None:
        """Figures in the order of systems, and of the number that a case begins with: turns come in any order."""
        sections = list(dict.fromkeys(each.section for each in self.figures))

        def place(figure: Figure) -> tuple[int, int, int]:
            number = figure.name.split()[0].replace(",", "")
            rank = systems.index(figure.system) if figure.system in systems else len(systems)
            return sections.index(figure.section), rank, int(number) if number.isdigit() else 0

        self.figures.sort(key=place)

    def require(self, section: str, name: str, holds: bool) -> None:
        self.facts.append(Fact(section, name, holds))

    @property
    def noisy(self) -> list[Figure]:
        return [each for each in self.figures if each.is_noisy]

    def status(self, *, check: bool) -> int:
        """The exit status: 1 where a fact does not hold or a checked bar is missed, 3 where figures are too noisy."""
        if not all(fact.holds for fact in self.facts):
            return MISSED
        if check and not all(bar.is_met for bar in self.bars):
            return MISSED
        return NOISY if self.noisy else 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **{name: value for name, value in vars(self).items() if name not in ("figures", "bars")},
            "facts": [asdict(fact) for fact in self.facts],
            "sections": [asdict(run) for run in self.sections],
            "bars": [{**asdict(bar), "is_met": bar.is_met} for bar in self.bars],
            "figures": [figure.to_dict() for figure in self.figures],
        }

    @classmethod
    def of_dict(cls, kept: Mapping[str, Any]) -> "Results":
        def made(kind: type[T], plain: Mapping[str, Any]) -> T:
            fields = {name: plain[name] for name in kind.__dataclass_fields__ if name in plain}  # type: ignore[attr-defined]
            return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})

        if kept["schema"] != SCHEMA:
            raise ValueError(f"schema {kept['schema']}, where {SCHEMA} is understood")
        return cls(
            kept["suite"],
            dict(kept["machine"]),
            dict(kept["settings"]),
            figures=[made(Figure, each) for each in kept["figures"]],
            facts=[made(Fact, each) for each in kept["facts"]],
            bars=[made(Bar, each) for each in kept["bars"]],
            notes=list(kept["notes"]),
            sections=[made(SectionRun, each) for each in kept["sections"]],
            traces=dict(kept["traces"]),
            duration_s=kept["duration_s"],
        )


def write_results(results: Results, path: Path) -> None:
    path.write_text(readable_json(results.to_dict()))


def read_results(paths: Sequence[Path], suite: str) -> Results:
    """Results from files, as one: of a section that several have, the last one's."""
    found = [_read(path, suite) for path in paths]
    merged = replace(found[-1], figures=[], facts=[], sections=[], notes=[])
    for results in reversed(found):
        later = {each.section for each in merged.figures} | {each.section for each in merged.facts}
        later |= {each.section for each in merged.sections}
        for kind in ("figures", "facts", "sections"):
            own = [each for each in getattr(results, kind) if each.section not in later]
            getattr(merged, kind)[:0] = own
    merged.notes = list(dict.fromkeys(note for results in found for note in results.notes))
    return merged


def _read(path: Path, suite: str) -> Results:
    try:
        results = Results.of_dict(json.loads(path.read_text()))
        if results.suite != suite:
            raise ValueError(f"it is of `{results.suite}`")
    except OSError as error:
        raise SettingError(f"--plot-from {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(f"--plot-from {path} is not a result of `bench {suite}`: {error!r}") from error
    return results


def bar_of(name: str, figure: Figure | None, limit: float, *, is_lower_limit: bool) -> Bar:
    """A bar for the median of a figure, which may not have been measured."""
    if figure is None:
        return Bar(name, None, limit, is_lower_limit, "not measured")
    return Bar(name, figure.median, limit, is_lower_limit, figure.noise)


def rotated(items: Iterable[T], num_rounds: int) -> Iterator[list[T]]:
    """All items in every round, each round beginning with the next one."""
    order = list(items)
    for index in range(num_rounds):
        yield from_turn(order, index)


def from_turn(order: Sequence[T], index: int) -> list[T]:
    """All items, beginning with that one, counted round and round."""
    shift = index % max(len(order), 1)
    return [*order[shift:], *order[:shift]]


def take_turns(
    orders: Iterable[Sequence[T]], num_rounds: Callable[[T], int] | None = None
) -> Iterator[tuple[int, T]]:
    """Each turn with its round. An item with fewer rounds than others has the first ones."""
    for index, order in enumerate(orders):
        for item in order:
            if num_rounds is None or index < num_rounds(item):
                gc.collect()
                yield index, item


@dataclass
class Bench:
    """What a suite is given: where results go, and who is told what goes on."""

    results: Results
    say: Callable[[str], None]
    path: Path | None = None
    started: float = field(default_factory=time.perf_counter)

    def describe(self, model: str, options: object, *names: str, **more: Any) -> None:
        """What is measured: the model, the options of these names, and more. Results keep it."""
        self.results.settings |= {"model": model, **{name: getattr(options, name) for name in names}, **more}

    def save(self) -> None:
        self.results.duration_s = time.perf_counter() - self.started
        if self.path is not None:
            write_results(self.results, self.path)
