"""Who may import whom: a layer sees only the layers above it in this list."""

import ast
from pathlib import Path

import pytest

import penstock

LAYERS = ("plan", "cache", "kernels", "layers", "models", "engine", "measure", "frontends")
# For every layer; they import no layer.
SHARED = {"errors", "files", "home", "machine", "pictures", "process_memory", "tables"}
ROOT = Path(penstock.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)


def imported_parts(path: Path) -> set[str]:
    """The parts of penstock (first name after `penstock.`) that a file imports, anywhere in it."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith("penstock.")}
    return parts


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_up(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    assert layer in LAYERS
    allowed = {*LAYERS[: LAYERS.index(layer) + 1], *SHARED, "__version__"}
    assert imported_parts(path) <= allowed


@pytest.mark.parametrize("name", sorted(SHARED))
def test_shared_files_import_no_layer(name: str) -> None:
    assert imported_parts(ROOT / f"{name}.py") <= SHARED


def test_every_layer_is_there() -> None:
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(
        LAYERS
    )


def test_one_file_imports_ray() -> None:
    def names(path: Path) -> set[str]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}

    users = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        for name in names(path)
        if name.split(".")[0] == "ray"
    }
    assert users == {"frontends/ray.py"}
    # Nor is that file imported by others before somebody asks for it.
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert not any(
            "penstock.frontends.ray" in ast.unparse(node)
            for node in tree.body
            if "import" in type(node).__name__.lower()
        )
