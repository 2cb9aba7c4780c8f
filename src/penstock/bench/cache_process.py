"""A prompt in a process of its own, which finds on disk what another has read; or which is killed half way."""

import json
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from penstock.bench.cache_child import ProcessJob
from penstock.bench.cache_runs import Answer
from penstock.measure.growth import MeasurementError


@dataclass(frozen=True)
class ProcessAnswer:
    """What a process gave back, and how long it took to load its model before."""

    answer: Answer
    load_s: float


def ask_in_process(job: ProcessJob) -> ProcessAnswer:
    """Read the prompt in a new process."""
    status, reply, said = _start(job)
    if status != 0 or "answer" not in reply:
        raise MeasurementError(f"a process that reads from disk failed (exit {status}): {said}")
    fields = reply["answer"]
    answer = Answer(fields["first_token_s"], tuple(fields["token_ids"]), fields["cached_tokens"])
    return ProcessAnswer(answer, reply["load_s"])


def kill_in_process(job: ProcessJob) -> int:
    """Read the prompt in a new process until it is killed: the tokens that the next one need not read."""
    status, reply, said = _start(job)
    if status != -signal.SIGKILL or "stored_tokens" not in reply:
        raise MeasurementError(f"a process that was to be killed ended by itself (exit {status}): {said}")
    return int(reply["stored_tokens"])


def _start(job: ProcessJob) -> tuple[int, dict[str, Any], str]:
    """The exit status, the last line that it printed as JSON, and the last line of its errors."""
    command = [sys.executable, "-m", "penstock.bench.cache_child"]
    done = subprocess.run(command, input=json.dumps(asdict(job)), capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    said = done.stderr.strip().splitlines() or ["it said nothing"]
    return done.returncode, json.loads(lines[-1]) if lines else {}, said[-1]
