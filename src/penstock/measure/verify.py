"""The laws, proved on a model end to end: which ways of running a prompt are compared, and what must come out."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from penstock.engine.llm import LLM
from penstock.errors import (
    CacheFullError,
    ContextLengthError,
    MemoryExhaustedError,
    PromptError,
    SettingError,
)
from penstock.files import readable_json
from penstock.kernels.probe import ProbeResult
from penstock.measure.compare import (
    Comparison,
    Law,
    compare_caches,
    compare_greedy,
    compare_logits,
    compare_traces,
)
from penstock.measure.machine import Machine, this_machine
from penstock.measure.prompts import text_tokens
from penstock.measure.traces import Subject, Trace, random_ends, run_batched, run_chunks
from penstock.models.opened import open_weights
from penstock.models.reading import first_line
from penstock.models.source import WeightSource
from penstock.plan import STATE_GRID

DEFAULT_CHUNKS = (1, 7, 64, 100, 512)
DEFAULT_MAX_TOKENS = 16
DEFAULT_OVERLAP = 64
DEFAULT_TOKENS = 600
# How far two orders of the same sums may be apart, in parts of the largest value: several times what was seen on
# random and on real models. A router in bfloat16 may take another expert where two nearly tie: then that token's
# result is another; float32 is the sharper look. A GPU's delta nets round within a block: chunks off their grid
# differ by up to 0.1 on a small random model, where a processor's differ by 0.02.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "bfloat16 with states": 0.3, "bfloat16 with experts": 0.5}
_SEEDS = (0, 1)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Checks:
    """What is run, after which prompt tokens are generated. None: the usual."""

    chunks: tuple[int, ...] = DEFAULT_CHUNKS
    overlap: int | None = None  # 0: none
    max_tokens: int = DEFAULT_MAX_TOKENS
    strict: bool = False
    tolerance: float | None = None
    with_transformers: bool = False


@dataclass(frozen=True)
class VerifyResults:
    """Everything that a verification found, and what it was found on."""

    machine: Machine
    model: str
    dtype: str
    kernels: str
    probe: ProbeResult
    token_ids: tuple[int, ...]  # of the prompt, then those generated
    texts: dict[int, str]  # of every token id that is named
    num_prompt: int
    num_positions: int  # of the tokens, those after which logits are compared
    tolerance: float
    strict: bool
    comparisons: tuple[Comparison, ...]
    duration_s: float

    @property
    def passed(self) -> bool:
        return all(each.passed for each in self.comparisons)

    def describe(self, position: int) -> str:
        """A token by its place and its text."""
        what = "token" if position < self.num_prompt else "generated token"
        return f"{what} {position} {self.texts[self.token_ids[position]]!r}"

    def to_json(self) -> str:
        plain = {
            **vars(self),
            "machine": asdict(self.machine),
            "probe": {**asdict(self.probe), "same_bits": self.probe.same_bits},
            "comparisons": [each.to_dict(self.describe) for each in self.comparisons],
            "passed": self.passed,
        }
        return readable_json(plain)


def prompt_of(llm: LLM, text: str | None, num_tokens: int | None, max_tokens: int) -> list[int]:
    """The text as it is, or so many tokens of another. At least two tokens, so that there is something to cut; with
    what follows, no more than the context has room for."""
    room = llm.context_length - max_tokens - 1
    if text is not None:
        prompt = llm.tokenize(text, raw=True)
    else:
        prompt = text_tokens(llm.tokenizer, num_tokens or max(min(DEFAULT_TOKENS, room), 2))
    if len(prompt) < 2:
        raise PromptError(f"a prompt of {len(prompt)} tokens cannot be cut: give at least 2")
    if len(prompt) > room:
        raise ContextLengthError(
            f"{len(prompt)} tokens and {max_tokens} generated after them do not fit into the model's context "
            f"of {llm.context_length}: give a shorter prompt or fewer --max-tokens"
        )
    return prompt


def verify(llm: LLM, prompt: list[int], checks: Checks, say: Say) -> VerifyResults:
    """Run the prompt in every way and compare each with the whole prompt in one chunk."""
    started = time.perf_counter()
    model = llm.model
    most_overlap = len(prompt) - 2
    overlap = min(DEFAULT_OVERLAP, (len(prompt) - 1) // 3) if checks.overlap is None else checks.overlap
    if overlap > most_overlap:
        accepted = f"at most {most_overlap}, or a longer prompt"
        raise SettingError("overlap", overlap, accepted, where=f"with a prompt of {len(prompt)} tokens")
    dtype = str(model.dtype).removeprefix("torch.")
    kind = ""
    if dtype == "bfloat16":
        kind = " with experts" if model.config.experts else " with states" if model.config.has_state else ""
    tolerance = checks.tolerance or TOLERANCES[dtype + kind]
    subject = Subject(model, llm.canon, llm.tokenizer, tuple(prompt), checks.max_tokens)
    say("the whole prompt in one chunk ...")
    whole = run_chunks(subject)
    comparisons: list[Comparison] = []
    for way in _ways(subject, whole, checks, overlap):
        say(f"{way.name} ...")
        comparisons += _compare(subject, way, tolerance, same_bits=llm.probe.same_bits)
    with contextlib.closing(open_weights(llm.path)) as source:
        description = source.describe()
        if checks.with_transformers:
            say("transformers ...")
            comparisons.append(_compare_with_transformers(subject, whole, source, tolerance))
    token_ids = (*prompt, *whole.generated)
    firsts = [each.greedy.first for each in comparisons if each.greedy is not None]
    named = {*token_ids, *(token for first in firsts if first for token in (first.token, first.expected))}
    return VerifyResults(
        machine=this_machine(),
        model=description,
        dtype=dtype,
        kernels=model.kernels.name,
        probe=llm.probe,
        token_ids=token_ids,
        texts={token: llm.tokenizer.decode([token], skip_special=False) for token in sorted(named)},
        num_prompt=len(prompt),
        num_positions=len(subject.positions),
        tolerance=tolerance,
        strict=checks.strict,
        comparisons=tuple(comparisons),
        duration_s=llm.load_s + time.perf_counter() - started,
    )


@dataclass(frozen=True)
class _Way:
    """A way of running the prompt, and what it is compared with. Bits are promised of tokens before `bits_until`."""

    name: str
    run: Callable[[], Trace]
    expected: Trace
    bits_until: int
    overlap: int = 0


def _ways(subject: Subject, whole: Trace, checks: Checks, overlap: int) -> Iterator[_Way]:
    num_prompt, forced = len(subject.prompt), whole.generated
    every = num_prompt + subject.num_generated
    sizes = [size for size in checks.chunks if size < num_prompt]

    def alone(name: str, **cuts: Any) -> _Way:
        return _Way(name, partial(run_chunks, subject, forced, **cuts), whole, every, cuts.get("overlap", 0))

    for size in sizes:
        yield alone("token by token" if size == 1 else f"chunks of {size}", chunk_size=size)
    if 1 in sizes:
        yield alone("token by token, as decodes", num_read=1)
    for seed in _SEEDS:  # cuts anywhere; and on the grid, where a model has one
        grid = STATE_GRID if subject.model.config.has_state and seed == _SEEDS[-1] else 1
        ends = random_ends(num_prompt, seed, grid)
        if len(ends) > 1:
            on_grid = f" on multiples of {grid}" if grid > 1 else ""
            yield alone(f"{len(ends)} random chunks{on_grid}, seed {seed}", chunk_ends=ends)
    if overlap:
        size = min(3 * overlap, num_prompt - 1)
        yield alone(f"chunks of {size}, overlap {overlap}", chunk_size=size, overlap=overlap)
    if checks.strict:
        run = partial(run_batched, subject, forced, strict=True)
        yield _Way("batched against alone, strict", run, run(is_alone=True), every)
    else:
        # Decodes take the shape that is fastest: what is generated is promised up to rounding only.
        yield _Way("batched against alone", partial(run_batched, subject, forced), whole, num_prompt)


def _compare(subject: Subject, way: _Way, tolerance: float, *, same_bits: bool) -> Iterator[Comparison]:
    def law(keeps_bits: bool) -> Law:
        return Law(way.bits_until if same_bits and keeps_bits else 0, tolerance)

    started = time.perf_counter()
    try:
        trace = way.run()
    except (MemoryError, MemoryExhaustedError, CacheFullError):
        raise
    except Exception as error:  # the whole prompt could be run, so this one could have been
        yield Comparison(way.name, law(True), error=f"{type(error).__name__}: {first_line(error)}")
        return
    seconds, its_law = time.perf_counter() - started, law(trace.keeps_bits)
    yield compare_traces(way.name, subject.positions, trace, way.expected, its_law, seconds)
    if (twice := trace.recomputed) is not None:
        name = f"overlap {way.overlap}: keys, values computed twice"
        yield Comparison(name, its_law, cache=compare_caches(twice.positions, twice.after, twice.before))


def _compare_with_transformers(
    subject: Subject, whole: Trace, source: WeightSource, tolerance: float
) -> Comparison:
    """The same weights in transformers' own model, in float32: logits after every token that we have some of, the
    generated ones included. There is no law of bits between two programs."""
    from transformers.utils import logging

    from penstock.measure.transformers_model import load_transformers

    started = time.perf_counter()
    logging.set_verbosity_error()
    model = load_transformers(source, torch.float32)
    token_ids = torch.tensor([[*subject.prompt, *whole.generated[:-1]]])
    with torch.inference_mode():
        output = model(token_ids, logits_to_keep=torch.tensor(subject.positions), use_cache=False)
    theirs = output.logits[0].float()
    return Comparison(
        "transformers, float32",
        Law(0, tolerance),
        logits=compare_logits(subject.positions, whole.logits, theirs),
        greedy=compare_greedy(subject.positions, whole.logits, theirs),
        seconds=time.perf_counter() - started,
    )
