"""No prompt is read twice: one prompt, read in every way that there is to come to its first token."""

import argparse
import gc
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.harness import NOISY_SHARE, Bar, Bench, Results, rotated, take_turns
from benchmarks.models import pieces, text_subject
from benchmarks.show import Picture
from benchmarks.suite import Suite, number, switch
from benchmarks.suites.serve import Watch, submit
from benchmarks.systems import Child, PeerError
from penstock.cache import BLOCK_TOKENS
from penstock.cache.keys import KeyChain, root_key
from penstock.engine.events import Event, Failed, Finished, GenerationRequest, PromptProgress
from penstock.engine.llm import LLM
from penstock.engine.service import Service, ServiceConfig
from penstock.errors import SettingError
from penstock.measure.growth import MeasurementError
from penstock.pictures import Panel
from penstock.plan.grids import DEFAULT_CHUNK_SIZE

FIRST_TOKEN = "time to first token"
# How a prompt comes to its first token, from the slowest to the soonest.
COLD, WRITING, RESUMED = "cold, nothing kept", "cold, written to disk", "resumed after a kill"
DISK, MEMORY = "from disk, new process", "from memory"
WAYS = (COLD, WRITING, RESUMED, DISK, MEMORY)
WRITING_OVER_COLD = "time to first token, written to disk over cold"
COLD_OVER_MEMORY = "time to first token, cold over from memory"
COLD_OVER_DISK = "time to first token, cold over from disk"
COLD_OVER_RESUMED = "time to first token, cold over resumed"
_WRITING_COST = 0.05
# By ratio: the limit, and whether it is a lower one.
LIMITS = {
    COLD_OVER_MEMORY: (50.0, True),
    COLD_OVER_DISK: (10.0, True),
    WRITING_OVER_COLD: (1 + _WRITING_COST, False),
}
_DTYPE = "bfloat16"
_PROMPT_TOKENS, _QUICK_TOKENS = 8000, 2000
_REPEATS, _QUICK_REPEATS = 5, 3
# The store's size limit: nothing is to be evicted while others are measured.
_UNLIMITED_BYTES = 1 << 40
METHOD = (
    "a new prompt every round, read in every way; another way begins each round. Cold: a service that keeps nothing. "
    "Written to disk: one that keeps what it reads in memory, and writes it to a new folder meanwhile. From memory: "
    "the same service is asked again when all is on disk. These have run a short prompt before. From disk: a new "
    "process on that folder, whose first request this is. Resumed: a process is killed (SIGKILL) when half of the "
    "prompt is on disk, and a new one goes on. Times are from a request's submission to its first token: looking on "
    "disk, reading and checking files are in it, loading the model is not. Files are in the system's file cache, "
    "since they were written just before"
)


