"""How a prompt is to be cut into chunks, and who goes first when others are waiting to decode."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from penstock.errors import SettingError
from penstock.plan.checks import check_int, check_member

DEFAULT_CHUNK_SIZE = 512
# The same on a GPU, which a few hundred rows do not fill.
GPU_CHUNK_SIZE = 2048


class PrefillPriority(StrEnum):
    """Who runs next when a prompt has chunks left and other requests have a decode step waiting."""

    PREFILL_FIRST = "prefill-first"
    INTERLEAVED = "interleaved"
    DECODE_PRIORITY = "decode-priority"

    @classmethod
    def parse(cls, name: object) -> Self:
        """The member of this name, such as `decode-priority` or `decode_priority`."""
        return check_member("priority", name, cls)


@dataclass(frozen=True)
class ChunkedPrefillConfig:
    """Chunking of one prompt. `chunk_size=0` runs the whole prompt in one chunk.

    Each chunk after the first begins `overlap` tokens before the end of the one before. `priority` may be
    given by name. `max_decode_steps` bounds the decode steps that decode-priority puts before a chunk.
    """

    chunk_size: int = DEFAULT_CHUNK_SIZE
    overlap: int = 0
    priority: PrefillPriority = PrefillPriority.PREFILL_FIRST
    max_decode_steps: int = 8

    def __post_init__(self) -> None:
        check_int("chunk_size", self.chunk_size, 0)
        check_int("overlap", self.overlap, 0)
        check_int("max_decode_steps", self.max_decode_steps, 1)
        object.__setattr__(self, "priority", PrefillPriority.parse(self.priority))
        if self.chunk_size == 0 and self.overlap > 0:
            raise SettingError(
                "overlap",
                self.overlap,
                contradicts={"chunk_size": 0},
                because="the whole prompt is one chunk",
            )
        if self.overlap >= self.chunk_size > 0:
            raise SettingError(
                "overlap",
                self.overlap,
                f"an overlap from 0 to {self.chunk_size - 1}",
                beside={"chunk_size": self.chunk_size},
            )

    @property
    def num_state_slots(self) -> int:
        """The recurrent states that one sequence holds during a step: the one it reads and the one it writes, so that
        it can fail without a trace. Where chunks overlap, both are kept where the next chunk begins, too."""
        return 4 if self.overlap else 2

    def with_overlap(self, overlap: int) -> Self:
        """The same configuration with another overlap."""
        return replace(self, overlap=overlap)

    def with_priority(self, priority: PrefillPriority | str) -> Self:
        """The same configuration with another priority."""
        return replace(self, priority=PrefillPriority.parse(priority))
