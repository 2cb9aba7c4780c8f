"""One prompt run in several ways, each with all that it leaves behind: logits, keys and values, recurrent states."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from penstock.cache import SequenceCache
from penstock.cache.space import CacheSpace
from penstock.cache.tensors import CacheSpec, CacheTensors
from penstock.engine.batcher import Batcher
from penstock.engine.events import GenerationRequest
from penstock.engine.job import Job
from penstock.engine.run import Run
from penstock.engine.sampling import Choice
from penstock.engine.status import StepRecord
from penstock.engine.step import Step, StepOutcome
from penstock.kernels.spans import AttendedSpan, AttentionWork, part_of
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder, ReadRows
from penstock.models.text.tokenizer import Tokenizer
from penstock.plan import STATE_GRID, ChunkedPrefillConfig
from penstock.plan.grids import RowLaw
from penstock.plan.policy import ScheduleConfig

# Logits of one way, at most. Keys and values are compared at every token, whatever this is.
_LOGITS_BYTES = 256 * 2**20
_EDGE = 256  # attention's pieces begin and end on multiples of this
_RANDOM_CUTS = 9
_BATCHED_CHUNK = 256
_MAX_RUNNING = 4
_SUBJECT = "subject"


@dataclass(frozen=True)
class Subject:
    """A model and what it reads: `num_generated` tokens follow the prompt, the greedy ones of the whole prompt."""

    model: Decoder
    canon: RowLaw
    tokenizer: Tokenizer
    prompt: tuple[int, ...]
    num_generated: int

    @property
    def prompt_positions(self) -> tuple[int, ...]:
        """Prompt tokens whose logits are compared, the last one aside: all, or as many as memory is set aside for,
        those at the edges of attention's pieces first."""
        last = len(self.prompt) - 1
        most = max(_LOGITS_BYTES // (4 * self.model.config.vocab_size) - self.num_generated, 2)
        if last <= most:
            return tuple(range(last))
        edges = [edge + step for edge in range(0, last, _EDGE) for step in (-1, 0, 1)]
        evenly = [index * last // most for index in range(most)]
        chosen = [position for position in dict.fromkeys([*edges, *evenly]) if 0 <= position < last]
        return tuple(sorted(chosen[:most]))

    @property
    def positions(self) -> tuple[int, ...]:
        """The tokens after which logits are compared, generated ones among them, but for the last."""
        end = len(self.prompt) - 1
        return (*self.prompt_positions, *range(end, end + self.num_generated))


@dataclass(frozen=True)
class Recomputed:
    """Keys and values of tokens that chunks have in common: as the earlier chunk left them, and the later one."""

    positions: Sequence[int]
    before: tuple[Tensor, ...]  # as `kv_of` returns them
    after: tuple[Tensor, ...]

    @classmethod
    def joined(cls, parts: "Sequence[Recomputed]") -> "Recomputed":
        positions = [position for part in parts for position in part.positions]
        before, after = zip(*((part.before, part.after) for part in parts), strict=True)
        return cls(positions, *(tuple(map(torch.cat, zip(*side, strict=True))) for side in (before, after)))


@dataclass(frozen=True)
class Trace:
    """What one way left behind."""

    logits: Tensor  # [positions, vocab], float32
    kv: tuple[Tensor, ...]  # of every token that was run, as `kv_of` returns them
    states: tuple[Tensor, ...]  # where the prompt ended; none without recurrent layers
    generated: tuple[int, ...]  # the greedy choices
    keeps_bits: bool  # whether its chunks lie where its bits must be those of any others
    recomputed: Recomputed | None = None


class WatchedDecoder(Decoder):
    """The same weights and the same pass as another decoder's, which also records logits of prompt tokens after which
    nothing is sampled.

    A batch with such tokens is run once more, with their logits wanted: a step writes the same keys, values and
    states each time, so the second pass changes nothing. The engine gets the result of its own pass.
    """

    def __init__(self, model: Decoder, canon: RowLaw, positions: Sequence[int], out: Tensor) -> None:
        """The logits after the tokens at `positions` go to the first rows of `out` [rows, vocab]."""
        vars(self).update(vars(model))  # weights are shared, not copied
        self._model = model  # which may be of a kind of its own
        self.own: SequenceCache | None = None  # of the sequence that is watched; None: all are
        self._canon = canon
        self._out = out
        self._index_of = {position: index for index, position in enumerate(positions)}

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        caches: CacheTensors,
        residual: Tensor | None = None,
        read: ReadRows | None = None,
    ) -> Tensor | None:
        rows, indices = self._watched(batch)
        if rows:
            seen = self._model.forward(_wanting(batch, rows, self._canon), caches)
            assert seen is not None
            self._out[indices] = seen.to(self._out.device)
            if not batch.num_logits:
                return None
        return self._model.forward(batch, caches, residual, read)

    @property
    def cache_spec(self) -> CacheSpec:
        return self._model.cache_spec

    @property
    def can_record(self) -> bool:
        return self._model.can_record

    def _watched(self, batch: ForwardBatch) -> tuple[list[int], list[int]]:
        """Rows of the batch that are prompt tokens to be watched, and where their logits go."""
        found: dict[int, int] = {}
        for span in batch.all_layers.spans:
            for row in range(span.start, span.end) if span.is_prompt and self._is_own(span) else ():
                index = self._index_of.get(span.position + row - span.start)
                if index is not None:
                    found[row] = index
        return list(found), list(found.values())

    def _is_own(self, span: AttendedSpan) -> bool:
        """By where its first token lies."""
        if self.own is None:
            return True
        has_begun = self.own.blocks.capacity_tokens > 0
        return has_begun and self.own.blocks.locate(0, 1)[0].start == span.places[0].start


def _wanting(batch: ForwardBatch, rows: Sequence[int], canon: RowLaw) -> ForwardBatch:
    """The same batch, with logits wanted of these rows, ascending, in place of its own."""
    spans: list[AttendedSpan] = []
    for span in batch.all_layers.spans:
        for row in (row for row in rows if span.start <= row < span.end):
            position, start = span.position + row - span.start, len(spans)
            places = part_of(span.places, 0, position + 1)
            spans.append(replace(span, start=start, end=start + 1, position=position, places=places))
    padding = canon.padded_rows(len(rows)) - len(rows)
    return replace(
        batch,
        logit_rows=np.array([*rows, *[0] * padding], dtype=np.int64),
        num_logits=len(rows),
        last_layer=AttentionWork(tuple(spans)),
    )


class _Recorder:
    """Gathers what becomes a trace. Generation goes on with the forced tokens, whatever was sampled."""

    def __init__(self, subject: Subject, forced: Sequence[int] | None) -> None:
        self.subject = subject
        self._forced = forced
        self._index_of = {position: index for index, position in enumerate(subject.positions)}
        # What is never written stays no number, and is equal to nothing.
        self._logits = torch.full((len(self._index_of), subject.model.config.vocab_size), torch.nan)
        self.model = WatchedDecoder(subject.model, subject.canon, subject.prompt_positions, self._logits)
        self._states: tuple[Tensor, ...] = ()
        self._chosen: list[int] = []

    @property
    def is_done(self) -> bool:
        return len(self._chosen) == self.subject.num_generated

    def record(self, logits: Tensor, cache: SequenceCache, space: CacheSpace) -> int:
        """Logits [vocab] after all that was run so far. Returns the token to go on with: of a prompt that runs as
        decodes, its next one."""
        position, prompt = cache.num_tokens - 1, self.subject.prompt
        if position in self._index_of:
            self._logits[self._index_of[position]] = logits
        if position < len(prompt) - 1:
            return prompt[position + 1]
        if not self._chosen:
            self._states = states_of(cache, space)
        self._chosen.append(int(logits.argmax()))
        return self._chosen[-1] if self._forced is None else self._forced[len(self._chosen) - 1]

    def trace(
        self, cache: SequenceCache, space: CacheSpace, keeps_bits: bool, again: Sequence[Recomputed] = ()
    ) -> Trace:
        kv = kv_of(cache, space, 0, len(self.subject.prompt) + self.subject.num_generated - 1)
        recomputed = Recomputed.joined(again) if again else None
        return Trace(self._logits, kv, self._states, tuple(self._chosen), keeps_bits, recomputed)


def run_chunks(
    subject: Subject,
    forced: Sequence[int] | None = None,
    *,
    chunk_size: int = 0,
    chunk_ends: Sequence[int] | None = None,
    overlap: int = 0,
    num_read: int | None = None,
) -> Trace:
    """The prompt alone, in chunks; 0: whole. Where they overlap, what is run twice is recorded both times.

    With `num_read`, only so many tokens are read, and the others run as decodes: other kernels, the same mathematics.
    """
    recorder = _Recorder(subject, forced)
    prompt = subject.prompt[:num_read]
    num_decodes = len(subject.prompt) - len(prompt)
    run = Run(
        recorder.model,
        prompt,
        config=ChunkedPrefillConfig(chunk_size, overlap),
        canon=subject.canon,
        max_tokens=num_decodes + subject.num_generated + 1,  # one more: a run that ends frees its cache
        chunk_ends=chunk_ends,
        depth=1 if overlap else None,  # a step in flight would write over what is to be compared
    )
    recomputed: list[Recomputed] = []
    while not recorder.is_done:
        end = run.cache.num_tokens
        before = kv_of(run.cache, run.space, max(end - overlap, 0), end) if overlap else ()
        step = run.step()
        if again := range(step.span.start, end):  # the whole overlap
            recomputed.append(Recomputed(again, before, kv_of(run.cache, run.space, again.start, end)))
        if run.logits is not None and step.token is not None:
            run.tokens[-1] = recorder.record(run.logits, run.cache, run.space)
    on_grid = run.lies_on(STATE_GRID) or not subject.model.config.has_state
    trace = recorder.trace(run.cache, run.space, on_grid and not num_decodes, recomputed)
    run.cancel()
    return trace


class RecordedJob(Job):
    """A request with its last logits [vocab], where it `needs_logits`. They lie where the step left them."""

    logits: Tensor | None = None
    needs_logits = True

    def choose(self, logits: Tensor) -> Choice:
        self.logits = logits
        return super().choose(logits)


class Stepwise(Batcher):
    """A batcher whose steps are taken one at a time. What fails is raised."""

    def new_job(self, name: str, request: GenerationRequest, tokenizer: Tokenizer) -> RecordedJob:
        """With a cache of its own; it is yet to be added."""
        sequence = self.space.new_sequence()
        return RecordedJob(name, request, sequence, tokenizer, frozenset(), None, lambda event: None)

    def begin(self) -> Step:
        step = super().begin()
        assert step is not None, "requests wait, and nothing runs"
        return step

    def run(self, step: Step) -> StepOutcome:
        """It may be run again: it changes nothing but what it writes to the cache, which is the same each time."""
        return self._checked(super().run(step))

    def _checked(self, outcome: StepOutcome) -> StepOutcome:
        for failed in (outcome.error, *outcome.choices.values()):
            if isinstance(failed, Exception):
                raise failed
        return outcome

    def step(self) -> StepRecord | None:
        if self._flight:  # it goes on with what was launched ahead
            step, launched = self._flight[0].step, self._flight[0].launched
            assert launched is not None
            outcome = self._checked(self._finish(step, launched))
        else:
            step = self.begin()
            outcome = self.run(step)
        record = self.settle(step, outcome)
        self.notices.clear()
        return record


def run_batched(
    subject: Subject, forced: Sequence[int], *, strict: bool = False, is_alone: bool = False
) -> Trace:
    """The prompt through the batcher of a service. Beside it one request decodes from the start, one reads its own
    prompt at the same time, and one arrives when the prompt has been read; unless it `is_alone`."""
    recorder = _Recorder(subject, forced)
    grid = STATE_GRID if subject.model.config.has_state else 1
    schedule = ScheduleConfig(chunk_size=_BATCHED_CHUNK, max_running=_MAX_RUNNING, grid=grid)
    requests = {
        _SUBJECT: GenerationRequest(subject.prompt, subject.num_generated + 1, ignore_eos=True),
        **({} if is_alone else _others(subject)),
    }
    num_tokens = sum(len(each.token_ids) + each.max_tokens for each in requests.values())
    space = CacheSpace.for_tokens(
        recorder.model, num_tokens + _MAX_RUNNING * _BATCHED_CHUNK, num_slots=2 * _MAX_RUNNING
    )
    batcher = Stepwise(recorder.model, subject.canon, space, schedule, strict=strict)
    jobs = {name: batcher.new_job(name, request, subject.tokenizer) for name, request in requests.items()}
    job = jobs[_SUBJECT]
    recorder.model.own = job.cache
    if not is_alone:
        batcher.add(jobs["decoding"])
        while not jobs["decoding"].num_generated:
            batcher.step()
    batcher.add(job)
    if not is_alone:
        batcher.add(jobs["reading"])
    while not recorder.is_done:
        if job.num_generated == 1 and "arriving" in jobs:
            batcher.add(jobs.pop("arriving"))
        num_generated = job.num_generated
        batcher.step()
        if job.num_generated > num_generated:
            assert job.logits is not None
            job.tokens[-1] = recorder.record(job.logits, job.cache, space)
    trace = recorder.trace(job.cache, space, keeps_bits=True)
    batcher.cancel_all()
    return trace


def _others(subject: Subject) -> dict[str, GenerationRequest]:
    """Parts of the same text, in another order and of other lengths."""
    prompt, room = subject.prompt, subject.model.config.max_position
    third = max(len(prompt) // 3, 1)
    prompts = {
        "decoding": prompt[-third:],
        "reading": prompt[::-1][: 2 * third],
        "arriving": prompt[third:] + prompt[:third],
    }
    most = len(prompt) // 64 + subject.num_generated + 8
    return {
        name: GenerationRequest(tokens, min(room - len(tokens), most), ignore_eos=True)
        for name, tokens in prompts.items()
    }


def random_ends(num_tokens: int, seed: int, grid: int = 1) -> list[int]:
    """A prompt cut at some places, each a multiple of the grid; the same ones for the same seed."""
    places = range(grid, num_tokens, grid)
    cuts = random.Random(seed).sample(places, min(_RANDOM_CUTS, len(places)))
    return [*sorted(cuts), num_tokens]


def kv_of(cache: SequenceCache, space: CacheSpace, start: int, end: int) -> tuple[Tensor, ...]:
    """A copy of the keys, then the values, of tokens [start, end), layer by layer."""
    places = cache.blocks.locate(start, end)
    layers = (layer.read(places) for layer in space.tensors.kv.layers)
    return tuple(part.clone() for layer in layers for part in (layer.keys, layer.values))


def states_of(cache: SequenceCache, space: CacheSpace) -> tuple[Tensor, ...]:
    """A copy of the convolution tail and the matrix of each recurrent layer."""
    if cache.state is None:
        return ()
    layers, slot = space.tensors.states.layers, cache.state.slot
    return tuple(part.clone() for layer in layers for part in (layer.tail(slot), layer.matrix(slot)))
