"""What a process of its own does: it reads a prompt, with what another has left on disk, or is killed half way.

It is started many times, so it imports no more than it needs."""

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.bench.cache_runs import ask, open_service
from penstock.bench.cache_workload import CacheWorkload
from penstock.cache import BLOCK_TOKENS
from penstock.cache.keys import KeyChain, root_key
from penstock.engine.events import Event, Failed, Finished, GenerationRequest, PromptProgress
from penstock.engine.llm import LLM, Dtype

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


def open_llm(model: str, dtype: Dtype, num_threads: int, folder: Path, chunk: int) -> LLM:
    """A model with a store. What one process keeps there another finds, if its settings are the same."""
    return LLM(
        model, dtype=dtype, chunk=chunk, threads=num_threads, cache_dir=folder, cache_size=UNLIMITED_BYTES
    )


def _main() -> None:
    fields = json.load(sys.stdin)
    job = ProcessJob(**{**fields, "workload": CacheWorkload(**fields["workload"])})
    with open_llm(job.model, job.dtype, job.num_threads, Path(job.folder), job.workload.chunk) as llm:
        if job.kill_at is not None:
            _read_and_die(llm, job, job.kill_at)
            sys.exit("the prompt was read in one chunk")
        with open_service(llm, job.workload, keeps=True) as service:
            answer = ask(service, job.prompt, job.workload.answer_tokens)
    print(json.dumps({"load_s": llm.load_s, "answer": asdict(answer)}))


def _read_and_die(llm: LLM, job: ProcessJob, kill_at: int) -> None:
    """The listener runs on the engine's thread, so nothing more is read while it waits for the disk."""
    over = threading.Event()

    def listen(event: Event) -> None:
        if isinstance(event, PromptProgress) and kill_at <= event.progress.num_done < len(job.prompt):
            num_stored = _stored_tokens(llm, job.prompt[: event.progress.num_done])
            print(json.dumps({"stored_tokens": num_stored}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(event, Finished | Failed):
            over.set()

    with open_service(llm, job.workload, keeps=True) as service:
        service.submit(GenerationRequest(job.prompt, job.workload.answer_tokens, ignore_eos=True), listen)
        over.wait()


def _stored_tokens(llm: LLM, tokens: Sequence[int]) -> int:
    """How far another process can go on from the disk, once these were read: to the last full block; with recurrent
    state, to the last one after which it was kept, which the store knows."""
    assert llm.store is not None
    assert llm.fingerprint is not None
    llm.store.flush()
    if not llm.model.config.has_state:
        return len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    chain = KeyChain(root_key(llm.fingerprint))
    chain.extend(tokens)
    found = llm.store.find(chain.keys, 0, needs_state=True)
    return 0 if found is None else found.num_blocks * BLOCK_TOKENS


if __name__ == "__main__":
    _main()
