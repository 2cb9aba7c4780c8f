"""From a row of logits to a token: how it is chosen, where an answer stops, how likely it was."""

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from penstock.errors import ModelError, SettingError

# Below this, logits over temperature would leave the range of float32.
MIN_TEMPERATURE = 1e-6
# Logits times or over a penalty of repetition stay in it.
MIN_REPETITION, MAX_REPETITION = 1e-9, 1e9
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
# Of so many of the likeliest tokens, top_p is looked for first.
_FEW_TOKENS = 512


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen. A temperature of 0 is greedy; `seed` makes a draw repeatable.

    Logits first get their bias, then the penalties: of repetition for every token of the sequence so far, of presence
    and frequency for those that were generated."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0  # taken from the logit of a token that was generated before
    frequency_penalty: float = 0.0  # the same for each time that it was
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # added to a token's logit
    min_tokens: int = 0  # before so many, no token that ends the answer
    stop_token_ids: tuple[int, ...] = ()  # that end the answer, too
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # tokens that never come in a row

    def __post_init__(self) -> None:
        temperature = _number(self.temperature)
        is_ok = temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf
        _require_number("temperature", self.temperature, is_ok, f"0 (greedy), or {MIN_TEMPERATURE} and more")
        _require_int("top_k", self.top_k, "0 (all) or more")
        _require_number("top_p", self.top_p, 0 < _number(self.top_p) <= 1, "above 0, up to 1")
        _require_number("min_p", self.min_p, 0 <= _number(self.min_p) < 1, "0 or more, below 1")
        is_ok = MIN_REPETITION <= _number(self.repetition_penalty) <= MAX_REPETITION
        accepted = f"from {MIN_REPETITION:g} to {MAX_REPETITION:g}"
        _require_number("repetition_penalty", self.repetition_penalty, is_ok, accepted)
        if self.seed is not None:
            _require_int("seed", self.seed, "0 or more", limit=2**63)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            accepted = f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}"
            _require_number(name, value, -MAX_PENALTY <= _number(value) <= MAX_PENALTY, accepted)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        _require_int("min_tokens", self.min_tokens, "0 or more")
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _checked_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise SettingError("allowed_token_ids", [], "at least one token id, or None")
            object.__setattr__(self, "allowed_token_ids", allowed)
        if not isinstance(self.bad_sequences, Sequence):
            raise SettingError("bad_sequences", ..., "a list of lists of token ids")
        bad = tuple(_checked_ids("bad_sequences", each) for each in self.bad_sequences)
        if not all(bad):
            raise SettingError("bad_sequences", [], "sequences of at least one token id")
        object.__setattr__(self, "bad_sequences", bad)

    @property
    def forbids(self) -> bool:
        """Whether some tokens are never chosen, or not yet."""
        return bool(self.min_tokens or self.allowed_token_ids or self.bad_sequences)

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse tokens that a model does not have."""
        named = {
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_sequences": (token for each in self.bad_sequences for token in each),
        }
        for name, tokens in named.items():
            if (outside := next((token for token in tokens if token >= vocab_size), None)) is not None:
                shown = {outside: self.logit_bias[outside]} if name == "logit_bias" else [outside]
                raise SettingError(name, shown, because=f"the model's tokens are 0 to {vocab_size - 1}")


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    is_bytes = isinstance(ids, bytes | bytearray)  # which are integers in a row
    if is_bytes or not isinstance(ids, Sequence) or not all(_is_int(token, 2**31) for token in ids):
        raise SettingError(name, ..., "a list of token ids")
    return tuple(ids)


def _checked_bias(bias: object) -> Mapping[int, float]:
    if not isinstance(bias, Mapping):
        raise SettingError("logit_bias", bias, "numbers by token id")
    for token, value in bias.items():
        if not _is_int(token, 2**31):
            raise SettingError("logit_bias", {token: value}, "token ids that are whole numbers, 0 or more")
        if not -MAX_BIAS <= _number(value) <= MAX_BIAS:
            raise SettingError("logit_bias", {token: value}, f"numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return MappingProxyType(dict(bias))


def _number(value: object) -> float:
    """The value, or not-a-number (which fails every comparison) where it is none that a float can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) > sys.float_info.max:
        return math.nan
    return value


def _require_number(name: str, value: object, ok: bool, accepted: str) -> None:
    if not ok:
        raise SettingError(name, value, f"a number {accepted}")


