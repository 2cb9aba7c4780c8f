"""The experts of a layer as one, where kernels can run them so."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.quantised import Weight
from penstock.plan.model import ExpertsConfig


class GroupedExperts(Protocol):
    """All experts of a layer: from a router's scores to what the layer adds to the residual."""

    @property
    def one(self) -> tuple[Weight, Weight]:
        """The weights of an expert, [2 * width, hidden] and [hidden, width]; the others' are as large."""

    @property
    def has_own_law(self) -> bool:
        """Whether a row's bits rest on `run` as a whole, and not on products that others have, too."""

    def run(self, x: Tensor, scores: Tensor, shared: Tensor | None, *, is_canonical: bool = True) -> Tensor:
        """What the experts of each row of x [rows, hidden] make of it, weighted and summed, with what the shared one
        made of it [rows, hidden]. `scores` are [rows, experts | the shared one's gate | ...]. A row's bits do not
        depend on what other rows there are, where they are canonical."""


@dataclass(frozen=True)
class Router:
    """What a layer's experts are chosen and weighted by, beside their scores."""

    config: ExpertsConfig
    choice_bias: Tensor | None = None  # [experts], float32
    expert_scales: Tensor | None = None  # [experts], float32: of what comes out of each


def route(
    scores: Tensor, router: Router, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
) -> tuple[Tensor, Tensor]:
    """Weights and numbers [rows, active] of the experts that each row goes to, from scores [rows, experts]."""
    config = router.config
    chances = torch.softmax(scores, dim=-1) if config.scores == "softmax" else sigmoid(scores)
    choice = chances if router.choice_bias is None else chances + router.choice_bias
    if config.num_groups > 1:
        choice = _of_best_groups(choice, config)
    weights, chosen = torch.topk(choice, config.num_active, dim=-1)
    if choice is not chances:
        weights = chances.gather(1, chosen)
    if config.normalised:
        weights /= weights.sum(dim=-1, keepdim=True)
    if config.scale != 1.0:
        weights = weights * config.scale
    return weights if router.expert_scales is None else weights * router.expert_scales[chosen], chosen


def _of_best_groups(choice: Tensor, config: ExpertsConfig) -> Tensor:
    """Those of the groups whose best experts are best together; the others are out of reach."""
    groups = choice.view(len(choice), config.num_groups, -1)
    best = groups.topk(min(config.group_best, groups.shape[2]), dim=-1).values.sum(dim=-1)  # [rows, groups]
    chosen = best.topk(config.num_active_groups, dim=-1).indices
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
    return groups.masked_fill(~is_chosen[..., None], -math.inf).flatten(1)
