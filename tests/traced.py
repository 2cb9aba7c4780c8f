"""Which lines of a layer each test runs, in its own process and in those that it starts: for `tests.mutate`.

Every process that finds this imported by a `sitecustomize` compiles the layer's functions so that they say which of
their statements run, and writes that into one file: a line of JSON each.
"""

import ast
import builtins
import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Tracer:
    """Statements in the functions of a package's layer that run, by test or, for what its tests share, by file."""

    def __init__(self, folder: Path, output: str, name: str) -> None:
        self._folder = folder
        self._output = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._is_child = bool(name)  # which may be killed at any moment
        self._name = name
        self._lines: defaultdict[str, set[int]] = defaultdict(set)
        os.register_at_fork(after_in_child=self._become_child)
        vars(builtins)["__ran__"] = self._ran
        SourceFileLoader.source_to_code = (  # type: ignore[method-assign]
            lambda _, *arguments, **options: self._compile(*arguments, **options)
        )

    def begin(self, name: str) -> str:
        """What runs from now on is of this name. Returns the one before."""
        self.write()
        before, self._name = self._name, name
        os.environ["MUTATE_NAME"] = name
        return before

    def write(self, **facts: float) -> None:
        self._write({file: sorted(lines) for file, lines in list(self._lines.items())}, **facts)
        self._lines.clear()

    def _write(self, lines: dict[str, list[int]], **facts: float) -> None:
        told = {"name": self._name, "lines": lines, **facts}
        os.write(self._output, json.dumps(told).encode() + b"\n")

    def _become_child(self) -> None:
        self._is_child = True
        self._lines.clear()

    def _ran(self, file: str, line: int) -> None:
        if line not in (lines := self._lines[file]):
            lines.add(line)
            if self._is_child:
                self._write({file: [line]})

    def _compile(self, data: bytes, path: str, *, _optimize: int = -1) -> CodeType:
        tree = ast.parse(data, path)
        if Path(path).is_relative_to(self._folder):
            _watch(tree, Path(path).relative_to(self._folder.parent).as_posix(), is_function=False)
            ast.fix_missing_locations(tree)
        code: CodeType = compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)
        return code


def _watch(node: ast.AST, file: str, *, is_function: bool) -> None:
    """Puts a call before every statement below a node that is in a function: what an import runs is no test's."""
    is_function |= isinstance(node, FUNCTIONS)
    for child in ast.iter_child_nodes(node):
        _watch(child, file, is_function=is_function)
    if not is_function:
        return
    for _, statements in ast.iter_fields(node):
        if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
            place = int(_is_text(statements[0]))  # a docstring stays the first
            for statement in statements[place:]:
                called = ast.Name("__ran__", ast.Load())
                told = ast.Call(called, [ast.Constant(file), ast.Constant(statement.lineno)], [])
                statements.insert(place, ast.copy_location(ast.Expr(told), statement))
                place += 2


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@dataclass
class _Test:
    bits: int = 0  # of its name and those of what it shares
    duration_s: float = 0.0
    setup_s: float = 0.0


class Traced:
    """What tracers wrote: which tests run which lines, and how long they take."""

    def __init__(self, output: Path, left_out: Collection[str] = ()) -> None:
        self._tests: defaultdict[str, _Test] = defaultdict(_Test)
        self._runs: defaultdict[tuple[str, int], int] = defaultdict(int)  # file, line > a bit for each name
        names = {"": 0}  # of what is run before any test, while they are collected
        for text in output.read_text().splitlines():
            told: dict[str, Any] = json.loads(text)
            bit = 1 << names.setdefault(told["name"], len(names))
            for file, lines in told["lines"].items():
                for line in lines:
                    self._runs[file, line] |= bit
            if "duration_s" in told and told["name"] not in left_out:
                test = self._tests[told["name"]]
                test.duration_s += told["duration_s"]
                test.setup_s += told["setup_s"]
        for name, test in self._tests.items():
            around = {name, *(name[:place] for place in range(len(name)) if name.startswith("::", place))}
            test.bits = sum(1 << names[shared] for shared in around & names.keys())

    def order(self, file: str, places: list[range]) -> dict[str, float]:
        """Tests that may notice a change in the first of these places, each with the seconds after which it hangs.
        They run a line there, or in the first place where any does. What an import runs, all may notice."""
        is_imported = places[-1].start == 0
        for number, lines in enumerate(places):
            bits = 0
            for line in lines:
                bits |= self._runs.get((file, line), 0)
            if bits & 1 or (number and is_imported):
                break
            if bits:
                return self._by_file(name for name, test in self._tests.items() if bits & test.bits)
        return self._by_file(self._tests if is_imported or bits else ())

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
        Path(os.environ["MUTATE_TRACED"]), os.environ["MUTATE_OUTPUT"], os.environ.get("MUTATE_NAME", "")
    )
