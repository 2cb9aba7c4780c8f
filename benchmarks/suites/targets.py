"""Automatic chunks against fixed ones: latency targets while streams decode, and prompts that come alone."""

import argparse
import copy
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from benchmarks.harness import RATIOS, Bar, Bench, Results, Series, bar_of, from_turn
from benchmarks.models import pieces, text_subject
from benchmarks.show import Gaps, Picture
from benchmarks.suite import Suite, number, switch
from benchmarks.suites.serve import cache_places, gaps_of, median_gap_s, percentile, run_stall, warm_service
from benchmarks.systems import AUTO, Spec, ask, load_systems
from penstock.engine.llm import LLM
from penstock.engine.profile import load_profile
from penstock.engine.service import Service, ServiceConfig
from penstock.errors import SettingError
from penstock.measure.growth import MeasurementError
from penstock.pictures import Panel
from penstock.plan.policy import ScheduleConfig
from penstock.plan.setting import Resolved
from penstock.plan.sizing import SMALLEST_CHUNK
from penstock.plan.step_time import StepTimeModel

ARRIVALS, LONE = "a prompt arrives while streams decode", "prompts alone"
KEPT, OUT_OF_REACH = "targets, with automatic chunks", "targets out of reach"
FIRST_TOKEN, P95 = "first token of the prompt", "p95 of gaps while it is read"
SHARE = "share of gaps that keep it"
# A gap keeps its target up to so much more than it; a sizing does where so many of its gaps do.
SLACK = 1.25
ENOUGH = 0.95
# Of a chunk's gaps, the share that keep a target where others may have missed it by chance.
_NEARLY = 0.85
# Two runs of the same thing lie so far apart on a quiet machine: less is not told apart from none.
NOISE_MARGIN = 0.05
_REPEATS = 3
# A stream runs when it has produced so many tokens: enough to tell how long it waits when nothing is read.
_SETTLE_TOKENS = 8
# Tokens that streams may produce beside those for each chunk: while the prompt is on its way, and when it is read.
_SPARE_TOKENS = 64
_WARM_UP_TOKENS = 128


@dataclass(frozen=True)
class Sizing:
    """How chunks get their size: fixed, of so many tokens; or automatic, with a target of so many milliseconds."""

    number: int
    is_auto: bool = False

    @property
    def label(self) -> str:
        return f"auto, {self.number:,} ms" if self.is_auto else f"chunk {self.number:,}"


@dataclass(frozen=True)
class Arrival:
    """One turn. Times are seconds since the prompt arrived."""

    sizing: Sizing
    round_index: int
    first_token_s: float
    first_token: int
    decode_gap_s: float  # median between tokens of the streams before it came
    gaps: tuple[tuple[float, float], ...]  # of all streams: those that end with a step that read a chunk


def share_within(gaps: Sequence[tuple[float, float]], target_ms: int) -> float:
    """The share of gaps that are no longer than the target and its slack."""
    return sum(end - start <= SLACK * target_ms / 1000 for start, end in gaps) / len(gaps)


@dataclass
class Arrivals:
    """All turns so far, and what follows from them."""

    runs: list[Arrival] = field(default_factory=list)

    def of(self, sizing: Sizing) -> list[Arrival]:
        return [run for run in self.runs if run.sizing == sizing]

    def share(self, sizing: Sizing, target_ms: int) -> float:
        """Of all rounds together."""
        return share_within([gap for run in self.of(sizing) for gap in run.gaps], target_ms)

    @property
    def fixed(self) -> list[Sizing]:
        """Ascending."""
        sizings = {run.sizing for run in self.runs if not run.sizing.is_auto}
        return sorted(sizings, key=lambda sizing: sizing.number)

    @property
    def targets(self) -> list[int]:
        return sorted({run.sizing.number for run in self.runs if run.sizing.is_auto})

    def best_fixed(self, target_ms: int) -> Sizing | None:
        """The fixed chunk with the soonest first token of those that keep the target."""
        keeping = [each for each in self.fixed if self.share(each, target_ms) >= ENOUGH]
        return min(keeping, key=lambda each: median(run.first_token_s for run in self.of(each)), default=None)

    def is_reachable(self, target_ms: int) -> bool:
        """Unless it is known that no chunk keeps the target: decoding alone does not, or none that is as small as an
        automatic one may be."""
        auto = Sizing(target_ms, is_auto=True)
        if self.best_fixed(target_ms) is not None or self.share(auto, target_ms) >= ENOUGH:
            return True
        decode_gap_s = median(run.decode_gap_s for run in self.runs)
        is_smallest = any(each.number <= SMALLEST_CHUNK for each in self.fixed)
        return not (is_smallest or decode_gap_s > SLACK * target_ms / 1000)

    def contenders(self) -> list[Sizing]:
        """Those worth another round: for each target within reach its automatic size, the best fixed one, and the
        next larger one if it nearly keeps it. Those that are compared follow each other."""
        found: list[Sizing] = []
        for target in filter(self.is_reachable, self.targets):
            best = self.best_fixed(target)
            place = self.fixed.index(best) + 1 if best else 0
            found += [Sizing(target, is_auto=True), *([best] if best else [])]
            found += [each for each in self.fixed[place : place + 1] if self.share(each, target) >= _NEARLY]
        return list(dict.fromkeys(found))


