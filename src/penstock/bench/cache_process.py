"""A prompt in a process of its own, which finds on disk what another has read; or which is killed half way."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.bench.cache_runs import Answer, ask, open_service
from penstock.bench.cache_workload import CacheWorkload
from penstock.bench.memory import MeasurementError
from penstock.cache import BLOCK_TOKENS
from penstock.engine.events import Event, Failed, Finished, GenerationRequest, PromptProgress
from penstock.engine.llm import LLM, Dtype
from penstock.engine.reuse import SNAPSHOT_TOKENS

# The store's size limit: nothing is to be evicted while others are measured.
UNLIMITED_BYTES = 1 << 40


@dataclass(frozen=True)
class ProcessJob:
    """What a fresh process is to read."""

    model: str  # a path
    dtype: Dtype
    num_threads: int
    folder: str  # of the store
    workload: CacheWorkload
    prompt: tuple[int, ...]
    kill_at: int | None = None  # tokens after which it is killed, as soon as they are on disk


@dataclass(frozen=True)
class ProcessAnswer:
    """What a process gave back, and how long it took to load its model before."""

    answer: Answer
    load_s: float


def open_llm(model: str, dtype: Dtype, num_threads: int, folder: Path, chunk: int) -> LLM:
    """A model with a store. What one process keeps there another finds, if its settings are the same."""
    return LLM(
        model, dtype=dtype, chunk=chunk, threads=num_threads, cache_dir=folder, cache_size=UNLIMITED_BYTES
    )


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
    command = [sys.executable, "-m", "penstock.bench.cache_process"]
    done = subprocess.run(command, input=json.dumps(asdict(job)), capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    said = done.stderr.strip().splitlines() or ["it said nothing"]
    return done.returncode, json.loads(lines[-1]) if lines else {}, said[-1]


def _main() -> None:
    fields = json.load(sys.stdin)
    job = ProcessJob(**{**fields, "workload": CacheWorkload(**fields["workload"])})
    with open_llm(job.model, job.dtype, job.num_threads, Path(job.folder), job.workload.chunk) as llm:
        if job.kill_at is not None:
            _read_and_die(llm, job, job.kill_at)
            raise MeasurementError(f"the prompt was read before {job.kill_at} tokens of it were on disk")
        with open_service(llm, job.workload, keeps=True) as service:
            answer = ask(service, job.prompt, job.workload.answer_tokens)
    print(json.dumps({"load_s": llm.load_s, "answer": asdict(answer)}))


def _read_and_die(llm: LLM, job: ProcessJob, kill_at: int) -> None:
    """The listener runs on the engine's thread, so nothing more is read while it waits for the disk."""
    assert llm.store is not None
    store, over = llm.store, threading.Event()
    # A model with recurrent state goes on only where its state was kept.
    grid = SNAPSHOT_TOKENS if llm.model.config.has_state else BLOCK_TOKENS

    def listen(event: Event) -> None:
        if isinstance(event, PromptProgress) and kill_at <= event.progress.num_done < len(job.prompt):
            store.flush()
            print(json.dumps({"stored_tokens": event.progress.num_done // grid * grid}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(event, Finished | Failed):
            over.set()

    with open_service(llm, job.workload, keeps=True) as service:
        service.submit(GenerationRequest(job.prompt, job.workload.answer_tokens, ignore_eos=True), listen)
        over.wait()


if __name__ == "__main__":
    _main()
