"""The docs are true of the code: the tree names every file, links lead somewhere, commands and options exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.engine.status import CacheStatus, ServiceStatus
from penstock.frontends.cli import app
from penstock.frontends.server.bodies import ChatBody, CompletionBody
from penstock.frontends.server.metrics import Telemetry
from tests import families

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")])
ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
# Packages are named by their folders.
UNNAMED = {"__init__.py", "__main__.py", "conftest.py", "py.typed"}
COMMANDS = {"generate", "chat", "serve", "worker", "plan", "tune", "verify", "pull", "cache"}


def tree(root: str) -> Iterator[str]:
    """The paths below `root` that its tree names, in the indented block that begins with it."""
    lines = ARCHITECTURE.read_text().splitlines()
    folders: list[str] = []
    for line in lines[lines.index(f"    {root}/") + 1 :]:
        match = re.match(r"    ((?:  )+)(\S+)", line)
        if match is None:
            break
        depth = len(match[1]) // 2
        folders = [*folders[: depth - 1], match[2]]
        yield "".join(folders)


@pytest.mark.parametrize("root", ["src/penstock", "benchmarks"])
def test_the_tree_names_every_file_and_no_other(root: str) -> None:
    named = list(tree(root))
    assert len(named) == len(set(named))
    # A folder without Python may be one line.
    whole = [
        path for path in named if path.endswith("/") and not any((REPOSITORY / root / path).glob("*.py"))
    ]
    files = {
        str(path.relative_to(REPOSITORY / root))
        for path in (REPOSITORY / root).rglob("*")
        if path.is_file() and path.name not in UNNAMED and not {"__pycache__", "built"} & set(path.parts)
    }
    folders = {f"{parent}/" for path in files for parent in map(str, list(Path(path).parents)[:-1])}
    expected = {
        path for path in files | folders if not any(path != own and path.startswith(own) for own in whole)
    }
    assert set(named) - {"__main__.py"} == expected


def test_the_tree_names_files_that_all_tests_share() -> None:
    files = {path.name for path in (REPOSITORY / "tests").glob("*.*")} - UNNAMED
    assert files == {name for name in tree("tests") if "/" not in name}


def headings(page: Path) -> set[str]:
    """As links name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            name, _, place = target.partition("#")
            found = page.parent / name if name else page
            assert found.exists(), target
            assert not place or place in headings(found), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    """Paths in backquotes, in the repository or in the package."""
    if page.name == "CHANGELOG.md":
        return  # which has old names
    names = re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|cpp|md|json|toml))`", page.read_text())
    roots = (REPOSITORY, REPOSITORY / "src", REPOSITORY / "src" / "penstock", REPOSITORY / "docs")
    assert not [name for name in names if not any((root / name).exists() for root in roots)]


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """Of each command, what its help lists."""
    runner = CliRunner()
    found = {}
    for command in COMMANDS:
        parts = ("ls", "verify", "rm") if command == "cache" else ("",)
        texts = [
            runner.invoke(app, [command, *filter(None, [part]), "--help"], env={"COLUMNS": "200"}).output
            for part in parts
        ]
        found[command] = set(re.findall(r"--[a-z][a-z0-9-]+", " ".join(texts)))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_options_that_are_shown(page: Path, options: dict[str, set[str]]) -> None:
    for command, rest in re.findall(r"\bpenstock ([a-z]+)((?: [^`\n|]*)?)", page.read_text()):
        if command in COMMANDS:
            shown = set(re.findall(r"(?<!\S)\[?(--[a-z][a-z0-9-]+)", rest)) - {"--help"}
            assert shown <= options[command], f"{command}: {shown - options[command]}"


def test_every_parameter_and_metric_of_the_server_is_told() -> None:
    text = (REPOSITORY / "docs" / "serving.md").read_text()
    names = set(re.findall(r"[a-z0-9_]+", text))
    assert set(ChatBody.model_fields) | set(CompletionBody.model_fields) <= names
    idle = ServiceStatus((), (), CacheStatus(0, 8, 64, 0, 0), 0, 0, 1.0)
    metrics = re.findall(r"^# TYPE penstock_(\w+)", Telemetry().render(idle).decode(), re.MULTILINE)
    assert {name for name in metrics if not name.endswith("_created")} <= names


def test_the_table_of_families_is_current() -> None:
    """Where this fails, `python -m tests.families` writes it anew."""
    assert families.PAGE.read_text() == families.page()


def test_every_family_was_compared_with_transformers() -> None:
    """A row of `FAMILIES` wants one of `MODELS` (`tests/engine/test_families.py`)."""
    assert "| 0 shapes |" not in families.table()


def test_the_readme_leads_to_every_page() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert not [page.name for page in REPOSITORY.glob("docs/*.md") if f"](docs/{page.name}" not in text]


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) < 120
