"""A step, run: its spans laid out as a forward batch, launched, waited for, and sampled from."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.cache import BLOCK_TOKENS, Extent, SequenceBlocks, StateStep, TokenRange
from penstock.cache.space import CacheSpace
from penstock.engine.events import ChunkRecord
from penstock.engine.graphs import record_passes
from penstock.engine.job import Job
from penstock.engine.prompt_rows import PromptRows
from penstock.engine.sampling import Choice, Sampling
from penstock.engine.status import LaterSpans, SpanRecord, StepRecord
from penstock.errors import StageLostError, is_out_of_memory
from penstock.kernels.device import device_kind
from penstock.kernels.spans import (
    AttendedSpan,
    AttentionWork,
    GroupWork,
    StateRows,
    StateWork,
    WrittenPlaces,
)
from penstock.layers.forward_batch import ForwardBatch, LateTokens, Overlap
from penstock.models.decoder import Decoder, FollowingPasses
from penstock.plan.grids import JOINED_TOKENS, RowLaw
from penstock.plan.sizing import SizeDecision
from penstock.plan.step import PlannedSpan, RequestId, Span, SpanKind, StepPlan

if TYPE_CHECKING:  # loads torch.distributed
    from penstock.engine.stages.pipeline import Issued, Pipeline


@dataclass(frozen=True)
class SpanInput:
    """A span of one sequence, its tokens, and the blocks that have room for them."""

    span: Span
    token_ids: Sequence[int]
    kv_groups: tuple[SequenceBlocks, ...]
    is_prompt: bool  # prompt tokens run on the tile grid; a decode is a token that sees all before it
    wants_logits: bool  # of its last token
    state: StateStep | None = None  # where the model has recurrent layers
    rows: PromptRows | None = None  # reads all of its rows behind the last layer
    is_long: bool = False  # as in `ModelConfig.is_long`

    @property
    def num_last(self) -> int:
        """Rows at its end that go through the last layer."""
        return len(self.span) if self.rows is not None else int(self.wants_logits)

    @property
    def extents(self) -> tuple[tuple[Extent, ...], ...]:
        return tuple([blocks.extents for blocks in self.kv_groups])

    @property
    def capacity_tokens(self) -> int:
        return min([blocks.capacity_tokens for blocks in self.kv_groups])


def build_batch(inputs: Sequence[SpanInput], *, canon: RowLaw, strict: bool = False) -> ForwardBatch:
    """Lay the spans out as rows, one after the other, and pad them where a prompt is among them; or always, if
    `strict`: then the bits of a decode do not depend on what runs beside it either. So few decodes that they do not
    anyway are not padded."""
    states: list[StateRows] = []
    num_tokens = 0
    logit_rows: list[int] = []
    for item in inputs:
        assert len(item.token_ids) == len(item.span), "a span has all of its tokens"
        states += _state_rows(item, num_tokens)
        num_tokens += len(item.span)
        logit_rows += range(num_tokens - item.num_last, num_tokens)
    groups = [_group_work(inputs, index, canon, strict=strict) for index in range(len(inputs[0].kv_groups))]

    num_rows, num_logits = num_tokens, len(logit_rows)
    has_prompt = any(item.is_prompt for item in inputs)
    is_canonical = has_prompt or (strict and num_tokens > canon.free_decodes)
    if is_canonical:
        num_rows = canon.prompt_rows(num_tokens) if has_prompt else canon.padded_rows(num_tokens)
        if num_logits:
            logit_rows += [0] * (canon.padded_rows(num_logits) - num_logits)
    token_ids, positions = np.zeros((2, num_rows), dtype=np.int64)
    token_ids[:num_tokens] = np.fromiter(
        chain.from_iterable(item.token_ids for item in inputs), np.int64, num_tokens
    )
    positions[:num_tokens] = _positions(groups[0].all_layers.spans)
    long_rows = np.zeros(num_rows if any(item.is_long for item in inputs) else 0, dtype=np.int64)
    if len(long_rows):
        long_rows[:num_tokens] = np.repeat(
            [item.is_long for item in inputs], [len(item.span) for item in inputs]
        )
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        end_position=max(item.span.end for item in inputs),
        num_tokens=num_tokens,
        places=groups[0].places,
        all_layers=groups[0].all_layers,
        last_layer=groups[0].last_layer,
        windows=tuple(groups[1:]),
        logit_rows=np.array(logit_rows, dtype=np.int64),
        num_logits=num_logits,
        is_canonical=is_canonical,
        states=StateWork(tuple(states)),
        long_rows=long_rows,
    )


def _group_work(inputs: Sequence[SpanInput], group: int, canon: RowLaw, *, strict: bool) -> GroupWork:
    """What the layers of one K/V group are told of the spans, laid out as rows."""
    places: list[TokenRange] = []
    spans: list[AttendedSpan] = []
    last_spans: list[AttendedSpan] = []
    row_of_start = row = 0
    for item in inputs:
        blocks, end = item.kv_groups[group], row_of_start + len(item.span)
        first_token = blocks.num_gone * BLOCK_TOKENS
        seen = blocks.locate(first_token, item.span.end)
        if len(item.span) == 1:  # of a decode it is the last
            places.append(TokenRange(seen[-1].end - 1, seen[-1].end))
        else:
            places += blocks.locate(item.span.start, item.span.end)
        span = AttendedSpan(
            start=row_of_start,
            end=end,
            position=item.span.start,
            places=seen,
            is_prompt=item.is_prompt,
            tile_size=canon.tile_size,
            origin=item.span.start,
            is_joined=strict or item.span.end <= JOINED_TOKENS,
            first_token=first_token,
        )
        spans.append(span)
        if count := item.num_last:
            is_alike = span.start == row and len(item.span) == count  # a decode among decodes
            position = item.span.end - count
            last_spans.append(
                span if is_alike else replace(span, start=row, end=row + count, position=position)
            )
            row += count
        row_of_start = end
    work = AttentionWork(tuple(spans))
    last = work if last_spans == spans else AttentionWork(tuple(last_spans))
    return GroupWork(WrittenPlaces(places), work, last)


def _positions(spans: Sequence[AttendedSpan]) -> NDArray[np.int64]:
    """Of each row, in its sequence."""
    firsts = np.array([span.position - span.start for span in spans], dtype=np.int64)
    lengths = [span.end - span.start for span in spans]
    rows = np.arange(spans[-1].end, dtype=np.int64)
    return rows + np.repeat(firsts, lengths)


def _state_rows(item: SpanInput, row_of_start: int) -> list[StateRows]:
    """A span is cut where a state is to be kept."""
    if item.state is None:
        return []
    rows: list[StateRows] = []
    start, read = row_of_start, item.state.read
    for write in item.state.writes:
        end = row_of_start + write.end - item.span.start
        rows.append(StateRows(start, end, read, write.slot, item.is_prompt))
        start, read = end, write.slot
    return rows


@dataclass(frozen=True)
class PassAhead:
    """A pass over decodes of these tokens, if the host knew them, and where all that they see lay when it was
    launched."""

    inputs: tuple[SpanInput, ...]
    tokens: tuple[int, ...]
    extents: tuple[tuple[tuple[Extent, ...], ...], ...]
    logits: Tensor
    batch: ForwardBatch

    def is_of(self, inputs: Sequence[SpanInput]) -> bool:
        """Whether it is the pass that these inputs want."""
        return len(inputs) == len(self.inputs) == len(self.tokens) and all(
            item.kv_groups == own.kv_groups
            and item.span == own.span
            and not item.is_prompt
            and item.token_ids[0] == token
            and item.extents == extents
            for item, own, token, extents in zip(inputs, self.inputs, self.tokens, self.extents, strict=True)
        )


@dataclass(frozen=True)
class ExpectedPass:
    """A pass over decodes of tokens that are not chosen yet."""

    inputs: tuple[SpanInput, ...]
    extents: tuple[tuple[tuple[Extent, ...], ...], ...]
    batch: ForwardBatch

    def launch(
        self,
        tokens: Sequence[int] | LateTokens,
        forward: Callable[[ForwardBatch, Overlap], Tensor | None],
    ) -> PassAhead | None:
        """With the tokens that were chosen; None where it cannot be."""
        late = tokens if isinstance(tokens, LateTokens) else None
        known = () if isinstance(tokens, LateTokens) else tuple(tokens)
        self.batch.token_ids[: len(known)] = known
        try:
            logits = forward(self.batch, Overlap(late))
        except Exception:  # if it is more than a moment's, the step itself meets it
            return None
        assert logits is not None  # of a decode they are always wanted
        return PassAhead(self.inputs, known, self.extents, logits, self.batch)


def expect(
    inputs: Sequence[SpanInput], prepare: Callable[[Sequence[SpanInput]], ForwardBatch]
) -> ExpectedPass | None:
    """The pass that follows one over these decodes, made ready; None where one of them is none, or a sequence has no
    room for its next token yet."""
    following: list[SpanInput] = []
    for item in reversed(inputs):  # prompts are the last
        start = item.span.end
        if item.is_prompt or not item.wants_logits or start + 1 > item.capacity_tokens:
            return None
        following.append(
            SpanInput(
                Span(start, start + 1),
                (0,),
                item.kv_groups,
                is_prompt=False,
                wants_logits=True,
                is_long=item.is_long,
            )
        )
    following.reverse()
    try:
        batch = prepare(following)
    except Exception:  # as above
        return None
    return ExpectedPass(tuple(following), tuple(item.extents for item in following), batch)


class LookAhead:
    """Decodes that are made ready while the step before them is computed, and launched before it is settled: the
    device computes while the host does books.

    Nothing depends on it. Where the next step is not the one that was expected, what was launched is forgotten: it
    wrote keys and values behind the end of each sequence, where whatever comes next writes again. A model with
    recurrent state has no slot to write to by then, so nothing is launched for it.

    Where a step goes on with what was launched ahead, and again (`go_on`), the passes are over the same sequences:
    a graph is told only what differs from one to the next."""

    def __init__(
        self,
        model: Decoder,
        space: CacheSpace,
        build: Callable[[Sequence[SpanInput]], ForwardBatch],
        *,
        is_wanted: bool,
    ) -> None:
        self._model = model
        self._tensors = space.tensors
        self._build = build
        self._is_on = is_wanted and space.slots is None
        self._expected: ExpectedPass | FollowingPasses | None = None
        self._ahead: PassAhead | Tensor | None = None  # the logits alone, of a following pass
        self._inputs: Sequence[SpanInput] = ()  # of the pass that a step went on with
        self._following: FollowingPasses | None = None

    def expect_after(self, inputs: Sequence[SpanInput]) -> bool:
        """Make ready what follows these, while they are computed. Whether anything does."""
        self._expected = expect(inputs, self._prepared) if self._is_on else None
        return self._expected is not None

    def expect_next(self) -> bool:
        """Make ready what follows the pass that the step went on with, while that is computed."""
        following = self._following
        if following is None:
            return self.expect_after(self._inputs)
        if following.advance():
            self._expected = following
        return self._expected is not None

    def _prepared(self, inputs: Sequence[SpanInput]) -> ForwardBatch:
        batch = self._build(inputs)
        self._model.prepare(batch, self._tensors)
        return batch

    def launch(self, tokens: Sequence[int] | LateTokens) -> None:
        """What is expected, with the tokens that were chosen."""
        expected, self._expected = self._expected, None
        if isinstance(expected, ExpectedPass):
            self._ahead = expected.launch(tokens, self._forward)
        elif expected is not None:
            self._ahead = expected.launch(tokens)

    def _forward(self, batch: ForwardBatch, overlap: Overlap) -> Tensor | None:
        if overlap.late is None:
            return self._model.forward(batch, self._tensors)
        return self._model.forward(batch, self._tensors, overlap=overlap)

    @property
    def is_ahead(self) -> bool:
        """Whether something was launched."""
        return self._ahead is not None

    def go_on(self) -> Tensor:
        """The logits of what was launched, which is of the step at hand: it goes on."""
        ahead, self._ahead = self._ahead, None
        assert ahead is not None
        if isinstance(ahead, Tensor):
            return ahead
        self._inputs = ahead.inputs
        self._following = self._model.follow(
            ahead.batch, self._tensors, [item.kv_groups for item in ahead.inputs]
        )
        return ahead.logits

    def forget(self) -> None:
        """What comes next is something else."""
        self._ahead = self._expected = self._following = None

    def take(self, inputs: Sequence[SpanInput]) -> Tensor | None:
        """The logits of these, where they are what was launched; all that was expected is forgotten in any case."""
        ahead = self._ahead
        self.forget()
        return ahead.logits if isinstance(ahead, PassAhead) and ahead.is_of(inputs) else None


@dataclass(frozen=True)
class Step:
    """A step that was planned, and for which the cache has room set aside; why it reads as much as it does, and what
    is expected of it."""

    plan: StepPlan
    inputs: tuple[SpanInput, ...]
    started_s: float
    decision: SizeDecision | None = None
    predicted_s: float | None = None
    predicted_bytes: int | None = None
    num_before: int = 0  # passes that its decodes have gone on from, whose tokens are not committed yet
    first: StepRecord | None = None  # of those
    awaited: frozenset[RequestId] = frozenset()  # whose tokens were not known when it was planned

    def again(self, first: StepRecord, now: float) -> "Step":
        """It goes on: the same decodes, each a token further."""
        return replace(self, num_before=self.num_before + 1, first=self.first or first, started_s=now)

    def record(self, index: int, start_s: float, seconds: float, issued: int | None = None) -> StepRecord:
        """What is kept of it once it is committed, and what is seen of it while it runs."""
        if self.first is not None:
            later = LaterSpans(self.first.spans, self.first.shape, self.num_before)
            return StepRecord(index, start_s, seconds, later, self.plan.num_held_decodes)
        return StepRecord(
            index=index,
            start_s=start_s,
            seconds=seconds,
            spans=tuple(
                SpanRecord(planned.request_id, planned.kind, planned.span.start, planned.span.end)
                for planned in self.plan.spans
            ),
            num_held_decodes=self.plan.num_held_decodes,
            preempted=tuple(
                preemption.request_id for preemption in self.plan.preemptions if preemption.was_running
            ),
            issued=issued,
        )

    def explain(self, chunk: PlannedSpan, num_prompt: int, seconds: float) -> ChunkRecord:
        """What is kept of one of its chunks, of a prompt of `num_prompt` tokens."""
        span, decision = chunk.span, self.decision
        assert decision is not None  # of a step that reads
        is_end = span.end == num_prompt and len(span) < decision.size
        return ChunkRecord(
            start=span.start,
            end=span.end,
            past=span.start,
            rule="end" if is_end else decision.rule,
            predicted_s=self.predicted_s,
            measured_s=seconds,
            predicted_bytes=self.predicted_bytes,
            num_decodes=sum(other.kind is SpanKind.DECODE for other in self.plan.spans),
            because=decision.because,
        )


@dataclass(frozen=True)
class StepOutcome:
    """What a step gave: a choice, or an error of its own, for each request that samples; or the step's error."""

    choices: dict[RequestId, Choice | Exception] = field(default_factory=dict)
    rows: dict[RequestId, Any] = field(default_factory=dict)  # what was read of prompts' own rows
    error: Exception | None = None
    issued: int | None = None  # its number among those that several stages ran


