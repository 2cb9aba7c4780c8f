"""Penstock beside other work: loops that keep processors busy, more of itself, or another checkout in turns."""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness import OURS, RATIOS, Bar, Bench, Results, bar_of, rotated, take_turns
from benchmarks.models import EXPERTS, HYBRID, Subject, random_subject, text_subject
from benchmarks.suite import Suite, number, some_of
from benchmarks.systems import ROOT, Child, Spec, ask, load_systems
from penstock.errors import SettingError
from penstock.machine import usable_cores

OTHER = "the other checkout"
IDLE, ONE, EACH, FOUR = "idle", "one loop", "a loop for each core", "four at once"
BESIDE = {"idle": IDLE, "one": ONE, "each": EACH, "four": FOUR}
RANDOM = {"hybrid": HYBRID, "experts": EXPERTS}
PREFILLING, DECODING, WHOLE = "prefill", "decode", "prompt and answer"
# Of the speed on an idle machine, at least.
LEAST_SHARES = {ONE: 0.6, EACH: 0.35, FOUR: 0.7}
NO_SLOWER = 0.98  # than the other checkout
LOOPS = {ONE: lambda: 1, EACH: usable_cores}
_WARM_UP_TOKENS, _DIGEST_TOKENS = 64, 2000
_REPEATS = 5
_LOOP = "while True: pass"


class RandomModelEngine:
    """A model without a tokenizer, by the engine itself. The other has the same form in `benchmarks.checkout`."""

    def load(self, model: str, chunk: int, **_: Any) -> None:
        spec = Spec(chunk=chunk)
        self._system = load_systems([spec], Path(model), "bfloat16")[spec]

    def measure(self, prompt: list[int], num_tokens: int) -> dict[str, float]:
        answer = ask(self._system, prompt, num_tokens)
        per_token_s = (answer.total_s - answer.first_token_s) / max(num_tokens - 1, 1)
        return {"prefill_s": answer.first_token_s, "decode_s": per_token_s}


@contextmanager
def busy_loops(num_loops: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(num_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    conditions = [BESIDE[name] for name in options.beside]
    if IDLE not in conditions:
        raise SettingError("--beside needs idle: the others are shares of it")
    bench.results.settings |= {
        "lengths": options.lengths,
        "chunk": options.chunk,
        "decode_tokens": options.decode_tokens,
        "tree": str(options.tree or ""),
    }
    for kind in options.models:
        subject = text_subject(options.model) if kind == "text" else random_subject(RANDOM[kind])
        _measure_model(options, bench, kind, subject, conditions)


def _measure_model(
    options: argparse.Namespace, bench: Bench, kind: str, subject: Subject, conditions: list[str]
) -> None:
    engine = "benchmarks.checkout:Engine" if kind == "text" else "benchmarks.suites.busy:RandomModelEngine"
    prompt, trees = list(subject.prompt(max(options.lengths))), {OURS: ROOT}
    if options.tree and kind == "text":
        trees[OTHER] = options.tree.resolve()
    with ExitStack() as stack:
        children: dict[str, list[Child]] = {}
        for name, tree in trees.items():
            env, num_children = (
                {"PYTHONPATH": str(tree / "src")},
                4 if (name, FOUR) in turns_of(conditions) else 1,
            )
            children[name] = [stack.enter_context(Child(engine, name, env=env)) for _ in range(num_children)]
            for child in children[name]:
                child.ask("load", model=str(subject.path), chunk=options.chunk)
                child.ask("measure", prompt=prompt[:_WARM_UP_TOKENS], num_tokens=4)
        if OTHER in trees:
            wanted: dict[str, Any] = {
                "prompt": prompt[:_DIGEST_TOKENS],
                "chunks": [100, 512, 0],
                "num_tokens": 24,
            }
            digests = {str(own[0].ask("digest", **wanted)) for own in children.values()}
            bench.results.require(
                kind, "logits, keys and values have the other checkout's bits", len(digests) == 1
            )
        for length in options.lengths:
            case, turns = (
                f"{kind}, {length:,} tokens",
                [turn for turn in turns_of(conditions) if turn[0] in trees],
            )
            request = {"prompt": prompt[:length], "num_tokens": 1 + options.decode_tokens}
            for index, (name, condition) in take_turns(rotated(turns, options.repeats or _REPEATS)):
                own = children[name] if condition == FOUR else children[name][:1]
                with busy_loops(LOOPS.get(condition, lambda: 0)()), ThreadPoolExecutor(len(own)) as pool:
                    asked = [pool.submit(child.ask, "measure", **request) for child in own]
                    answers = [each.result() for each in asked]
                _add(bench, case, index, f"{name}, {condition}", answers, length, options.decode_tokens)
            for quantity, (name, condition) in product((PREFILLING, DECODING, WHOLE), turns):
                over, under = f"{OURS}, {condition}", f"{OURS}, {IDLE}"
                if name == OTHER:
                    under = f"{OTHER}, {IDLE}"
                if over != under and (condition != FOUR or quantity == WHOLE):
                    label = condition if name == OURS else OTHER
                    bench.results.add_ratio(f"{quantity}, {label}", quantity, case, over, under)


def turns_of(conditions: list[str]) -> list[tuple[str, str]]:
    """Systems and what is beside them. The other checkout has the machine for itself."""
    return [*((OURS, condition) for condition in conditions), (OTHER, IDLE)]


def _add(
    bench: Bench,
    case: str,
    index: int,
    system: str,
    answers: list[dict[str, Any]],
    length: int,
    num_decodes: int,
) -> None:
    """Of several at once, what they do together in the time of the last."""
    prefill_s = max(answer["prefill_s"] for answer in answers)
    decode_s = max(answer["decode_s"] for answer in answers)
    whole_s = max(answer["prefill_s"] + num_decodes * answer["decode_s"] for answer in answers)
    speeds = {
        PREFILLING: length / prefill_s,
        DECODING: 1 / decode_s,
        WHOLE: (length + num_decodes) / whole_s,
    }
    for section, speed in speeds.items():
        bench.results.add_row(section, {case: ("tokens/s", speed * len(answers))}, system, index)
    bench.say(
        f"{case}, round {index + 1}: {system}: {speeds[PREFILLING]:.0f}, then {speeds[DECODING]:.1f} tokens/s"
    )


def _bars(results: Results) -> list[Bar]:
    bars = []
    for figure in results.of(RATIOS):
        condition = figure.system.partition(", ")[2]
        least = LEAST_SHARES.get(condition, NO_SLOWER)
        bars.append(bar_of(f"{figure.system}: {figure.name}", figure, least, is_lower_limit=True))
    return bars


OPTIONS: Mapping[str, Any] = {
    "--models": {
        "type": some_of(("text", "hybrid", "experts")),
        "default": ("text", "hybrid", "experts"),
        "metavar": "NAME,NAME",
        "help": "text (--model), and random ones of two other kinds: hybrid, experts (all)",
    },
    "--beside": {
        "type": some_of(tuple(BESIDE)),
        "default": tuple(BESIDE),
        "metavar": "NAME,NAME",
        "help": f"what the machine does else: some of {', '.join(BESIDE)} (all)",
    },
    "--lengths": number((512,), "tokens of the prompts"),
    "--decode-tokens": number(64, "tokens generated after the first"),
    "--chunk": number(512, "tokens of a chunk"),
    "--tree": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "another checkout, to be no slower than, bit by bit",
    },
}
BUSY = Suite(
    "Speed beside other work, as a share of that on an idle machine; and against another checkout.",
    _measure,
    _bars,
    takes=("--model",),
    options=OPTIONS,
)
