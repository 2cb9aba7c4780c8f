"""One request on its way through the model: a step at a time, each a transaction."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from penstock.cache.space import CacheSpace
from penstock.engine.batch import SpanInput, build_batch
from penstock.engine.explain import ChunkRecord
from penstock.engine.lookahead import LookAhead
from penstock.engine.results import FinishReason
from penstock.engine.reuse import Prefix, Reuse
from penstock.engine.sampler import Sampler, SamplingParams
from penstock.engine.sampling import sample_one
from penstock.engine.step_clock import pace_of
from penstock.errors import (
    ContextLengthError,
    MemoryExhaustedError,
    PromptError,
    SettingError,
    is_out_of_memory,
)
from penstock.kernels.device import device_kind
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder
from penstock.plan import STATE_GRID, ChunkedPrefillConfig, ChunkSizer, Prefill, PrefillScheduler, Span
from penstock.plan.grids import RowLaw
from penstock.plan.step_shape import StepShape


@dataclass(frozen=True)
class StepResult:
    """What a finished step did."""

    span: Span
    is_prompt: bool
    token: int | None  # sampled after the span, where it ended the sequence


class Run:
    """A prompt and what was generated after it. `step` runs the next span; a step that fails changes nothing."""

    def __init__(
        self,
        model: Decoder,
        prompt: Sequence[int],
        *,
        config: ChunkedPrefillConfig,
        canon: RowLaw,
        max_tokens: int,
        sampling: SamplingParams | None = None,
        eos_ids: frozenset[int] = frozenset(),
        chunk_ends: Sequence[int] | None = None,
        space: CacheSpace | None = None,
        sizer: ChunkSizer | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        """With `reuse`, which is of `space`, what is known of the prompt is not read again."""
        check_request(prompt, max_tokens, model.config.max_position, model.config.vocab_size)
        self.model = model
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        self.max_tokens = max_tokens
        self.finish_reason: FinishReason | None = None
        # Chunks of a model with recurrent state have the best bits and speed on the grid, also when memory runs out.
        grid = STATE_GRID if model.config.has_state else 1
        # The last token generated is never run, so it needs no place.
        self.space = space or CacheSpace.for_tokens(
            model, len(prompt) + max_tokens - 1, num_slots=config.num_state_slots
        )
        self.cache = self.space.new_sequence()
        self._reuse = reuse
        self._prefix: Prefix | None = None
        if reuse is not None:
            if config.overlap:
                raise SettingError(
                    "overlap", config.overlap, "0, which loses nothing", where="where prompts are kept"
                )
            self._prefix = reuse.fetch(prompt, self.cache)
        self.num_cached = self.cache.num_tokens  # of the prompt, that were there and are not read again
        self.prefill = PrefillScheduler(
            prompt, config, chunk_ends=chunk_ends, grid=grid, sizer=sizer, start=self.num_cached
        )
        self.chunks: list[ChunkRecord] = []  # of the prompt, as they were run
        self.logits: Tensor | None = None  # [vocab], after the last step that sampled
        self.num_shrinks = 0  # how often memory ran out and the chunk was halved
        self._canon = canon
        self._sizer = sizer
        self._sampler = Sampler(sampling or SamplingParams())
        self._eos_ids = eos_ids
        # Where the device runs behind the host.
        self._ahead = LookAhead(model, self.space, is_wanted=model.can_record)
        self._pace = pace_of(model.device)
        self._untimed: deque[tuple[Span, Prefill | None]] = deque()  # steps whose time is not known yet

    @property
    def generated(self) -> list[int]:
        """The tokens sampled so far, an end-of-sequence token included."""
        return self.tokens[self.prompt_length :]

    def step(self) -> StepResult:
        """Schedule, build, run, sample, commit. Where memory runs out, the chunk is halved and tried again."""
        device_kind(self.model.device).use()
        while True:
            item, action = self._schedule()
            try:
                state = self.cache.reserve(item.span.start, self._states_to_keep(item, action))
                logits = self._logits_of(replace(item, state=state))
                token = None if logits is None else self._sample(logits, item)
                times = self._pace.end(is_done=token is not None)
            except BaseException as error:
                self._pace.abandon()
                self._abort(item.span, action, error)
            else:
                self._untimed.append((item.span, action))
                self._commit(item.span, action, logits, token, times)
                if token is not None and self.finish_reason is None:
                    self._ahead.launch([token], self._forward)
                return StepResult(item.span, item.is_prompt, token)

    def cancel(self) -> None:
        """Stop between steps and free everything."""
        self.finish("cancelled")

    def finish(self, reason: FinishReason) -> None:
        """End the request, if it has not ended, and give its cache back. A stop string in the last token counts."""
        if self.finish_reason is None or (self.finish_reason, reason) == ("length", "stop"):
            self.finish_reason = reason
            if self._reuse is not None and self._prefix is not None:
                self._reuse.end(self._prefix, self.cache)
            self.cache.free()

    def _logits_of(self, item: SpanInput) -> Tensor | None:
        logits = self._ahead.take([item])
        if logits is not None:
            return logits
        self._pace.abandon()  # what was launched ahead, if anything was
        return self._forward(self._batch([item]))

    def _batch(self, inputs: Sequence[SpanInput]) -> ForwardBatch:
        return build_batch(inputs, canon=self._canon)

    def _forward(self, batch: ForwardBatch) -> Tensor | None:
        self._pace.begin()
        logits = self.model.forward(batch, self.space.tensors)
        self._pace.launched()
        return logits

    def _sample(self, logits: Tensor, item: SpanInput) -> int:
        """The token after a span. Meanwhile its decode is made ready; but the first token is told of before anything
        is recorded for those after it."""
        return sample_one(
            logits, self._sampler, self.tokens, lambda: self._ahead.expect_after([item], self._batch)
        )

    def _schedule(self) -> tuple[SpanInput, Prefill | None]:
        if self.finish_reason is not None:
            raise SettingError(f"the request has ended ({self.finish_reason}): there is no step to run")
        if not self.prefill.is_complete():
            action = self.prefill.next_action()
            assert isinstance(action, Prefill)  # nobody else decodes
            chunk = action.chunk
            span = Span(chunk.start_pos, chunk.end_pos)
            return SpanInput(span, chunk.tokens, self.cache.blocks, True, chunk.is_last), action
        start = len(self.tokens) - 1
        return SpanInput(Span(start, start + 1), self.tokens[start:], self.cache.blocks, False, True), None

    def _states_to_keep(self, item: SpanInput, action: Prefill | None) -> list[int]:
        """The positions whose states the step keeps: its end, and where the next chunk begins if it runs some tokens
        again."""
        positions = {item.span.end}
        if action is not None:
            positions.add(self.prefill.next_start(action.chunk))
            if self._reuse is not None and self._prefix is not None and self.space.slots is not None:
                num_free = self.space.slots.num_free - 1
                positions.update(
                    self._reuse.states_to_keep(self._prefix, item.span.start, item.span.end, num_free)
                )
        return sorted(positions)

    def _abort(self, span: Span, action: Prefill | None, error: BaseException) -> None:
        """Leave the request as it was before the step, and raise the error: unless memory ran out and the chunk can
        be made smaller."""
        self.cache.abort()
        if is_out_of_memory(error):
            device_kind(self.model.device).release(error)
        if action is not None and is_out_of_memory(error) and len(span) > 1:
            self.prefill.shrink(action.chunk)
            self.num_shrinks += 1
            return
        if action is not None:
            self.prefill.abandon(action.chunk)
        if is_out_of_memory(error):
            raise MemoryExhaustedError(
                f"there is no memory left to run one token after {span.start}: free some, or use a smaller model"
            ) from error
        raise error

    def _commit(
        self,
        span: Span,
        action: Prefill | None,
        logits: Tensor | None,
        token: int | None,
        times: Sequence[float],
    ) -> None:
        self.cache.commit(span.end)
        if self._reuse is not None and self._prefix is not None:
            self._reuse.note(self._prefix, self.cache, self.tokens, span.start, is_chunk=action is not None)
        if action is not None:
            self.prefill.complete(action.chunk)
        for seconds in times:
            self._time(*self._untimed.popleft(), seconds)
        if logits is None or token is None:
            return
        self.logits = logits[0]
        self.tokens.append(token)
        if token in self._eos_ids:
            self.finish("stop")
        elif len(self.tokens) - self.prompt_length >= self.max_tokens:
            self.finish("length")

    def _time(self, span: Span, action: Prefill | None, seconds: float) -> None:
        """A step that is done took so long."""
        if action is not None:
            self.prefill.timed(action.chunk, seconds)
            self._explain(action, seconds)
        elif self._sizer is not None:
            self._sizer.record(StepShape(0, num_decodes=1, decode_pasts=span.end, num_logits=1), seconds)

    def _explain(self, action: Prefill, seconds: float) -> None:
        chunk, decision = action.chunk, action.decision
        self.chunks.append(
            ChunkRecord(
                start=chunk.start_pos,
                end=chunk.end_pos,
                past=chunk.start_pos,
                rule=decision.rule if decision else "fixed",
                predicted_s=decision.predicted_s if decision else None,
                measured_s=seconds,
                predicted_bytes=decision.predicted_bytes if decision else None,
                because=decision.because if decision else "",
            )
        )


def check_request(prompt: Sequence[int], max_tokens: int, context: int, vocab_size: int) -> None:
    """Refuse what cannot be run, before any work."""
    if not len(prompt):
        raise PromptError("the prompt is empty: give at least one token, there is nothing to sample from")
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise SettingError("max_tokens", max_tokens, "a whole number, 1 or more")
    if len(prompt) + max_tokens > context:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, together "
            f"{len(prompt) + max_tokens}, but the model's context is {context} tokens: "
            f"shorten the prompt or ask for fewer tokens"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise PromptError(f"the prompt has token ids outside the model's vocabulary, 0 to {vocab_size - 1}")
