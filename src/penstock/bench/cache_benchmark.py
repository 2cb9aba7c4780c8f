"""From settings to results of the prefix cache: every way to a first token takes its turn on the round's prompt."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from penstock.bench.cache_child import ProcessJob, open_llm
from penstock.bench.cache_process import ask_in_process, kill_in_process
from penstock.bench.cache_prompts import CachePrompts, make_prompts
from penstock.bench.cache_results import CacheResults, CacheRun, CacheSettings
from penstock.bench.cache_runs import ask, warm_service
from penstock.bench.cache_workload import Way
from penstock.bench.timing import rounds
from penstock.engine.llm import LLM
from penstock.measure.growth import MeasurementError
from penstock.measure.machine import this_machine

Say = Callable[[str], None]


def run_cache_benchmark(model: str, settings: CacheSettings, say: Say) -> CacheResults:
    """Measure what the settings ask for. `say` is told what goes on. The store's folder is a temporary one."""
    started = time.perf_counter()
    machine, workload = this_machine(), settings.workload
    with TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        kept = folder / "kept"
        with open_llm(model, settings.dtype, torch.get_num_threads(), kept, workload.chunk) as llm:
            workload.require_context(llm.context_length)
            prompts = make_prompts(llm.tokenizer, workload, settings.repeats)
            subject = _Subject(llm, settings, prompts, folder)
            turns = (subject.run_cold, subject.run_kept, subject.run_killed)
            runs: list[CacheRun] = []
            for index, order in enumerate(rounds(turns, settings.repeats)):
                for turn in order:
                    for run in turn(index):
                        runs.append(run)
                        say(f"round {index + 1} of {settings.repeats}: {_told(run)}")
        seconds = time.perf_counter() - started
        return CacheResults(machine, settings, file_system(folder), tuple(runs), seconds)


@dataclass(frozen=True)
class _Subject:
    """A model with a store, and a prompt for every round. One service lives at a time, so that none waits for the
    threads of another."""

    llm: LLM
    settings: CacheSettings
    prompts: CachePrompts
    folder: Path

    def run_cold(self, index: int) -> list[CacheRun]:
        workload = self.settings.workload
        with warm_service(self.llm, workload, self.prompts.warm_up, keeps=False) as service:
            answer = ask(service, self.prompts.rounds[index], workload.answer_tokens)
        return [CacheRun(Way.COLD, index, answer, 0)]

    def run_kept(self, index: int) -> list[CacheRun]:
        """Written, then from memory, then by a new process from disk."""
        workload, prompt, store = self.settings.workload, self.prompts.rounds[index], self.llm.store
        if store is None or not store.is_usable:
            raise MeasurementError(f"the folder {self.folder} cannot be used: nothing could be measured")
        with warm_service(self.llm, workload, self.prompts.warm_up, keeps=True) as service:
            store.flush()
            bytes_before = store.stats().bytes_on_disk
            started = time.perf_counter()
            written = ask(service, prompt, workload.answer_tokens)
            store.flush()
            flushed_s = time.perf_counter() - started
            num_bytes = store.stats().bytes_on_disk - bytes_before
            again = ask(service, prompt, workload.answer_tokens)
            store.flush()
        found = ask_in_process(self._job(prompt, store.folder))
        has_state = self.llm.model.config.has_state
        return [
            CacheRun(Way.WRITING, index, written, 0, flushed_s=flushed_s, disk_bytes=num_bytes),
            CacheRun(Way.MEMORY, index, again, workload.remembered_tokens(has_state=has_state)),
            CacheRun(Way.DISK, index, found.answer, workload.shareable_tokens, load_s=found.load_s),
        ]

    def run_killed(self, index: int) -> list[CacheRun]:
        """A process is killed half way, and another goes on."""
        workload, prompt = self.settings.workload, self.prompts.rounds[index]
        folder = self.folder / f"killed-{index}"
        num_stored = kill_in_process(self._job(prompt, folder, kill_at=workload.prompt_tokens // 2))
        found = ask_in_process(self._job(prompt, folder))
        shutil.rmtree(folder)
        return [CacheRun(Way.RESUMED, index, found.answer, num_stored, load_s=found.load_s)]

    def _job(self, prompt: Sequence[int], folder: Path, kill_at: int | None = None) -> ProcessJob:
        return ProcessJob(
            model=str(self.llm.path),
            dtype=self.settings.dtype,
            num_threads=torch.get_num_threads(),
            folder=str(folder),
            workload=self.settings.workload,
            prompt=tuple(prompt),
            kill_at=kill_at,
        )


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """What kind a folder is on: one in memory is no disk. None where the system does not tell."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    parents = {str(folder.resolve()), *map(str, folder.resolve().parents)}
    found = [(len(fields[1]), fields[2]) for fields in lines if len(fields) > 2 and fields[1] in parents]
    return max(found)[1] if found else None


def _told(run: CacheRun) -> str:
    cached = f", {run.answer.cached_tokens:,} tokens from the cache" if run.answer.cached_tokens else ""
    return f"{run.way.label}: first token after {run.first_token_s:.3f} s{cached}"