@dataclass(frozen=True)
class Launched:
    """A forward pass that the device computes, or is done with: its logits, where a request samples, and how to wait
    for it; or that other stages compute, how to end it, and to see to it that nothing of it is run here any more. Or
    the error that kept it from being launched."""

    logits: Tensor | None = None
    wait: Callable[[], None] | None = None
    error: Exception | None = None
    run: Callable[[], Tensor | None] | None = None
    drop: Callable[[], None] = lambda: None
    issued: int | None = None
    rows: "_RowReading | None" = None
    nearly: Callable[[], None] | None = None  # waits until all but the last layers are done


class _RowReading:
    """What reads the rows of prompts in one pass, behind its last layer, and leaves the head those that are sampled
    from."""

    def __init__(self, spans: Sequence[tuple[RequestId, SpanInput]], model: Decoder) -> None:
        self._spans = spans
        self._model = model
        self._waits: dict[RequestId, Callable[[], Any]] = {}

    def __call__(self, rows: Tensor) -> Tensor | None:
        start, sampled = 0, list[int]()
        for request_id, item in self._spans:
            end = start + item.num_last
            if item.rows is not None:
                wait = item.rows.read(rows[start:end], item.span.start, self._model.logits)
                self._waits[request_id] = wait
            if item.wants_logits:
                sampled.append(end - 1)
            start = end
        return self._model.logits(rows[sampled]) if sampled else None

    def finish(self) -> dict[RequestId, Any]:
        return {request_id: wait() for request_id, wait in self._waits.items()}


