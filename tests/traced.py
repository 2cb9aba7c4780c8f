"""Which lines of a layer each test runs, in its own process and in those that it starts: for `tests.mutate`.

Every process that finds this imported by a `sitecustomize` writes what it runs into one file: a line of JSON each.
"""

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MOST_CALLS = 2000  # of one function in one test: the calls after them run the lines that these ran


class Tracer:
    """Lines of the files in `folder` that run, until the next test."""

    def __init__(self, folder: str, output: str, test: str) -> None:
        self._folder = folder + os.sep
        self._output = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._is_child = bool(test)  # which may be killed at any moment, and has only the one test
        self._test = test
        self._lines: defaultdict[str, set[int]] = defaultdict(set)
        self._calls: dict[int, tuple[CodeType, int]] = {}  # with the code: another one could have its id
        os.register_at_fork(after_in_child=self._become_child)
        threading.settrace(self._call)
        sys.settrace(self._call)

    def begin(self, test: str) -> None:
        self._test = test
        self._lines.clear()
        self._calls.clear()

    def end(self, **facts: float) -> None:
        lines = {name: sorted(found) for name, found in list(self._lines.items())}
        self._write(lines=lines, **facts)

    def _write(self, **facts: object) -> None:
        os.write(self._output, json.dumps({"test": self._test, **facts}).encode() + b"\n")

    def _become_child(self) -> None:
        self._is_child = True
        self._lines.clear()

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        # What an import runs, bodies of modules and classes, is no test's.
        if not (code.co_flags & CO_OPTIMIZED and code.co_filename.startswith(self._folder)):
            return None
        num_calls = self._calls.get(id(code), (code, 0))[1] + 1
        self._calls[id(code)] = code, num_calls
        return self._line if num_calls <= MOST_CALLS else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        seen = self._lines[frame.f_code.co_filename]
        if event == "line" and frame.f_lineno not in seen:
            seen.add(frame.f_lineno)
            if self._is_child:
                self._write(lines={frame.f_code.co_filename: [frame.f_lineno]})
        return self._line


@dataclass
class _Test:
    number: int
    duration_s: float = 0.0
    setup_s: float = 0.0


class Traced:
    """What tracers wrote: which tests run which lines, and how long they take."""

    def __init__(self, output: Path) -> None:
        self._tests: dict[str, _Test] = {}
        self._runs: dict[tuple[str, int], int] = {}  # file, line > a bit for each test
        for text in output.read_text().splitlines():
            told = json.loads(text)
            test = self._tests.setdefault(told["test"], _Test(len(self._tests)))
            test.duration_s += told.get("duration_s", 0.0)
            test.setup_s += told.get("setup_s", 0.0)
            for name, lines in told["lines"].items():
                for place in ((name, line) for line in lines):
                    self._runs[place] = self._runs.get(place, 0) | 1 << test.number

    def order(self, file: Path, places: list[range]) -> dict[str, float]:
        """Tests that may notice a change in the first of these places, each with the seconds after which it hangs.
        They run a line there, or in the first place where any does. What an import runs, all may notice."""
        is_imported = places[-1].start == 0
        for number, lines in enumerate(places):
            bits = 0
            for line in lines:
                bits |= self._runs.get((str(file), line), 0)
            if bits:
                near = {name for name, test in self._tests.items() if bits >> test.number & 1}
                rest = self._tests.keys() - near if number and is_imported else ()
                return self._by_file(near) | self._by_file(rest)
        return self._by_file(self._tests if is_imported else ())

    def _by_file(self, names: Iterable[str]) -> dict[str, float]:
        """File by file, since tests of one share what is set up. The quickest are first."""
        files: dict[str, list[str]] = {}
        for name in sorted(names, key=lambda name: (self._tests[name].duration_s, name)):
            files.setdefault(name.split("::")[0], []).append(name)
        limits: dict[str, float] = {}
        for tests in sorted(
            files.values(), key=lambda names: sum(self._tests[name].duration_s for name in names)
        ):
            setup_s = max(self._tests[name].setup_s for name in tests)
            limits |= {name: 60 + 10 * (setup_s + self._tests[name].duration_s) for name in tests}
        return limits


TRACER: Tracer | None = None
if "MUTATE_TRACED" in os.environ:
    TRACER = Tracer(
        os.environ["MUTATE_TRACED"],
        os.environ["MUTATE_OUTPUT"],
        os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0],
    )
