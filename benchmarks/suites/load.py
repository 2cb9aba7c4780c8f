"""A card under load, beside vLLM: both are loaded on it at once, and take turns with the same requests."""

import argparse
import importlib.util
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

from benchmarks.harness import OURS, RATIOS, Bar, Bench, Results, bar_of, rotated, take_turns
from benchmarks.suite import Suite, number, some_of, switch, value
from benchmarks.suites.gpu.plan import BIG, LITTLE, PLAN
from benchmarks.suites.serve import percentile
from benchmarks.systems import Child
from penstock.kernels.device import chosen_device

VLLM = "vLLM"
AT_ONCE, STALL, CAPACITY, ARRIVALS, VARIED = "at once", "stall", "capacity", "arrivals", "varied"
SCENARIOS = (AT_ONCE, STALL, CAPACITY, ARRIVALS, VARIED)
READY, FIRST = "ready", "first after ready, over later ones"
Request = tuple[float | None, int, int]  # when it arrives (None: when all before it run), prompt, answer
_ENGINES = {OURS: "benchmarks.load_engine:Penstock", VLLM: "benchmarks.workers.load_engines:Vllm"}
_REPEATS, _LOAD_S = 5, 24.0
# Nothing is fetched or reported, and its processes talk to each other on this machine.
_VLLM_ENV = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
# Ours over vLLM's, by how a figure's name ends: the most of times, the least of rates.
_TOKENS_S, _REQUESTS_S = "tokens/s", "requests/s"
_IDLE = "no kernel to run"
_GAP, _FIRST_TOKEN, _NEXT, _WHOLE = "gap while it is read", "first token", "next token", "whole request"


@dataclass(frozen=True)
class Size:
    """Numbers of requests and tokens; a test has smaller ones."""

    bursts: tuple[tuple[int, int, int], ...] = ((64, 1024, 128), (16, 8192, 128))
    streams: tuple[int, int, int] = (16, 1024, 300)
    long: tuple[int, int] = (32_768, 16)
    settle_tokens: int = 100
    request: tuple[int, int] = (2048, 256)
    num_saturating: int = 96
    num_varied: int = 64
    varied: tuple[tuple[int, int], tuple[int, int]] = ((100, 16_000), (16, 512))
    max_running: int = 64
    cache_tokens: int = 320_000
    load_s: float = _LOAD_S
    rates: tuple[float, ...] = (6.0, 9.0)  # where there is no vLLM whose capacity they are shares of
    shares: tuple[float, ...] = (0.6, 0.9)
    varied_share: float = 0.8

    def stall(self) -> list[Request]:
        count, length, num_tokens = self.streams
        return [*[(0.0, length, num_tokens)] * count, (None, *self.long)]

    def warm_up(self, length: int) -> list[Request]:
        """Batches of every size, for what is recorded or compiled when it first comes."""
        return [(0.0, length, 16 + 3 * index) for index in range(self.max_running)]

    def many(self) -> list[Request]:
        return [(0.0, *self.request)] * self.num_saturating

    def mixture(self, seed: int) -> list[Request]:
        """Lengths log-uniform."""
        chance = random.Random(seed)

        def draw(least: int, most: int) -> int:
            return round(exp(chance.uniform(log(least), log(most))))

        return [(0.0, draw(*self.varied[0]), draw(*self.varied[1])) for _ in range(self.num_varied)]


def arriving(requests: Sequence[Request], rate: float, seed: int) -> list[Request]:
    """At random, so many a second; exactly so many, whatever was drawn."""
    chance = random.Random(seed)
    gaps = [chance.expovariate(1.0) for _ in requests]
    scale, at = len(requests) / rate / sum(gaps), 0.0
    found: list[Request] = []
    for gap, (_, length, num_tokens) in zip(gaps, requests, strict=True):
        at += gap * scale
        found.append((at, length, num_tokens))
    return found


