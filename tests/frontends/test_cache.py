"""`penstock cache`: what is kept, whether it is whole, and how to be rid of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.frontends.cli import app
from tests.cache.storing import FINGERPRINT, HYBRID, PLAIN, files_in, fill, keys_of, num_found, open_store
from tests.odd_files import ODD_FILES

OTHER = b"other" + bytes(27)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_CACHE_DIR", "PENSTOCK_CACHE_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three blocks of one model, two blocks and states of another, and something that is nobody's."""
    folder = tmp_path / "cache"
    store = open_store(folder, PLAIN)
    fill(store, keys_of(3), 0, PLAIN)
    store.close()
    hybrid = open_store(folder, HYBRID, fingerprint=OTHER, about={"model": "[b]two\n", "dtype": "float32"})
    fill(hybrid, keys_of(2), 0, HYBRID)
    hybrid.close()
    (folder / "notes.txt").write_text("mine")
    return folder


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["cache", *(str(argument) for argument in arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_the_list_says_what_is_kept_of_which_model(folder: Path) -> None:
    status, out, err = run("ls", "--cache-dir", folder, "--cache-size", "1MiB")
    assert (status, err) == (0, "")
    titles, *rows, total = out.splitlines()
    assert titles.split() == ["id", "model", "dtype", "tokens", "states", "files", "size", "last", "used"]
    assert {tuple(row.split()[:6]) for row in rows} == {
        (FINGERPRINT.hex()[:12], "tiny", "bfloat16", "192", "0", "3"),
        (OTHER.hex()[:12], "[b]two?", "float32", "128", "2", "4"),
    }
    assert total.startswith(f"{folder}: ")
    assert " of 1.0 MiB (" in total


def test_the_list_as_json(folder: Path) -> None:
    status, out, _ = run("ls", "--cache-dir", folder, "--json")
    assert status == 0
    found = json.loads(out)
    assert found["max_bytes"] == 10 << 30
    assert found["num_bytes"] == sum(file.stat().st_size for file in files_in(folder))
    rows = {row["id"]: row for row in found["models"]}
    assert rows.keys() == {FINGERPRINT.hex()[:32], OTHER.hex()[:32]}
    row = rows[OTHER.hex()[:32]]
    assert (row["model"], row["tokens"], row["states"], row["files"]) == ("[b]two\n", 128, 2, 4)


def test_an_empty_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "none"))
    status, out, _ = run("ls")
    assert status == 0
    assert out.splitlines() == ["nothing is kept", f"{tmp_path / 'none'}: 0 B of 10.0 GiB (0.0%)"]


def test_descriptions_that_are_damaged_are_passed_over(folder: Path) -> None:
    for number, about in enumerate(sorted(folder.glob("*/about.json"))):
        about.write_bytes(b"\xff\xfe" if number else b'{"model": 7}')
    status, out, _ = run("ls", "--cache-dir", folder)
    assert status == 0
    assert out.count("unknown") == 4


@pytest.mark.parametrize("put", ODD_FILES)
def test_descriptions_that_are_no_files_are_passed_over(folder: Path, put: Callable[[Path], object]) -> None:
    about = next(iter(sorted(folder.glob("*/about.json"))))
    about.unlink()
    put(about)
    status, out, _ = run("ls", "--cache-dir", folder)
    assert status == 0
    assert out.count("unknown") == 2


def test_whole_files_are_whole(folder: Path) -> None:
    assert run("verify", "--cache-dir", folder) == (0, f"{folder}: 7 files, all whole\n", "")


