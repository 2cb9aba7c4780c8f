"""The files of the package that `penstock generate` enters before its first token: those whose functions run.

python -m tests.entered                          # one line a file, then their number
python -m tests.entered --model FOLDER --seed 1  # options of `generate`
"""

import sys
import threading
from collections import Counter
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "penstock"
PROMPT = ("--prompt", "The quick brown fox")


class FirstTextError(Exception):
    """The answer has begun."""


class _Output:
    """Standard output, up to what is first written to it."""

    def write(self, text: str) -> int:
        raise FirstTextError

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.__stdout__, name)


def entered(arguments: list[str]) -> Counter[str]:
    """How many calls each file of the package had."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        # Neither what an import runs, modules and bodies of classes, nor comprehensions, which may be part of that.
        code = frame.f_code
        if event == "call" and code.co_flags & CO_OPTIMIZED and not code.co_name.endswith(("comp>", "expr>")):
            calls[code.co_filename] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        from penstock.frontends.cli import app

        sys.stdout = _Output()
        app(["generate", *PROMPT, *arguments], standalone_mode=False)
    except FirstTextError:
        pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        sys.stdout = sys.__stdout__
    names = {name: Path(name) for name in calls}
    return Counter(
        {
            str(path.relative_to(PACKAGE)): calls[name]
            for name, path in names.items()
            if PACKAGE in path.parents
        }
    )


def main() -> None:
    found = entered(sys.argv[1:])
    for name, number in sorted(found.items()):
        print(f"{number:9d}  {name}")
    print(f"{len(found)} files")


if __name__ == "__main__":
    main()