@dataclass(frozen=True)
class Watched:
    """Requests that were run: when each arrived, and when its tokens came."""

    arrived_s: tuple[float, ...]
    stamps_s: tuple[tuple[float, ...], ...]
    idle_share: float | None = None  # of the device's time

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "Watched":
        found = answer["requests"]
        return cls(
            tuple(each["arrived_s"] for each in found),
            tuple(tuple(each["stamps_s"]) for each in found),
            answer.get("idle_share"),
        )

    @property
    def seconds(self) -> float:
        return max(stamps[-1] for stamps in self.stamps_s)

    def first_ms(self) -> list[float]:
        return [1e3 * (stamps[0] - at) for at, stamps in zip(self.arrived_s, self.stamps_s, strict=True)]

    def whole_ms(self) -> list[float]:
        return [1e3 * (stamps[-1] - at) for at, stamps in zip(self.arrived_s, self.stamps_s, strict=True)]

    def gaps_ms(self, start: float = 0.0, end: float = float("inf")) -> list[float]:
        """Those that lie, or reach, into a span of time."""
        gaps = (gap for stamps in self.stamps_s for gap in pairwise(stamps))
        return [1e3 * (later - sooner) for sooner, later in gaps if later > start and sooner < end]


@dataclass
class _Job:
    """Engines that are ready, on one budget of tokens a step."""

    bench: Bench
    size: Size
    budget: int
    repeats: int
    children: Mapping[str, Child]
    _idle: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    def run(self, system: str, requests: Sequence[Request], seed: int) -> Watched:
        how: dict[str, Any] = {
            "requests": list(requests),
            "seed": seed,
            "settle_tokens": self.size.settle_tokens,
        }
        found = Watched.of(self.children[system].ask("run", **how))
        self._idle = {} if found.idle_share is None else {_IDLE: ("%", 100 * found.idle_share)}
        return found

    def turns(self, num_rounds: int | None = None) -> Iterator[tuple[int, str]]:
        return take_turns(rotated(self.children, num_rounds or self.repeats))

    def add(self, section: str, system: str, index: int, values: Mapping[str, tuple[str, float]]) -> None:
        """What was found in the last run."""
        values = {**values, **self._idle}
        section = f"{section}, budget {self.budget:,}"
        self.bench.results.add_row(section, values, system, index)
        told = ", ".join(f"{name} {amount:,.1f} {unit}" for name, (unit, amount) in values.items())
        self.bench.say(f"{section}, round {index + 1}: {system}: {told}")
        self.bench.save()


def _percentiles(name: str, values: Sequence[float], *percents: int) -> dict[str, tuple[str, float]]:
    return {f"{name} p{each}": ("ms", percentile(values, each)) for each in percents}


def _at_once(job: _Job) -> None:
    for number_, (count, length, num_tokens) in enumerate(job.size.bursts):
        requests: list[Request] = [(0.0, length, num_tokens)] * count
        for index, system in job.turns():
            seconds = job.run(system, requests, 1000 + 10 * index + number_).seconds
            speed = count * (length + num_tokens) / seconds
            name = f"{count} x ({length:,} + {num_tokens}), {_TOKENS_S}"
            job.add(AT_ONCE, system, index, {name: (_TOKENS_S, speed)})


def _stall(job: _Job) -> None:
    """The first turn of each system is that after it was ready: nothing has warmed it up for this."""
    for index, system in job.turns(1 + job.repeats):
        run = job.run(system, job.size.stall(), 2000 + index)
        arrived, first = run.arrived_s[-1], run.stamps_s[-1][0]
        during = run.gaps_ms(arrived, first)
        values = {
            **_percentiles(_GAP, during, 50, 99),
            _FIRST_TOKEN: ("ms", 1e3 * (first - arrived)),
        }
        section = STALL if index else f"{STALL}, the first after ready"
        job.add(section, system, index, values)


def _capacity(job: _Job) -> dict[str, float]:
    """Requests a second that each can do."""
    found: dict[str, float] = {}
    for index, system in job.turns():
        run = job.run(system, job.size.many(), 3000 + index)
        found[system] = job.size.num_saturating / run.seconds
        values = {_REQUESTS_S: (_REQUESTS_S, found[system]), **_percentiles(_NEXT, run.gaps_ms(), 50, 99)}
        job.add(CAPACITY, system, index, values)
    return found


