"""Time to first token, decoding and memory of Penstock and transformers, on the same weights and prompt."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.harness import RATIOS, Bar, Bench, Results, bar_of, rotated, take_turns
from benchmarks.models import Subject, random_subject, text_subject
from benchmarks.show import Panel, Picture
from benchmarks.suite import Suite, number, switch
from benchmarks.systems import GROWTH_METHOD, Answer, Spec, ask, growth_of, load_systems
from penstock.errors import SettingError
from penstock.measure.growth import WARM_UP_TOKENS, can_measure_growth
from penstock.plan.grids import DEFAULT_CHUNK_SIZE

PREFILLING, DECODING, ACTIVATIONS, CACHED = "prefill", "decode", "activation memory", "cached for the prompt"
OVER_WHOLE = "prefill tokens/s, Penstock over transformers whole"
OVER_CHUNKED = "prefill tokens/s, Penstock over transformers chunked"
DECODE_OVER = "decode tokens/s, Penstock over transformers"
TILED_OVER_UNTILED = "prefill time, with the tile grid over without"
CHUNKED_OVER_WHOLE = "prefill time, Penstock chunked over whole"
OVER_TOKENWISE = "prefill tokens/s, Penstock over token by token"
# A pass over a long prompt takes so long that only the systems of most interest run it, and fewer times.
_LONG_TOKENS = 4000
_REPEATS, _LONG_REPEATS = 5, 3
_WARM_UP_PROMPT, _SLOW_WARM_UP_PROMPT = 512, 32
# Growth below this is not told apart from none.
_RESOLUTION_MIB = 1.0
_DTYPE = "bfloat16"


@dataclass(frozen=True)
class Kind:
    """What the two suites do not share. Chunks of 0 are whole prompts; None is the chunk that is asked for."""

    lengths: tuple[int, ...]
    memory_lengths: tuple[int, ...]
    chunks: tuple[tuple[int | None, bool], ...]  # of Penstock's systems, each with tiles or without
    memory_chunks: tuple[int | None, ...]  # of transformers' systems whose memory is measured
    limits: Mapping[str, tuple[float, bool]]  # by ratio: the limit, and whether it is a lower one
    limited: range  # lengths of prompts whose ratios have a limit
    growth: tuple[int, int, float]  # activations at the second length over those at the first, at most

    def systems(self, chunk: int) -> list[Spec]:
        ours = [Spec("Penstock", chunk if size is None else size, tiled) for size, tiled in self.chunks]
        return [*ours, Spec("transformers", 0), Spec("transformers", chunk)]

    def measured(self, chunk: int) -> list[Spec]:
        theirs = [Spec("transformers", chunk if size is None else size) for size in self.memory_chunks]
        return [Spec("Penstock", chunk), *theirs]


TEXT = Kind(
    lengths=(512, 2048, 8000),
    memory_lengths=(512, 2048, 8000),
    chunks=((None, True), (0, True), (None, False)),
    memory_chunks=(0, None),
    limits={
        OVER_WHOLE: (0.95, True),
        OVER_CHUNKED: (1.1, True),
        DECODE_OVER: (2.0, True),
        TILED_OVER_UNTILED: (1.05, False),
    },
    limited=range(DEFAULT_CHUNK_SIZE, sys.maxsize),
    growth=(2048, 8000, 1.5),
)
# Recurrent layers tempt people to read a prompt token by token, so that is run too.
DELTA_NETS = Kind(
    lengths=(1000, 4000),
    memory_lengths=(2000, 8000),
    chunks=((None, True), (1, True)),
    memory_chunks=(0,),
    limits={OVER_TOKENWISE: (5.0, True), OVER_WHOLE: (1.0, True)},
    limited=range(1000, 1001),
    growth=(2000, 8000, 1.1),
)


@dataclass(frozen=True)
class _Work:
    """What is asked for, and of whom."""

    kind: Kind
    options: argparse.Namespace
    bench: Bench
    subject: Subject
    prompt: Sequence[int]  # as long as the longest

    def time(self, lengths: Sequence[int]) -> None:
        """Every length in rounds, in which systems take turns."""
        options, chunk = self.options, self.options.chunk
        decoding = {Spec("Penstock", chunk), Spec("transformers", 0)}
        systems = load_systems(self.kind.systems(chunk), self.subject.path, options.dtype)
        for spec, system in systems.items():
            length = min(_SLOW_WARM_UP_PROMPT if spec.chunk == 1 else _WARM_UP_PROMPT, *lengths)
            for _ in range(2):
                ask(system, self.prompt[:length], 5 if spec in decoding else 1)
        self.bench.say("loaded and warmed up")
        for length in lengths:
            is_short = options.full or length < _LONG_TOKENS
            specs = [spec for spec in systems if is_short or spec in {*decoding, Spec("transformers", chunk)}]
            usual = _REPEATS if is_short else _LONG_REPEATS
            counted = {
                each: options.repeats or (_LONG_REPEATS if each.chunk == 1 else usual) for each in specs
            }
            answers: dict[Spec, list[Answer]] = {spec: [] for spec in specs}
            for index, spec in take_turns(rotated(specs, max(counted.values())), counted.__getitem__):
                # How fast a system decodes does not depend on how it read, so one of each engine does.
                num_tokens = 1 + (options.decode_tokens if spec in decoding else 0)
                answers[spec].append(ask(systems[spec], self.prompt[:length], num_tokens))
                self._add(index, length, spec, answers[spec][-1])
            _judge_answers(self.bench.results, length, answers, chunk)

    def _add(self, index: int, length: int, spec: Spec, answer: Answer) -> None:
        name, decoding = f"{length:,} tokens", answer.decode_tokens_per_s
        for section, speed in ((PREFILLING, length / answer.first_token_s), (DECODING, decoding)):
            self.bench.results.add_row(section, {name: ("tokens/s", speed)}, spec.label, index)
        then = "" if decoding is None else f", then {decoding:.1f} tokens/s"
        self.bench.say(f"{name}, round {index + 1}: {spec.label}: {answer.first_token_s:.2f} s{then}")


def measure_memory(
    bench: Bench,
    subject: Subject,
    dtype: str,
    specs: Sequence[Spec],
    lengths: Sequence[int],
    own_repeats: int,
) -> None:
    """Each in a fresh process: Penstock's, which has a bar, several times, the others' once."""
    prompt = subject.prompt(max(lengths))
    # What is measured once per machine and kept is then there for all processes alike.
    for spec in specs[:1]:
        growth_of(spec, subject.path, dtype, prompt[:WARM_UP_TOKENS])
    for length in lengths:
        name = f"{length:,} tokens"
        for spec in specs:
            for _ in range(own_repeats if spec.is_ours else 1):
                grown = growth_of(spec, subject.path, dtype, prompt[:length])
                bench.results.add(ACTIVATIONS, name, "MiB", grown.activation_mib, system=spec.label)
                bench.say(f"{name}, memory: {spec.label}: {grown.activation_mib:.1f} MiB and the cache")
            bench.results.add(CACHED, name, "MiB", grown.cache_bytes / 2**20, system=spec.label)


def _measure(options: argparse.Namespace, bench: Bench, kind: Kind) -> None:
    lengths, memory_lengths = (options.lengths or each for each in (kind.lengths, kind.memory_lengths))
    if options.skip_memory and options.only_memory:
        raise SettingError("--skip-memory and --only-memory leave nothing to measure: give one of them")
    with_memory = not options.skip_memory and can_measure_growth()
    if options.only_memory and not with_memory:
        raise SettingError("--only-memory needs Linux's /proc/self/status and /proc/self/clear_refs")
    if not with_memory and not options.skip_memory:
        bench.results.notes.append("memory growth is not measured: it needs Linux's /proc")
    subject = random_subject(bench.say) if kind is DELTA_NETS else text_subject(options.model)
    longest = max(*lengths, *memory_lengths)
    subject.require_room(longest, options.decode_tokens + 1, "shorter --lengths or fewer --decode-tokens")
    bench.results.settings |= {
        "model": subject.description,
        "dtype": options.dtype,
        "chunk": options.chunk,
        "lengths": lengths,
        "memory_lengths": memory_lengths if with_memory else (),
        "decode_tokens": options.decode_tokens,
        **({"method": f"memory: {GROWTH_METHOD}"} if with_memory else {}),
    }
    work = _Work(kind, options, bench, subject, subject.prompt(longest))
    if not options.only_memory:
        work.time(lengths)
    if with_memory:
        specs = kind.measured(options.chunk)
        measure_memory(bench, subject, options.dtype, specs, memory_lengths, options.memory_repeats)
    _compare(bench.results, options.chunk)


def _judge_answers(
    results: Results, length: int, answers: Mapping[Spec, Sequence[Answer]], chunk: int
) -> None:
    """Chunked and whole, in every round, Penstock's first token is the same one. Token by token, chunks end within
    the blocks of a recurrent state, which may round it otherwise."""
    same = [each for spec in (Spec("Penstock", chunk), Spec("Penstock", 0)) for each in answers.get(spec, ())]
    first = {answer.token_ids[0] for answer in same}
    results.require(
        PREFILLING, f"all passes of Penstock over {length:,} tokens have one first token", len(first) == 1
    )
    ours, theirs = (
        answers[spec][-1].token_ids for spec in (Spec("Penstock", chunk), Spec("transformers", 0))
    )
    equal = [one == other for one, other in zip(ours, theirs, strict=True)]
    in_a_row = equal.index(False) if False in equal else len(equal)
    results.notes.append(
        f"after {length:,} tokens Penstock and transformers agree on {sum(equal)} of {len(equal)} greedy tokens, the "
        f"first {in_a_row} in a row"
    )


def _compare(results: Results, chunk: int) -> None:
    """All ratios of the systems that ran, round by round."""
    ours = Spec("Penstock", chunk).label
    pairs = {
        OVER_WHOLE: (PREFILLING, Spec("transformers", 0).label, False),
        OVER_CHUNKED: (PREFILLING, Spec("transformers", chunk).label, False),
        DECODE_OVER: (DECODING, Spec("transformers", 0).label, False),
        TILED_OVER_UNTILED: (PREFILLING, Spec("Penstock", chunk, False).label, True),
        CHUNKED_OVER_WHOLE: (PREFILLING, Spec("Penstock", 0).label, True),
        OVER_TOKENWISE: (PREFILLING, Spec("Penstock", 1).label, False),
    }
    for label, (section, theirs, of_times) in pairs.items():
        for length in results.settings["lengths"]:
            results.add_ratio(label, section, f"{length:,} tokens", ours, theirs, inverse=of_times)


def _bars(results: Results, kind: Kind) -> list[Bar]:
    """Those for which there is a measurement, of the default chunk and type. Activations must not grow with the
    prompt: those of the longer of two, over those of the shorter."""
    settings, bars = results.settings, []
    if settings["dtype"] != _DTYPE or settings["chunk"] != DEFAULT_CHUNK_SIZE:
        return []
    for label, (limit, is_lower) in kind.limits.items():
        for length in settings["lengths"]:
            figure = results.figure(f"{length:,} tokens", label, RATIOS)
            if length in kind.limited and figure is not None:
                bars.append(bar_of(f"{label}, {figure.name}", figure, limit, is_lower_limit=is_lower))
    few, many, limit = kind.growth
    ours = results.by_case(ACTIVATIONS).get(Spec("Penstock", settings["chunk"]).label, {})
    grown = [ours[name] for name in (f"{few:,} tokens", f"{many:,} tokens") if name in ours]
    if len(grown) == 2:
        shorter, longer = (max(figure.median, _RESOLUTION_MIB) for figure in grown)
        noise = grown[0].noise or grown[1].noise
        name = f"activation memory, Penstock, {many:,} over {few:,} tokens"
        bars.append(Bar(name, longer / shorter, limit, False, noise))
    return bars


def _picture(results: Results) -> Picture:
    memory = "peak growth, cache aside (MiB)"
    panels = [
        Panel("Prefill", "prompt tokens per second", results.by_case(PREFILLING)),
        Panel("Decode after the prompt", "tokens per second", results.by_case(DECODING)),
        Panel("Activation memory during prefill", memory, results.by_case(ACTIVATIONS), kind="lines"),
    ]
    return Picture("Penstock and transformers", panels)


def _suite(kind: Kind, about: str, takes: tuple[str, ...]) -> Suite:
    usual, memory = (",".join(map(str, each)) for each in (kind.lengths, kind.memory_lengths))
    return Suite(
        about,
        partial(_measure, kind=kind),
        partial(_bars, kind=kind),
        _picture,
        repeats="rounds at every length (5; 3 for long prompts and token by token)",
        takes=takes,
        options={
            "--lengths": number(None, f"prompt tokens ({usual}; of memory: {memory})", several=True),
            "--chunk": number(DEFAULT_CHUNK_SIZE, "tokens per chunk"),
            "--decode-tokens": number(32, "tokens after the first"),
            "--memory-repeats": number(3, "processes whose memory is measured, for Penstock"),
            "--full": switch("every system and every round at long prompts too"),
            "--skip-memory": switch("timings only"),
            "--only-memory": switch("memory growth only"),
        },
    )


PREFILL = _suite(
    TEXT,
    "Penstock and transformers read a text, taking turns. Takes about ten minutes on two cores.",
    ("--model", "--dtype", "--device", "--threads"),
)
HYBRID = _suite(
    DELTA_NETS,
    "A random Qwen3.5, three delta nets to one attention, reads random tokens in Penstock and in transformers, "
    "taking turns. Takes about five minutes on two cores.",
    ("--dtype", "--device", "--threads"),
)