@dataclass(frozen=True)
class Part:
    """What one pass runs of a step: spans, each with the number of the step's that it is, or is a piece of."""

    numbers: tuple[int, ...]
    inputs: tuple[SpanInput, ...]


class _Pass(NamedTuple):
    batch: ForwardBatch
    run: Callable[..., Tensor | None]  # of a stage: with the residual of the one before it


class LateOnes(NamedTuple):
    """Tokens that the device has, one for each of these requests, and the host learns of later."""

    names: Sequence[RequestId]
    tokens: Tensor

    def put(self, rows: Sequence[int], names: Sequence[RequestId]) -> LateTokens | None:
        if not rows:
            return None
        place_of = {name: place for place, name in enumerate(self.names)}
        return LateTokens(np.array(rows), np.array([place_of[name] for name in names]), self.tokens)


class Ready(NamedTuple):
    """A step's passes, and what reads the rows of prompts in the last of them."""

    parts: Sequence[Part]
    passes: Iterable[_Pass]
    rows: "_RowReading | None"

    def awaited(self, step: Step) -> Iterator[tuple[_Pass, list[int], list[RequestId]]]:
        """Of each pass, the rows whose tokens were not known, and whose they are."""
        for part, made in zip(self.parts, self.passes, strict=True):
            starts = [0, *accumulate(len(item.span) for item in part.inputs)]
            ids = [step.plan.spans[number].request_id for number in part.numbers]
            found = [(start, name) for start, name in zip(starts, ids, strict=False) if name in step.awaited]
            yield made, [start for start, _ in found], [name for _, name in found]


