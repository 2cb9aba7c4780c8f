"""`python -m benchmarks.requantised MODEL FORMAT FILE`: a GGUF file in another format, written by llama.cpp itself.
Where rows are no multiple of a format's blocks, it takes another for them."""

import argparse
from pathlib import Path

from benchmarks.suite import PEERS_FOLDER
from benchmarks.suites.peers import ENGINES, find_pythons
from benchmarks.systems import Child
from penstock.models.hub import resolve_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("format", help="as llama.cpp names it: Q4_K_M, Q8_0, ...")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    engine, wanted = "llama.cpp", {"format": options.format, "output": str(options.file), "threads": 2}
    with Child(ENGINES[engine], engine, find_pythons(PEERS_FOLDER["default"])[engine]) as child:
        child.ask("prepare", model=str(resolve_model(options.model)), **wanted)


if __name__ == "__main__":
    main()
