"""One request on its way: its tokens, its cache, how its next token is chosen, who is told."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock.cache import SequenceCache
from penstock.engine.events import (
    ChunkRecord,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    Listener,
    PromptProgress,
    PromptScored,
    TokenGenerated,
    Usage,
)
from penstock.engine.prompt_rows import PooledRows, PromptScores
from penstock.engine.reuse import Prefix
from penstock.engine.sampler import Sampler, StopMatcher, token_logprobs
from penstock.engine.sampling import Choice
from penstock.engine.status import Outcome, RequestStatus, RequestSummary
from penstock.models.text.tokenizer import StreamDecoder, Tokenizer
from penstock.plan.batch_scheduler import RequestView
from penstock.plan.progress import PrefillClock, Progress
from penstock.plan.step import RequestId

if TYPE_CHECKING:  # what compiles schemas is loaded when one is asked for
    from penstock.engine.constraint import Constraint


class Job:
    """What the engine knows of one request. Times are of one monotonic clock, in seconds. Without a tokenizer its
    events have no text."""

    def __init__(
        self,
        request_id: RequestId,
        request: GenerationRequest,
        cache: SequenceCache,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        constraint: "Constraint | None",
        listener: Listener,
        prefix: Prefix | None = None,
    ) -> None:
        self.id = request_id
        self.prefix = prefix  # None: nothing is shared
        self.request = request
        self.cache = cache
        self.tokens = list(request.token_ids)
        self.num_prompt = len(self.tokens)
        self._least_tokens = self.num_prompt + request.sampling.min_tokens
        self._most_tokens = self.num_prompt + request.max_tokens
        self.listener = listener
        self.wants_cancel = False
        # That was told, though a step in flight has it still.
        self.ending: FinishReason | Exception | None = None
        self._num_losses = self._done_at_loss = 0
        self.chunks: list[ChunkRecord] = []  # of its prompt, as they were run; some twice, if it gave them up
        self.cuts: set[int] = set()  # where spans of its prompt began, ended, or left a state off
        self.rows = request.rows()
        self._eos_ids = (frozenset() if request.ignore_eos else eos_ids).union(
            request.sampling.stop_token_ids
        )
        self.sampler = Sampler(request.sampling, eos_ids)
        self._constraint = constraint
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer, request.shown_special)
        self._stops = StopMatcher(request.stop, includes=request.includes_stop)
        self._clock = PrefillClock(self.num_prompt, 0)
        self._arrived_s = time.perf_counter()
        self._started_s: float | None = None  # its first step
        self._chunk_began_s: float | None = None  # when its last chunk ended, or a step began after a pause
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were in the cache and not read again."""
        return self._clock.progress().num_cached

    @property
    def progress(self) -> Progress:
        """How far the prompt has been read, and how many chunks it takes if those to come are as long as the last."""
        progress = self._clock.progress()
        num_left = self.num_prompt - progress.num_done
        size = len(self.chunks[-1]) if self.chunks else max(num_left, 1)
        return replace(progress, num_chunks=progress.chunks_done + -(-num_left // size))

    def start(self, now: float) -> bool:
        """A step with a span of this request begins. Whether it is the first."""
        is_first = self._started_s is None
        if is_first:
            self._started_s = now
        if self._chunk_began_s is None:
            self._chunk_began_s = now
        return is_first

    def skip(self, end: int) -> Event | None:
        """Prompt tokens up to `end` are in the cache, and were not read for this request."""
        news = end > self._clock.progress().num_done
        self._clock.skip(end)
        return PromptProgress(self.progress) if news else None

    @property
    def num_losses(self) -> int:
        """How often a stage was lost in its steps, in a row, with nothing new of it in between."""
        return self._num_losses if self._num_losses and self._num_done <= self._done_at_loss else 0

    def lose_stage(self) -> None:
        """A stage was lost in a step of this request."""
        self._num_losses, self._done_at_loss = self.num_losses + 1, self._num_done

    @property
    def _num_done(self) -> int:
        return self._clock.progress().num_done + self.num_generated

    def pause(self) -> None:
        """It gave cache space up: how long it waits now says nothing of how fast it reads."""
        self._chunk_began_s = None

    @property
    def needs_logits(self) -> bool:
        """Whether its token takes more than its sampler: a constraint, or log-probabilities that are to be told."""
        return self._is_held or self.request.num_logprobs is not None

    @property
    def _is_held(self) -> bool:
        return self._constraint is not None and self._constraint.is_holding

    @property
    def has_last_token(self) -> bool:
        """Whether the answer ends with its next token, whatever that is."""
        return len(self.tokens) + 1 >= self._most_tokens

    @property
    def may_go_on(self) -> bool:
        """Whether its next token may not be the last, and can be followed by another at once."""
        return not (self.has_last_token or self.wants_cancel or self.ending or self._is_held)

    def ends_with(self, token: int) -> bool:
        """Whether the answer plainly ends with a token."""
        return token in self._eos_ids

    def lies_on(self, grid: int) -> bool:
        """Whether every span of its prompt began and ended on a grid of so many tokens, but for the prompt's end."""
        return all(cut % grid == 0 for cut in self.cuts - {self.num_prompt})

    def choose(self, logits: Tensor) -> Choice:
        """The next token, from logits [vocab]."""
        allowed = self._constraint.mask(logits) if self._constraint is not None and self._is_held else logits
        token = self.sampler.sample(allowed, self.tokens, self.num_prompt)
        wanted = self.request.num_logprobs
        return Choice(token, None if wanted is None else token_logprobs(logits, token, wanted))

    def read(self, chunk: ChunkRecord, resumes_at: int | None, now: float) -> Event | None:
        """A chunk of the prompt is in the cache; what was there once before is no news."""
        start, end = chunk.start, chunk.end
        self.chunks.append(chunk)
        self.cuts |= {start, end} if resumes_at is None else {start, end, resumes_at}
        news = end > self._clock.progress().num_done
        if news and self._chunk_began_s is not None:
            self._clock.record(start, end, now - self._chunk_began_s)
        self._chunk_began_s = now
        return PromptProgress(self.progress) if news else None

    def take_rows(self, found: Any, end: int) -> Event | None:
        """What was read of its prompt's own rows, up to `end`."""
        assert self.rows is not None
        self.rows.take(found)
        self.rows.num_taken = max(self.rows.num_taken, end)
        return PromptScored(self.rows.news()) if isinstance(self.rows, PromptScores) else None

    def take(self, choice: Choice, now: float) -> tuple[Event | None, FinishReason | None]:
        """The chosen token is the request's: what to tell of it, and whether it is the last."""
        if len(self.tokens) >= self._most_tokens:  # no answer is wanted
            return None, "length"
        token = choice.token
        self.tokens.append(token)
        if self._first_token_s is None:
            self._first_token_s = now
        self._last_token_s = now
        is_end = token in self._eos_ids
        if self._constraint is not None:
            self._constraint.accept(token)
        text = ""
        if self._decoder is not None and (not is_end or self.request.includes_stop):
            text = self._decoder.push(token)
            # No stop string is looked for in what has to come.
            if len(self.tokens) >= self._least_tokens:
                text = self._stops.push(text)
        is_whole = self._constraint is not None and self._constraint.is_finished
        reason: FinishReason | None = None
        if is_end or self._stops.found is not None or is_whole:
            reason = "stop"
        elif len(self.tokens) >= self._most_tokens:
            reason = "length"
        return TokenGenerated(token, text, choice.logprobs), reason

    def end(self, reason: FinishReason, now: float) -> Finished:
        """What to tell when nothing more will come."""
        rest = "" if self._decoder is None else self._decoder.finish()
        text = self._stops.push(rest) + self._stops.finish()
        first = now if self._first_token_s is None else self._first_token_s
        started = now if self._started_s is None else self._started_s
        return Finished(
            reason=reason,
            text=text,
            usage=Usage(self.num_prompt, self.num_generated, self.num_cached),
            queue_s=started - self._arrived_s,
            prefill_s=first - started,
            decode_s=(self._last_token_s or first) - first,
            stop=self._stops.found if reason == "stop" else None,
            vector=self.rows.vector if isinstance(self.rows, PooledRows) and reason == "length" else None,
        )

    def gap_s(self, now: float) -> float:
        """The time since the token before, or since the arrival."""
        return now - (self._arrived_s if self._last_token_s is None else self._last_token_s)

    def status(self, view: RequestView, now: float) -> RequestStatus:
        return RequestStatus(
            id=self.id,
            phase=view.phase,
            num_prompt_tokens=self.num_prompt,
            num_prompt_done=min(view.num_run, self.num_prompt),
            num_generated=self.num_generated,
            max_tokens=self.request.max_tokens,
            age_s=now - self._arrived_s,
            prompt_eta_s=self._prompt_eta_s(view.num_run),
            num_preemptions=view.num_preemptions,
            num_prompt_cached=self.num_cached,
        )

    def _prompt_eta_s(self, num_run: int) -> float | None:
        progress = self._clock.progress()
        if num_run >= self.num_prompt or progress.eta_s is None:
            return None
        # What it has to read once more, since it gave it up, is not on the clock.
        again = max(progress.num_done - num_run, 0)
        return progress.eta_s + (again / progress.tokens_per_s if again else 0.0)

    def summary(self, outcome: Outcome, now: float) -> RequestSummary:
        first = self._first_token_s
        return RequestSummary(
            id=self.id,
            outcome=outcome,
            num_prompt_tokens=self.num_prompt,
            num_generated=self.num_generated,
            first_token_s=None if first is None else first - self._arrived_s,
            seconds=now - self._arrived_s,
        )