def sizings_of(fixed: Sequence[int], targets_ms: Sequence[int]) -> list[Sizing]:
    """All of them, the automatic ones spread out among the fixed ones."""
    places = {Sizing(size): index / len(fixed) for index, size in enumerate(fixed)}
    places |= {Sizing(ms, is_auto=True): (i + 0.5) / len(targets_ms) for i, ms in enumerate(targets_ms)}
    return sorted(places, key=places.__getitem__)


def with_target(llm: LLM, target_ms: int | None) -> LLM:
    """The same weights with this target and no other bound, and with step times that are its own: what others
    measure teaches it nothing, what it measures itself it knows the next time."""
    own = copy.copy(llm)
    target_s = None if target_ms is None else target_ms / 1000
    own.settings = replace(
        llm.settings,
        max_activation=Resolved(None),
        target_itl_s=Resolved(target_s),
        target_ttft_s=Resolved(None),
    )
    profile = load_profile(llm)
    own.times = StepTimeModel(profile.coefficients if profile else None)
    return own


def run_arrival(
    service: Service, sizing: Sizing, index: int, prompts: Sequence[Sequence[int]], stream_tokens: int
) -> Arrival:
    """When the prompt is read, all is over."""
    gc.collect()
    run = run_stall(service, prompts, stream_tokens, 1, _SETTLE_TOKENS, until_read=True)
    if not run.num_chunks:
        raise MeasurementError("nothing is known of the long prompt's chunks")
    stamps, first_token_s = run.stream_stamps, run.first_token_s
    gaps = [gap for each in stamps for gap in reading_gaps(each, first_token_s, run.num_chunks)]
    decode_gap_s = median_gap_s(stamps, 0.0)  # before it came
    return Arrival(sizing, index, first_token_s, run.first_token, decode_gap_s, tuple(gaps))


