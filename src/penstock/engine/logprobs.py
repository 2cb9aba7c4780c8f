"""How likely the model found a token, and which it found most likely."""

import torch
from torch import Tensor

from penstock.engine.results import RankedToken, TokenLogprobs
from penstock.errors import SettingError


def token_logprobs(logits: Tensor, token: int, num_most_likely: int) -> TokenLogprobs:
    """Log-probabilities by raw logits [vocab]: the chosen token's, and those of the most likely (all, where there are
    fewer), of equal ones the lowest id first."""
    vocab_size = logits.shape[0]
    if not 0 <= token < vocab_size:
        raise SettingError("token", token, f"0 to {vocab_size - 1}, the vocabulary")
    if num_most_likely < 0:
        raise SettingError("num_most_likely", num_most_likely, "0 or more")
    logits = logits.cpu().float()
    logprobs = logits.log_softmax(dim=-1)
    # By logits: two that differ may round to the same log-probability.
    ranked = _largest(logits, min(num_most_likely, vocab_size))
    most_likely = zip(ranked.tolist(), logprobs[ranked].tolist(), strict=True)
    return TokenLogprobs(float(logprobs[token]), tuple(RankedToken(*each) for each in most_likely))


def _largest(logits: Tensor, count: int) -> Tensor:
    """The ids of the largest logits, the largest first."""
    if not count:
        return torch.empty(0, dtype=torch.long)
    # topk alone may return any of several equal values. All that reach the least of them, by id, sorted without
    # changing the order of equal ones, gives the lowest ids.
    least = logits.topk(count).values[-1]
    candidates = torch.nonzero(logits >= least).flatten()
    order = logits[candidates].sort(descending=True, stable=True).indices
    return candidates[order[:count]]
