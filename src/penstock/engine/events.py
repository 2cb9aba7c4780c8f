"""What goes into a service and what comes out of it: a request, and events until one that ends it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.results import FinishReason, TokenLogprobs, Usage
from penstock.engine.sampler import SamplingParams, StopMatcher
from penstock.errors import ContextLengthError, PenstockError, PromptError
from penstock.plan.checks import check_int
from penstock.plan.model import ModelConfig
from penstock.plan.progress import Progress


@dataclass(frozen=True)
class JsonFormat:
    """The answer is to be JSON: of a schema, or any object where there is none."""

    schema: dict[str, Any] | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """Token ids, and how to go on from them."""

    token_ids: Sequence[int] = field(repr=False)
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    num_logprobs: int | None = None  # None: none; n: of the token that was chosen, and of the n most likely
    json_format: JsonFormat | None = None
    ignore_eos: bool = False  # go on to max_tokens
    cache_salt: str = field(default="", repr=False)  # only requests with the same one share what was read

    def check(self, model: ModelConfig) -> None:
        """Refuse what a model cannot run, before any work."""
        prompt, max_tokens = self.token_ids, self.max_tokens
        if not len(prompt):
            raise PromptError("the prompt is empty: give at least one token, there is nothing to sample from")
        check_int("max_tokens", max_tokens, 1)
        if len(prompt) + max_tokens > model.max_position:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, together "
                f"{len(prompt) + max_tokens}, but the model's context is {model.max_position} tokens: "
                f"shorten the prompt or ask for fewer tokens"
            )
        if min(prompt) < 0 or max(prompt) >= model.vocab_size:
            raise PromptError(
                f"the prompt has token ids outside the model's vocabulary, 0 to {model.vocab_size - 1}"
            )
        if self.num_logprobs is not None:
            check_int("num_logprobs", self.num_logprobs, 0)
        self.sampling.check_vocab(model.vocab_size)
        StopMatcher(self.stop)


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """A chunk of the prompt was read."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class TokenGenerated:
    """A token, and the text that is known by now: often its own, sometimes none, sometimes some that was held back
    since it might have begun a stop string."""

    token: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request that was not refused. `text` is what was held back and is known now."""

    reason: FinishReason
    text: str
    usage: Usage
    queue_s: float  # from its arrival to its first step
    prefill_s: float  # from its first step to its first token, the steps of others in between included
    decode_s: float  # from its first token to its last


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that went wrong; no other request is touched."""

    error: PenstockError


Event = PromptProgress | TokenGenerated | Finished | Failed
# Called on the engine's thread, in order; it must return at once. Finished or Failed is the last, and comes once.
Listener = Callable[[Event], None]