def _arrivals(job: _Job, capacity: Mapping[str, float]) -> None:
    rates = [share * capacity[VLLM] for share in job.size.shares] if VLLM in capacity else job.size.rates
    for share, rate in zip(job.size.shares, rates, strict=True):
        requests = [(0.0, *job.size.request)] * max(int(rate * job.size.load_s), 2)
        for index, system in job.turns(2):
            run = job.run(system, arriving(requests, rate, index), 4000 + index)
            values = {
                **_percentiles(_FIRST_TOKEN, run.first_ms(), 50, 99),
                **_percentiles(_NEXT, run.gaps_ms(), 50, 99),
                **_percentiles(_WHOLE, run.whole_ms(), 50),
            }
            job.add(f"{ARRIVALS} at {share:.0%}", system, index, values)
        job.bench.results.notes.append(f"{ARRIVALS} at {share:.0%}: {rate:.2f} requests a second")


def _varied(job: _Job) -> None:
    """All at once, for what each can do; then at a share of what the peer can."""
    rate = 0.0
    for system in (VLLM, OURS):
        if system in job.children and not rate:
            seconds = job.run(system, job.size.mixture(7), 5000).seconds
            rate = job.size.varied_share * job.size.num_varied / seconds
    job.bench.results.notes.append(f"{VARIED}: {rate:.2f} requests a second")
    for index, system in job.turns():
        run = job.run(system, arriving(job.size.mixture(index), rate, index), 5001 + index)
        values = {
            _REQUESTS_S: (_REQUESTS_S, job.size.num_varied / run.seconds),
            **_percentiles(_FIRST_TOKEN, run.first_ms(), 50, 99),
            **_percentiles(_NEXT, run.gaps_ms(), 50, 99),
        }
        job.add(VARIED, system, index, values)


def measure(options: argparse.Namespace, bench: Bench, size: Size | None = None) -> None:
    size = size or Size()
    if options.load_seconds:
        size = replace(size, load_s=float(options.load_seconds))
    systems = [OURS]
    if options.vllm is not None or importlib.util.find_spec("vllm") is not None:
        systems.append(VLLM)
    else:
        bench.results.notes.append("vLLM cannot be imported: it was not measured")
    settings = PLAN.models[options.shapes]
    bench.describe(f"{options.shapes} shapes, random weights, bfloat16", options, "budgets", "strict")
    for budget in options.budgets:
        with ExitStack() as stack:
            children = {
                name: stack.enter_context(_start(name, options, settings, budget, size, bench))
                for name in systems
            }
            job = _Job(bench, size, budget, options.repeats or _REPEATS, children)
            _run(job, options.cases if budget == options.budgets[-1] else (STALL,))
    compare(bench.results)


