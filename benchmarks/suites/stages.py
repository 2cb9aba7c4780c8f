"""Stages on the processors of one machine: how much sooner a prompt is read, how fast several answers go on at once,
what each stage holds, what a slow link does, and whether the plan said so."""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.checkout import Engine
from benchmarks.harness import RATIOS, Bar, Bench, Results, rotated, take_turns
from benchmarks.models import Subject, text_subject
from benchmarks.namespaces import Joined, NamespaceError, enter_namespace, joined_namespaces
from benchmarks.suite import Suite, number, some_of
from benchmarks.systems import ROOT, Child, PeerError
from penstock.errors import SettingError
from penstock.plan.pipeline import (
    STEP_OVERHEAD_S,
    Link,
    Machine,
    PartCosts,
    prompt_steps,
    run_pipeline,
    stages_of,
)
from penstock.plan.step_time import StepTimeCoefficients

ALONE, TWO_THREADS, STAGES = "1 x 1 thread", "1 x 2 threads", "2 stages x 1 thread"
NOW, BEFORE = "this checkout", "the other checkout"
PROCESSOR, READING, DECODING, MEMORY, LINKS, PLAN = (
    "processor time without stages",
    "first token",
    "answers",
    "what a stage holds",
    "links",
    "plan over measured",
)
ONE_STREAM, MANY_STREAMS = "one answer", "8 answers"
SHARE, LIMITED = "largest stage, embedding aside", "under a limit that refuses one process, two stages answer"
LOOPBACK, FAST, SLOW = "loopback", "1 Gb/s", "4 Mb/s"
RATES = {FAST: 1_000_000_000, SLOW: 4_000_000}
CASES = ("read", "decode", "memory", "links", "before")
# By ratio: the limit, and whether it is a lower one.
SPEED_UP, OF_THREADS, NO_SLOWER = (
    "2 stages over 1 x 1",
    "2 stages over 1 x 2",
    "the other's time over this one's",
)
MANY_RATIO, ONE_MORE, FAST_RATIO = (
    "8 answers, 2 stages over 1 x 1",
    "one answer, ms more a token",
    "1 Gb/s over loopback",
)
_LIMITS = {
    SPEED_UP: (1.7, True),
    OF_THREADS: (0.9, True),
    MANY_RATIO: (1.5, True),
    SHARE: (0.55, False),
    FAST_RATIO: (1.05, False),
}
_PLAN_ERROR = 0.1
_NO_SLOWER = 0.99
# Processor time differs by some percent from round to round, and a round is short.
_ROUNDS_MORE = 4
_REPEATS, _NUM_STREAMS = 5, 8
_CACHE_TOKENS = 60_000


