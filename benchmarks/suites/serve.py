"""Many users at once: streams that decode while a long prompt arrives, and many requests at once."""

import argparse
import gc
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from math import inf
from statistics import median

from benchmarks.harness import Bar, Bench, Results, Series, rotated, take_turns
from benchmarks.models import pieces, text_subject
from benchmarks.show import Gaps, Picture
from benchmarks.suite import Suite, number, switch
from penstock.cache import BLOCK_TOKENS
from penstock.engine.events import Event, Failed, Finished, GenerationRequest, TokenGenerated
from penstock.engine.llm import LLM
from penstock.engine.service import Service, ServiceConfig
from penstock.errors import SettingError
from penstock.measure.growth import MeasurementError
from penstock.pictures import Panel
from penstock.plan.grids import DEFAULT_CHUNK_SIZE
from penstock.plan.policy import ScheduleConfig, SchedulePolicy

STALLS, BURSTS = "a long prompt arrives while streams decode", "many requests"
UNCHUNKED, MIXED = "unchunked", "mixed"
VARIANTS = (UNCHUNKED, "prefill-first", "interleaved", "decode-priority", MIXED)
# Those that a bar compares; the others are run less, for a prompt of this length takes long.
COMPARED = (UNCHUNKED, MIXED)
LONGEST, SPEED, ALL_DONE, STEP = "longest gap", "all tokens/s", "all done", "decode step"
AT_ONCE, IN_TURN = "at once", "one after the other"
STALL_RATIO = "longest gap, unchunked over mixed"
SPEED_RATIO = "tokens/s of everything, mixed over unchunked"
BURST_RATIO = "time of all requests, at once over one after the other"
# By ratio: the limit, and whether it is a lower one.
LIMITS = {STALL_RATIO: (10.0, True), SPEED_RATIO: (0.9, True), BURST_RATIO: (0.5, False)}
# A stream runs when it has produced so many tokens; the long prompt arrives when all streams run.
SETTLE_TOKENS = 4
_REPEATS, _OTHER_REPEATS = 3, 1
_WARM_UP_PROMPT, _WARM_UP_TOKENS = 64, 4
_POLL_S = 1.0
_DTYPE = "bfloat16"
Tokens = tuple[tuple[int, ...], ...]  # by request


def _number(default: int, meaning: str) -> int:
    """A field that is an option, too."""
    return field(default=default, metadata=number(default, meaning))


