"""A soak: many clients at once, well-behaved and not, against a server, for as long as one likes.

    python -m tests.server.soak --seconds 600 --clients 32 --model llama

Every answer that is read to its end is the one that the request has alone. There is no failure of the server's own,
and nobody waits forever. When all have gone, nothing is left of them: no requests, blocks, slots, threads, files, nor
memory.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.engine.events import GenerationRequest
from penstock.engine.llm import LLM
from penstock.engine.service import Service, ServiceConfig
from penstock.frontends.server import body_reader, connections
from penstock.frontends.server.settings import ServerSettings
from penstock.plan.policy import ScheduleConfig, SchedulePolicy
from tests.byte_models import model_of_bytes
from tests.server.running import NAME, Running, running
from tests.server.soak_cases import MAX_BODY_BYTES, Case, Sizes, make_cases, make_refusals
from tests.server.soak_checks import ErrorLog, Resources, Submits, check_idle, check_resources, watch
from tests.server.soak_clients import HELD, Client, Nuisance, Tally, Traffic

# The part of a phase after which memory, threads and files are to grow no more.
_WARM_UP = 0.3
# What a soak must have seen, or it shows little.
_SIGHTS = (
    "answers compared",
    "429s",
    "refused",
    "half sent",
    "read slowly",
    "served well",
    "hung up on idle",
    "hung up on half",
    "hung up on unread",
    "left at once",
    "left waiting",
    "left in prompt",
    "left in answer",
    "cancels",
    "preemptions",
)
_QUEUE: dict[str, Any] = {"max_running": 12, "max_waiting": 6}
PHASES = (
    ScheduleConfig(policy=SchedulePolicy.MIXED, chunk_size=128, **_QUEUE),
    ScheduleConfig(policy=SchedulePolicy.DECODE_PRIORITY, chunk_size=64, max_running_per_key=5, **_QUEUE),
)
# Of the clients, of the one that comes to nothing, and of the one that is well behaved and has its own.
_KEYS = ("one", "two", "three")
_NUISANCE, _WELL = "nuisance", "well"
# Clients that do not send, or do not read, are given less time than usual, so that all of it happens.
_STALLED_S, _STALLED_PART = 10.0, 1 / 6  # at most, and of a soak
_HASTE = ((connections, "BEGIN_S", 1.5), (body_reader, "BODY_GRACE_S", 1.5))


@dataclass(frozen=True)
class Soak:
    """How to soak a model: each phase is a server of its own."""

    seconds: float
    num_clients: int = 32
    seed: int = 0
    phases: tuple[ScheduleConfig, ...] = PHASES
    num_held: int = 24  # connections that come to nothing
    num_busy: int = 0  # processes that keep the processor busy
    patience_s: float = 60.0  # the longest that a well-behaved client waits
    max_rounds: int = 10  # of all phases, in order to see all there is to see
    cache_tokens: int = 4_352  # little, so that requests have to give way
    sizes: Sizes = field(default_factory=Sizes)
    strict: bool = False
    limit_s: float = 180.0  # the longest wait for an answer, that nobody should come near
    rest_s: float = 60.0  # how soon nothing is left of clients that have gone
    max_growth_bytes: int = 32 << 20  # of a phase, after its warm-up, twice in a row


@dataclass(frozen=True)
class Report:
    """How it went. `failures` are what must not be; `unseen` is what should have happened and did not."""

    tally: Tally
    growths_bytes: tuple[int, ...]  # of memory, phase by phase
    seconds: float

    @property
    def failures(self) -> list[str]:
        return self.tally.failures

    @property
    def unseen(self) -> list[str]:
        return _unseen(self.tally)

    def lines(self) -> list[str]:
        counts, waits = self.tally.counts, sorted(self.tally.first_token_s)
        growths = ", ".join(f"{growth / 2**20:+.1f} MiB" for growth in self.growths_bytes)
        first = f"{waits[int(0.95 * (len(waits) - 1))]:.2f} s" if waits else "none"
        lefts = sum(number for what, number in counts.items() if what.startswith("left "))
        return [
            f"{counts['requests']} requests in {self.seconds:.0f} s: {counts['answers compared']} answers compared, "
            f"{lefts} left midway ({counts['left in prompt']} in the prompt, {counts['left in answer']} in the "
            f"answer), {counts['refused']} refused, {counts['half sent']} half sent, {counts['429s']} told to wait, "
            f"{counts['503s']} not let in",
            f"{counts['served well']} served well, {counts['read slowly']} read slowly; hung up on "
            + ", ".join(f"{counts[f'hung up on {kind}']} {kind}" for kind in HELD),
            f"{counts['preemptions']} preemptions, {counts['cancels']} cancels, {counts['looks']} looks on the way; "
            f"first token within {first} for 95%; memory {growths} after warm-up",
            *(f"FAILED: {what}" for what in self.failures),
            *(f"NOT SEEN: {what}" for what in self.unseen),
        ]


def prepare(llm: LLM, how: Soak) -> list[Case]:
    """The requests, with their answers alone; and whatever a first time takes that later ones do not."""
    _meet_shapes(llm, max(schedule.chunk_size + schedule.max_running for schedule in how.phases))
    return make_cases(llm, how.sizes, seed=how.seed, strict=how.strict)


def soak(llm: LLM, how: Soak, cases: Sequence[Case]) -> Report:
    """Run every phase, or up to the first that fails. Where that did not see all there is to see, again."""
    started = time.monotonic()
    tally = Tally()
    growths: list[int] = []
    with ErrorLog(tally).listening(), _hastily(), _busy(how.num_busy):
        for index, schedule in enumerate(how.phases * how.max_rounds):
            has_seen_all = index >= len(how.phases) and not _unseen(tally)
            if has_seen_all or tally.has_failed.is_set():
                break
            growths.append(_soak_phase(llm, how, cases, schedule, index, tally))
    return Report(tally, tuple(growths), time.monotonic() - started)


@contextmanager
def _hastily() -> Iterator[None]:
    before = [getattr(module, name) for module, name, _ in _HASTE]
    for module, name, seconds in _HASTE:
        setattr(module, name, seconds)
    try:
        yield
    finally:
        for (module, name, _), seconds in zip(_HASTE, before, strict=True):
            setattr(module, name, seconds)


@contextmanager
def _busy(number: int) -> Iterator[None]:
    """Others want the processor, too."""
    children = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def _unseen(tally: Tally) -> list[str]:
    return [what for what in _SIGHTS if not tally.counts[what]]


def _meet_shapes(llm: LLM, most_rows: int) -> None:
    """Run a step of every number of rows: the library of matrix products keeps a kernel for each that it has met."""
    config = ServiceConfig(schedule=ScheduleConfig(chunk_size=0), cache_tokens=most_rows)
    with Service(llm, config) as quiet:
        for num_rows in range(1, most_rows + 1):
            quiet.run(GenerationRequest([0] * num_rows, max_tokens=1))


def _soak_phase(
    llm: LLM, how: Soak, cases: Sequence[Case], schedule: ScheduleConfig, index: int, tally: Tally
) -> int:
    """The growth of memory after the warm-up, in bytes."""
    name = f"{schedule.policy}, chunk {schedule.chunk_size}"
    config = ServiceConfig(schedule=schedule, cache_tokens=how.cache_tokens, strict=how.strict)
    settings = ServerSettings(
        NAME,
        api_keys=(*_KEYS, _NUISANCE, _WELL),
        max_body_bytes=MAX_BODY_BYTES,
        max_connections=how.num_clients + how.num_held // 2 + 4,
        stalled_s=min(_STALLED_S, how.seconds * _STALLED_PART),
    )
    seconds = how.seconds / len(how.phases)
    before = Resources.now()
    with ExitStack() as stack:
        server = replace(stack.enter_context(running(llm, settings, config)), key=_WELL)
        submits = stack.enter_context(Submits().of(server.service))
        refusals = make_refusals(server.service.max_request_tokens)
        traffic = Traffic(cases, refusals, how.limit_s, is_exact=how.strict, patience_s=how.patience_s)
        rng = random.Random(f"{how.seed} {index}")
        _load(server, traffic, how, seconds * _WARM_UP, rng, tally)
        check_idle(server, submits, tally, how.rest_s)
        # What is lost is lost again the next time; the memory of a process may grow by chance once.
        for _ in range(2):
            warm = Resources.now()
            _load(server, traffic, how, seconds * (1 - _WARM_UP), rng, tally)
            metrics = check_idle(server, submits, tally, how.rest_s)
            rested = check_resources(warm, tally, how.rest_s, f"{name}, at rest", is_running=True)
            growth_bytes = rested.allocated_bytes - warm.allocated_bytes
            if growth_bytes <= how.max_growth_bytes or tally.has_failed.is_set():
                break
        for what in ("preemptions", "cancels"):
            tally.count(what, int(metrics[f"{what}_total"]))
    check_resources(before, tally, how.rest_s, f"{name}, after the server's end")
    if growth_bytes > how.max_growth_bytes:
        tally.fail(
            f"{name}: memory grew by {growth_bytes / 2**20:.1f} MiB, and may by {how.max_growth_bytes / 2**20:g}"
        )
    return growth_bytes


def _load(
    server: Running, traffic: Traffic, how: Soak, seconds: float, rng: random.Random, tally: Tally
) -> None:
    """Clients for so many seconds, or until something fails; all have ended when this returns."""
    is_over = threading.Event()

    def client(key: str) -> Client:
        return Client(server.port, traffic, tally, random.Random(rng.getrandbits(64)), key)

    runs = [client(rng.choice(_KEYS)).run for _ in range(how.num_clients)]
    runs.append(client(_WELL).serve_well)
    if how.num_held:
        runs.append(Nuisance(server.port, traffic, tally, rng, _NUISANCE, how.num_held).run)
    threads = [threading.Thread(target=run, args=(is_over,), daemon=True) for run in runs]
    threads.append(
        threading.Thread(target=watch, args=(server, tally, is_over, traffic.limit_s), daemon=True)
    )
    for thread in threads:
        thread.start()
    tally.has_failed.wait(seconds)
    is_over.set()
    # A client gives up by itself at its limit.
    deadline = time.monotonic() + 2 * traffic.limit_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    if num_left := sum(thread.is_alive() for thread in threads):
        tally.fail(f"{num_left} clients never came back")


def load_model(name: str, folder: Path) -> LLM:
    """`llama` and `hybrid` are tiny and random, in float32, where no two tokens are nearly as likely."""
    if name == "smollm2":
        return LLM(name)
    family = {"llama": "llama", "hybrid": "qwen3_5_text"}[name]
    return LLM(model_of_bytes(family, folder / name), dtype="float32", chunk=64, threads=1)


def soak_of(name: str, seconds: float, num_clients: int, seed: int) -> Soak:
    """How a model of this name is soaked: SmolLM2 is slower, and its tokens may be nearly as likely."""
    how = Soak(seconds, num_clients, seed)
    if name == "smollm2":
        # Strict, so that bits are those alone.
        return replace(
            how,
            sizes=Sizes(prompt=1500, answer=64, num_cases=30),
            cache_tokens=1_664,
            strict=True,
            limit_s=300.0,
            patience_s=120.0,
            max_growth_bytes=64 << 20,
        )
    return how


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server.soak", description="Soak a server.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--model", choices=("llama", "hybrid", "smollm2"), default="llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--busy", type=int, default=0, help="processes that keep the processor busy")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as folder:
        llm = load_model(given.model, Path(folder))
        how = replace(soak_of(given.model, given.seconds, given.clients, given.seed), num_busy=given.busy)
        report = soak(llm, how, prepare(llm, how))
    print(f"soak of {given.model}, {given.clients} clients, seed {given.seed}, {given.busy} busy loops")
    for line in report.lines():
        print(f"  {line}")
    return 1 if report.failures or report.unseen else 0


if __name__ == "__main__":
    sys.exit(main())
