"""Whether a layer's tests notice faults: one token of its code is changed, and its tests have to fail.

    python -m tests.mutate plan --sample 40 --seed 1

Changes are drawn by the seed from all that are possible: comparisons, arithmetic, numbers, booleans, `min` and `max`,
`and` and `or`, `not`. Text, annotations and what is raised stay as they are. A mutant is written into a copy of the
package, where the tests that run its line have to notice it. Those that behave as the original does are listed, with
a reason each, in `equivalent_mutants.toml`.
"""

import argparse
import ast
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from difflib import unified_diff
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import Phase, settings

import penstock
from tests.traced import TRACER, Traced

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "src" / "penstock"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
LAYERS = ("plan", "cache", "engine")
GPU_FILES = ("graphs/chunk.py", "graphs/recording.py")  # which `python -m tests.gpu` enters alone
BAR = 0.85  # of the mutants are to be caught
TIMEOUT = 124  # the exit status of a run with a test that hangs
# Libraries that take seconds to load, and are in no way what is tested.
PRELOADED = ["hypothesis", "numpy", "pytest", "torch", "transformers.models.auto.modeling_auto"]
FIRST_FILES = 4  # of tests, which are collected before the others

OPERATORS: dict[type[ast.AST], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("+", "//")),
    ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("*", "/")),
    ast.Mod: ("%", ("//",)),
    ast.Pow: ("**", ("*",)),
    ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
    ast.And: ("and", ("or",)),
    ast.Or: ("or", ("and",)),
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Of these flags no result depends: memory, looks, types, and checks that cannot fail.
SILENT_FLAGS = {"slots", "repr", "strict", "stacklevel", "daemon", "total"}


@dataclass(frozen=True)
class Mutant:
    """The bytes [start, end) of a file become `new`."""

    file: str  # in the package
    source: bytes
    start: int
    end: int
    new: str

    @property
    def line(self) -> int:
        return self.source.count(b"\n", 0, self.start) + 1

    @property
    def change(self) -> str:
        return f"{self.source[self.start : self.end].decode()} -> {self.new}"

    @property
    def name(self) -> tuple[str, str, str]:
        """How the list of equivalent mutants calls it: file, line of source, change."""
        return self.file, self.source.decode().splitlines()[self.line - 1].strip(), self.change

    @property
    def places(self) -> list[range]:
        """Lines of its statement without what is below it, then of what is around it, up to its function. Those of
        the whole file are the last, where it is an import that runs it."""
        found: list[range] = []
        for node in reversed(list(ast.walk(ast.parse(self.source)))):  # from inside out
            if not isinstance(node, ast.stmt):
                continue
            start = min(child.lineno for child in [node, *getattr(node, "decorator_list", [])])
            if not start <= self.line <= (end := node.end_lineno or 0):
                continue
            if found:
                found.append(range(start, end + 1))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    return found
            else:
                body: list[ast.stmt] = getattr(node, "body", [])
                found.append(range(start, body[0].lineno if body else end + 1))
        return [*found, range(self.source.count(b"\n") + 2)]

    @property
    def mutated(self) -> bytes:
        return self.source[: self.start] + self.new.encode() + self.source[self.end :]

    def __str__(self) -> str:
        before, after = (text.decode().splitlines() for text in (self.source, self.mutated))
        changed = list(unified_diff(before, after, n=0, lineterm=""))[3:]
        return "\n    ".join([f"src/penstock/{self.file}:{self.line}: {self.change}", *changed])


class _Sites:
    """Every token of a file that can be changed, and what it can become."""

    def __init__(self, path: Path) -> None:
        self._file = path.relative_to(PACKAGE).as_posix()
        self._source = path.read_bytes()
        self._line_starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def find(self) -> list[list[Mutant]]:
        """A list for each token, of its mutants."""
        return [found for node in _code(ast.parse(self._source)) for found in self._at(node) if found]

    def _at(self, node: ast.AST) -> Iterator[list[Mutant]]:
        match node:
            case ast.Compare(left, ops, comparators):
                for before, op, after in zip([left, *comparators], ops, comparators, strict=False):
                    yield self._operator(op, before, after)
            case ast.BinOp(left, op, right):
                if not (_is_type(left) or _is_type(right)):
                    yield self._operator(op, left, right)
            case ast.AugAssign(target, op, value):
                yield self._operator(op, target, value)
            case ast.BoolOp(op, values):
                for before, after in pairwise(values):
                    yield self._operator(op, before, after)
            case ast.UnaryOp(ast.Not()):
                yield self._change(self._start(node), self._start(node) + len("not "), "")
            case ast.Call(ast.Name(name) as called) if name in CALLS:
                yield self._change(self._start(called), self._end(called), CALLS[name])
            case ast.Constant(bool() as value):
                yield self._change(self._start(node), self._end(node), repr(not value))
            case ast.Constant(int() as number):
                yield self._change(
                    self._start(node), self._end(node), *map(repr, {number + 1, abs(number - 1)})
                )
            case ast.Constant(float() as number):
                yield self._change(
                    self._start(node), self._end(node), repr(2 * number or 1.0), repr(number / 2 or 1.0)
                )

    def _operator(self, op: ast.AST, before: ast.expr, after: ast.expr) -> list[Mutant]:
        if type(op) not in OPERATORS:
            return []
        old, new = OPERATORS[type(op)]
        start, end = self._end(before), self._start(after)
        between = re.sub(rb"#.*", lambda comment: b" " * len(comment[0]), self._source[start:end])
        found = re.search(rb"\s+".join(re.escape(word.encode()) for word in old.split()), between)
        assert found is not None, f"{self._file}: {old} between {start} and {end}"
        return self._change(start + found.start(), start + found.end(), *new)

    def _change(self, start: int, end: int, *new: str) -> list[Mutant]:
        old = self._source[start:end].decode()
        return [Mutant(self._file, self._source, start, end, text) for text in sorted({*new} - {old})]

    def _start(self, node: ast.expr) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, but for what says nothing of behaviour."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Raise | ast.JoinedStr) or not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.keyword) and child.arg in SILENT_FLAGS:
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                continue
            yield from _code(child)