@dataclass(frozen=True)
class Workload:
    """Numbers of tokens."""

    prompt_tokens: int = _PROMPT_TOKENS
    chunk: int = DEFAULT_CHUNK_SIZE
    answer_tokens: int = 8  # which must be the same whatever came from the cache

    def __post_init__(self) -> None:
        if self.prompt_tokens <= self.chunk:
            because, beside = "a process is to be killed between two chunks", {"chunk": self.chunk}
            accepted = "more tokens than a chunk has"
            raise SettingError("prompt_tokens", self.prompt_tokens, accepted, because=because, beside=beside)

    @property
    def shareable_tokens(self) -> int:
        """Those that can come from the cache: whole blocks, and never the last token, whose logits are wanted."""
        return (self.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def remembered_tokens(self, *, has_state: bool) -> int:
        """Those that memory gives: where the prompt ends with a block, all but the last token, unless there is a
        state, which cannot go back by one."""
        ends_with_block = self.prompt_tokens % BLOCK_TOKENS == 0 and not has_state
        return self.prompt_tokens - 1 if ends_with_block else self.shareable_tokens

    @property
    def warm_up_tokens(self) -> int:
        """A whole chunk, and one of a block: what is read after a hit."""
        return self.chunk + BLOCK_TOKENS

    @property
    def cache_tokens(self) -> int:
        """Room for a prompt, and for what is kept of others."""
        return 2 * (self.prompt_tokens + self.answer_tokens + self.warm_up_tokens)


@dataclass(frozen=True)
class Reply:
    """What came back of a prompt."""

    first_token_s: float  # from the submission, which looks on disk, to the first token
    token_ids: tuple[int, ...]
    cached_tokens: int  # of the prompt, that were not read


def request(service: Service, prompt: Sequence[int], num_tokens: int) -> Reply:
    """One request, alone. What earlier ones left behind is collected first, outside the time."""
    gc.collect()
    started = time.perf_counter()
    watch = submit(service, prompt, num_tokens, Watch())
    watch.finish(service, num_tokens)
    return Reply(watch.stamps[0] - started, tuple(watch.token_ids), watch.cached_tokens)


def open_service(llm: LLM, work: Workload, *, keeps: bool) -> Service:
    """Without `keeps` it shares and stores nothing."""
    return Service(llm, ServiceConfig(cache_tokens=work.cache_tokens, reuse=keeps))


class StoreEngine:
    """In a process of its own: it reads a prompt with what another has left on disk, or until it is to be killed."""

    def load(
        self, model: str, dtype: Any, threads: int, folder: str, workload: dict[str, int]
    ) -> dict[str, float]:
        """A model with a store. What one process keeps there another finds, if its settings are the same."""
        self._work = Workload(**workload)
        store: dict[str, Any] = {"cache_dir": Path(folder), "cache_size": _UNLIMITED_BYTES}
        self.llm = LLM(model, dtype=dtype, chunk=self._work.chunk, threads=threads, **store)
        return {"load_s": self.llm.load_s}

    def read(self, prompt: list[int]) -> dict[str, Any]:
        with self.llm, open_service(self.llm, self._work, keeps=True) as service:
            return asdict(request(service, prompt, self._work.answer_tokens))

    def read_until(self, prompt: list[int], num_tokens: int) -> dict[str, int]:
        """Tokens that are on disk when so many were read. The engine's thread then waits, to be killed."""
        halted, over = threading.Event(), threading.Event()
        stored: list[int] = []

        def listen(event: Event) -> None:
            if isinstance(event, PromptProgress) and num_tokens <= event.progress.num_done < len(prompt):
                stored.append(_stored_tokens(self.llm, prompt[: event.progress.num_done]))
                over.set()
                halted.wait()
            if isinstance(event, Finished | Failed):
                over.set()

        self._service = open_service(self.llm, self._work, keeps=True)
        self._service.submit(GenerationRequest(prompt, self._work.answer_tokens, ignore_eos=True), listen)
        over.wait()
        if not stored:
            raise MeasurementError("the prompt was read in one chunk")
        return {"stored_tokens": stored[0]}


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


@dataclass
class Subject:
    """A model with a store, and a prompt for every round. One service lives at a time, so that none waits for the
    threads of another."""

    engine: StoreEngine
    settings: dict[str, Any]  # of the engine, for others of its kind
    work: Workload
    prompts: Sequence[Sequence[int]]  # of the rounds, and the last one to warm up with
    folder: Path
    results: Results
    say: Callable[[str], None]

    def run_cold(self, index: int) -> None:
        with open_service(self.engine.llm, self.work, keeps=False) as service:
            request(service, self.prompts[-1], self.work.answer_tokens)
            reply = request(service, self.prompts[index], self.work.answer_tokens)
        self._add(COLD, index, reply, 0)

    def run_kept(self, index: int) -> None:
        """Written, then from memory, then by a new process from disk."""
        prompt, work, llm = self.prompts[index], self.work, self.engine.llm
        store = llm.store
        if store is None or not store.is_usable:
            raise MeasurementError(f"the folder {self.folder} cannot be used: nothing could be measured")
        with open_service(llm, work, keeps=True) as service:
            request(service, self.prompts[-1], work.answer_tokens)
            store.flush()
            bytes_before, started = store.stats().bytes_on_disk, time.perf_counter()
            written = request(service, prompt, work.answer_tokens)
            store.flush()
            flushed_s = time.perf_counter() - started
            num_bytes = store.stats().bytes_on_disk - bytes_before
            again = request(service, prompt, work.answer_tokens)
            store.flush()
        self._add(WRITING, index, written, 0)
        self.results.add("written", "all on disk after", "s", flushed_s, round_index=index)
        self.results.add("written", "on disk", "MiB", num_bytes / 2**20, round_index=index)
        self._add(MEMORY, index, again, work.remembered_tokens(has_state=llm.model.config.has_state))
        self._add(DISK, index, self._in_process(prompt, store.folder), work.shareable_tokens)

    def run_killed(self, index: int) -> None:
        """A process is killed half way, and another goes on."""
        prompt, folder = self.prompts[index], self.folder / f"killed-{index}"
        with Child("benchmarks.suites.cache:StoreEngine", "the process that is killed") as child:
            child.ask("load", **{**self.settings, "folder": str(folder)})
            reply = child.ask("read_until", prompt=list(prompt), num_tokens=self.work.prompt_tokens // 2)
            child.kill()
        self._add(RESUMED, index, self._in_process(prompt, folder), reply["stored_tokens"])
        shutil.rmtree(folder)

    def _in_process(self, prompt: Sequence[int], folder: Path) -> Reply:
        with Child("benchmarks.suites.cache:StoreEngine", "a process that reads from disk") as child:
            loaded = child.ask("load", **{**self.settings, "folder": str(folder)})
            reply = child.ask("read", prompt=list(prompt))
        self.results.add("model loaded by a new process", "after", "s", loaded["load_s"])
        return Reply(reply["first_token_s"], tuple(reply["token_ids"]), reply["cached_tokens"])

    def _add(self, way: str, index: int, reply: Reply, expected: int) -> None:
        """All that can come from the cache does, and whatever came from it, the answer is a cold engine's."""
        self.results.add_row(FIRST_TOKEN, {"seconds": ("s", reply.first_token_s)}, way, index, NOISY_SHARE)
        name = f"{way}, round {index + 1}: {reply.cached_tokens} tokens from the cache, where {expected} are there"
        self.results.require(FIRST_TOKEN, name, reply.cached_tokens == expected)
        self.results.traces.setdefault("answers", []).append([index, way, list(reply.token_ids)])
        cached = f", {reply.cached_tokens:,} tokens from the cache" if reply.cached_tokens else ""
        self.say(f"round {index + 1}: {way}: first token after {reply.first_token_s:.3f} s{cached}")


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    usual = _QUICK_TOKENS if options.quick else _PROMPT_TOKENS
    work = Workload(options.prompt_tokens or usual, options.chunk)
    num_rounds = options.repeats or (_QUICK_REPEATS if options.quick else _REPEATS)
    subject = text_subject(options.model)
    subject.require_room(work.prompt_tokens, work.answer_tokens, "fewer --prompt-tokens")
    prompts = pieces(subject, [*[work.prompt_tokens] * num_rounds, work.warm_up_tokens])
    with TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        settings = {
            "model": str(subject.path),
            "dtype": options.dtype,
            "threads": torch.get_num_threads(),
            "workload": asdict(work),
        }
        more = {"workload": asdict(work), "file_system": file_system(folder), "method": METHOD}
        bench.describe(subject.description, options, "dtype", **more)
        engine = StoreEngine()
        engine.load(**settings, folder=str(folder / "kept"))
        with engine.llm:
            own = Subject(engine, settings, work, prompts, folder, bench.results, bench.say)
            turns = (own.run_cold, own.run_kept, own.run_killed)
            try:
                for index, turn in take_turns(rotated(turns, num_rounds)):
                    turn(index)
            except PeerError as error:
                raise MeasurementError(str(error)) from error
    _judge_answers(bench.results)
    compare(bench.results)


def _judge_answers(results: Results) -> None:
    answers = {(index, way): tokens for index, way, tokens in results.traces.pop("answers")}
    for (index, way), tokens in answers.items():
        name = f"{way}, round {index + 1}: the answer is that of the cold run"
        results.require(FIRST_TOKEN, name, tokens == answers[index, COLD])


def compare(results: Results) -> None:
    """Round by round. The cost of writing is judged by a few percent, so its quartiles must lie no further apart."""
    results.arrange(WAYS)
    most = _WRITING_COST if _has_bars(results) else None
    for label, over, under, most_spread in (
        (WRITING_OVER_COLD, WRITING, COLD, most),
        (COLD_OVER_MEMORY, COLD, MEMORY, None),
        (COLD_OVER_DISK, COLD, DISK, None),
        (COLD_OVER_RESUMED, COLD, RESUMED, None),
    ):
        results.add_ratio(
            label, FIRST_TOKEN, "seconds", over, under, as_name="ratio", most_spread=most_spread
        )


def _has_bars(results: Results) -> bool:
    work = results.settings["workload"]
    is_usual: bool = results.settings["dtype"] == _DTYPE and work["chunk"] == DEFAULT_CHUNK_SIZE
    return is_usual and int(work["prompt_tokens"]) >= _PROMPT_TOKENS


def _bars(results: Results) -> list[Bar]:
    """For bfloat16, the default chunk and prompts as long as the default or longer."""
    return results.ratio_bars(LIMITS) if _has_bars(results) else []


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """What kind a folder is on: one in memory is no disk. None where the system does not tell."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    parents = {str(folder.resolve()), *map(str, folder.resolve().parents)}
    found = [(len(fields[1]), fields[2]) for fields in lines if len(fields) > 2 and fields[1] in parents]
    return max(found)[1] if found else None


def _picture(results: Results) -> Picture:
    figures = results.of(FIRST_TOKEN)
    series = {each.system + " (noisy)" * each.is_noisy: {"": each.values} for each in figures}
    tokens = results.settings["workload"]["prompt_tokens"]
    panel = Panel("Time to the first token, model loading aside", "s", series, "", is_log=True)
    return Picture(f"A prompt of {tokens:,} tokens, the first time and again", [panel])


CACHE = Suite(
    "No prompt is read twice: time to the first token of a prompt that nothing is known of, of one that is written "
    "to disk meanwhile, of one that is in memory, of one that a new process finds on disk, and of one that goes on "
    "after a kill. All take turns, on a new prompt every round, and all answers must be the same. A figure whose "
    "repeats lie too far apart is not given: its cell reads 'noisy', and the exit status is 3. Takes about six "
    "minutes on two cores, and a gigabyte of the system's temporary folder.",
    _measure,
    _bars,
    _picture,
    repeats="rounds (5; quick: 3)",
    options={
        "--prompt-tokens": number(None, f"tokens of a prompt ({_PROMPT_TOKENS})"),
        "--chunk": number(DEFAULT_CHUNK_SIZE, "tokens per chunk"),
        "--quick": switch(
            f"prompts of {_QUICK_TOKENS} tokens and {_QUICK_REPEATS} rounds, where nothing else is given; bars on "
            "speed are for longer ones"
        ),
    },
)
