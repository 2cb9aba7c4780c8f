"""Packages that only some uses need: everything else is imported without them."""

import subprocess
import sys
from pathlib import Path

LAYERS = ("plan", "cache", "kernels", "layers", "models", "engine", "measure")
ABSENT = ("gguf", "typer", "rich", "matplotlib", "fastapi")

BLOCK = f"""
import sys
for name in {ABSENT}:
    sys.modules[name] = None
"""
IMPORT_ALL = f"""
import importlib, pkgutil
for layer in {LAYERS}:
    package = importlib.import_module(f"penstock.{{layer}}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith("penstock.models.gguf."):
            importlib.import_module(module.name)
"""
OPEN_GGUF = """
from pathlib import Path
from penstock.errors import ModelError
from penstock.models.opened import open_model
try:
    open_model(Path(sys.argv[1]))
except ModelError as error:
    print(error)
"""


def run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_layer_is_imported_without_them() -> None:
    run(BLOCK + IMPORT_ALL)


def test_a_gguf_file_without_the_package_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    said = run(BLOCK + OPEN_GGUF, str(tmp_path / "model.gguf"))
    assert said == "reading GGUF files needs the gguf package: pip install gguf\n"
