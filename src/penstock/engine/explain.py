"""What is kept of every chunk that ran, to tell afterwards why it was so long and whether that was right."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.plan.sizing import SizeRule

# In words, for a line of text.
_WORDS: dict[SizeRule, str] = {
    "default": "the default",
    "tuned": "tuned on this machine",
    "memory": "by memory",
    "latency": "by the latency target",
    "smallest": "the smallest there is",
    "largest": "the largest there is",
}


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """The part [start, end) of a prompt that a step read, after `past` tokens, with decodes of others beside it.

    `rule` says what set its length. Times and bytes are of the whole step; what was not known, or not measured, is
    None.
    """

    start: int
    end: int
    past: int
    rule: SizeRule
    predicted_s: float | None
    measured_s: float
    predicted_bytes: int | None
    measured_bytes: int | None = None
    num_decodes: int = 0
    because: str = ""  # more about the rule, where there is more

    def __len__(self) -> int:
        return self.end - self.start


def usual_size(records: Sequence[ChunkRecord], otherwise: int) -> int:
    """The longest chunk that was cut by a rule, not by the prompt's end; `otherwise` if there was none."""
    return max((len(record) for record in _ruled(records)), default=otherwise)


def auto_reason(records: Sequence[ChunkRecord], otherwise: str) -> str:
    """Why automatic chunks were as long as they were."""
    ruled = _ruled(records)
    if not ruled:
        return otherwise
    words = ", ".join(dict.fromkeys(_WORDS.get(record.rule, record.rule) for record in ruled))
    smallest, largest = min(map(len, ruled)), max(map(len, ruled))
    sizes = "" if smallest == largest else f"{smallest} to {largest} tokens, "
    return f"auto: {sizes}{words}"


def _ruled(records: Sequence[ChunkRecord]) -> list[ChunkRecord]:
    return [record for record in records if record.rule in _WORDS]
