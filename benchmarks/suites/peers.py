"""Penstock, transformers, llama.cpp and vLLM read the same tokens and decode after them, each in its own process."""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import penstock
from benchmarks.harness import RATIOS, Bar, Bench, Results, bar_of, take_turns
from benchmarks.models import Subject, text_subject
from benchmarks.reading import DECODING, PREFILLING, Turn, note_agreement, read_turns
from benchmarks.show import Picture
from benchmarks.suite import PEERS_FOLDER, SEED, Suite, number, some_of, switch, value
from benchmarks.systems import (
    AUTO,
    Answer,
    Child,
    PeerError,
    PenstockSystem,
    TransformersSystem,
    ask,
)
from penstock.engine.llm import LLM
from penstock.kernels.quantised import BLOCK_FORMS
from penstock.machine import AMX, instruction_set, processor_flags
from penstock.measure.prompts import shuffled_rounds
from penstock.models.hub import DEFAULT_MODEL
from penstock.models.opened import open_weights
from penstock.pictures import Panel
from penstock.plan import format_bytes

FIXED, CHOSEN, TRANSFORMERS = "Penstock, chunk 512", "Penstock, auto", "transformers, whole"
LLAMA_FILE, LLAMA_BEST, VLLM = "llama.cpp, this file", "llama.cpp, its best format", "vLLM, bfloat16"
# By system: its engine. Those of PEERS run in environments of their own, where there are any.
SYSTEMS = {
    FIXED: "penstock",
    CHOSEN: "penstock",
    TRANSFORMERS: "transformers",
    LLAMA_FILE: "llama.cpp",
    LLAMA_BEST: "llama.cpp",
    VLLM: "vllm",
}
PEER_ENGINES = ("llama.cpp", "vllm")
ENGINES = {
    "penstock": "benchmarks.suites.peers:PenstockEngine",
    "transformers": "benchmarks.suites.peers:TransformersEngine",
    "llama.cpp": "llama_cpp_engine:Engine",
    "vllm": "vllm_engine:Engine",
}
# By quantity and peer: what Penstock's speed over its must be at least, by prompt length.
LIMITS: Mapping[tuple[str, str], Mapping[int, float]] = {
    (PREFILLING, LLAMA_FILE): {512: 3.0, 2048: 4.0, 8000: 4.0},
    (PREFILLING, LLAMA_BEST): {2048: 2.0, 8000: 2.0},
    (PREFILLING, VLLM): {512: 1.1, 2048: 1.1, 8000: 1.1},
    (PREFILLING, TRANSFORMERS): {2048: 1.2, 8000: 1.5},
    (DECODING, LLAMA_FILE): {512: 1.5, 8000: 1.5},
    (DECODING, LLAMA_BEST): {512: 1.1, 8000: 1.1},
}
# Of other files than the default model's, and of processors without AVX-512, for which llama.cpp is built, too.
K_QUANTS: Mapping[tuple[str, str], Mapping[int, float]] = {
    (PREFILLING, LLAMA_FILE): {512: 2.0, 2048: 2.5},
    (DECODING, LLAMA_FILE): {512: 1.15, 2048: 1.6},
}
# With AVX-512; its decodes are not judged by what rounds rows.
ROUNDED: Mapping[tuple[str, str], Mapping[int, float]] = {(PREFILLING, LLAMA_FILE): {512: 3.0, 2048: 3.5}}
TILES: Mapping[tuple[str, str], Mapping[int, float]] = {
    (PREFILLING, LLAMA_FILE): {512: 2.0, 2048: 2.0},
    (DECODING, LLAMA_FILE): {512: 1.15, 2048: 1.15},
}
AVX2: Mapping[tuple[str, str], Mapping[int, float]] = {
    (PREFILLING, LLAMA_FILE): {512: 1.3, 2048: 1.3},
    (DECODING, LLAMA_FILE): {512: 1.1, 2048: 1.1},
}
ALL_LIMITS = {"": LIMITS, "k-quants": K_QUANTS, "int8": ROUNDED, "amx": TILES, "avx2": AVX2}
_DTYPE = "bfloat16"
_FORMATS = ("Q4_0", "Q8_0", "BF16", "F16")
# Less than this is noise, and another process for its sake would only take memory.
_MIN_GAIN = 1.03
_TRIAL_DECODES = 16
_LONG_TOKENS = 4000  # prompts of so many are tried once
# Threads of the engine before go to sleep in this time.
_SETTLE_S = 0.3
METHOD = (
    "every engine in a process of its own, in its own environment, on the same token ids; one computes at a time; "
    "after a warm-up all take turns, in another order each round; each engine stamps its tokens itself, from the "
    "call to the token; prefill: prompt tokens over the time to the first token; decode: tokens after the first over "
    "theirs"
)


