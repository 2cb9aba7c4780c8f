"""`python -m tests.wheel WHEEL`: a wheel in an empty environment, without a compiler, runs the default model.

It does so with each set of instructions that this processor has, by native kernels that came with it, to the tokens
that this checkout gives; where its sources are changed, no library of others is loaded. Then the two take turns."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.home import cache_home
from penstock.machine import INSTRUCTION_SETS, ISA_VARIABLE, processor_flags

REPOSITORY = Path(__file__).resolve().parent.parent
PROMPT = str(REPOSITORY / "README.md")
OPTIONS = ("generate", "--prompt-file", PROMPT, "--max-tokens", "128", "--ignore-eos", "--json", "--quiet")


class Installed:
    """Penstock in an environment. What it compiles or measures goes to a folder of its own."""

    def __init__(self, folder: Path, home: Path, **environ: str) -> None:
        self._command = folder / "penstock"
        home.mkdir()
        (home / "models").symlink_to(cache_home() / "models")
        given = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        self._environ = given | {"PENSTOCK_HOME": str(home)} | environ

    def generate(self, instructions: str) -> dict[str, Any]:
        run = subprocess.run(
            [self._command, *OPTIONS],
            env=self._environ | {ISA_VARIABLE: instructions},
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise SystemExit(f"{self._command} failed: {run.stderr}")
        found: dict[str, Any] = json.loads(run.stdout)
        return found


def environment(folder: Path, wheel: Path) -> Path:
    """An empty environment with the wheel: where its commands are."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    constraints = REPOSITORY / "constraints.txt"
    (torch,) = [line for line in constraints.read_text().splitlines() if line.startswith("torch==")]
    for what in ([torch], ["-c", str(constraints), str(wheel)]):  # torch first and alone, as in the Makefile
        subprocess.run([*install, *what], check=True)
    return folder / "bin"


def check(name: str, is_so: bool, said: object) -> None:
    print(f"{name}: {'yes' if is_so else 'NO'}")
    if not is_so:
        raise SystemExit(f"{name}: {said}")


def rates(results: Iterable[dict[str, Any]], name: str) -> str:
    of = [result["timings"][name] for result in results]
    return f"{statistics.median(of):.0f} ({min(of):.0f} to {max(of):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--environment", type=Path, help="bin/ of one that has it, in place of a new one")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    sets = [name for name, flags in INSTRUCTION_SETS.items() if {*flags} <= processor_flags()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = given.environment or environment(folder / "environment", given.wheel)
        wheel = Installed(commands, folder / "home", PATH=str(commands), CXX="", PYTHONPATH="")
        checkout = Installed(Path(sys.executable).parent, folder / "home of the checkout")
        for instructions in sets:
            result = wheel.generate(instructions)
            kernels = result["kernels"]
            is_native = kernels["name"] == "native" and kernels["instructions"] == instructions
            check(f"{instructions}: native kernels without a compiler", is_native, kernels)
            theirs = checkout.generate(instructions)
            check(
                f"{instructions}: the checkout's tokens", result["text"] == theirs["text"], theirs["kernels"]
            )
        (source,) = commands.parent.glob("lib/python*/site-packages/penstock/kernels/native/rows.cpp")
        text = source.read_text()
        try:
            source.write_text(text + "// other sources\n")
            kernels = wheel.generate(sets[0])["kernels"]
            check("no library of other sources", kernels["name"] == "torch", kernels)
            check("that is told", "no C++ compiler" in str(kernels["slower"]), kernels)
        finally:
            source.write_text(text)
        turns = [(wheel.generate(sets[0]), checkout.generate(sets[0])) for _ in range(given.turns)]
        for what, results in zip(("wheel", "checkout"), zip(*turns, strict=True), strict=True):
            prefill, decode = rates(results, "prefill_tokens_per_s"), rates(results, "decode_tokens_per_s")
            print(
                f"{what}, {sets[0]}: prefill {prefill}, decode {decode} tokens/s, of {given.turns} runs in turns"
            )
        ratios = [
            ours["timings"]["decode_tokens_per_s"] / theirs["timings"]["decode_tokens_per_s"]
            for ours, theirs in turns
        ]
        print(
            f"decode, wheel to checkout: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