def parts_of(inputs: Sequence[SpanInput], most: int) -> list[Part]:
    """Decodes by themselves, up to `most` tokens in a pass, then all prompts in one; where `most` is 0, or there are
    no decodes, all in one."""
    decodes = [(number, item) for number, item in enumerate(inputs) if not item.is_prompt] if most else []
    if not decodes:
        return [Part(tuple(range(len(inputs))), tuple(inputs))]
    prompts = [(number, item) for number, item in enumerate(inputs) if item.is_prompt]
    passes: list[list[tuple[int, SpanInput]]] = [[]]  # of decodes
    for number, item in decodes:
        for piece in _pieces(item, most):
            if sum(len(each.span) for _, each in passes[-1]) + len(piece.span) > most:
                passes.append([])
            passes[-1].append((number, piece))
    return [Part(*zip(*each, strict=True)) for each in (*passes, prompts) if each]


def _pieces(item: SpanInput, most: int) -> Iterator[SpanInput]:
    """A replay may have many tokens: each pass but the last is full."""
    if len(item.span) <= most:
        yield item
        return
    for start in range(item.span.start, item.span.end, most):
        end = min(start + most, item.span.end)
        offset, is_last = start - item.span.start, end == item.span.end
        token_ids = item.token_ids[offset : offset + end - start]
        yield replace(
            item, span=Span(start, end), token_ids=token_ids, wants_logits=item.wants_logits and is_last
        )