class PenstockEngine:
    """Penstock in a child."""

    def load(
        self,
        model: str,
        chunk: Any,
        dtype: Any,
        threads: int,
        weights: Any = None,
        activations: Any = None,
        **_: Any,
    ) -> dict[str, str]:
        own = {"weights": weights, "activations": activations}
        llm = LLM(model, dtype=dtype, chunk=chunk, threads=threads, device="cpu", **own)
        is_auto = chunk == AUTO
        system = PenstockSystem.auto(llm) if is_auto else PenstockSystem(llm.model, llm.canon, chunk)
        self.generate = system.generate
        shapes, plain = llm.model.probe_shapes, str(llm.model.dtype).removeprefix("torch.")
        products = (*shapes.products, *shapes.expert_products, shapes.head)
        known = {product.form for product in products if product}
        forms = ", ".join(sorted({form if form in BLOCK_FORMS else plain for form in known}))
        why = f" ({llm.weights.reason})" if llm.weights.reason else ""
        return {
            "about": f"penstock {penstock.__version__}, torch {torch.__version__}, weights in memory: {forms}, "
            f"{format_bytes(llm.model.num_weight_bytes)}{why}, activations {llm.model.kernels.activations}"
        }


class TransformersEngine:
    """transformers in a child. It writes weights for others that read its files."""

    def prepare(self, model: str, output: str, dtype: str, **_: Any) -> None:
        """The weights of a model, unpacked, as a Hugging Face folder."""
        self._open(model, dtype).save_pretrained(output)

    def load(self, model: str, dtype: str, threads: int, **_: Any) -> dict[str, str]:
        torch.set_num_threads(threads)
        self.generate = TransformersSystem(self._open(model, dtype), 0).generate
        return {"about": f"transformers {version('transformers')}, torch {torch.__version__}"}

    def _open(self, model: str, dtype: str) -> Any:
        from penstock.measure.transformers_model import load_transformers  # takes seconds to import

        with closing(open_weights(Path(model))) as source:
            return load_transformers(source, getattr(torch, dtype))


@dataclass(frozen=True)
class Candidate:
    """An engine with settings of its own: a process."""

    engine: str
    values: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, engine: str, **values: Any) -> "Candidate":
        return cls(engine, tuple((name, value) for name, value in values.items() if value is not None))

    @property
    def label(self) -> str:
        parts = ", ".join(f"{name} {value}" for name, value in self.values)
        return f"{self.engine} ({parts})" if parts else self.engine


Costs = dict[
    tuple[str, int], dict[Candidate, float]
]  # by section and length: seconds to the first token, or of one


class Workers:
    """Processes that are started when they are first asked, of which one computes at a time."""

    def __init__(self, pythons: Mapping[str, Path], folder: Path, common: Mapping[str, Any]) -> None:
        """`pythons` has the interpreters of the engines; `folder` is for files that engines need; `common` is told to
        all (`common_settings`)."""
        self._pythons = pythons
        self._folder = folder
        self._common = common
        self._running: dict[Candidate, Child] = {}
        self.about: dict[str, str] = {}

    def generate(self, candidate: Candidate, prompt: Sequence[int], num_tokens: int) -> Answer:
        child = self._running.get(candidate) or self._start(candidate)
        time.sleep(_SETTLE_S)
        return ask(child, prompt, num_tokens)

    def close(self) -> None:
        while self._running:
            self._running.popitem()[1].close()

    def _start(self, candidate: Candidate) -> Child:
        settings = {**self._common, **dict(candidate.values)}
        settings["model"] = str(self._model(candidate.engine, settings.get("format")))
        child = self._running[candidate] = self._open(candidate.engine, candidate.label)
        self.about[candidate.engine] = str(child.ask("load", **settings).get("about"))
        return child

    def _open(self, engine: str, name: str) -> Child:
        return Child(ENGINES[engine], name, self._pythons[engine])

    def _model(self, engine: str, format_name: str | None) -> Path:
        """The model's file, or what is made of it for this engine, once."""
        maker = "transformers" if engine == "vllm" else engine
        made = self._folder / ("weights" if engine == "vllm" else f"{format_name}.gguf")
        if engine != "vllm" and format_name is None:
            return Path(self._common["model"])
        if not made.exists():
            with self._open(maker, f"{maker} (writing {made.name})") as child:
                child.ask("prepare", **{**self._common, "format": format_name, "output": str(made)})
        return made


