"""Requests of made-up tokens through the batcher of a service, one step at a time."""

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from penstock.bench.gpu_models import Subject
from penstock.cache import BLOCK_TOKENS
from penstock.engine.batcher import Batcher
from penstock.engine.events import GenerationRequest
from penstock.engine.job import Job
from penstock.engine.sampling import Choice
from penstock.engine.step import Step, StepOutcome
from penstock.models.text.tokenizer import SpecialTokens, Tokenizer
from penstock.plan import STATE_GRID
from penstock.plan.policy import ScheduleConfig


class WatchedJob(Job):
    """A request whose last logits [vocab] are told. They lie where the step left them, until the next."""

    logits: Tensor | None = None
    needs_logits = True

    def choose(self, logits: Tensor) -> Choice:
        self.logits = logits
        return super().choose(logits)


J = TypeVar("J", bound=Job)


class Requests:
    """All of one batcher, over a cache with room for them."""

    def __init__(
        self,
        subject: Subject,
        chunk: int,
        num_requests: int,
        num_tokens: int,
        *,
        step_tokens: int | None = None,
        looks_ahead: bool | None = None,
    ) -> None:
        """`num_tokens` is what their prompts and answers take together."""
        self.space = subject.space(num_tokens + num_requests * BLOCK_TOKENS, num_requests)
        grid = STATE_GRID if subject.model.config.has_state else 1
        schedule = ScheduleConfig(
            chunk_size=chunk, step_tokens=step_tokens, max_running=num_requests, grid=grid
        )
        self._batcher = Batcher(subject.model, subject.canon, self.space, schedule, looks_ahead=looks_ahead)

    def add(self, name: str, prompt: Sequence[int], max_tokens: int) -> Job:
        return self._add(Job, name, prompt, max_tokens)

    def watch(self, name: str, prompt: Sequence[int], max_tokens: int) -> WatchedJob:
        return self._add(WatchedJob, name, prompt, max_tokens)

    def _add(self, kind: type[J], name: str, prompt: Sequence[int], max_tokens: int) -> J:
        request, cache = GenerationRequest(prompt, max_tokens, ignore_eos=True), self.space.new_sequence()
        job = kind(name, request, cache, _tokenizer(), frozenset(), None, lambda event: None)
        self._batcher.add(job)
        return job

    def begin_decodes(self, tokens: Sequence[int], num_requests: int, max_tokens: int) -> None:
        """Add so many requests, each with its share of the tokens for a prompt, and step until all decode."""
        size = len(tokens) // num_requests
        added = [
            self.add(f"decoding-{index}", tokens[index * size : (index + 1) * size], max_tokens)
            for index in range(num_requests)
        ]
        while not all(job.num_generated for job in added):
            self.step()

    def step(self) -> None:
        step = self.begin()
        self.settle(step, self.run(step))

    def begin(self) -> Step:
        step = self._batcher.begin()
        assert step is not None, "requests wait, and nothing runs"
        return step

    def run(self, step: Step) -> StepOutcome:
        """It may be run again: it changes nothing but what it writes to the cache, which is the same each time."""
        outcome = self._batcher.run(step)
        if outcome.error is not None:
            raise outcome.error
        for choice in outcome.choices.values():
            if isinstance(choice, Exception):
                raise choice
        return outcome

    def settle(self, step: Step, outcome: StepOutcome) -> None:
        self._batcher.settle(step, outcome)
        self._batcher.notices.clear()


def tokens_to_last(num_steps: int, num_requests: int, past: int, chunk: int) -> int:
    """How many tokens requests must be allowed for all of them to decode together in so many steps: they begin one
    after the other, and the first must not end before the last is done."""
    steps_to_begin = -(-num_requests * past // chunk) if chunk else num_requests
    return num_steps + steps_to_begin + num_requests + 2


@cache
def _tokenizer() -> Tokenizer:
    """The first tokens are bytes; those beyond have no text."""
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, SpecialTokens(), None)
