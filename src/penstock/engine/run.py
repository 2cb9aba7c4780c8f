"""One request, driven step by step in the caller's thread: a batcher of its own; and its text as it comes."""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from torch import Tensor

from penstock.cache import SequenceCache
from penstock.cache.space import CacheSpace
from penstock.engine.batcher import Batcher, steps_in_flight
from penstock.engine.events import (
    ChunkRecord,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generation,
    GenerationRequest,
    MemoryReport,
    PrefillReport,
    PromptProgress,
    PromptScored,
    Timings,
    TokenGenerated,
    Usage,
    auto_reason,
    usual_size,
)
from penstock.engine.job import Job
from penstock.engine.reuse import Reuse
from penstock.engine.sampler import SamplingParams, TokenLogprobs
from penstock.errors import PenstockError, SettingError, StageError, StageFailedError
from penstock.kernels.device import device_kind
from penstock.models.decoder import Decoder
from penstock.models.text.tokenizer import Tokenizer
from penstock.plan import (
    STATE_GRID,
    ChunkedPrefillConfig,
    ChunkSizer,
    ScheduleConfig,
    Span,
    create_prefill_chunks_at,
)
from penstock.plan.admission import WindowRoom
from penstock.plan.grids import RowLaw
from penstock.plan.model import ModelConfig
from penstock.plan.progress import Progress
from penstock.plan.sizing import SizeDecision, SizeQuestion, SizeRules
from penstock.plan.step import SpanKind

_log = logging.getLogger("penstock.engine")
_ID = "run"
# A stage that is lost is waited for, and looked for every so often.
_STAGE_PATIENCE_S = 60.0
_STAGE_RETRY_S = 0.5


@dataclass(frozen=True)
class StepResult:
    """What a finished step did."""

    span: Span
    is_prompt: bool
    token: int | None  # sampled after the span, where it ended the sequence