def try_all(
    workers: Workers,
    candidates: Sequence[Candidate],
    prompt: Sequence[int],
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> Costs:
    """One process at a time. What disturbs a pass makes it slower, never faster: the best counts. Candidates that
    fail are left out; where all do, so does this."""
    costs: Costs = {}
    failure = None
    for candidate in candidates:
        tried: dict[tuple[str, int], float] = {}
        try:
            for length in options.lengths:
                num_passes = 1 if options.quick or length >= _LONG_TOKENS else 2
                passes = [
                    workers.generate(candidate, prompt[:length], _TRIAL_DECODES + 1)
                    for _ in range(num_passes)
                ]
                first_s = min(each.first_token_s for each in passes)
                token_s = min(1 / (each.decode_tokens_per_s or 1e-9) for each in passes)
                tried |= {(PREFILLING, length): first_s, (DECODING, length): token_s}
                speeds = f"prefill {length / first_s:,.0f} tokens/s, decode {1 / token_s:.1f}"
                say(f"tried {candidate.label}, {length:,} tokens: {speeds}")
        except PeerError as error:
            say(f"left out: {error}")
            failure = error
            continue
        finally:
            workers.close()
        for key, cost in tried.items():
            costs.setdefault(key, {})[candidate] = cost
    if failure is not None and not costs:
        raise failure
    return costs


def choose(costs: Costs, length: int) -> tuple[Candidate, Candidate]:
    """For reading, the candidate that is best on the whole, but where another is better by more than noise; for
    decoding the same one, but for the same."""
    reading = [each for (section, _), each in costs.items() if section == PREFILLING]

    def lost(candidate: Candidate) -> float:
        return sum(each[candidate] / min(each.values()) for each in reading)

    def better(own: Mapping[Candidate, float], usual: Candidate) -> Candidate:
        best = min(own, key=own.__getitem__)
        return usual if own[usual] <= _MIN_GAIN * own[best] else best

    own = costs[PREFILLING, length]
    prefill = better(own, min(own, key=lost))
    return prefill, better(costs[DECODING, length], prefill)


def find_pythons(folder: Path) -> dict[str, Path]:
    """The interpreters of the engines: this one's own, and those of the environments that are in the folder."""
    found = dict.fromkeys(("penstock", "transformers"), Path(sys.executable))
    if find_spec("llama_cpp") is not None:
        found["llama.cpp"] = Path(sys.executable)
    for engine in PEER_ENGINES:
        python = folder / engine / "bin" / "python"
        if python.exists():
            found[engine] = python.absolute()
    return found


def common_settings(subject: Subject, options: argparse.Namespace, most_tokens: int) -> dict[str, Any]:
    """What every engine is told."""
    return {
        "model": str(subject.path),
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "most_tokens": most_tokens,
    }


def left_out(
    wanted: Sequence[str], present: Sequence[str], path: Path, same_file: bool = False
) -> dict[str, str]:
    """The systems that do not take part, and why."""
    found = {}
    for system, engine in SYSTEMS.items():
        if same_file and engine != "penstock" and system != LLAMA_FILE:
            found[system] = "does not compute with the file as it is"
        elif engine in PEER_ENGINES and engine not in wanted:
            found[system] = "not asked for"
        elif engine == "llama.cpp" and (path.is_dir() or path.suffix != ".gguf"):
            found[system] = "reads GGUF files alone, and the model is none"
        elif engine not in present:
            found[system] = "not installed: make bench-peers"
    return found


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    quick, results = options.quick, bench.results
    lengths = options.lengths = options.lengths or ((512, 2048) if quick else (512, 2048, 8000))
    options.decode_tokens = options.decode_tokens or (16 if quick else 64)
    options.repeats = options.repeats or (3 if quick else 5)
    most_tokens = max(lengths) + options.decode_tokens + 1
    subject = text_subject(options.model)
    subject.require_room(most_tokens, 0, "shorter --lengths or fewer --decode-tokens")
    pythons = find_pythons(options.peers_folder)
    absent = left_out(options.peers, list(pythons), subject.path, options.same_file)
    names = ("dtype", "lengths", "decode_tokens")
    limits = limits_of(options.model, instruction_set(processor_flags()), options.activations)
    bench.describe(subject.description, options, *names, left_out=absent, limits=limits, method=METHOD)
    common = common_settings(subject, options, most_tokens)
    prompt = subject.prompt(max(lengths))
    # Where processes that were given up still write, it is not an error that the folder cannot be emptied.
    with tempfile.TemporaryDirectory(prefix="penstock-peers-", ignore_cleanup_errors=True) as folder:
        with closing(Workers(pythons, Path(folder), common)) as workers:
            turns = plan_turns(workers, prompt, options, absent, bench)
            answers = run_turns(workers, turns, prompt, options, bench)
        results.notes += [f"{engine}: {about}" for engine, about in workers.about.items()]
    results.notes += [f"left out: {system}: {why}" for system, why in absent.items()]
    note_agreement(bench, answers, FIXED)
    results.arrange(list(SYSTEMS))
    compare(results)


def limits_of(model: str, instructions: str | None, activations: str | None = None) -> str:
    """Which of `ALL_LIMITS` holds."""
    if instructions == AMX:
        return "amx"
    if instructions not in ("avx512_bf16", "avx512"):
        return "avx2"
    return "int8" if activations == "int8" else "" if model == DEFAULT_MODEL else "k-quants"


def plan_turns(
    workers: Workers,
    prompt: Sequence[int],
    options: argparse.Namespace,
    absent: dict[str, str],
    bench: Bench,
) -> list[Turn]:
    """Each system with its best settings. Peers that fail are left out, and it is said why."""
    turns: list[Turn] = []
    lengths, found = options.lengths, dict[str, Costs]()
    for system in SYSTEMS:
        if system == LLAMA_BEST and LLAMA_FILE in absent:
            absent.setdefault(system, absent[LLAMA_FILE])
        if system in absent:
            bench.say(f"{system} is left out: {absent[system]}")
            continue
        # With the settings that are best for the file as it is, on a prompt of middle length.
        middle = lengths[len(lengths) // 2]
        file = choose(found[LLAMA_FILE], middle)[0] if system == LLAMA_BEST else None
        ours = {"weights": options.weights, "activations": options.activations}
        candidates = candidates_of(system, ours, dict(file.values) if file else {})
        if len(candidates) > 1:
            try:
                found[system] = try_all(workers, candidates, prompt, options, bench.say)
            except PeerError as error:
                absent[system] = str(error)
                bench.say(f"{system} is left out: {error}")
                continue
        for length in lengths:
            best = choose(found[system], length) if system in found else 2 * (candidates[0],)
            turns += turns_of(system, length, *best, lengths, options.decode_tokens)
    return turns


def candidates_of(system: str, ours: Mapping[str, Any], file_settings: Mapping[str, Any]) -> list[Candidate]:
    """The settings of a system that are tried; `ours` are Penstock's beside the chunk."""
    settings: dict[str, list[dict[str, Any]]] = {
        FIXED: [{"chunk": 512, **ours}],
        CHOSEN: [{"chunk": AUTO, **ours}],
        TRANSFORMERS: [{}],
        LLAMA_FILE: [{"batch": size, "flash": flash} for size in (512, 2048) for flash in (True, False)],
        LLAMA_BEST: [{"format": name, **file_settings} for name in _FORMATS],
        VLLM: [{"batch": size} for size in (512, 2048, 8192)],
    }
    return [Candidate.of(SYSTEMS[system], **each) for each in settings[system]]


def turns_of(
    system: str,
    length: int,
    reading: Candidate,
    decoding: Candidate,
    lengths: Sequence[int],
    num_decodes: int,
) -> list[Turn]:
    """Decoding is measured after the shortest and the longest prompt; one system of Penstock is enough for it."""
    reads = Turn(system, length, 1, (PREFILLING,), reading)
    if length not in (min(lengths), max(lengths)) or system == CHOSEN:
        return [reads]
    if reading == decoding:
        return [Turn(system, length, num_decodes + 1, (PREFILLING, DECODING), reading)]
    return [reads, Turn(system, length, num_decodes + 1, (DECODING,), decoding)]


def run_turns(
    workers: Workers, turns: Sequence[Turn], prompt: Sequence[int], options: argparse.Namespace, bench: Bench
) -> dict[Turn, list[Answer]]:
    """All turns, after a warm-up of every process."""
    processes = list(dict.fromkeys(turn.by for turn in turns))
    bench.say(f"warming up {len(processes)} processes")
    for candidate in processes:
        workers.generate(candidate, prompt[: min(options.lengths)], 2)
    bench.results.settings["choices"] = [
        f"{turn.system}, {turn.case}, {' and '.join(turn.sections)}: {turn.by.label}" for turn in turns
    ]
    rounds = take_turns(shuffled_rounds(turns, options.repeats, options.seed))
    return read_turns(
        bench, rounds, lambda turn: workers.generate(turn.by, prompt[: turn.length], turn.num_tokens)
    )


def compare(results: Results) -> None:
    """Penstock's speed over each other's, round by round."""
    for section, ours in ((PREFILLING, FIXED), (PREFILLING, CHOSEN), (DECODING, FIXED)):
        for figure in results.of(section):
            if figure.system not in (FIXED, CHOSEN):
                label = f"{section}: {ours} over {figure.system}"
                results.add_ratio(label, section, figure.name, ours, figure.system)


def _bars(results: Results) -> list[Bar]:
    """All of them, also those that could not be measured. Prefill is judged with fixed and with automatic chunks."""
    bars = []
    for (section, theirs), limits in ALL_LIMITS[results.settings.get("limits", "")].items():
        for ours in (FIXED, CHOSEN) if section == PREFILLING else (FIXED,):
            for length, limit in limits.items():
                label, name = f"{section}: {ours} over {theirs}", f"{length:,} tokens"
                figure = results.figure(name, label, RATIOS) if results.settings["dtype"] == _DTYPE else None
                bars.append(bar_of(f"{label}, {name}", figure, limit, is_lower_limit=True))
    return bars


def _picture(results: Results) -> Picture:
    panels = [
        Panel("Reading a prompt", "prompt tokens per second", results.by_case(PREFILLING)),
        Panel("Decoding after it", "tokens per second", results.by_case(DECODING)),
    ]
    return Picture("All taking turns, each with its best settings", panels)


PEERS = Suite(
    "Penstock, transformers, llama.cpp and vLLM read the same tokens and decode after them, each in a process of its "
    "own, taking turns. llama.cpp and vLLM take part where `make bench-peers` has made their environments, each with "
    "its best settings, which are looked for first. On two cores and the default model that takes 45 minutes to an "
    "hour, nearly all of it theirs; with --peers none, about 6 minutes.",
    _measure,
    _bars,
    _picture,
    repeats="rounds (5; quick: 3)",
    takes=("--model", "--dtype", "--threads"),
    options={
        "--lengths": number(None, "prompt tokens (512,2048,8000)", several=True),
        "--decode-tokens": number(None, "after the first, after shortest and longest prompt (64)"),
        "--quick": switch(
            "512,2048 tokens, 16 decoded, 3 rounds, where nothing else is given; some bars are not measured then"
        ),
        "--peers": value(
            some_of(PEER_ENGINES),
            PEER_ENGINES,
            "NAME,NAME",
            f"none, or some of {','.join(PEER_ENGINES)} (all)",
        ),
        "--peers-folder": PEERS_FOLDER,
        "--same-file": switch("only Penstock and llama.cpp, which compute with a GGUF file as it is"),
        "--weights": value(str, None, "FORM", "the form in which Penstock has weights (its own choice)"),
        "--activations": value(str, None, "FORM", "plain or int8, Penstock's alone (its own choice)"),
        "--seed": SEED,
    },
)
