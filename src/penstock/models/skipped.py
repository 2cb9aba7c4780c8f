"""Weights that a file holds and the model has no use for, by kind, so that nothing is skipped in silence."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.models.reading import shortened
from penstock.plan.model import ModelConfig

_SHOWN = 4
_NAME_LENGTH = 80
_LAYER = re.compile(r"(?:model\.layers|blk)\.([0-9]{1,9})\.")

_VISION = ("model.visual.", "visual.", "v.", "mm.")


@dataclass(frozen=True)
class SkippedWeights:
    """The names of weights that are left in the file."""

    multi_token: tuple[str, ...] = ()  # layers that predict several tokens at once
    vision: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def describe(self) -> str | None:
        """One line for a user; None where nothing is worth a word."""
        kinds = {"multi-token-prediction": self.multi_token, "vision": self.vision, "unknown": self.unknown}
        parts = [_counted(len(names), kind) for kind, names in kinds.items() if names]
        if self.unknown:
            # Somebody else chose these names: quotes and escapes where they are not plain.
            shown = [name if name.isprintable() else repr(name) for name in self.unknown[:_SHOWN]]
            more = [f"{len(self.unknown) - _SHOWN} more"] if len(self.unknown) > _SHOWN else []
            parts[-1] += f" ({', '.join([*(shortened(name, _NAME_LENGTH) for name in shown), *more])})"
        return f"skipped: {', '.join(parts)}" if parts else None


def skipped_weights(config: ModelConfig, unused: Iterable[str]) -> SkippedWeights:
    """`unused` as `check_source` returns it. A tied head that is stored all the same and rotary frequencies say
    nothing that the model does not know: they are left out."""
    multi_token, vision, unknown = [], [], []
    for name in sorted(unused):
        if name.endswith(".inv_freq") or (config.tied_head and name == "lm_head.weight"):
            continue
        layer = _LAYER.match(name)
        if name.startswith("mtp.") or (layer and int(layer[1]) >= config.num_layers):
            multi_token.append(name)
        elif name.startswith(_VISION):
            vision.append(name)
        else:
            unknown.append(name)
    return SkippedWeights(tuple(multi_token), tuple(vision), tuple(unknown))


def _counted(number: int, kind: str) -> str:
    return f"{number} {kind} weight{'' if number == 1 else 's'}"
