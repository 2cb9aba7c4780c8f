"""Steps of the engine on a GPU: decodes, alone and together, a chunk with decodes beside it, and the same bits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from benchmarks.suites.gpu.job import Job, over
from benchmarks.suites.gpu.models import Subject
from benchmarks.suites.gpu.plan import CHUNK, BitsCase, DecodeCase
from benchmarks.suites.gpu.prompts import measure_prefills
from penstock.cache import BLOCK_TOKENS, SequenceCache
from penstock.cache.space import CacheSpace
from penstock.engine.batcher import Batcher
from penstock.engine.events import GenerationRequest
from penstock.engine.run import Run
from penstock.engine.status import StepRecord
from penstock.errors import PenstockError
from penstock.measure.traces import RecordedJob, Stepwise, kv_of, states_of
from penstock.models.text.tokenizer import SpecialTokens, Tokenizer
from penstock.plan import STATE_GRID, ChunkedPrefillConfig
from penstock.plan.policy import ScheduleConfig

_WARM_UP_STEPS = _STEPS_IN_A_ROW = 10
# Rounds of mixed steps for each repeat that is asked for: a step is short.
_MIXED_ROUNDS, _MIXED_WARM_UPS = 4, 3
STRICT = "strict"


class Requests(Stepwise):
    """Requests of made-up tokens, a step at a time, over a cache with room for them. Where it looks ahead, steps are
    those of a service: the device has the next one before the host knows what the last one gave."""

    def __init__(
        self,
        subject: Subject,
        chunk: int,
        num_requests: int,
        num_tokens: int,
        *,
        looks_ahead: bool = False,
        strict: bool = False,
    ) -> None:
        """`num_tokens` is what their prompts and answers take together."""
        grid = STATE_GRID if subject.model.config.has_state else 1
        schedule = ScheduleConfig(chunk_size=chunk, max_running=num_requests, grid=grid)
        space = subject.space(num_tokens + num_requests * BLOCK_TOKENS, num_requests)
        super().__init__(
            subject.model,
            subject.canon,
            space,
            schedule,
            strict=strict,
            looks_ahead=None if looks_ahead else False,
            depth=None if looks_ahead else 1,
        )
        self._looks_ahead = looks_ahead

    def step(self) -> StepRecord | None:
        if not self._looks_ahead:
            return super().step()
        record = Batcher.step(self)
        self.notices.clear()
        return record

    def add_prompt(
        self, name: str, prompt: Sequence[int], max_tokens: int, *, needs_logits: bool = False
    ) -> RecordedJob:
        job = self.new_job(name, GenerationRequest(prompt, max_tokens, ignore_eos=True), made_up_tokenizer())
        job.needs_logits = needs_logits
        self.add(job)
        return job

    def begin_decodes(self, tokens: Sequence[int], num_requests: int, max_tokens: int) -> None:
        """Add so many requests, each with its share of the tokens for a prompt, and step until all decode."""
        size = len(tokens) // num_requests
        added = [
            self.add_prompt(f"decoding-{index}", tokens[index * size : (index + 1) * size], max_tokens)
            for index in range(num_requests)
        ]
        while not all(request.num_generated for request in added):
            self.step()


def tokens_to_last(num_steps: int, num_requests: int, past: int, chunk: int) -> int:
    """How many tokens requests must be allowed for all of them to decode together in so many steps: they begin one
    after the other, and the first must not end before the last is done."""
    steps_to_begin = -(-num_requests * past // chunk) if chunk else num_requests
    return num_steps + steps_to_begin + num_requests + 2


@cache
def made_up_tokenizer() -> Tokenizer:
    """The first tokens are bytes; those beyond have no text."""
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, SpecialTokens(), None)


def measure_decodes(job: Job, errors: list[str]) -> None:
    """Each step is planned, run, sampled from and committed, a few in a row: the device may be ahead within them."""
    for model in dict.fromkeys(case.model for case in job.plan.decodes):
        _measure_decodes_of(job, errors, job.subject(model), model, job.plan.decodes)


def _measure_decodes_of(
    job: Job, errors: list[str], subject: Subject, model: str, cases: Sequence[DecodeCase]
) -> None:
    for case in cases:
        if case.model == model:
            with job.attempt(case.label, errors):
                job.figure(case.label, "ms", time_decodes(job, subject, case))


def measure_experts(job: Job, errors: list[str]) -> None:
    """Prompts beside transformers, and decodes; then the model with all of its layers, without transformers."""
    cases, deep, decodes = job.plan.prefills[job.section], job.plan.deep, job.plan.expert_decodes
    measure_prefills(job, errors, cases)
    model = cases[0].model
    _measure_decodes_of(job, errors, job.subject(model), model, decodes)
    job.free_memory()
    if deep is None:
        return
    subjects: list[Subject] = []
    ready_ms = job.milliseconds(lambda: subjects.append(job.subject(deep.model)))
    job.figure(f"{deep.model}, loaded and probed", "s", [ready_ms / 1e3])
    measure_prefills(replace(job, with_peer=False), errors, [deep], subjects[0])
    _measure_decodes_of(job, errors, subjects[0], deep.model, decodes)


def time_decodes(job: Job, subject: Subject, case: DecodeCase) -> list[float]:
    """Milliseconds of a step, in each of some rows of them."""
    num_steps = _WARM_UP_STEPS + job.plan.decode_steps + _STEPS_IN_A_ROW
    if case.num_sequences == 1:
        run = Run(
            subject.model,
            job.prompt(case.model, case.past),
            config=ChunkedPrefillConfig(CHUNK),
            canon=subject.canon,
            max_tokens=num_steps + 2,  # the first comes with the prompt; one more, so that it does not end
        )
        while not run.generated:
            run.step()
        step: Callable[[], object] = run.step
    else:
        step = _decoding(job, subject, case.model, case.num_sequences, case.past, num_steps).step
    for _ in range(_WARM_UP_STEPS):
        step()

    return [job.milliseconds(_in_a_row(step)) / _STEPS_IN_A_ROW for _ in range(_num_rows(job))]


def _in_a_row(step: Callable[[], object]) -> Callable[[], None]:
    def some() -> None:
        for _ in range(_STEPS_IN_A_ROW):
            step()

    return some


def _num_rows(job: Job) -> int:
    return -(-job.plan.decode_steps // _STEPS_IN_A_ROW)


def measure_strict(job: Job, errors: list[str]) -> None:
    """Decodes whose bits do not depend on what runs beside them, in turns with those of the same requests whose bits
    may."""
    for model in dict.fromkeys(case.model for case in job.plan.strict):
        subject = job.subject(model)
        for case in job.plan.strict:
            if case.model == model:
                with job.attempt(case.label, errors):
                    _measure_strict(job, subject, case)


def _measure_strict(job: Job, subject: Subject, case: DecodeCase) -> None:
    num_steps = _WARM_UP_STEPS + job.plan.decode_steps + _STEPS_IN_A_ROW
    given = (job, subject, case.model, case.num_sequences, case.past, num_steps)
    requests = {name: _decoding(*given, strict=name == STRICT) for name in (STRICT, "plain")}
    for _ in range(_WARM_UP_STEPS):
        for each in requests.values():
            each.step()
    turns = {name: _in_a_row(each.step) for name, each in requests.items()}
    rows = job.time_turns(turns, dict.fromkeys(turns, _num_rows(job)))
    for name, values in rows.items():
        job.figure(f"{case.label}, {name}", "ms", [value / _STEPS_IN_A_ROW for value in values])
    job.figure(strict_label(case), "x", over(rows[STRICT], rows["plain"]))


def strict_label(case: DecodeCase) -> str:
    return f"{case.label}, strict over plain"


def _decoding(
    job: Job,
    subject: Subject,
    model: str,
    num_sequences: int,
    past: int,
    num_steps: int,
    chunk: int = CHUNK,
    other_tokens: int = 0,
    looks_ahead: bool = True,
    strict: bool = False,
) -> Requests:
    """Requests that all decode, and will for so many steps; with room for another, of `other_tokens`."""
    max_tokens = tokens_to_last(num_steps, num_sequences, past, chunk)
    requests = Requests(
        subject,
        chunk,
        num_sequences + (other_tokens > 0),
        num_sequences * (past + max_tokens) + other_tokens,
        looks_ahead=looks_ahead,
        strict=strict,
    )
    requests.begin_decodes(job.prompt(model, num_sequences * past), num_sequences, max_tokens)
    return requests


def measure_mixed(job: Job, errors: list[str]) -> None:
    """A chunk with decodes beside it, without, and the decodes alone, taking turns. No step is committed: each is run
    again and again where it stands."""
    case = job.plan.mixed
    subject = job.subject(case.model)
    # So many steps while the prompt is read up to there, then the one that is measured.
    num_steps = -(-case.past // case.chunk) + 2
    # Tokens of a prompt whose end is not in the chunk that is measured, wherever that begins, and of the answer.
    num_read = case.past + 2 * case.chunk + 2
    given = (job, subject, case.model, case.num_decodes, case.decode_past, num_steps)
    both = _decoding(*given, case.chunk, num_read, looks_ahead=False)
    decodes = _decoding(*given, looks_ahead=False)
    chunk = Requests(subject, case.chunk, 1, num_read)
    for requests in (both, chunk):
        reader = requests.add_prompt("reading", job.prompt(case.model, num_read - 1), 1)
        while reader.cache.num_tokens < case.past:
            requests.step()
    turns = {
        "both": _again(both, case.chunk + case.num_decodes),
        "chunk": _again(chunk, case.chunk),
        "decodes": _again(decodes, case.num_decodes),
    }
    for work in _MIXED_WARM_UPS * [*turns.values()]:
        work()
    times = job.time_turns(turns, dict.fromkeys(turns, _MIXED_ROUNDS * job.repeats))
    decoding = f"{case.label}, {case.num_decodes} decodes"
    apart = [first + second for first, second in zip(times["chunk"], times["decodes"], strict=True)]
    job.figure(f"{case.label}, of a prompt", "ms", times["chunk"])
    job.figure(f"{decoding} alone", "ms", times["decodes"])
    job.figure(f"{decoding} beside them", "ms", times["both"])
    job.figure(f"{decoding} beside them, over none", "x", over(times["both"], times["chunk"]))
    job.figure(f"{decoding} beside them, over both apart", "x", over(times["both"], apart))


def _again(requests: Requests, num_tokens: int) -> Callable[[], object]:
    step = requests.begin()
    assert step is not None
    found = sum(len(item.span) for item in step.inputs)
    if found != num_tokens:
        raise PenstockError(f"the step that is measured has {found} tokens; it should have {num_tokens}")
    return lambda: requests.run(step)


def measure_bits(job: Job, errors: list[str]) -> None:
    """A prompt in many chunkings, alone and beside decodes, against the whole of it alone."""
    for model in job.plan.bits.models:
        with job.attempt(model, errors):
            _compare_bits(job, model, job.plan.bits)


def _compare_bits(job: Job, model: str, case: BitsCase) -> None:
    subject = job.subject(model, num_hidden_layers=case.num_layers)
    prompt = job.prompt(model, case.prompt_tokens)
    label = f"{model}, {case.num_layers} layers"
    job.fact(f"{label}: the probe finds the laws to hold", subject.found.same_bits)
    whole = _alone(subject, prompt, 0)
    chunks = case.chunks if subject.model.config.has_state else (*case.chunks, *case.off_grid_chunks)
    for chunk in (*sorted(chunks), 0):
        how = f"chunk {chunk:,}" if chunk else "whole"
        found = {f"beside {case.num_decodes} decodes": _beside(job, subject, model, prompt, chunk, case)}
        if chunk:
            found["alone"] = _alone(subject, prompt, chunk)
        for where, left in found.items():
            for what, tensors in left.items():
                holds = all(map(torch.equal, tensors, whole[what]))
                job.fact(f"{label}, {how}, {where}: same {what} as whole", holds)


def _left(
    logits: Tensor, held: SequenceCache, space: CacheSpace, num_tokens: int
) -> dict[str, tuple[Tensor, ...]]:
    """What a prompt left behind, by name: logits after it, its keys and values, its states."""
    kv, states = kv_of(held, space, 0, num_tokens), states_of(held, space)
    parts = {"logits": (logits.to("cpu", copy=True),), "keys and values": kv}
    return {**parts, "states": states} if states else parts


def _alone(subject: Subject, prompt: Sequence[int], chunk: int) -> dict[str, tuple[Tensor, ...]]:
    # A run that ends frees its cache.
    config = ChunkedPrefillConfig(chunk)
    run = Run(subject.model, prompt, config=config, canon=subject.canon, max_tokens=2)
    while not run.generated:
        run.step()
    assert run.logits is not None
    return _left(run.logits, run.cache, run.space, len(prompt))


def _beside(
    job: Job, subject: Subject, model: str, prompt: Sequence[int], chunk: int, case: BitsCase
) -> dict[str, tuple[Tensor, ...]]:
    """The others decode before the prompt arrives, and until it is read."""
    num_steps = -(-len(prompt) // chunk) if chunk else 1
    max_tokens = tokens_to_last(num_steps, case.num_decodes, case.decode_past, chunk)
    num_tokens = len(prompt) + 2 + case.num_decodes * (case.decode_past + max_tokens)
    requests = Requests(subject, chunk, 1 + case.num_decodes, num_tokens)
    requests.begin_decodes(
        job.prompt(model, case.num_decodes * case.decode_past), case.num_decodes, max_tokens
    )
    reader = requests.add_prompt("reading", prompt, 2, needs_logits=True)
    while not reader.num_generated:
        requests.step()
    assert reader.logits is not None
    return _left(reader.logits, reader.cache, requests.space, len(prompt))
