"""`python -m tests.server.tool_soak`: random schemas of tools, required and named, on a random model: every call
parses and fits, or was cut."""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.engine.llm import LLM
from penstock.frontends.server.settings import ServerSettings
from tests.byte_models import model_of_bytes
from tests.server.running import NAME, Running, running
from tests.server.test_tools import call_by_force


def ends_of(server: Running, num_examples: int, *, is_named: bool) -> dict[str, int]:
    ends: Counter[str] = Counter()

    @settings(
        max_examples=num_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        ends[call_by_force(server, data, is_named=is_named)] += 1

    check()
    return dict(ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=1000, help="of each of required and named")
    num_examples: int = parser.parse_args().examples
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(model_of_bytes("llama", Path(folder) / NAME), dtype="float32", threads=1)
        with running(llm, ServerSettings(NAME)) as server:
            for is_named in (False, True):
                ends = ends_of(server, num_examples, is_named=is_named)
                print(f"{'named' if is_named else 'required'}: {ends}", flush=True)


if __name__ == "__main__":
    main()