class _Inbox:
    """Listens to a request. It holds nothing of the engine, so that a run that is dropped is gone at once."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.finish_reason: FinishReason | None = None
        self.failure: PenstockError | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.finish_reason = event.reason
        elif isinstance(event, Failed):
            self.failure = event.error
        self.events.append(event)


class Run:
    """A prompt and what is generated after it. `step` runs the next span; a step that fails changes nothing."""

    def __init__(
        self,
        model: Decoder,
        prompt: Sequence[int] | GenerationRequest,
        *,
        config: ChunkedPrefillConfig,
        canon: RowLaw,
        max_tokens: int = 1,
        sampling: SamplingParams | None = None,
        eos_ids: frozenset[int] = frozenset(),
        chunk_ends: Sequence[int] | None = None,
        space: CacheSpace | None = None,
        sizer: ChunkSizer | None = None,
        reuse: Reuse | None = None,
        tokenizer: Tokenizer | None = None,
        constraint: "Constraint | None" = None,
        depth: int | None = None,
        stages: "Pipeline | None" = None,
    ) -> None:
        """With `reuse`, which is of `space`, what is known of the prompt is not read again. `chunk_ends` cuts the
        prompt in place of the configuration and of any sizer. Without a tokenizer events have no text. `stages` run
        the layers before the model's."""
        if isinstance(prompt, GenerationRequest):
            request = prompt
        else:
            request = GenerationRequest(prompt, max_tokens, sampling or SamplingParams())
        request.check(model.config)
        if reuse is not None and config.overlap:
            raise SettingError(
                "overlap", config.overlap, "0, which loses nothing", where="where prompts are kept"
            )
        num_prompt = len(request.token_ids)
        if chunk_ends is not None:
            sizer = _ScriptedSizer(request.token_ids, chunk_ends)
        depth = steps_in_flight(model, stages) if depth is None else depth
        schedule = _schedule_of(model.config, config, sizer, num_prompt)
        # The last token generated is never run, so it needs no place.
        self.space = space or CacheSpace.for_tokens(
            model,
            num_prompt + max(request.max_tokens, 1) - 1,
            num_slots=config.num_state_slots + depth - 1,
            windows=WindowRoom(1, depth * (schedule.chunk_size or num_prompt) + config.overlap),
        )
        self.model = model
        self._inbox = _Inbox()
        self._batcher = Batcher(
            model,
            canon,
            self.space,
            schedule,
            sizer=sizer,
            reuse=reuse,
            depth=depth,
            raises=True,
            keeps_logits=True,
            stages=stages,
        )
        cache = self._batcher.new_sequence(request)
        self._job = Job(
            _ID,
            request,
            cache,
            tokenizer,
            eos_ids,
            constraint,
            self._inbox.take,
            prefix=None
            if reuse is None
            else reuse.open(
                request.token_ids, cache, request.cache_salt, reads_all=request.rows() is not None
            ),
        )
        self._stages = stages
        self._batcher.add(self._job)
        self._batcher.admit()
        self._batcher.notices.clear()  # what is known of the prompt before the first step is no progress

    @property
    def events(self) -> deque[Event]:
        """What there is to tell, to be taken out by the caller."""
        return self._inbox.events

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._inbox.finish_reason

    @property
    def prompt_length(self) -> int:
        return self._job.num_prompt

    @property
    def tokens(self) -> list[int]:
        return self._job.tokens

    @property
    def generated(self) -> list[int]:
        """The tokens sampled so far, an end-of-sequence token included."""
        return self._job.tokens[self._job.num_prompt :]

    @property
    def cache(self) -> SequenceCache:
        return self._job.cache

    @property
    def is_reading(self) -> bool:
        """Whether the prompt is not read to its end."""
        return self._job.num_generated == 0 and self._job.cache.num_tokens < self._job.num_prompt

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were in the cache and not read."""
        return self._job.num_cached

    @property
    def job(self) -> Job:
        return self._job

    @property
    def chunks(self) -> list[ChunkRecord]:
        """Of the prompt, as they were run."""
        return self._job.chunks

    @property
    def logits(self) -> Tensor | None:
        """[vocab], after the last step that sampled."""
        logits = self._batcher.logits
        return None if logits is None else logits[0]

    @property
    def num_shrinks(self) -> int:
        """How often memory ran out and the chunk was halved."""
        return self._batcher.num_shrinks

    def lies_on(self, grid: int) -> bool:
        """Whether the prompt was cut on a grid of so many tokens only."""
        return self._job.lies_on(grid)

    def step(self) -> StepResult:
        """Run the next span. Where memory runs out, the chunk is halved and tried again. A stage that is lost is
        waited for, and what it had is read again."""
        if self.finish_reason is not None:
            raise SettingError(f"the request has ended ({self.finish_reason}): there is no step to run")
        device_kind(self.model.device).use()
        num_before = self._job.num_generated
        record, lost_s = None, 0.0  # since when a stage is
        while record is None:
            try:
                record = self._batcher.step()
                lost_s = 0.0
            except StageError as error:
                lost_s = lost_s or time.monotonic()
                is_late = time.monotonic() > lost_s + _STAGE_PATIENCE_S
                if (
                    is_late
                    or isinstance(error, StageFailedError)
                    or (self._stages and self._stages.is_closed)
                ):
                    raise
                time.sleep(_STAGE_RETRY_S)
        self._deliver()
        if self._inbox.failure is not None:
            raise self._inbox.failure
        (span,) = record.spans
        token = self._job.tokens[-1] if self._job.num_generated > num_before else None
        return StepResult(Span(span.start, span.end), span.kind is SpanKind.CHUNK, token)

    def cancel(self) -> None:
        """Stop between steps and free everything."""
        self._batcher.abandon()
        self._batcher.cancel(_ID)
        self._deliver()

    def _deliver(self) -> None:
        notices = self._batcher.notices
        while notices:
            notices.popleft().tell()


class _ScriptedSizer(ChunkSizer):
    """Ends chunks where it was told to."""

    def __init__(self, prompt: Sequence[int], ends: Sequence[int]) -> None:
        super().__init__(SizeRules())
        self._ends = [chunk.end_pos for chunk in create_prefill_chunks_at(prompt, ends)]

    def decide(self, question: SizeQuestion) -> SizeDecision:
        size = next(end for end in self._ends if end > question.past) - question.past
        if question.most is not None and size > question.most:
            return SizeDecision(question.most, "halved")
        return SizeDecision(size, "fixed")


def _schedule_of(
    model: ModelConfig, config: ChunkedPrefillConfig, sizer: ChunkSizer | None, num_prompt: int
) -> ScheduleConfig:
    """The schedule of one request. Chunks of a model with recurrent state have the best bits and speed on the grid,
    also when memory runs out."""
    is_auto = sizer is not None and sizer.rules.is_auto
    chunk_size, grid = config.chunk_size, 1
    if isinstance(sizer, _ScriptedSizer):
        chunk_size = num_prompt
    elif sizer is not None and is_auto:
        chunk_size, grid = sizer.rules.most, sizer.rules.grid
    elif model.has_state and chunk_size % STATE_GRID == 0:
        grid = STATE_GRID
    return ScheduleConfig(
        chunk_size=chunk_size,
        grid=grid,
        auto_chunk=is_auto,
        keeps_itl=True,
        max_running=1,
        max_waiting=1,
        overlap=0 if isinstance(sizer, _ScriptedSizer) else config.overlap,
    )


if TYPE_CHECKING:
    from penstock.engine.constraint import Constraint
    from penstock.engine.llm import LLM
    from penstock.engine.stages.pipeline import Pipeline

ProgressCallback = Callable[[Progress], None]


class TextStream:
    """An iterator over pieces of text. `result` is there once it has ended; closing it early frees its cache."""

    def __init__(
        self,
        llm: "LLM",
        run: Run,
        on_progress: ProgressCallback | None,
        before_s: float,
    ) -> None:
        self._llm = llm
        self._run = run
        self._on_progress = on_progress
        self._wants_cancel = False
        self._prefill_s = 0.0
        self._decode_s = 0.0
        self._before_s = before_s  # what it took to tokenize the prompt and to choose a cache
        self._first_token_s: float | None = None
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        self.vector: Sequence[float] | None = None  # of the prompt, where it was asked for
        self._peak_bytes = 0
        self._pieces = self._generate()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cancel(self) -> None:
        """End the request before its next step. May be called from a signal handler or a progress callback."""
        self._wants_cancel = True

    def close(self) -> None:
        """End the request now, if it has not ended, and free its cache."""
        self._pieces.close()
        self._run.cancel()

    @property
    def num_prompt_tokens(self) -> int:
        return self._run.prompt_length

    @property
    def progress(self) -> Progress:
        """How far the prompt has been read, and how many chunks that takes as things stand now."""
        return self._run.job.progress

    @property
    def result(self) -> Generation:
        """The finished request; an error before its end."""
        run = self._run
        if run.finish_reason is None:
            raise SettingError("the stream has not ended: read it to its end, or close it")
        generated, progress = run.generated, self.progress
        num_decoded = len(generated) - 1
        chunk, caches = self._llm.chunk, run.space.tensors
        keeps_bits = not run.model.config.has_state or run.lies_on(STATE_GRID)
        return Generation(
            text="".join(self._text),
            token_ids=tuple(generated),
            finish_reason=run.finish_reason,
            usage=Usage(run.prompt_length, len(generated), run.num_cached),
            timings=Timings(
                load_s=self._llm.load_s,
                prefill_s=self._prefill_s,
                time_to_first_token_s=self._first_token_s,
                decode_s=self._decode_s,
                prefill_tokens_per_s=progress.tokens_per_s,
                decode_tokens_per_s=num_decoded / self._decode_s if num_decoded > 0 else None,
            ),
            prefill=PrefillReport(
                requested=chunk.requested,
                effective=usual_size(run.chunks, chunk.effective) if chunk.is_auto else chunk.effective,
                source=chunk.source,
                reason=(auto_reason(run.chunks, chunk.reason) if chunk.is_auto else chunk.reason)
                + _shrink_reason(run.num_shrinks),
                overlap=self._llm.overlap,
                chunks=progress.chunks_done,
                # The way a prompt is cut has no part in its bits, but where a state is cut inside a block.
                same_bits=self._llm.same_bits and keeps_bits,
                records=tuple(run.chunks),
            ),
            memory=MemoryReport(
                weights_bytes=self._llm.model.num_weight_bytes,
                kv_cache_bytes=caches.num_bytes - caches.state_bytes,
                recurrent_bytes=caches.state_bytes,
                peak_resident_bytes=self._peak_bytes,
            ),
            logprobs=None if run.job.request.num_logprobs is None else tuple(self._logprobs),
            prompt_logprobs=None if run.job.request.prompt_logprobs is None else tuple(self._prompt_logprobs),
        )

    def _generate(self) -> Generator[str, None, None]:
        run = self._run
        device_kind(run.model.device).reset_peak()
        self._began_s = time.perf_counter()
        try:
            while run.finish_reason is None:
                if self._wants_cancel:
                    run.cancel()
                else:
                    self._step()
                while run.events:
                    if piece := self._take(run.events.popleft()):
                        self._text.append(piece)
                        yield piece
        finally:
            self._peak_bytes = device_kind(run.model.device).peak_bytes()
            run.cancel()

    def _step(self) -> None:
        started = time.perf_counter()
        is_prompt = self._run.step().is_prompt
        seconds = time.perf_counter() - started
        if is_prompt:
            self._prefill_s += seconds
        else:
            self._decode_s += seconds

    def _take(self, event: Event) -> str:
        """The text that an event brings, if any."""
        match event:
            case PromptProgress() if self._on_progress is not None:
                self._on_progress(event.progress)
            case TokenGenerated():
                if self._first_token_s is None:
                    self._first_token_s = self._before_s + time.perf_counter() - self._began_s
                if event.logprobs is not None:
                    self._logprobs.append(event.logprobs)
                return event.text
            case PromptScored():
                self._prompt_logprobs += event.logprobs
            case Finished():
                self.vector = event.vector
                return event.text
        return ""


def _shrink_reason(num_shrinks: int) -> str:
    return f"; halved {num_shrinks}x when memory ran out" if num_shrinks else ""
