"""Time to first token, decoding and memory of Penstock and transformers, on the same weights and prompt."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.harness import RATIOS, Bar, Bench, Results, bar_of, rotated, take_turns
from benchmarks.models import HYBRID as HYBRID_CONFIG
from benchmarks.models import SPARSE as SPARSE_CONFIG
from benchmarks.models import Subject, random_subject, text_subject
from benchmarks.reading import (
    ACTIVATIONS,
    DECODING,
    PREFILLING,
    Turn,
    measure_memory,
    note_agreement,
    read_turns,
)
from benchmarks.show import Picture
from benchmarks.suite import Suite, number, switch
from benchmarks.systems import Answer, Spec, ask, load_systems
from penstock.errors import SettingError
from penstock.measure.growth import STEADY_METHOD, can_measure_growth
from penstock.pictures import Panel
from penstock.plan.grids import DEFAULT_CHUNK_SIZE

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
    random: Path | None = None  # the configuration of a random model; None: a model of one's choice

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
    random=HYBRID_CONFIG,
)
MIXTURES = Kind(
    lengths=(512, 2048),
    memory_lengths=(512, 2048),
    chunks=((None, True), (0, True)),
    memory_chunks=(0,),
    limits={OVER_WHOLE: (2.0, True), DECODE_OVER: (4.0, True)},
    limited=range(DEFAULT_CHUNK_SIZE, sys.maxsize),
    growth=(512, 2048, 1.5),
    random=SPARSE_CONFIG,
)


def time_turns(kind: Kind, options: argparse.Namespace, bench: Bench, subject: Subject) -> None:
    """Every length in rounds, in which systems take turns."""
    chunk, lengths = options.chunk, options.lengths or kind.lengths
    prompt = subject.prompt(max(lengths))
    # How fast a system decodes does not depend on how it read, so one of each engine does.
    decoding = {Spec("Penstock", chunk), Spec("transformers", 0)}
    systems = load_systems(kind.systems(chunk), subject.path, options.dtype)
    for spec, system in systems.items():
        length = min(_SLOW_WARM_UP_PROMPT if spec.chunk == 1 else _WARM_UP_PROMPT, *lengths)
        for _ in range(2):
            ask(system, prompt[:length], 5 if spec in decoding else 1)
    bench.say("loaded and warmed up")
    for length in lengths:
        is_short = options.full or length < _LONG_TOKENS
        repeats: dict[Turn, int] = {}
        for spec in systems:
            if is_short or spec in {*decoding, Spec("transformers", chunk)}:
                turn = Turn(spec.label, length, 1, (PREFILLING,), spec)
                if spec in decoding:
                    both = (PREFILLING, DECODING)
                    turn = replace(turn, num_tokens=1 + options.decode_tokens, sections=both)
                usual = _REPEATS if is_short and spec.chunk != 1 else _LONG_REPEATS
                repeats[turn] = options.repeats or usual
        turns = take_turns(rotated(repeats, max(repeats.values())), repeats.__getitem__)
        answers = read_turns(
            bench, turns, lambda turn: ask(systems[turn.by], prompt[: turn.length], turn.num_tokens)
        )
        judge_answers(bench, answers, chunk)


def _measure(options: argparse.Namespace, bench: Bench, kind: Kind) -> None:
    lengths, memory_lengths = (options.lengths or each for each in (kind.lengths, kind.memory_lengths))
    if options.skip_memory and options.only_memory:
        raise SettingError("--skip-memory and --only-memory leave nothing to measure: give one of them")
    with_memory = not options.skip_memory and can_measure_growth()
    if options.only_memory and not with_memory:
        raise SettingError("--only-memory needs Linux's /proc/self/status and /proc/self/clear_refs")
    if not with_memory and not options.skip_memory:
        bench.results.notes.append("memory growth is not measured: it needs Linux's /proc")
    subject = random_subject(kind.random) if kind.random else text_subject(options.model)
    longest = max(*lengths, *memory_lengths)
    subject.require_room(longest, options.decode_tokens + 1, "shorter --lengths or fewer --decode-tokens")
    more = {"lengths": lengths, "memory_lengths": memory_lengths if with_memory else ()}
    more |= {"method": f"memory: {STEADY_METHOD}"} if with_memory else {}
    bench.describe(subject.description, options, "dtype", "chunk", "decode_tokens", **more)
    if not options.only_memory:
        time_turns(kind, options, bench, subject)
    if with_memory:
        specs = kind.measured(options.chunk)
        measure_memory(bench, subject, options.dtype, specs, memory_lengths, options.memory_repeats)
    _compare(bench.results, options.chunk)


def judge_answers(bench: Bench, answers: Mapping[Turn, Sequence[Answer]], chunk: int) -> None:
    """Chunked and whole, in every round, Penstock's first token is the same one. Token by token, chunks end within
    the blocks of a recurrent state, which may round it otherwise."""
    same = (Spec("Penstock", chunk), Spec("Penstock", 0))
    first = {each.token_ids[0] for turn, given in answers.items() if turn.by in same for each in given}
    (case,) = {turn.case for turn in answers}
    name = f"all passes of Penstock over {case} have one first token"
    bench.results.require(PREFILLING, name, len(first) == 1)
    decoding = {turn: given for turn, given in answers.items() if DECODING in turn.sections}
    note_agreement(bench, decoding, same[0].label)


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
    ours = Spec("Penstock", settings["chunk"]).label
    shorter, longer = (results.figure(f"{each:,} tokens", ours, ACTIVATIONS) for each in (few, many))
    if shorter and longer:
        ratio = max(longer.median, _RESOLUTION_MIB) / max(shorter.median, _RESOLUTION_MIB)
        name = f"activation memory, Penstock, {many:,} over {few:,} tokens"
        bars.append(Bar(name, ratio, limit, False, shorter.noise or longer.noise))
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
EXPERTS = _suite(
    MIXTURES,
    "A random Qwen3-MoE with 64 experts, 8 of them active, reads random tokens in Penstock and in transformers, "
    "taking turns. Takes about five minutes on two cores.",
    ("--dtype", "--device", "--threads"),
)