@dataclass(frozen=True)
class Workload:
    """Numbers of requests and of tokens. The defaults are those that the bars are for."""

    streams: int = _number(4, "streams that decode when the long prompt arrives")
    stream_prompt: int = _number(32, "prompt tokens of a stream")
    stream_tokens: int = _number(200, "tokens that a stream generates")
    long_prompt: int = _number(8000, "tokens of the long prompt")
    long_tokens: int = _number(8, "tokens generated after it")
    serve_chunk: int = _number(128, "tokens per chunk of the long prompt")
    requests: int = _number(16, "requests that come at once, and one after the other")
    request_prompt: int = _number(512, "prompt tokens of each")
    request_tokens: int = _number(64, "tokens that each generates")
    chunk: int = _number(DEFAULT_CHUNK_SIZE, "tokens per chunk of their prompts")

    def __post_init__(self) -> None:
        # Mixed and interleaved give a stream a token for every chunk of the long prompt.
        least = SETTLE_TOKENS + -(-self.long_prompt // self.serve_chunk) + 1
        if self.stream_tokens < least:
            beside = {"long_prompt": self.long_prompt, "serve_chunk": self.serve_chunk}
            because = "the streams are to outlast the prompt"
            given = ("stream_tokens", self.stream_tokens, f"at least {least}")
            raise SettingError(*given, because=because, beside=beside)
        if self.requests > 1 and self.request_tokens < 2:
            because = "the first ends a prompt"
            raise SettingError("request_tokens", self.request_tokens, "at least 2", because=because)

    @property
    def stall_total(self) -> int:
        """All tokens of a run with the long prompt, read or generated."""
        return self.streams * (self.stream_prompt + self.stream_tokens) + self.long_prompt + self.long_tokens

    @property
    def lengths(self) -> list[int]:
        """Of the prompts: the long one, the streams', the requests'."""
        streams, requests = [self.stream_prompt] * self.streams, [self.request_prompt] * self.requests
        return [self.long_prompt, *streams, *requests]


class Watch:
    """A listener that stamps tokens. `settled` is set with the token of that number, `ended` with the end."""

    def __init__(self, settle_tokens: int = 1) -> None:
        self.stamps: list[float] = []
        self.token_ids: list[int] = []
        self.cached_tokens = 0
        self.settled = threading.Event()
        self.ended = threading.Event()
        self.error: str | None = None
        self.request_id = ""
        self._settle_tokens = settle_tokens

    def __call__(self, event: Event) -> None:
        match event:
            case TokenGenerated(token=token):
                self.stamps.append(time.perf_counter())
                self.token_ids.append(token)
                if len(self.stamps) == self._settle_tokens:
                    self.settled.set()
            case Finished(reason=reason, usage=usage):
                self.cached_tokens = usage.cached_tokens
                self._end(None if reason == "length" else f"it ended with {reason!r}")
            case Failed(error=error):
                self._end(str(error))

    def _end(self, error: str | None) -> None:
        self.error = error
        self.settled.set()
        self.ended.set()

    def finish(self, service: Service, num_tokens: int) -> None:
        """Wait for the end, with as many tokens as there were to be."""
        wait(service, self.ended)
        if self.error is not None or len(self.token_ids) != num_tokens:
            why = self.error or f"it gave {len(self.token_ids)} tokens where {num_tokens} were asked for"
            raise MeasurementError(f"a request of the benchmark failed: {why}")


def submit(service: Service, prompt: Sequence[int], num_tokens: int, watch: Watch) -> Watch:
    watch.request_id = service.submit(GenerationRequest(prompt, num_tokens, ignore_eos=True), watch)
    return watch


def wait(service: Service, event: threading.Event) -> None:
    """Until it is set, as long as the service lives."""
    while not event.wait(_POLL_S):
        if not service.is_healthy:
            raise MeasurementError("the service's thread has died: nothing could be measured")


def cache_places(lengths: Iterable[int]) -> int:
    """Room in the cache for sequences of these lengths, each in blocks of its own."""
    return sum((-(-length // BLOCK_TOKENS) + 1) * BLOCK_TOKENS for length in lengths)


@contextmanager
def warm_service(llm: LLM, config: ServiceConfig, prompt: Sequence[int]) -> Iterator[Service]:
    """A service that has run before: what is done once is done. There is one at a time: the worker threads of an idle
    one would slow the other's down."""
    with Service(llm, config) as service:
        run_requests(service, [prompt[:_WARM_UP_PROMPT]] * 2, _WARM_UP_TOKENS, at_once=True)
        gc.collect()
        yield service


def gaps_of(stamps: Sequence[float]) -> list[tuple[float, float]]:
    """From each token of a stream to its next; the wait for its first is none of them."""
    return list(pairwise(stamps))


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of the values that at least so many percent of them do not exceed. It is a wait that somebody had:
    nothing is interpolated."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    return sorted(values)[max(0, -(-percent * len(values) // 100) - 1)]


@dataclass(frozen=True)
class Stall:
    """Streams decode, a long prompt arrives. Times are seconds since its arrival."""

    stream_stamps: tuple[tuple[float, ...], ...]  # of each stream's tokens, those before the arrival negative
    first_token_s: float  # of the long prompt
    first_token: int
    seconds: float  # from the first submission to the last token
    num_chunks: int = 0  # of the long prompt

    @property
    def gaps(self) -> list[tuple[float, float]]:
        return [gap for stamps in self.stream_stamps for gap in gaps_of(stamps)]

    def gap_ms(self, percent: int, *, while_read: bool) -> float:
        """Of all gaps, or of those that lie, or reach, into the time when the long prompt was read."""
        found = [
            1e3 * (end - start)
            for start, end in self.gaps
            if not while_read or (start < self.first_token_s and end > 0.0)
        ]
        return percentile(found, percent)

    @property
    def num_outlasting(self) -> int:
        """Streams that still decoded when the long prompt had been read."""
        return sum(stamps[-1] > self.first_token_s for stamps in self.stream_stamps)


def run_stall(
    service: Service,
    prompts: Sequence[Sequence[int]],
    stream_tokens: int,
    long_tokens: int,
    settle_tokens: int = SETTLE_TOKENS,
    *,
    until_read: bool = False,
) -> Stall:
    """The first prompt arrives when the streams, which are the others, all run. All end by themselves; or, with
    `until_read`, the streams with the prompt."""
    started = time.perf_counter()
    streams = [submit(service, prompt, stream_tokens, Watch(settle_tokens)) for prompt in prompts[1:]]
    for watch in streams:
        wait(service, watch.settled)
    arrived = time.perf_counter()
    long = submit(service, prompts[0], long_tokens, Watch())
    if until_read:
        wait(service, long.ended)
    for watch in streams:
        if until_read:
            service.cancel(watch.request_id)
            wait(service, watch.ended)
        else:
            watch.finish(service, stream_tokens)
    long.finish(service, long_tokens)
    if any(watch.stamps[-1] <= arrived for watch in streams):
        raise MeasurementError("a stream ended before the long prompt arrived: give more --stream-tokens")
    return Stall(
        tuple(tuple(stamp - arrived for stamp in watch.stamps) for watch in streams),
        long.stamps[0] - arrived,
        long.token_ids[0],
        max(watch.stamps[-1] for watch in (*streams, long)) - started,
        len(service.explain(long.request_id) or ()),
    )


@dataclass(frozen=True)
class Burst:
    """Many requests through one service."""

    seconds: float
    decode_step_s: float  # median gap while as many requests decode as ever do: all of them, or one
    token_ids: Tokens


def run_requests(
    service: Service, prompts: Sequence[Sequence[int]], num_tokens: int, *, at_once: bool
) -> Burst:
    started = time.perf_counter()
    watches = []
    for prompt in prompts:
        watches.append(submit(service, prompt, num_tokens, Watch()))
        if not at_once:
            watches[-1].finish(service, num_tokens)
    for watch in watches:
        watch.finish(service, num_tokens)
    stamps = [watch.stamps for watch in watches]
    # One after the other, none runs beside another: all gaps count.
    return Burst(
        max(each[-1] for each in stamps) - started,
        median_gap_s(stamps, min(each[-1] for each in stamps) if at_once else -inf),
        tuple(tuple(watch.token_ids) for watch in watches),
    )


def median_gap_s(stamps: Sequence[Sequence[float]], end: float) -> float:
    """Of gaps in which all streams ran, from the last one's first token to the end; where there are none (few tokens
    for many prompts), of all gaps."""
    gaps = [gap for each in stamps for gap in gaps_of(each)]
    all_run = max(each[0] for each in stamps)
    together = [gap for gap in gaps if gap[0] >= all_run and gap[1] <= end]
    return median(end - start for start, end in together or gaps)


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    work = Workload(**{each.name: getattr(options, each.name) for each in fields(Workload)})
    subject = text_subject(options.model)
    for option, prompt, generated in (
        ("--stream-tokens", work.stream_prompt, work.stream_tokens),
        ("--long-prompt", work.long_prompt, work.long_tokens),
        ("--request-prompt", work.request_prompt, work.request_tokens),
    ):
        subject.require_room(prompt, generated, f"a smaller {option}")
    llm = LLM(options.model, dtype=options.dtype, chunk=work.chunk)
    method = (
        f"{work.streams} streams decode, a prompt of {work.long_prompt:,} tokens arrives; then "
        f"{work.requests} requests of {work.request_prompt} tokens and {work.request_tokens} generated after them, "
        f"mixed, chunk {work.chunk}. Another variant begins each round."
    )
    bench.describe(subject.description, options, "dtype", workload=asdict(work), method=method)
    prompts = pieces(subject, work.lengths)
    streams, requests = prompts[: 1 + work.streams], prompts[1 + work.streams :]
    _run_stalls(llm, work, streams, options, bench)
    _run_bursts(llm, work, requests, options, bench)
    compare(bench.results)


def _run_stalls(
    llm: LLM, work: Workload, prompts: Sequence[Sequence[int]], options: argparse.Namespace, bench: Bench
) -> None:
    results, first = bench.results, set()
    other = options.repeats or (_REPEATS if options.full else _OTHER_REPEATS)
    counted = {name: (options.repeats or _REPEATS) if name in COMPARED else other for name in VARIANTS}
    lengths = [work.stream_prompt + work.stream_tokens] * work.streams
    places = cache_places([*lengths, work.long_prompt + work.long_tokens])
    for index, name in take_turns(rotated(VARIANTS, max(counted.values())), counted.__getitem__):
        policy = SchedulePolicy.PREFILL_FIRST if name == UNCHUNKED else SchedulePolicy(name)
        chunk = 0 if name == UNCHUNKED else work.serve_chunk
        schedule = ScheduleConfig(policy, chunk_size=chunk, max_running=work.streams + 1)
        config = ServiceConfig(schedule, cache_tokens=places, reuse=False)
        with warm_service(llm, config, prompts[0]) as service:
            run = run_stall(service, prompts, work.stream_tokens, work.long_tokens)
        first.add(run.first_token)
        add_stall(results, name, index, run, work.stall_total)
        longest = f"longest gap {run.gap_ms(100, while_read=False):,.0f} ms"
        bench.say(f"round {index + 1}: {name}: {longest}, all done in {run.seconds:.1f} s")
    results.require(STALLS, "all runs have the same first token of the long prompt", len(first) == 1)


def add_stall(results: Results, name: str, index: int, run: Stall, num_tokens: int) -> None:
    """Figures of one turn, and its times, for the picture."""
    values = {
        **{f"p{each} while it is read": ("ms", run.gap_ms(each, while_read=True)) for each in (50, 95, 99)},
        **{f"p{each} of the whole run": ("ms", run.gap_ms(each, while_read=False)) for each in (50, 95, 99)},
        LONGEST: ("ms", run.gap_ms(100, while_read=False)),
        "first token of the prompt": ("s", run.first_token_s),
        ALL_DONE: ("s", run.seconds),
        SPEED: ("tokens/s", num_tokens / run.seconds),
    }
    results.add_row(STALLS, values, name, index)
    early = len(run.stream_stamps) - run.num_outlasting
    if early:
        results.notes.append(f"{name}, round {index + 1}: {early} streams ended before the prompt was read")
    stamps = [[round(stamp, 4) for stamp in each] for each in run.stream_stamps]
    trace = {"variant": name, "round": index, "first_token_s": run.first_token_s, "stream_stamps_s": stamps}
    results.traces.setdefault("stalls", []).append(trace)


def _run_bursts(
    llm: LLM, work: Workload, prompts: Sequence[Sequence[int]], options: argparse.Namespace, bench: Bench
) -> None:
    """One after the other takes longest: strict, it is there for its tokens, and runs once unless --full."""
    results = bench.results
    schedule = ScheduleConfig(SchedulePolicy.MIXED, chunk_size=work.chunk, max_running=work.requests)
    places = cache_places([work.request_prompt + work.request_tokens] * work.requests)
    turns = [(arrival, strict) for strict in (False, True) for arrival in (AT_ONCE, IN_TURN)]
    num_rounds = options.repeats or _REPEATS
    tokens: dict[tuple[str, bool], list[Tokens]] = {turn: [] for turn in turns}

    def rounds_of(turn: tuple[str, bool]) -> int:
        return 1 if turn == (IN_TURN, True) and not options.full else num_rounds

    for index, (arrival, strict) in take_turns(rotated(turns, num_rounds), rounds_of):
        config = ServiceConfig(schedule, cache_tokens=places, strict=strict, reuse=False)
        with warm_service(llm, config, prompts[0]) as service:
            run = run_requests(service, prompts, work.request_tokens, at_once=arrival == AT_ONCE)
        tokens[arrival, strict].append(run.token_ids)
        name, total = burst_name(arrival, strict), work.requests * (work.request_prompt + work.request_tokens)
        values = {
            ALL_DONE: ("s", run.seconds),
            SPEED: ("tokens/s", total / run.seconds),
            STEP: ("ms", 1e3 * run.decode_step_s),
        }
        results.add_row(BURSTS, values, name, index)
        bench.say(f"round {index + 1}: {work.requests} requests, {name}: {run.seconds:.1f} s")
    for strict in (False, True):
        equal = fewest_equal(tokens[AT_ONCE, strict], tokens[IN_TURN, strict])
        what = f"{equal} of {work.requests} requests have the same tokens at once and one after the other"
        results.notes.append(f"{'strict' if strict else 'plain'}: {what}")
        if strict and llm.probe.same_bits:
            name = "all requests have the same tokens at once and one after the other, strict"
            results.require(BURSTS, name, equal == work.requests)
    if not llm.probe.same_bits:
        why = "this machine does not keep the laws that strict decoding rests on: nothing is promised"
        results.notes.append(why)


def burst_name(arrival: str, strict: bool) -> str:
    return f"{arrival}, strict" if strict else arrival


def fewest_equal(first: Sequence[Tokens], second: Sequence[Tokens]) -> int:
    """Requests that got the same tokens, in the worst pair of runs."""
    return min(
        sum(one == other for one, other in zip(ours, theirs, strict=True))
        for ours in first
        for theirs in second
    )


def compare(results: Results) -> None:
    strict_once, strict_turn = burst_name(AT_ONCE, True), burst_name(IN_TURN, True)
    for label, what, section, over, under in (
        (STALL_RATIO, LONGEST, STALLS, UNCHUNKED, MIXED),
        (SPEED_RATIO, SPEED, STALLS, MIXED, UNCHUNKED),
        (BURST_RATIO, ALL_DONE, BURSTS, AT_ONCE, IN_TURN),
        ("time at once, strict over plain", ALL_DONE, BURSTS, strict_once, AT_ONCE),
        ("decode step of all requests, strict over plain", STEP, BURSTS, strict_once, AT_ONCE),
        ("decode step of one request, strict over plain", STEP, BURSTS, strict_turn, IN_TURN),
    ):
        results.add_ratio(label, section, what, over, under, as_name="ratio")


def _bars(results: Results) -> list[Bar]:
    """For the numbers of requests, tokens and chunks that are the default."""
    if results.settings["dtype"] != _DTYPE or results.settings["workload"] != asdict(Workload()):
        return []
    return results.ratio_bars(LIMITS)


def _picture(results: Results) -> Picture:
    """Gaps over time, of each variant the run with the median longest gap; and what each costs."""
    gaps = []
    for name in VARIANTS:
        runs = [each for each in results.traces.get("stalls", ()) if each["variant"] == name]
        found = [
            (each["first_token_s"], [gap for stamps in each["stream_stamps_s"] for gap in gaps_of(stamps)])
            for each in runs
        ]
        found.sort(key=lambda each: max(end - start for start, end in each[1]))
        if found:
            until_s, typical = found[(len(found) - 1) // 2]
            longest = max(end - start for start, end in typical)
            gaps.append(Gaps(f"{name}: longest {longest:.2f} s", typical, until_s))

    def by_variant(what: str) -> Series:
        return {figure.system: {"": figure.values} for figure in results.of(STALLS) if figure.name == what}

    panels = [
        Panel("Longest gap of a stream", "ms", by_variant(LONGEST), "", is_log=True),
        Panel("Throughput", "all tokens per second", by_variant(SPEED), ""),
    ]
    work = results.settings["workload"]
    what = f"{work['streams']} streams decode, a prompt of {work['long_prompt']:,} tokens arrives"
    return Picture(what, panels, gaps)


SERVE = Suite(
    "Many users at once. First, streams decode and a long prompt arrives: how long do they wait for their next "
    "token, by scheduling policy? Then many requests, at once and one after the other: how much sooner are all done? "
    "Takes about eight minutes on two cores.",
    _measure,
    _bars,
    _picture,
    repeats="rounds (3; 1 for what has no bar)",
    options={
        **{f"--{each.name.replace('_', '-')}": dict(each.metadata) for each in fields(Workload)},
        "--full": switch("as many rounds for what has no bar"),
    },
)