def test_damaged_files_are_named_and_set_aside(folder: Path) -> None:
    block, *_, state = [file for file in files_in(folder) if file.parent.name == OTHER.hex()[:32]]
    content = bytearray(block.read_bytes())
    content[-1] ^= 1
    block.write_bytes(content)
    state.write_bytes(state.read_bytes()[:-1])
    status, out, err = run("verify", "--cache-dir", folder)
    assert status == 1
    assert {line.split(": ")[0] for line in out.splitlines()} == {str(block), str(state)}
    assert err == f"penstock: 2 files in {folder} are damaged, and set aside; 5 are whole\n"
    assert not block.exists()
    assert len(list(block.parent.glob("damaged/*"))) == 2
    assert run("verify", "--cache-dir", folder)[0] == 0
    assert "(2 damaged)" in run("ls", "--cache-dir", folder)[1]


def test_one_model_is_removed_by_the_beginning_of_its_id(folder: Path) -> None:
    (folder / OTHER.hex()[:32] / ".tmp-1-2").write_text("left by a process that was killed")
    status, out, _ = run("rm", "--cache-dir", folder, "--model", OTHER.hex()[:6])
    assert status == 0
    assert out.startswith(f"{folder}: removed 5 files, ")
    assert {entry.name for entry in folder.iterdir()} == {FINGERPRINT.hex()[:32], "notes.txt"}
    store = open_store(folder)
    assert num_found(store, keys_of(3)) == 3
    store.close()


def test_all_of_it_is_removed_but_for_what_is_not_the_stores(folder: Path) -> None:
    mine = folder / OTHER.hex()[:32] / "mine.txt"
    mine.write_text("mine")
    status, out, _ = run("rm", "--cache-dir", folder, "--all")
    assert (status, out.split(", ")[0]) == (0, f"{folder}: removed 7 files")
    assert mine.exists()
    assert not files_in(folder)
    assert {entry.name for entry in folder.iterdir()} == {mine.parent.name, "notes.txt"}
    assert run("rm", "--cache-dir", folder, "--all")[1] == f"{folder}: removed 0 files, 0 B\n"


def test_what_was_long_unused_is_removed(folder: Path) -> None:
    for file in files_in(folder)[:2]:
        then = time.time_ns() - 8 * 86_400 * 10**9
        os.utime(file, ns=(then, then))
    assert run("rm", "--cache-dir", folder, "--older-than", "9d")[1].startswith(f"{folder}: removed 0 files")
    assert run("rm", "--cache-dir", folder, "--older-than", "1w")[1].startswith(f"{folder}: removed 2 files")
    assert len(files_in(folder)) == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ls",), "give --cache-dir, or set PENSTOCK_CACHE_DIR"),
        (("rm", "--cache-dir", "x"), "give --model ID, --older-than AGE or --all"),
        (("rm", "--cache-dir", "x", "--all", "--older-than", "1d"), "--all contradicts"),
        (("rm", "--cache-dir", "x", "--older-than", "soon"), "--older-than 'soon' is not accepted"),
        (("rm", "--cache-dir", "{folder}", "--model", "../x"), "--model '../x' is not accepted"),
        (
            ("rm", "--cache-dir", "{folder}", "--model", "ffff"),
            "--model 'ffff' is not accepted: it is the id of no model",
        ),
        (("ls", "--cache-dir", "{folder}", "--cache-size", "10GB"), "--cache-size '10GB' is not accepted"),
        (("verify", "--cache-dir", "{folder}/notes.txt"), "is no folder"),
    ],
)
def test_mistakes_are_one_line(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    status, out, err = run(*(argument.format(folder=folder) for argument in arguments))
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert len(files_in(folder)) == 7


def test_an_id_that_several_models_share_is_not_enough(folder: Path) -> None:
    open_store(folder, fingerprint=OTHER[:6] + bytes(range(26))).close()
    status, _, err = run("rm", "--cache-dir", folder, "--model", OTHER.hex()[:8])
    assert status == 2
    assert "several ids" in err
    assert len(files_in(folder)) == 7


def test_it_needs_no_torch(folder: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from penstock.frontends.cli import app\n"
        f"for command in (['ls'], ['verify'], ['rm', '--all']):\n"
        f"    app(['cache', *command, '--cache-dir', {str(folder)!r}], standalone_mode=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not files_in(folder)
