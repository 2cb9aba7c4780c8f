"""What goes into a service and what comes out of it: a request, and events until one that ends it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.results import FinishReason, Usage
from penstock.engine.sampler import SamplingParams
from penstock.errors import PenstockError
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


@dataclass(frozen=True, slots=True)
class RankedToken:
    """A token that could have been chosen."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithm of the probability that the model gave the chosen token, before any temperature, penalty
    or constraint, and the most likely tokens, the likeliest first."""

    logprob: float
    most_likely: tuple[RankedToken, ...]


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