def _is_int(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def _require_int(name: str, value: object, accepted: str, limit: int = 2**31) -> None:
    if not _is_int(value, limit):
        raise SettingError(name, value, f"a whole number, {accepted}, below {limit}")


class Sampler:
    """Draws tokens for one sequence, which only grows, with a random state of its own."""

    def __init__(self, params: SamplingParams, ends: Collection[int] = ()) -> None:
        """`ends` are tokens that end an answer, beside those of the parameters."""
        self.params = params
        penalties = (params.repetition_penalty - 1.0, params.presence_penalty, params.frequency_penalty)
        # Whether logits are changed before a choice, by a bias or by the tokens so far.
        self.is_adjusted = bool(params.logit_bias) or params.forbids or any(penalties)
        self._ends = torch.tensor([*{*ends, *params.stop_token_ids}], dtype=torch.long)
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._seen, self._generated = _Counts(), _Counts()
        self._bias_tokens = torch.tensor(list(params.logit_bias), dtype=torch.long)
        self._bias_values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)

    def random_number(self) -> float:
        """The next one, from 0 up to 1: what a draw is decided by."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def sample(self, logits: Tensor, previous: Sequence[int], num_prompt: int = 0) -> int:
        """A token from logits [vocab], float32, given all tokens of the sequence so far, of which the first
        `num_prompt` are the prompt. A token at -inf is never drawn; a row with none to draw is an error."""
        params = self.params
        logits = self._adjusted(logits.cpu(), previous, num_prompt)
        if params.temperature == 0:
            token = int(logits.argmax())  # of a row with not-a-number in it, one that is
            require_finite(float(logits[token]))
            return token
        largest = logits.max()
        require_finite(float(largest))
        # Scaled from the largest, so that a tiny temperature cannot overflow.
        logits = (logits - largest) / params.temperature
        if 0 < params.top_k < logits.shape[0]:
            logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -math.inf)
        probabilities = logits.softmax(dim=-1)
        tokens = None  # all, in order of their ids
        if params.top_p < 1:
            probabilities, tokens = _nucleus(probabilities, params.top_p)
        if params.min_p > 0:
            probabilities[probabilities < params.min_p * probabilities.max()] = 0
        drawn = self._draw(probabilities)
        return drawn if tokens is None else int(tokens[drawn])

    def _draw(self, probabilities: Tensor) -> int:
        """An index, as likely as its probability, of which the sum may be any."""
        sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
        point = self.random_number() * sums[-1]
        # The first whose sum is above the point: never one of probability 0.
        index = int(torch.searchsorted(sums, point, right=True))
        return min(index, int(torch.searchsorted(sums, sums[-1])))

    def _adjusted(self, logits: Tensor, previous: Sequence[int], num_prompt: int) -> Tensor:
        """Logits with bias and penalties: themselves where there are none, else a new tensor."""
        params = self.params
        if params.logit_bias:
            params.check_vocab(logits.shape[0])
            logits = logits.index_add(0, self._bias_tokens, self._bias_values)
        if params.repetition_penalty != 1.0:
            seen = self._seen.counts(previous, 0, logits.shape[0]) > 0
            moved = torch.where(
                logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
            )
            logits = torch.where(seen, moved, logits)
        if params.presence_penalty or params.frequency_penalty:
            counts = self._generated.counts(previous, num_prompt, logits.shape[0])
            logits = logits - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts
        return self._permitted(logits, previous, num_prompt) if params.forbids else logits

    def _permitted(self, logits: Tensor, previous: Sequence[int], num_prompt: int) -> Tensor:
        """A new tensor, in which what must not come now is at -inf."""
        params = self.params
        if params.allowed_token_ids is not None:
            allowed = torch.tensor(params.allowed_token_ids, dtype=torch.long)
            logits = torch.full_like(logits, -math.inf).index_copy(0, allowed, logits[allowed])
        else:
            logits = logits.clone()
        if len(previous) - num_prompt < params.min_tokens:
            logits[self._ends] = -math.inf
        for bad in params.bad_sequences:
            num_before = len(bad) - 1
            recent = previous[max(len(previous) - num_before, num_prompt) :] if num_before else ()
            if tuple(recent) == bad[:-1]:
                logits[bad[-1]] = -math.inf
        if not bool(logits.isfinite().any()):
            because = "min_tokens, allowed_token_ids and what must not come leave no token"
            raise SettingError(
                "allowed_token_ids" if params.allowed_token_ids else "bad_words", ..., because=because
            )
        return logits


def require_finite(largest: float) -> None:
    """An error unless a row whose largest logit this is has a token to choose."""
    if not math.isfinite(largest):
        raise ModelError(
            f"the largest of a row of logits is {largest}, so there is no token to choose: either the model's "
            "weights or its dtype do not serve, or every token is forbidden"
        )


def _nucleus(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest tokens that reach `top_p`, the likeliest first: their probabilities, and which they are."""
    num_tokens = probabilities.shape[0]
    size = min(_FEW_TOKENS, num_tokens)
    while True:
        # Most of the time a few are enough, and much faster to find than the order of all.
        ordered, order = probabilities.topk(size)
        sums = ordered.cumsum(dim=-1)
        if size == num_tokens or float(sums[-1]) >= top_p:
            # A token stays if those before it do not reach top_p, so the first always stays.
            num_kept = max(int((sums - ordered < top_p).sum()), 1)
            return ordered[:num_kept], order[:num_kept]
        size = min(8 * size, num_tokens)


