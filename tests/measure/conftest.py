"""The command `verify` on small models."""

import json
from pathlib import Path

import pytest

from tests.measure.verifying import Found, Verify, folder_of, home, run_command


@pytest.fixture(name="verify")
def fixture_verify(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Verify:
    """Runs the command in float32 on 120 tokens of a family's model, unless the arguments say otherwise."""
    monkeypatch.setenv("PENSTOCK_HOME", str(home()))

    def verify(family: str, *arguments: str, status: int = 0) -> Found:
        output = tmp_path / "found.json"
        usual = ["--model", str(folder_of(family)), "--dtype", "float32", "--max-tokens", "4"]
        tokens = [] if "--prompt-file" in arguments else ["--tokens", "120"]
        done = run_command("verify", *usual, *tokens, "--json", str(output), *arguments)
        assert done.exit_code == status, done.output
        found = Found(json.loads(output.read_text()), done.stdout)
        assert found.plain["passed"] == (status == 0)
        return found

    return verify