def _joined(parts: Sequence[Part], logits_of_parts: Sequence[Tensor | None]) -> Tensor | None:
    """The logits of all parts, in the order of the step's spans."""
    wanted = [logits for logits in logits_of_parts if logits is not None]
    if len(wanted) < 2:
        return wanted[0] if wanted else None
    numbers = [
        number
        for part in parts
        for number, item in zip(part.numbers, part.inputs, strict=True)
        if item.wants_logits
    ]
    return torch.cat(wanted)[sorted(range(len(numbers)), key=numbers.__getitem__)]


class StepRunner:
    """Runs steps of one model over one cache. It changes nothing but the cache's tensors, and decides nothing.

    A step is launched and then finished; others may be launched in between. The step after one of decodes is made
    ready while that one is computed, and can be launched before it is settled.
    """

    def __init__(
        self,
        model: Decoder,
        canon: RowLaw,
        space: CacheSpace,
        *,
        strict: bool = False,
        looks_ahead: bool = False,
        overlaps: bool = False,
        keeps_logits: bool = False,
        stages: "Pipeline | None" = None,
    ) -> None:
        """Where it `overlaps`, passes say when they are nearly over. `stages` run the layers before the model's,
        which is the last of them."""
        record_passes(model)
        self._stages = stages
        self._space_number = 0 if stages is None else stages.caches.open_space(space)
        self._model = model
        self._device = device_kind(model.device)
        self._tensors = space.tensors
        self._build = partial(build_batch, canon=canon, strict=strict)
        self._most_decodes = canon.free_decodes if strict else 0  # in a pass; 0: any
        self._lookahead = LookAhead(model, space, self._build, is_wanted=looks_ahead)
        self._overlaps = overlaps
        self._keeps_logits = keeps_logits
        self.logits: Tensor | None = None  # [rows, vocab] of the last step that sampled, where they are kept

    def prepare(self, step: Step) -> Ready | None:
        """All that can be done for a step before its tokens are known. None where a pass is to be recorded for it:
        whoever is computed now would be told late."""
        ready = self._laid_out(step)
        ready = ready._replace(passes=list(ready.passes))
        recorded = self._model.recorded
        if recorded and any(recorded.must_record(made.batch, self._tensors) for made in ready.passes):
            return None
        for made in ready.passes:
            self._model.prepare(made.batch, self._tensors)
        return ready

    def launch(self, step: Step) -> Launched:
        """Start the forward pass. A GPU's is not done when this returns."""
        try:
            if self._stages is None and (logits := self._lookahead.take(step.inputs)) is not None:
                return Launched(logits)
            ready = self._laid_out(step)
            if self._stages is not None:
                return self._issue(self._stages, *ready)
            return self._launched(ready, [None] * len(ready.parts))
        except Exception as error:
            return Launched(error=self._recoverable(error))

    def launch_ready(self, step: Step, ready: Ready, tokens: Mapping[RequestId, int] | LateOnes) -> Launched:
        """The same of a step that was made ready, with the tokens that were awaited."""
        self._lookahead.forget()
        late: list[LateTokens | None] = []
        try:
            for made, rows, names in ready.awaited(step):
                if isinstance(tokens, LateOnes):
                    late.append(tokens.put(rows, names))
                else:
                    made.batch.token_ids[rows] = [tokens[name] for name in names]
                    late.append(None)
            return self._launched(ready, late)
        except Exception as error:
            return Launched(error=self._recoverable(error))

    def _launched(self, ready: Ready, late: Sequence[LateTokens | None]) -> Launched:
        nearly: list[Callable[[], None] | None] = [None]

        def mark() -> None:
            nearly[0] = self._device.marker()

        marks = mark if self._overlaps else None
        logits = _joined(
            ready.parts,
            [
                made.run(overlap=Overlap(tokens, marks)) if tokens or marks else made.run()
                for made, tokens in zip(ready.passes, late, strict=True)
            ],
        )
        # Of a step that samples, the tokens are waited for.
        wait = self._device.marker() if logits is None else None
        return Launched(logits, wait, rows=ready.rows, nearly=nearly[0])

    def _laid_out(self, step: Step) -> Ready:
        parts = parts_of(step.inputs, self._most_decodes)
        rows = self._row_reading(step, parts[-1])  # of prompts, which are in the last
        return Ready(parts, self._passes(parts, rows), rows)

    def finish(
        self,
        step: Step,
        launched: Launched,
        jobs: Sequence[Job],
        meanwhile: Callable[[Sampling], None] = lambda sampling: None,
    ) -> StepOutcome:
        """Wait for the pass, and choose a token for each of the jobs: those that sample, in the step's order. What is
        to be done `meanwhile` is done before the wait."""
        if launched.error is not None:
            return StepOutcome(error=launched.error)
        try:
            if launched.run is not None:
                launched = replace(launched, logits=launched.run(), wait=self._device.marker(), run=None)
            logits = launched.logits
            rows = launched.rows.finish() if launched.rows is not None else {}
            if logits is None:
                if launched.wait is not None:
                    launched.wait()
                return StepOutcome(rows=rows, issued=launched.issued)
            sampling = Sampling(logits, jobs)
            meanwhile(sampling)
            choices = sampling.choices()
        except Exception as error:
            return StepOutcome(error=self._recoverable(error))
        if self._keeps_logits:
            self.logits = logits
        chosen = {job.id: choice for job, choice in zip(jobs, choices, strict=True)}
        return StepOutcome(chosen, rows, issued=launched.issued)

    def expect_after(self, step: Step) -> bool:
        """Make ready the same decodes, each a token further. Whether there is such a pass."""
        if step.num_before:
            return self._lookahead.expect_next()
        return self._lookahead.expect_after(step.inputs)

    @property
    def is_ahead(self) -> bool:
        """Whether the pass after the last was launched, too."""
        return self._lookahead.is_ahead

    def go_on(self) -> Launched:
        """That pass, which the step at hand goes on with."""
        return Launched(self._lookahead.go_on())

    def launch_next(self, jobs: Sequence[Job], tokens: Sequence[int] | Tensor | None = None) -> None:
        """Launch the step that follows the one in which these jobs sampled, all that it had, with these tokens, if it
        is plain that they decode on; where the host is yet to learn of tokens, some may have ended by then."""
        if tokens is None or not all(job.may_go_on for job in jobs):
            return
        if isinstance(tokens, Tensor):
            self._lookahead.launch(LateTokens.in_order(tokens))
        elif not any(job.ends_with(token) for job, token in zip(jobs, tokens, strict=True)):
            self._lookahead.launch(tokens)

    def _recoverable(self, error: Exception) -> Exception:
        """The error of a step that can be undone, with its memory given back; others are raised."""
        if is_out_of_memory(error):
            self._device.release(error)
        elif isinstance(error, torch.AcceleratorError | StageLostError):
            raise error  # the device or a stage does nothing more, for anybody
        return error

    def _row_reading(self, step: Step, part: Part) -> _RowReading | None:
        if all(item.rows is None for item in part.inputs):
            return None
        ids = [step.plan.spans[number].request_id for number in part.numbers]
        return _RowReading(list(zip(ids, part.inputs, strict=True)), self._model)

    def _passes(self, parts: Sequence[Part], rows: _RowReading | None) -> Iterator[_Pass]:
        """Each is made when the one before it was launched."""
        for part in parts:
            batch = self._build(part.inputs)
            run = partial(self._model.forward, batch, self._tensors)
            yield _Pass(batch, run if rows is None or part is not parts[-1] else partial(run, read=rows))

    def _issue(
        self, stages: "Pipeline", parts: Sequence[Part], passes: Iterable[_Pass], rows: _RowReading | None
    ) -> Launched:
        """Let all stages begin the passes, which end later."""
        issued: list[Issued] = []

        def drop() -> None:
            for each in reversed(issued):
                each.receipt.drop()

        def run() -> Tensor | None:
            return _joined(parts, [stages.finish(each) for each in issued])

        try:
            for batch, layers in passes:
                issued.append(stages.issue(batch, self._space_number, layers))
        except BaseException:
            drop()
            raise
        return Launched(run=run, issued=issued[-1].number, rows=rows, drop=drop)
