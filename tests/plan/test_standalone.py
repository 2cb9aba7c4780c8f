"""The planning library is a library of its own: standard library only, of use where torch is absent."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock.plan

PLAN = Path(penstock.plan.__file__).parent
SOURCE = PLAN.parent.parent

PROGRAM = f"""
import sys
for name in ("torch", "numpy", "transformers"):
    sys.modules[name] = None
sys.path.insert(0, {str(SOURCE)!r})
from penstock.plan import *
config = ChunkedPrefillConfig(chunk_size=4, overlap=1).with_priority("interleaved")
scheduler = PrefillScheduler(list(range(10)), config)
while not isinstance(action := scheduler.next_action(decodes_waiting=1), StartDecode):
    if isinstance(action, Prefill):
        print(list(action.chunk.tokens))
        scheduler.complete(action.chunk)
    else:
        print("decode")
print(scheduler.progress(), resolve_chunk_size(environ={{}}).effective)
"""


def test_it_works_without_any_installed_package() -> None:
    # -S: no site-packages. -I: no environment, no current folder.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[0, 1, 2, 3]",
        "decode",
        "[3, 4, 5, 6]",
        "decode",
        "[6, 7, 8, 9]",
        "1.0 512",
    ]


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module


@pytest.mark.parametrize("path", sorted(PLAN.rglob("*.py")), ids=lambda path: path.name)
def test_it_imports_the_standard_library_and_itself_only(path: Path) -> None:
    for module in imported_modules(path):
        own = module in ("penstock.errors", "penstock.machine") or module.startswith("penstock.plan.")
        assert own or module.partition(".")[0] in sys.stdlib_module_names, f"{path.name} imports {module}"


def test_what_is_exported_is_there() -> None:
    for name in penstock.plan.__all__:
        assert hasattr(penstock.plan, name)
