"""`python -m tests.clients [PYTHON]`: real clients' tool loops against a real server, of which only the logits are a
double: it calls the tool that writes a file, and ends once the result is there. PYTHON has the clients (`make
test-clients` makes such an environment)."""

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

from penstock.engine.job import Job
from penstock.engine.llm import LLM
from penstock.engine.service import ServiceConfig
from penstock.frontends.server.settings import ServerSettings
from tests.models.call_templates import TEMPLATES
from tests.server.running import NAME, running
from tests.server.scripted import scripted
from tests.server.test_tools import with_template

CONTEXT = 131_072
HERE = Path(__file__).parent
NAMES = (
    *("openai_chat", "openai_responses", "anthropic_messages", "agents_chat", "agents_responses"),
    *("langchain_openai", "langchain_anthropic", "pydantic_ai", "instructor", "llm_tool", "smolagents"),
)
FILE = {"path": "note.txt", "content": "hello"}


def said(llm: LLM, job: Job) -> str:
    """What a model that knows its tools would say to this prompt."""
    prompt = llm.tokenizer.decode(job.tokens[: job.num_prompt])
    is_done = "written: 5 letters" in prompt
    if is_done and '"final_answer"' not in prompt:
        return "It is written."
    arguments = {"answer": "It is written."} if is_done else FILE
    name = "final_answer" if is_done else "write_file" if '"write_file"' in prompt else "File"
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", nargs="?", default=".clients/bin/python", help="the clients' Python")
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--serve", action="store_true", help="only serve, for clients by hand")
    given = parser.parse_args()
    python = Path(given.python).absolute()
    failed = []
    with tempfile.TemporaryDirectory() as name:
        folder = with_template(Path(name), TEMPLATES["hermes"][0])
        config = folder / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": CONTEXT}))
        llm = LLM(folder, dtype="float32", threads=1)
        served = running(llm, ServerSettings(NAME), ServiceConfig(cache_tokens=2 * CONTEXT))
        with served as server, scripted(llm, lambda job: said(llm, job)):
            if given.serve:
                print(server.url, flush=True)
                time.sleep(3600)
            for client in given.only:
                place = Path(name) / client
                place.mkdir()
                command = [python, HERE / "loops.py", client, server.url]
                done = subprocess.run(
                    command, cwd=place, capture_output=True, text=True, timeout=300, check=False
                )
                print(f"{client}: {'ok' if done.returncode == 0 else 'failed'}", flush=True)
                if done.returncode:
                    failed.append(client)
                    print(done.stderr[-2000:], flush=True)
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