class StagesEngine(Engine):
    """Penstock in a process of its own, with stages or without."""

    def load(
        self, model: str, processors: list[int] | None = None, namespace: str | None = None, **options: Any
    ) -> dict[str, Any]:
        if processors:
            os.sched_setaffinity(0, processors)
        if namespace:
            enter_namespace(namespace)
        return super().load(model, **options)

    def first_token(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds from the call to the first token, and the token."""
        begun = time.perf_counter()
        with self._llm.stream(prompt, max_tokens=1, ignore_eos=True) as stream:
            for _ in stream:
                pass
        return {"seconds": time.perf_counter() - begun, "tokens": list(stream.result.token_ids)}

    def answers(self, prompts: list[list[int]], num_tokens: int, past: int) -> dict[str, Any]:
        """Seconds for a token of each answer, from when all have `past` of them to when the first has all."""
        from benchmarks.suites.serve import Watch, submit
        from penstock.engine.service import Service, ServiceConfig

        with Service(self._llm, ServiceConfig(reuse=False, cache_tokens=1 << 14)) as service:
            watches = [submit(service, prompt, num_tokens, Watch()) for prompt in prompts]
            for watch in watches:
                watch.finish(service, num_tokens)
        begun = max(watch.stamps[past - 1] for watch in watches)
        ended = min(watch.stamps[-1] for watch in watches)
        num_made = sum(begun < stamp <= ended for watch in watches for stamp in watch.stamps)
        return {"tokens_per_s": num_made / (ended - begun), "tokens": [watch.token_ids for watch in watches]}

    def held(self) -> dict[str, Any]:
        """Bytes of weights, and of the cache for each token, by stage."""
        own, pipeline = self._llm.model, getattr(self._llm, "stages", None)
        parts = [
            (stage.weight_bytes, stage.cache.bytes_per_token)
            for stage in (pipeline.stages if pipeline else ())
        ]
        return {"stages": [*parts, (own.num_weight_bytes, own.cache_spec.bytes_per_token)]}

    def layers(self) -> dict[str, Any]:
        """How many each stage has."""
        pipeline = getattr(self._llm, "stages", None)
        return {"layers": [len(part) for part in pipeline.layers] if pipeline else []}

    def step_times(self) -> dict[str, Any]:
        return asdict(self._llm.times.coefficients)

    def limited(
        self, model: str, limit_bytes: int, cache_tokens: int, prompt: list[int], **options: Any
    ) -> dict[str, Any]:
        """The tokens of a service that has no more memory of its own than this, above what its imports take; its
        stages inherit the limit."""
        import resource

        from benchmarks.suites.serve import Watch, submit
        from penstock.engine.service import Service, ServiceConfig

        limit = _data_bytes() + limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        super().load(model, **options)
        with Service(self._llm, ServiceConfig(cache_tokens=cache_tokens)) as service:
            watch = submit(service, prompt, 4, Watch())
            watch.finish(service, 4)
        return {"tokens": watch.token_ids}


def _data_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    raise PeerError("this system does not tell a process's data")


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        raise SettingError("two stages need two processors, and this process may use one")
    subject = text_subject(options.model)
    bench.describe(
        subject.description, options, "lengths", "chunk", processors=processors, tree=str(options.tree or "")
    )
    _Suite(options, bench, subject, processors).run()


class _Suite:
    def __init__(
        self, options: argparse.Namespace, bench: Bench, subject: Subject, processors: list[int]
    ) -> None:
        self.options, self.bench, self.results = options, bench, bench.results
        self.subject, self.processors = subject, processors
        self.repeats = options.repeats or _REPEATS
        longest = max(*options.lengths, _NUM_STREAMS * options.stream_prompt)
        self.text = list(subject.prompt(longest + self.repeats + 2))

    def run(self) -> None:
        with ExitStack() as stack:
            if {"read", "decode", "links"} & set(self.options.cases):
                self.children = {name: stack.enter_context(self._started(name)) for name in self._systems()}
                self.layers = self.children[STAGES].ask("layers")["layers"]
                self.results.settings["layers"] = self.layers
            for case in self.options.cases:
                getattr(self, f"_{case}")()
            if "read" in self.options.cases:
                self._compare_plan()

    def _systems(self) -> list[str]:
        return [ALONE, TWO_THREADS, STAGES]

    @contextlib.contextmanager
    def _started(self, name: str, **more: Any) -> Iterator[Child]:
        by_name: dict[str, dict[str, Any]] = {
            ALONE: {"threads": 1, "processors": self.processors[:1]},
            TWO_THREADS: {"threads": 2, "processors": self.processors[:2]},
            STAGES: {
                "threads": 2,
                "stages": 2,
                "layers": self.options.layers,
                "processors": self.processors[:2],
            },
        }
        with Child("benchmarks.suites.stages:StagesEngine", name) as child:
            model = {"model": str(self.subject.path), "chunk": self.options.chunk}
            child.ask("load", **{**model, **by_name[name], **more})
            child.ask("measure", prompt=self.text[: 2 * self.options.chunk], num_tokens=4)
            yield child

    def _prompt(self, length: int, index: int) -> list[int]:
        """No two rounds have a block in common."""
        return self.text[index + 1 : index + 1 + length]

    # A prompt

    def _read(self) -> None:
        tokens: dict[tuple[int, int], set[Any]] = {}
        for length in self.options.lengths:
            for index, name in take_turns(rotated(self._systems(), self.repeats)):
                answer = self.children[name].ask("first_token", prompt=self._prompt(length, index))
                seconds = answer["seconds"]
                tokens.setdefault((length, index), set()).add(tuple(answer["tokens"]))
                self.results.add_row(READING, {_case(length): ("s", seconds)}, name, index)
                self.bench.say(f"{length:,} tokens, round {index + 1}: {name}: {seconds:.3f} s")
            pairs = {SPEED_UP: ALONE, OF_THREADS: TWO_THREADS}
            for label, under in pairs.items():
                self.results.add_ratio(label, READING, _case(length), STAGES, under, inverse=True)
        same = all(len(found) == 1 for found in tokens.values())
        self.results.require(READING, "all systems have the same first tokens", same)

    def _compare_plan(self) -> None:
        """What the clock says, by the step times of the one stage of one thread, over what was measured."""
        times = self._step_times
        for length in self.options.lengths:
            for name, shares in ((ALONE, [1.0]), (STAGES, self._shares(length))):
                self._add_prediction(f"{name}, {_case(length)}", name, READING, length, shares, Link(), times)

    def _add_prediction(
        self,
        label: str,
        system: str,
        section: str,
        length: int,
        shares: Sequence[float],
        link: Link,
        times: StepTimeCoefficients,
    ) -> None:
        measured = self.results.figure(_case(length), system, section)
        if measured is None:
            return
        steps = prompt_steps(times, length, self.options.chunk, 2 * self.subject.config.hidden_size)
        overhead = STEP_OVERHEAD_S if len(shares) > 1 else 0.0
        predicted = run_pipeline(steps, shares, link, overhead_s=overhead).seconds
        self.results.add(PLAN, label, "x", predicted / measured.median)
        self.bench.say(f"{label}: {predicted:.3f} s predicted, {measured.median:.3f} s measured")

    @property
    def _step_times(self) -> StepTimeCoefficients:
        if not hasattr(self, "_kept_times"):
            if "read" not in self.options.cases:
                for length in self.options.lengths:
                    self.children[ALONE].ask("first_token", prompt=self._prompt(length, 0))
            self._kept_times = StepTimeCoefficients(**self.children[ALONE].ask("step_times"))
            self.results.settings["step_times"] = asdict(self._kept_times)
        return self._kept_times

    def _shares(self, length: int) -> list[float]:
        costs = PartCosts.of_model(self.subject.config, past=length / 2)
        machines = [Machine()] * len(self.layers)
        return [stage.share for stage in stages_of(costs, self.layers, machines)]

    # Answers

    def _decode(self) -> None:
        for num_streams, case in ((1, ONE_STREAM), (_NUM_STREAMS, MANY_STREAMS)):
            for index, name in take_turns(rotated((ALONE, STAGES), self.repeats)):
                length = self.options.stream_prompt
                prompts = [self._prompt(length, index + place * length) for place in range(num_streams)]
                asked = {"prompts": prompts, "num_tokens": self.options.decode_tokens + 8, "past": 8}
                speed = self.children[name].ask("answers", **asked)["tokens_per_s"]
                self.results.add_row(DECODING, {case: ("tokens/s", speed)}, name, index)
                self.bench.say(f"{case}, round {index + 1}: {name}: {speed:.1f} tokens/s")
        self.results.add_ratio(MANY_RATIO, DECODING, MANY_STREAMS, STAGES, ALONE)
        one = [self.results.figure(ONE_STREAM, name, DECODING) for name in (STAGES, ALONE)]
        if all(one):
            slow, fast = (figure.values for figure in one if figure)
            more = (1e3 / a - 1e3 / b for a, b in zip(slow, fast, strict=True))
            self.results.add(DECODING, ONE_MORE, "ms", *more)

    # Memory

    def _memory(self) -> None:
        """Weights and a cache; then a limit between what one process and the larger of two needs."""
        with ExitStack() as stack:
            held = {
                name: stack.enter_context(self._started(name)).ask("held")["stages"]
                for name in (ALONE, STAGES)
            }
        ((weights, per_token),) = held[ALONE]
        # The embedding, which two of them have.
        twice = max(sum(stage[0] for stage in held[STAGES]) - weights, 0)
        whole = weights - twice + _CACHE_TOKENS * per_token
        shares = [(own - twice + _CACHE_TOKENS * each) / whole for own, each in held[STAGES]]
        self.results.add(MEMORY, SHARE, "x", max(shares))
        self.results.settings["held"] = held
        limit = int(0.8 * whole)
        found: dict[str, Any] = {}
        asked: dict[str, Any] = {"limit_bytes": limit, "cache_tokens": _CACHE_TOKENS, "threads": 2}
        for name, num_stages in ((ALONE, None), (STAGES, 2)):
            asked |= {"model": str(self.subject.path), "prompt": self.text[:300], "stages": num_stages}
            try:
                with Child("benchmarks.suites.stages:StagesEngine", f"{name}, limited") as child:
                    found[name] = child.ask("limited", **asked)["tokens"]
            except PeerError as error:
                found[name] = str(error)
            self.bench.say(f"within {limit >> 20} MiB: {name}: {found[name]}")
        is_refused = any(each in found[ALONE] for each in ("CacheFullError", "MemoryExhaustedError"))
        self.results.require(MEMORY, LIMITED, is_refused and isinstance(found[STAGES], list))

    # Another checkout

    def _before(self) -> None:
        """What one thread computes for a prompt and its answer, here and by another checkout, in turns."""
        if self.options.tree is None:
            return
        length, num_tokens = self.options.stream_prompt, self.options.decode_tokens
        trees = {NOW: ROOT, BEFORE: self.options.tree.resolve()}
        with ExitStack() as stack:
            children = {}
            for name, tree in trees.items():
                child = Child("benchmarks.checkout:Engine", name, env={"PYTHONPATH": str(tree / "src")})
                children[name] = stack.enter_context(child)
                child.ask("pin", processors=self.processors[:1])
                child.ask("load", model=str(self.subject.path), chunk=self.options.chunk, threads=1)
                child.ask("processor_times", prompt=self._prompt(length, 0), num_tokens=num_tokens)
            for index, name in take_turns(rotated(list(children), _ROUNDS_MORE * self.repeats)):
                times = children[name].ask(
                    "processor_times",
                    prompt=self._prompt(length, index % self.repeats),
                    num_tokens=num_tokens,
                )
                row = {
                    _case(length): ("s", times["prefill_s"]),
                    "a token more": ("ms", 1e3 * times["decode_s"]),
                }
                self.results.add_row(PROCESSOR, row, name, index)
                self.bench.say(f"round {index + 1}: {name}: {times}")
        for case in (_case(length), "a token more"):
            self.results.add_ratio(NO_SLOWER, PROCESSOR, case, NOW, BEFORE, inverse=True)

    # Links

    def _links(self) -> None:
        """Workers that listen, each with a processor of its own; on loopback, and in namespaces of their own."""
        length = max(self.options.lengths)
        with _token_file() as token, ExitStack() as stack:
            drivers = {}
            for name in (LOOPBACK, FAST):
                with self._skipped(name):
                    drivers[name] = stack.enter_context(self._joined(name, token))
            for index, name in take_turns(rotated(list(drivers), self.repeats)):
                self._read_over(name, drivers[name], length, index)
            self.results.add_ratio(FAST_RATIO, LINKS, _case(length), FAST, LOOPBACK)
        with _token_file() as token, self._skipped(SLOW), self._joined(SLOW, token) as driver:
            self._read_over(SLOW, driver, length, 0)
        for name, rate in {LOOPBACK: None, **RATES}.items():
            link = Link() if rate is None else Link(rate / 8)
            label = f"{name}, {_case(length)}"
            self._add_prediction(label, name, LINKS, length, self._shares(length), link, self._step_times)

    def _read_over(self, name: str, driver: Child, length: int, index: int) -> None:
        seconds = driver.ask("first_token", prompt=self._prompt(length, index))["seconds"]
        self.results.add_row(LINKS, {_case(length): ("s", seconds)}, name, index)
        self.bench.say(f"{length:,} tokens over {name}, round {index + 1}: {seconds:.3f} s")

    @contextlib.contextmanager
    def _skipped(self, name: str) -> Iterator[None]:
        """Where a system has no namespaces, results say so."""
        try:
            yield
        except NamespaceError as error:
            self.results.notes.append(f"{name} was skipped: {error}")
            self.bench.say(f"SKIPPED: {name}: {error}")

    @contextlib.contextmanager
    def _joined(self, name: str, token: Path) -> Iterator[Child]:
        """A driver whose worker is at the other end of a link."""
        with ExitStack() as stack:
            joined: Joined | None = None
            host, command = "127.0.0.1", []
            more: dict[str, Any] = {"processors": self.processors[:1], "threads": 1}
            if name in RATES:
                joined = stack.enter_context(joined_namespaces(RATES[name]))
                host, command = joined.addresses[1], ["ip", "netns", "exec", joined.names[1]]
                more["namespace"] = joined.names[0]
            address = stack.enter_context(_worker(host, token, self.processors[1], command))
            stages = {"stages": address, "token_file": str(token), "stage_timeout": 60}
            yield stack.enter_context(self._started(STAGES, **more, **stages))


@contextlib.contextmanager
def _token_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.write_text("benchmark-" * 4)
        token.chmod(0o600)
        yield token


@contextlib.contextmanager
def _worker(host: str, token: Path, processor: int, command: list[str]) -> Iterator[str]:
    """`penstock worker` on a processor of its own; its address."""
    address = f"{host}:{7070 if command else 7071}"
    run = [*command, sys.executable, "-m", "penstock", "worker", "--listen", address]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [*run, "--token-file", str(token), "--threads", "1"],
        env=environment,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, [processor]),
    )
    try:
        yield address
    finally:
        process.terminate()
        process.wait()


def _case(length: int) -> str:
    return f"{length:,} tokens"


def _bars(results: Results) -> list[Bar]:
    longest = _case(max(results.settings["lengths"], default=0))
    bars = []
    for name, (limit, is_lower) in _LIMITS.items():
        figure = (
            results.figure(longest, name, RATIOS)
            or results.figure(MANY_STREAMS, name, RATIOS)
            or results.figure(name)
        )
        if figure is not None:
            bars.append(Bar(name, figure.median, limit, is_lower, figure.noise))
    for figure in results.of(RATIOS):
        if figure.system == NO_SLOWER:
            name = f"{figure.name}: {NO_SLOWER}"
            bars.append(Bar(name, figure.median, _NO_SLOWER, is_lower_limit=True, noise=figure.noise))
    for figure in results.of(PLAN):
        error = abs(figure.median - 1)
        bars.append(Bar(f"plan's error: {figure.name}", error, _PLAN_ERROR, is_lower_limit=False))
    return bars


OPTIONS = {
    "--cases": {
        "type": some_of(CASES),
        "default": CASES,
        "metavar": "NAME,NAME",
        "help": f"some of {', '.join(CASES)} (all)",
    },
    "--lengths": number((2000, 8000), "tokens of the prompts"),
    "--chunk": number(256, "tokens of a chunk"),
    "--layers": {"metavar": "N,N", "help": "layers of each of the two stages (equal shares of a prompt)"},
    "--stream-prompt": number(512, "prompt tokens of each answer"),
    "--decode-tokens": number(64, "tokens generated by each answer"),
    "--tree": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "another checkout, than which this one is to be no slower without stages (case before)",
    },
}
STAGES_SUITE = Suite(
    "Two stages of one thread each, against one stage of one thread and of two: prompts, answers, memory, links of "
    "two rates between network namespaces, and the plan's predictions.",
    _measure,
    _bars,
    takes=("--model",),
    options=OPTIONS,
)
