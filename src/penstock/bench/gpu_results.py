"""What was measured on a GPU: figures and facts, section by section, written down as they come."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.bench.gpu_device import Card
from penstock.bench.gpu_workload import Section
from penstock.bench.spread import Spread
from penstock.errors import SettingError
from penstock.measure.machine import Machine

GpuSystem = Literal["Penstock", "transformers"]
Unit = Literal["ms", "s", "GiB", "MHz", "W", "x", "share"]


@dataclass(frozen=True)
class Figure:
    """Repeated measurements of one thing."""

    section: Section
    name: str
    unit: Unit
    values: tuple[float, ...]
    system: GpuSystem = "Penstock"

    @property
    def spread(self) -> Spread:
        return Spread(self.values)

    @property
    def median(self) -> float:
        return self.spread.median

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), **self.spread.to_dict()}


@dataclass(frozen=True)
class Fact:
    """Something that must be so, and is or is not."""

    section: Section
    name: str
    holds: bool


@dataclass(frozen=True)
class SectionRun:
    """How a section went. What failed in it left what else was measured."""

    section: Section
    seconds: float
    error: str = ""


@dataclass
class GpuResults:
    """Grows while sections run."""

    machine: Machine
    card: Card
    repeats: int
    figures: list[Figure] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was left out or is to be known
    runs: list[SectionRun] = field(default_factory=list)

    @property
    def sections(self) -> list[Section]:
        """Those that were begun, in order."""
        found = {each.section for each in self.figures} | {each.section for each in self.facts}
        found |= {each.section for each in self.runs}
        return [section for section in Section if section in found]

    def figure(self, name: str, system: GpuSystem = "Penstock") -> Figure | None:
        """The last of that name."""
        found = [each for each in self.figures if (each.name, each.system) == (name, system)]
        return found[-1] if found else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": asdict(self.machine),
            "card": asdict(self.card),
            "dtype": "bfloat16",
            "repeats": self.repeats,
            "figures": [figure.to_dict() for figure in self.figures],
            "facts": [asdict(fact) for fact in self.facts],
            "notes": self.notes,
            "sections": [asdict(run) for run in self.runs],
        }


class Ledger:
    """Takes what sections measure: says it, and writes all that is known to a file each time."""

    def __init__(self, results: GpuResults, path: Path | None, say: Callable[[str], None]) -> None:
        self.results = results
        self._path = path
        self._say = say
        self._errors: list[str] = []  # of the section that runs

    def figure(self, figure: Figure) -> None:
        self.results.figures.append(figure)
        self._keep(f"{figure.name}, {figure.system}: {shown(figure)}")

    def fact(self, fact: Fact) -> None:
        self.results.facts.append(fact)
        self._keep(f"{fact.name}: {'yes' if fact.holds else 'NO'}")

    def note(self, text: str) -> None:
        self.results.notes.append(text)
        self._keep(f"note: {text}")

    def failed(self, what: str, error: Exception) -> None:
        """A part of the section that runs, or all that was left of it."""
        self._errors.append(f"{what}: {type(error).__name__}: {error}")

    def ended(self, section: Section, seconds: float) -> None:
        run = SectionRun(section, seconds, "; ".join(self._errors))
        self._errors.clear()
        self.results.runs.append(run)
        self._keep(f"{run.section}: {run.seconds:.0f} s" + (f", FAILED: {run.error}" if run.error else ""))

    def _keep(self, line: str) -> None:
        self._say(line)
        if self._path is not None:
            self._path.write_text(json.dumps(self.results.to_dict(), indent=2) + "\n")


def read_results(paths: Sequence[Path]) -> GpuResults:
    """Results from files, as one: of a section that several have, the last one's."""
    found = [_read(path) for path in paths]
    last = found[-1]
    merged = GpuResults(last.machine, last.card, last.repeats)
    for index, results in enumerate(found):
        later = {section for other in found[index + 1 :] for section in other.sections}
        merged.figures += [figure for figure in results.figures if figure.section not in later]
        merged.facts += [fact for fact in results.facts if fact.section not in later]
        merged.runs += [run for run in results.runs if run.section not in later]
        merged.notes += [note for note in results.notes if note not in merged.notes]
    return merged


def _read(path: Path) -> GpuResults:
    try:
        kept = json.loads(path.read_text())
        return GpuResults(
            machine=Machine(**kept["machine"]),
            card=Card(**kept["card"]),
            repeats=kept["repeats"],
            figures=[
                Figure(
                    Section(each["section"]),
                    each["name"],
                    each["unit"],
                    tuple(each["values"]),
                    each["system"],
                )
                for each in kept["figures"]
            ],
            facts=[Fact(Section(each["section"]), each["name"], each["holds"]) for each in kept["facts"]],
            notes=kept["notes"],
            runs=[
                SectionRun(Section(each["section"]), each["seconds"], each["error"])
                for each in kept["sections"]
            ],
        )
    except OSError as error:
        raise SettingError(f"--plot-from {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SettingError(f"--plot-from {path} is not a result of `bench gpu`: {error!r}") from error


def shown(figure: Figure) -> str:
    """The median, and from where to where the values lie."""
    spread = figure.spread
    text = f"{with_digits(spread.median)} {figure.unit}"
    if len(figure.values) == 1:
        return text
    return f"{text} ({with_digits(spread.smallest)} to {with_digits(spread.largest)}, n={len(figure.values)})"


def with_digits(value: float) -> str:
    """Three digits or more."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.3f}"