class _Counts:
    """How often each token came in a sequence that only grows, from some position on."""

    def __init__(self) -> None:
        self._num_counted = 0
        self._counts = torch.zeros(0, dtype=torch.long)

    def counts(self, tokens: Sequence[int], start: int, vocab_size: int) -> Tensor:
        """[vocab] of tokens[start:]."""
        if len(self._counts) != vocab_size or self._num_counted > len(tokens):
            self._num_counted, self._counts = start, torch.zeros(vocab_size, dtype=torch.long)
        new = torch.tensor(tokens[max(self._num_counted, start) :], dtype=torch.long)
        self._counts.index_add_(0, new, torch.ones_like(new))
        self._num_counted = len(tokens)
        return self._counts


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


def token_logprobs(logits: Tensor, token: int, num_most_likely: int) -> TokenLogprobs:
    """Log-probabilities by raw logits [vocab]: the chosen token's, and those of the most likely (all, where there are
    fewer), of equal ones the lowest id first."""
    vocab_size = logits.shape[0]
    if not 0 <= token < vocab_size:
        raise SettingError("token", token, f"0 to {vocab_size - 1}, the vocabulary")
    if num_most_likely < 0:
        raise SettingError("num_most_likely", num_most_likely, "0 or more")
    return rank_rows(logits.cpu()[None], [token], num_most_likely).listed()[0]


@dataclass(frozen=True)
class RankedRows:
    """Log-probabilities of a token in each row, and of the most likely, where the logits were."""

    chosen: Tensor  # [rows]
    tokens: Tensor  # [rows, most likely]
    logprobs: Tensor  # of these

    def listed(self) -> list[TokenLogprobs]:
        rows = zip(self.chosen.tolist(), self.tokens.tolist(), self.logprobs.tolist(), strict=True)
        return [TokenLogprobs(one, tuple(map(RankedToken, ids, found))) for one, ids, found in rows]


def rank_rows(logits: Tensor, tokens: Sequence[int], num_most_likely: int) -> RankedRows:
    """`token_logprobs` of rows of logits [rows, vocab], a token for each, without waiting for the device."""
    logits = logits.float()
    logprobs = logits.log_softmax(dim=-1)
    chosen = torch.tensor(tokens, dtype=torch.long).to(logits.device, non_blocking=True)[:, None]
    # By logits: two that differ may round to the same log-probability.
    ranked = _largest(logits, min(num_most_likely, logits.shape[1]))
    return RankedRows(logprobs.gather(1, chosen)[:, 0], ranked, logprobs.gather(1, ranked))


def _largest(logits: Tensor, count: int) -> Tensor:
    """[rows, count]: the ids of each row's largest logits, the largest first, of equal ones the lowest id."""
    if count <= 1:  # the first of equal ones is what this gives
        return logits.argmax(dim=-1, keepdim=True)[:, :count]
    # Whole numbers in the order of the logits (-0 is 0), and of equal ones that of their ids: none are equal.
    bits = (logits + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, -(bits & 0x7FFF_FFFF), bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (order * 2**32 - ids).topk(count).indices


def stop_strings(stops: object) -> tuple[str, ...]:
    """Several, or one by itself."""
    if isinstance(stops, str):
        return (stops,)
    if not isinstance(stops, Sequence) or isinstance(stops, bytes | bytearray):
        raise SettingError("stop", stops, "a list of strings")
    return tuple(stops)


class StopMatcher:
    """Passes text through up to the first stop string, which is not part of it. A character costs the same however
    long the strings are."""

    def __init__(self, stops: Sequence[str], *, includes: bool = False) -> None:
        """With `includes`, the stop string is the end of the text."""
        self._includes = includes
        for stop in stop_strings(stops):
            if not isinstance(stop, str) or not stop:
                raise SettingError("stop", stop, "strings of at least one character")
        self._searches = [_Search(stop) for stop in stop_strings(stops)]
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns what is now known to come before any stop string."""
        if self.found is not None:
            return ""
        if not self._searches:
            return text
        known, self._held = self._held + text, ""
        found = [
            (start, search.wanted) for search in self._searches if (start := search.push(text)) is not None
        ]
        if found:
            start, self.found = min(found)
            return known[: len(known) - len(text) + start + (len(self.found) if self._includes else 0)]
        num_held = max(search.num_matched for search in self._searches)
        self._held = known[len(known) - num_held :]
        return known[: len(known) - num_held]

    def finish(self) -> str:
        """The text still held back, when no more will come."""
        held, self._held = self._held, ""
        return held


class _Search:
    """One string in a text that comes in pieces, as Knuth, Morris and Pratt look for it."""

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted
        # For each beginning of the string, the length of the longest shorter one that it ends with.
        self._shorter = [0]
        for index in range(1, len(wanted)):
            self._shorter.append(self._extend(self._shorter[index - 1], wanted[index]))
        self.num_matched = 0  # the text so far ends with so many of the string's first characters

    def push(self, text: str) -> int | None:
        """Where in this piece the string begins, below 0 if that is before it, once it has come to its end."""
        for index, character in enumerate(text):
            self.num_matched = self._extend(self.num_matched, character)
            if self.num_matched == len(self.wanted):
                return index + 1 - len(self.wanted)
        return None

    def _extend(self, num_matched: int, character: str) -> int:
        while num_matched and self.wanted[num_matched] != character:
            num_matched = self._shorter[num_matched - 1]
        return num_matched + (self.wanted[num_matched] == character)
