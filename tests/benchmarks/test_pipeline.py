"""The table of several machines in the docs is what its command makes, without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import pipeline

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_in_the_docs_is_what_the_command_makes() -> None:
    shown = (DOCS / "distributed.md").read_text()
    short = [case for case in pipeline.cases() if case.prompt_tokens < 100_000]
    titles, _, *rows = pipeline.table([(case, case.plan(link)) for case in short for link in case.links])
    assert len(rows) == 5
    assert titles.removesuffix(" |") in shown
    for row in rows:
        assert row.removesuffix("|") in shown


def test_it_needs_no_torch_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    program = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path; from benchmarks import pipeline; "
        "plans = [(case, case.plan('1Gb/s')) for case in pipeline.cases()[:2]]; "
        "pipeline.picture(plans, Path(sys.argv[1]))"
    )
    path = tmp_path / "clock.png"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    assert path.read_bytes().startswith(b"\x89PNG")