def _is_type(node: ast.expr) -> bool:
    """Whether it looks like a type, as in `int | None`."""
    name = ast.unparse(node).split("[")[0].split(".")[-1]
    return bool(re.fullmatch(r"None|int|float|str|bool|bytes|[A-Z]\w*[a-z]\w*", name))


def draw(layer: str, patterns: list[str], seed: int) -> Iterator[Mutant]:
    """Mutants in an order that depends on nothing but the code and the seed, no two of one token."""
    folder = PACKAGE / layer
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    chosen = [
        path
        for name, path in files.items()
        if path.name != "__init__.py"
        and not any(fnmatch(name, pattern) for pattern in GPU_FILES)
        and (not patterns or any(fnmatch(name, pattern) for pattern in patterns))
    ]
    sites = [site for path in chosen for site in _Sites(path).find()]
    chance = random.Random(seed)
    chance.shuffle(sites)
    for site in sites:
        yield chance.choice(site)


def equivalents() -> dict[tuple[str, str, str], str]:
    """The mutants that nothing can tell from the original, and why not."""
    entries = tomllib.loads(EQUIVALENT.read_text())["mutant"]
    return {
        (entry["file"], entry["line"], change): entry["reason"]
        for entry in entries
        for change in entry["changes"]
    }


def _python_path() -> list[str]:
    """Where packages are that this process was told of: it may have been told so from its own folder."""
    return [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


class Tests:
    """A layer's tests, and what they test, in a folder of their own."""

    def __init__(self, layer: str, folder: Path, seed: int) -> None:
        shutil.copytree(
            REPOSITORY, folder, ignore=shutil.ignore_patterns(".*", "__pycache__"), dirs_exist_ok=True
        )
        self._folder = folder
        self._layer = layer
        self._seed = seed
        self._num_runs = 0
        self._order = folder / "order.json"
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(folder / "src"), str(folder), *_python_path()]),
            "PYTHONPYCACHEPREFIX": str(folder / ".bytecode"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / ".hypothesis"),
            "MUTATE_ORDER": str(self._order),
        }
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(PRELOADED)

    def trace(self, output: Path, jobs: int) -> Traced:
        """Runs all of them. Those that fail when they are watched, and when they are not, are left out."""
        hook = self._folder / "src" / "sitecustomize.py"
        hook.write_text("import tests.traced\n")
        failed = self._run(
            [f"--numprocesses={jobs if jobs > 1 else 0}", "--dist=worksteal", f"tests/{self._layer}"],
            PYTHONPYCACHEPREFIX=str(self._folder / ".watched"),
            MUTATE_TRACED=str(self._folder / "src" / "penstock" / self._layer),
            MUTATE_OUTPUT=str(output),
        )
        hook.unlink()
        if not output.exists():
            raise SystemExit(f"no test was run: {failed}")
        if failed and (failed := self._run_forked(failed)):
            print(*(f"fails without a fault, and is left out: {name}" for name in failed), sep="\n")
        return Traced(output, failed)

    def notice(self, mutant: Mutant, traced: Traced) -> str | None:
        """The test that fails, or `a timeout`; None where all pass."""
        path = self._folder / "src" / "penstock" / mutant.file
        if not (order := traced.order(mutant.file, mutant.places)):
            return None
        path.write_bytes(mutant.mutated)
        # Bytecode is known by its source's size and time in seconds.
        self._num_runs += 1
        os.utime(path, (self._num_runs, self._num_runs))
        self._order.write_text(json.dumps(order))
        files = [*dict.fromkeys(name.split("::")[0] for name in order)]
        try:
            for some in filter(None, (files[:FIRST_FILES], files[FIRST_FILES:])):
                if failed := self._run_forked(["-x", *some]):
                    return failed[0]
        finally:
            path.write_bytes(mutant.source)
            self._order.unlink()
        return None

    def _run(self, arguments: list[str], **environment: str) -> list[str]:
        """The tests that fail, in a process that begins with nothing."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *self._options(), *arguments],
            cwd=self._folder,
            env=self._environment | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        return _failed(done.returncode, done.stdout)

    def _run_forked(self, arguments: list[str]) -> list[str]:
        """The tests that fail, in a process that begins with the libraries."""
        output = self._folder / "output.txt"
        process = self._processes.Process(
            target=_test, args=(self._folder, self._environment, [*self._options(), *arguments], output)
        )
        process.start()
        process.join()
        assert process.exitcode is not None
        return _failed(process.exitcode, output.read_text())

    def _options(self) -> list[str]:
        shutil.rmtree(self._folder / ".hypothesis", ignore_errors=True)
        return (
            "-q --no-header --tb=no -p tests.mutate -p no:cacheprovider --continue-on-collection-errors "
            f"--hypothesis-seed={self._seed}"
        ).split()


def _test(folder: Path, environment: dict[str, str], arguments: list[str], output: Path) -> None:
    """Runs pytest in this process, as if it had begun in a folder with this environment."""
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), sys.stdout.fileno())
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.pycache_prefix = environment["PYTHONPYCACHEPREFIX"]
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    for name in [name for name in sys.modules if name.split(".")[0] in ("penstock", "tests")]:
        del sys.modules[name]
    status = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(status)  # threads that tests left behind are not waited for


def _failed(status: int, output: str) -> list[str]:
    """The tests that fail, by what pytest says at its end."""
    if status == pytest.ExitCode.OK:
        return []
    if status == TIMEOUT:
        return ["a timeout"]
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE) or [
        "an error before any test"
    ]


class Watch:
    """Ends a test that hangs. A second counts if this process could run: one that was stopped does not hang."""

    def __init__(self, limits: dict[str, float]) -> None:
        self._limits = limits
        self._left_s = math.inf
        self._begun_s = 0.0
        self._setup_s = 0.0
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        while self._left_s > 0:
            time.sleep(1)
            self._left_s -= 1
        os._exit(TIMEOUT)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._limits:
            places = {name: place for place, name in enumerate(self._limits)}
            items[:] = sorted(
                (item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid]
            )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._left_s = self._limits.get(nodeid, math.inf)
        self._begun_s = time.monotonic()
        if TRACER is not None:
            TRACER.begin(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._setup_s = report.duration

    def pytest_runtest_logfinish(self) -> None:
        if TRACER is not None:
            duration_s = time.monotonic() - self._begun_s - self._setup_s
            TRACER.write(setup_s=self._setup_s, duration_s=duration_s)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Iterator[None]:
        if TRACER is None or fixturedef.scope == "function":
            return (yield)
        test = TRACER.begin(request.node.nodeid)  # of all that share it
        try:
            return (yield)
        finally:
            TRACER.begin(test)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """This file is a plugin of the tests that it runs: they shrink no example, and test the copy."""
    settings.register_profile("mutants", parent=settings(), phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutants")
    assert Path(penstock.__file__).parent == PACKAGE, f"{penstock.__file__} is not what is tested"
    order = Path(os.environ["MUTATE_ORDER"])
    if not config.getoption("numprocesses") or hasattr(config, "workerinput"):  # of those that run tests
        config.pluginmanager.register(Watch(json.loads(order.read_text()) if order.exists() else {}))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__.splitlines()[0])
    parser.add_argument("layer", choices=LAYERS)
    parser.add_argument("--sample", type=int, default=40, help="mutants to try")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument(
        "--files", nargs="*", default=[], help="only in these files of the layer, as patterns"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--list", action="store_true", help="say which they would be, run nothing")
    options = parser.parse_args()
    known = equivalents()
    mutants = draw(options.layer, options.files, options.seed)
    sample: list[Mutant] = []
    for mutant in mutants:
        if len(sample) == options.sample:
            break
        if mutant.name in known:
            print(f"equivalent: {mutant}\n    {known[mutant.name]}")
        else:
            sample.append(mutant)
    if options.list:
        print(*sample, sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        free: SimpleQueue[Tests] = SimpleQueue()
        for job in range(options.jobs):
            free.put(Tests(options.layer, Path(folder, str(job)), options.seed))
        traced = (tests := free.get()).trace(Path(folder, "traced.jsonl"), options.jobs)
        free.put(tests)

        def notice(mutant: Mutant) -> str | None:
            tests = free.get()
            try:
                return tests.notice(mutant, traced)
            finally:
                free.put(tests)

        survivors = []
        tried = {pool.submit(notice, mutant): mutant for mutant in sample}
        for number, future in enumerate(as_completed(tried), 1):
            mutant, noticed = tried[future], future.result()
            verdict = f"caught by {noticed}" if noticed else "SURVIVED"
            print(f"[{number}/{len(sample)}] {mutant}\n    {verdict}", flush=True)
            if noticed is None:
                survivors.append(mutant)
    num_caught = len(sample) - len(survivors)
    print(f"\n{num_caught} of {len(sample)} caught in {options.layer}, seed {options.seed}")
    print(*(f"survived: {mutant}" for mutant in survivors), sep="\n")
    return int(num_caught < BAR * len(sample))


if __name__ == "__main__":
    raise SystemExit(main())