def reading_gaps(stamps: Sequence[float], first_token_s: float, num_chunks: int) -> list[tuple[float, float]]:
    """Those that ended with a step which read a chunk. Each such step gave the stream a token, the last of them about
    when the prompt's first token came, a little before it or after: what began then is another step's."""
    gaps = [(start, end) for start, end in gaps_of(stamps) if (start + end) / 2 < first_token_s][-num_chunks:]
    if len(gaps) < num_chunks or stamps[-1] < gaps[-1][1]:
        raise MeasurementError(
            f"a stream has {len(gaps)} gaps while a prompt was read in {num_chunks} chunks: it ended too early"
        )
    return gaps


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    subject, lone_lengths = text_subject(options.model), () if options.skip_lone else options.lone_lengths
    smallest = min((SMALLEST_CHUNK, *options.fixed))
    # So many that no stream ends before the prompt is read, in chunks however small.
    stream_tokens = _SETTLE_TOKENS + -(-options.prompt // smallest) + _SPARE_TOKENS
    subject.require_room(
        max((options.prompt, *lone_lengths)), 1, "a smaller --prompt, and smaller --lone-lengths"
    )
    subject.require_room(options.stream_prompt, stream_tokens, "a smaller --prompt, or larger --fixed sizes")
    llm = LLM(options.model, dtype=options.dtype, chunk=AUTO)
    odd = [size for size in options.fixed if size % llm.chunk.grid]
    if odd:
        because = "this model's chunks end there"
        raise SettingError("fixed", odd[0], f"multiples of {llm.chunk.grid}", because=because)
    start = "a profile of this machine" if load_profile(llm) is not None else "nothing"
    method = (
        f"automatic chunks start from {start} in the first round, and learn from round to round; what is "
        f"not near the best takes part in the first round alone; a gap keeps its target up to {SLACK:g} times it"
    )
    more = {"targets_ms": options.targets, "prompt_tokens": options.prompt, "method": method}
    bench.describe(subject.description, options, "dtype", "streams", **more)
    prompts = pieces(subject, [options.prompt, *[options.stream_prompt] * options.streams])
    _run_arrivals(llm, options, prompts, stream_tokens, bench)
    if lone_lengths:
        _run_lone(llm, options, subject.prompt(max(lone_lengths)), lone_lengths, bench)


def _run_arrivals(
    llm: LLM,
    options: argparse.Namespace,
    prompts: Sequence[Sequence[int]],
    stream_tokens: int,
    bench: Bench,
) -> None:
    """First all, then the contenders; every round begins with another one."""
    arrivals, sizings = Arrivals(), sizings_of(options.fixed, options.targets)
    # Fixed chunks need no step times, but their service records them: not into what an automatic size knows.
    subjects = {each: with_target(llm, each.number if each.is_auto else None) for each in sizings}
    places = cache_places([*[options.stream_prompt + stream_tokens] * options.streams, options.prompt + 1])
    num_rounds = options.repeats or _REPEATS
    for index in range(num_rounds):
        for sizing in from_turn(arrivals.contenders() if index else sizings, index):
            own = subjects[sizing]
            schedule = ScheduleConfig(
                chunk_size=own.most_chunk if sizing.is_auto else sizing.number,
                max_running=options.streams + 1,
                grid=own.chunk.grid,
                auto_chunk=sizing.is_auto,
            )
            config = ServiceConfig(schedule, cache_tokens=places, reuse=False)
            with warm_service(own, config, prompts[0]) as service:
                run = run_arrival(service, sizing, index, prompts, stream_tokens)
            arrivals.runs.append(run)
            so_far = f"round {index + 1} of {num_rounds}: {sizing.label}"
            bench.say(f"{so_far}: first token after {run.first_token_s:.1f} s")
    sum_up(arrivals, bench.results)


def sum_up(arrivals: Arrivals, results: Results) -> None:
    """Figures of every sizing, and what came of every target."""
    for sizing in [*arrivals.fixed, *(Sizing(target, is_auto=True) for target in arrivals.targets)]:
        for run in arrivals.of(sizing):
            gaps_ms = [1e3 * (end - start) for start, end in run.gaps]
            values = {
                "p50 of gaps while it is read": ("ms", percentile(gaps_ms, 50)),
                P95: ("ms", percentile(gaps_ms, 95)),
                "longest gap": ("ms", max(gaps_ms)),
                FIRST_TOKEN: ("s", run.first_token_s),
            }
            for target in arrivals.targets:
                values[f"within {SLACK * target:g} ms"] = ("share", share_within(run.gaps, target))
            results.add_row(ARRIVALS, values, sizing.label, run.round_index)
            if sizing.is_auto:
                gaps = [[round(start, 4), round(end, 4)] for start, end in run.gaps]
                trace = {"target_ms": sizing.number, "first_token_s": run.first_token_s, "gaps_s": gaps}
                results.traces.setdefault("arrivals", []).append(trace)
    for target in arrivals.targets:
        auto, best = Sizing(target, is_auto=True), arrivals.best_fixed(target)
        section, name = KEPT if arrivals.is_reachable(target) else OUT_OF_REACH, f"{target:,} ms"
        results.add(section, name, "share", arrivals.share(auto, target), system=SHARE)
        worst = min(share_within(run.gaps, target) for run in arrivals.of(auto))
        results.add(section, name, "share", worst, system="worst round")
        if best is not None:
            label = f"first token at {target:,} ms, auto over {best.label}"
            results.add_ratio(label, ARRIVALS, FIRST_TOKEN, auto.label, best.label, as_name="ratio")
    first = {run.first_token for run in arrivals.runs}
    results.require(ARRIVALS, "all runs have the same first token of the long prompt", len(first) == 1)


def _run_lone(
    llm: LLM, options: argparse.Namespace, prompt: Sequence[int], lengths: Sequence[int], bench: Bench
) -> None:
    """The same of prompts that come when nothing else runs: first all, then the automatic size and the two fixed ones
    with the soonest first token so far."""
    own, results, auto = with_target(llm, None), bench.results, Spec("Penstock", AUTO)
    specs = [auto, *(Spec("Penstock", chunk) for chunk in options.lone_chunks)]
    systems = load_systems(specs, llm.path, options.dtype, own)
    num_rounds = options.repeats or _REPEATS
    for length in lengths:
        name = f"{length:,} tokens"

        def soonest(spec: Spec, name: str = name) -> float:
            figure = results.figure(name, spec.label, LONE)
            return min(figure.values) if figure else 0.0

        for system in systems.values():
            ask(system, prompt[: min(_WARM_UP_TOKENS, length)], 1)
        for index in range(num_rounds):
            order = [auto, *sorted(specs[1:], key=soonest)[:2]] if index else specs
            for spec in from_turn(order, index):
                seconds = ask(systems[spec], prompt[:length], 1).first_token_s
                results.add(LONE, name, "s", seconds, system=spec.label, round_index=index)
                bench.say(f"{name} alone, round {index + 1} of {num_rounds}: {spec.label}: {seconds:.2f} s")
        figures = [
            figure for figure in results.of(LONE) if figure.name == name and figure.system != auto.label
        ]
        if figures:
            best = min(figures, key=lambda figure: figure.median)
            label = f"first token alone, auto over {best.system.removeprefix('Penstock, ')}"
            results.add_ratio(label, LONE, name, auto.label, best.system)


def _bars(results: Results) -> list[Bar]:
    """For every target that some chunk can keep, and for prompts that come alone."""
    bars = [
        Bar(f"share of gaps that keep {figure.name}", figure.median, ENOUGH, is_lower_limit=True)
        for figure in results.of(KEPT)
        if figure.system == SHARE
    ]
    for figure in results.of(RATIOS):
        bars.append(bar_of(f"{figure.system}, {figure.name}", figure, 1 + NOISE_MARGIN, is_lower_limit=False))
    return bars


def _picture(results: Results) -> Picture:
    """Gaps over time, of each target the run with the median time to the first token; and when the prompt's first
    token comes against how long the streams wait."""
    gaps = []
    for target in results.settings["targets_ms"]:
        runs = [each for each in results.traces.get("arrivals", ()) if each["target_ms"] == target]
        runs.sort(key=lambda each: each["first_token_s"])
        if runs:
            typical = runs[(len(runs) - 1) // 2]
            share = share_within(typical["gaps_s"], target)
            title = f"target {target:,} ms: {share:.1%} within {SLACK * target:g} ms"
            gaps.append(Gaps(title, typical["gaps_s"], typical["first_token_s"], target))
    trade: Series = {"fixed chunks": {}}
    for figure in results.of(ARRIVALS):
        if figure.name == FIRST_TOKEN:
            waits = results.figure(P95, figure.system, ARRIVALS)
            series = "fixed chunks" if figure.system.startswith("chunk") else figure.system
            trade.setdefault(series, {})[waits.median if waits else 0.0] = figure.values
    x_label = "p95 of the streams' gaps while it is read (ms)"
    panel = Panel("Lower left is better", "time to the prompt's first token (s)", trade, x_label, "lines")
    settings = results.settings
    what = f"{settings['streams']} streams decode, a prompt of {settings['prompt_tokens']:,} tokens arrives"
    return Picture(what, [panel], gaps)


TARGETS = Suite(
    "Automatic chunks against fixed ones. First, streams decode and a long prompt arrives: how many of the gaps "
    "between their tokens keep a latency target, and when does the prompt's first token come, beside that of the "
    "best fixed chunk that keeps the same target? Then prompts that come alone: how soon is the first token, "
    "compared with the best fixed chunk? All take turns. Takes about twelve minutes on two cores.",
    _measure,
    _bars,
    _picture,
    repeats="rounds; what is not near the best takes part in the first alone (3)",
    options={
        "--targets": number((100, 200, 400), "latency targets, ms from one token to the next"),
        "--fixed": number((16, 32, 64, 128, 256, 512), "fixed chunks to compare with, tokens"),
        "--lone-lengths": number((2048, 8000), "tokens of the prompts that come alone"),
        "--lone-chunks": number((128, 256, 512, 1024, 2048), "fixed chunks to compare with there"),
        "--streams": number(4, "streams that decode when the long prompt arrives"),
        "--stream-prompt": number(32, "prompt tokens of a stream"),
        "--prompt": number(8000, "tokens of the long prompt"),
        "--skip-lone": switch("no prompts that come alone"),
    },
)