def _start(
    name: str, options: argparse.Namespace, settings: Mapping[str, Any], budget: int, size: Size, bench: Bench
) -> Child:
    started = time.perf_counter()
    env = dict(_VLLM_ENV) if name == VLLM else {}
    if name == VLLM and options.vllm is not None:
        env["PYTHONPATH"] = str(options.vllm)
    child = Child(_ENGINES[name], name, env=env)
    longest = max(size.long[0] + size.long[1], sum(most for _, most in size.varied))
    about = child.ask(
        "load",
        model=options.shapes,
        settings=dict(settings),
        budget=budget,
        max_running=size.max_running,
        cache_tokens=size.cache_tokens,
        max_len=-(-longest // 1024) * 1024 + 1024,
        memory_share=0.4,  # of the card: both are on it
        device=str(chosen_device(options.device)),
        strict=True if options.strict else None,
    )["about"]
    seconds = time.perf_counter() - started
    bench.results.notes.append(f"{name}, budget {budget:,}: {about}")
    bench.results.add(READY, f"budget {budget:,}", "s", seconds, system=name)
    bench.say(f"{name} is ready after {seconds:.1f} s: {about}")
    return child


def _run(job: _Job, cases: Sequence[str]) -> None:
    if STALL in cases:
        _stall(job)
    lengths = {job.size.streams[1], job.size.request[0]}
    if set(cases) - {STALL}:
        for system in job.children:
            for length in sorted(lengths):
                job.run(system, job.size.warm_up(length), 1)
    if AT_ONCE in cases:
        _at_once(job)
    capacity = partial(_capacity, job)
    if ARRIVALS in cases:
        _arrivals(job, capacity())
    elif CAPACITY in cases:
        capacity()
    if VARIED in cases:
        _varied(job)


def compare(results: Results) -> None:
    """Ours over vLLM's, round by round; and what the first request after a start waits for."""
    for figure in [each for each in results.figures if each.system == OURS and each.section != RATIOS]:
        results.add_ratio(figure.section, figure.section, figure.name, OURS, VLLM, as_name=figure.name)
    first = [each for each in results.figures if f"{STALL}, the first after ready" in each.section]
    for figure in [each for each in first if each.name != _IDLE]:
        later = results.figure(
            figure.name, figure.system, figure.section.replace(", the first after ready", "")
        )
        if later is not None:
            results.add(FIRST, figure.name, "x", figure.median / later.median, system=figure.system)


# By a section's beginning and a figure's name: the most that ours may be of vLLM's, or the least of a rate.
_LIMITS: tuple[tuple[str, str, float], ...] = (
    (f"{AT_ONCE}", "64 x", 1.08),
    (f"{AT_ONCE}", "16 x", 1.03),
    (f"{STALL}, budget 2,048", _GAP, 0.95),
    (f"{STALL}, budget 2,048", _FIRST_TOKEN, 0.97),
    (f"{STALL}, budget 512", _GAP, 0.9),
    (f"{STALL}, budget 512", _FIRST_TOKEN, 0.85),
    (CAPACITY, _REQUESTS_S, 1.05),
    (CAPACITY, f"{_NEXT} p50", 1.0),
    (f"{ARRIVALS} at 60%", f"{_WHOLE} p50", 1.0),
    (f"{ARRIVALS} at 90%", f"{_FIRST_TOKEN} p99", 0.6),
    (f"{ARRIVALS} at 90%", f"{_NEXT} p99", 0.6),
    (VARIED, "", 1.0),
)
_MOST_FIRST = 1.15
_MOST_READY_S = 15.0


def bars(results: Results) -> list[Bar]:
    found = []
    for ratio in results.of(RATIOS):
        for section, name, limit in _LIMITS:
            if ratio.system.startswith(section) and ratio.name.startswith(name):
                is_rate = ratio.name.endswith("/s")
                found.append(
                    bar_of(f"{ratio.system}: {ratio.name}, over {VLLM}", ratio, limit, is_lower_limit=is_rate)
                )
                break
    for figure in results.of(FIRST) + results.of(READY):
        if figure.system == OURS:
            limit = _MOST_FIRST if figure.section == FIRST else _MOST_READY_S
            found.append(bar_of(f"{figure.section}: {figure.name}", figure, limit, is_lower_limit=False))
    return found


LOAD = Suite(
    "A card under load: many requests at once, a long prompt among streams, arrivals at random, lengths of all "
    "kinds; beside vLLM, where it can be imported: both are on the card, and take turns. Takes about eight minutes.",
    measure,
    bars,
    repeats=f"rounds ({_REPEATS})",
    takes=("--device",),
    options={
        "--cases": value(some_of(SCENARIOS), SCENARIOS, "C,C", f"of {', '.join(SCENARIOS)} (all)"),
        "--shapes": {"choices": (BIG, LITTLE), "default": BIG, "help": "of the model (%(default)s)"},
        "--budgets": number(
            (512, 2048), "tokens of a step; all cases with the largest, stalls with others, too"
        ),
        "--load-seconds": number(None, f"how long requests arrive ({_LOAD_S:g})"),
        "--strict": switch("Penstock's decodes in a fixed shape"),
        "--vllm": value(Path, None, "FOLDER", "where vLLM's packages are, if not beside ours"),
    },
)
