"""What a sweep runs: every configuration on every prompt length, in another order each round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.bench.systems import SystemName

AUTO: Literal["auto"] = "auto"
ChunkChoice = int | Literal["auto"]
Baseline = Literal["transformers", "llama.cpp"]
BASELINES: tuple[Baseline, ...] = ("transformers", "llama.cpp")

DEFAULT_CHUNKS: tuple[ChunkChoice, ...] = (0, 128, 256, 512, 1024)
DEFAULT_LENGTHS = (512, 2048, 8000)
DEFAULT_REPEATS = 5
DEFAULT_DECODE_TOKENS = 16


@dataclass(frozen=True)
class Configuration:
    """A system and its chunk size; 0 is the whole prompt at once, or the system's own choice."""

    system: SystemName
    chunk: int

    @property
    def label(self) -> str:
        return self.system.label(self.chunk)

    @property
    def is_ours(self) -> bool:
        return self.system.startswith("penstock")


@dataclass(frozen=True)
class Cell:
    """A configuration and a prompt length: what is measured once in every round."""

    configuration: Configuration
    prompt_tokens: int


def configurations(
    chunks: Sequence[ChunkChoice], baselines: Sequence[Baseline] = ()
) -> tuple[Configuration, ...]:
    """Penstock at each size, and each baseline at each: what has no `auto` leaves it out. transformers reads the
    prompt whole as well, which is its default."""
    sizes = [chunk for chunk in dict.fromkeys(chunks) if chunk != AUTO]
    found = [
        Configuration(SystemName.PENSTOCK if size else SystemName.PENSTOCK_WHOLE, size) for size in sizes
    ]
    if AUTO in chunks:
        found.append(Configuration(SystemName.PENSTOCK_AUTO, 0))
    if "transformers" in baselines:
        found.append(Configuration(SystemName.TRANSFORMERS, 0))
        found += [Configuration(SystemName.TRANSFORMERS_CHUNKED, size) for size in sizes if size]
    if "llama.cpp" in baselines:
        found += [Configuration(SystemName.LLAMA_CPP, size) for size in sizes or [0]]
    return tuple(found)
