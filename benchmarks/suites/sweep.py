"""Chunk sizes against prompt lengths: every configuration on every length, in another order each round."""

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.harness import MIN_VALUES, NOISY_SHARE, Bench, Results, Series, take_turns
from benchmarks.models import Subject, text_subject
from benchmarks.reading import (
    ACTIVATIONS,
    FIRST_TOKEN,
    PREFILLING,
    TOTAL,
    Turn,
    measure_memory,
    read_turns,
)
from benchmarks.show import Picture
from benchmarks.suite import PEERS_FOLDER, SEED, Suite, count, number, switch, value
from benchmarks.suites.peers import LLAMA_FILE, Candidate, Workers, common_settings, find_pythons, left_out
from benchmarks.systems import AUTO, Answer, Spec, ask, load_systems
from penstock.engine.llm import LLM
from penstock.errors import SettingError
from penstock.measure.growth import STEADY_METHOD, can_measure_growth
from penstock.measure.prompts import shuffled_rounds
from penstock.pictures import Panel

BASELINES = ("transformers", "llama.cpp")
_REPEATS = 5


def specs_of(chunks: Sequence[int | str], baselines: Sequence[str]) -> list[Spec]:
    """Penstock at each size, and each baseline at each: what has no `auto` leaves it out. transformers reads the
    prompt whole as well, which is its default."""
    sizes = [int(chunk) for chunk in dict.fromkeys(chunks) if chunk != AUTO]
    found = [Spec("Penstock", size) for size in sizes]
    found += [Spec("Penstock", AUTO)] if AUTO in chunks else []
    if "transformers" in baselines:
        found += [Spec("transformers", size) for size in dict.fromkeys((0, *sizes))]
    if "llama.cpp" in baselines:
        found += [Spec("llama.cpp", size) for size in sizes or [0]]
    return found


def _chunks(text: str) -> tuple[int | str, ...]:
    parts = text.split(",")
    return tuple(dict.fromkeys(AUTO if part == AUTO else 0 if part == "0" else count(part) for part in parts))


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1")
    return value


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    repeats = options.repeats or _REPEATS
    if repeats < MIN_VALUES:
        because = "fewer have no spread to judge"
        raise SettingError("repeats", repeats, f"{MIN_VALUES} or more", because=because)
    subject, specs = text_subject(options.model), specs_of(options.chunks, options.baseline)
    subject.require_room(
        max(options.lengths), options.decode_tokens, "shorter --lengths or fewer --decode-tokens"
    )
    absent = left_out(options.baseline, list(find_pythons(options.peers_folder)), subject.path)
    if "llama.cpp" in options.baseline and LLAMA_FILE in absent:
        raise SettingError("baseline", "llama.cpp", because=absent[LLAMA_FILE])
    method = "all take turns, in another order each round" + f"; memory: {STEADY_METHOD}" * options.memory
    names = ("dtype", "chunks", "lengths", "decode_tokens")
    bench.describe(subject.description, options, *names, method=method)
    time_turns(subject, specs, options, repeats, bench)
    bench.results.arrange([spec.label for spec in specs])
    if options.memory and can_measure_growth():
        # Of systems that a fresh process can load by their names.
        measured = [spec for spec in specs if spec.engine != "llama.cpp" and spec.chunk != AUTO]
        measure_memory(bench, subject, options.dtype, measured, options.lengths, 1)
    elif options.memory:
        bench.results.notes.append("memory growth is not measured: it needs Linux's /proc")


def time_turns(
    subject: Subject, specs: Sequence[Spec], options: argparse.Namespace, repeats: int, bench: Bench
) -> None:
    """A warm-up that is not counted, then every system and length once in every round. llama.cpp runs with flash
    attention, as its own programs choose."""
    prompt = subject.prompt(max(options.lengths))
    own = [spec for spec in specs if spec.engine != "llama.cpp"]
    llm = LLM(subject.path, dtype=options.dtype, chunk=AUTO)
    systems = load_systems(own, subject.path, options.dtype, llm)
    common = common_settings(subject, options, max(options.lengths) + options.decode_tokens)
    with closing(Workers(find_pythons(options.peers_folder), Path(), common)) as workers:

        def generate(turn: Turn) -> Answer:
            part = prompt[: turn.length]
            if turn.by in systems:
                return ask(systems[turn.by], part, turn.num_tokens)
            candidate = Candidate.of("llama.cpp", batch=turn.by.chunk, flash=True)
            return workers.generate(candidate, part, turn.num_tokens)

        turns = [
            Turn(spec.label, length, options.decode_tokens, (FIRST_TOKEN, PREFILLING, TOTAL), spec)
            for spec in specs
            for length in options.lengths
        ]
        for turn in turns:
            if turn.length == min(options.lengths):
                generate(turn)
        bench.say(f"warmed up; {repeats} rounds of {len(turns)} turns")
        rounds = take_turns(shuffled_rounds(turns, repeats, options.seed))
        read_turns(bench, rounds, generate, options.max_spread)
        bench.results.notes += workers.about.values()


def _picture(results: Results) -> Picture:
    """Against the chunk: a line for each engine and length. What is noisy is left out."""
    sections = ((FIRST_TOKEN, "seconds", True), (PREFILLING, "prompt tokens per second", False))
    panels = [
        Panel(section, unit, _lines(results, section), "chunk (tokens)", "lines", is_log)
        for section, unit, is_log in (*sections, (ACTIVATIONS, "peak growth, cache aside (MiB)", False))
    ]
    return Picture("Chunks and prompts", panels)


def _lines(results: Results, section: str) -> Series:
    lines: Series = {}
    for system, cases in results.by_case(section).items():
        engine, _, how = system.partition(", ")
        for case, values in cases.items():
            lines.setdefault(f"{engine}, {case}", {})[how.removeprefix("chunk ")] = values
    return {
        name: dict(sorted(line.items(), key=lambda each: int(each[0]) if each[0].isdigit() else 1 << 40))
        for name, line in lines.items()
    }


SWEEP = Suite(
    "Chunk sizes against prompt lengths: time to first token, tokens per second, total time and, if asked for, "
    "memory. All take turns, in another order each round. A figure whose repeats lie too far apart is not given: its "
    "cell reads 'noisy', and the exit status is 3.",
    _measure,
    picture=_picture,
    repeats="rounds (5; at least 3)",
    options={
        "--chunks": value(
            _chunks,
            (0, 128, 256, 512, 1024),
            "N,N",
            "chunk sizes; 0: the whole prompt, auto: Penstock's own choice (0,128,256,512,1024)",
        ),
        "--lengths": number((512, 2048, 8000), "prompt tokens"),
        "--decode-tokens": number(16, "generated in all, for the total time"),
        "--baseline": {
            **value(str, [], "NAME", f"another system, of {', '.join(BASELINES)}; may be given twice"),
            "choices": BASELINES,
            "action": "append",
        },
        "--peers-folder": PEERS_FOLDER,
        "--memory": switch("peak memory too, each in a fresh process"),
        "--max-spread": value(
            _share,
            NOISY_SHARE,
            "X",
            "quartiles further apart than this share of the median are noise (%(default)s)",
        ),
        "--seed": SEED,
    },
)
