"""Who is compared, on what, and with which settings of its own each may run."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

PEERS = "peers"

DEFAULT_LENGTHS = (512, 2048, 8000)
QUICK_LENGTHS = (512, 2048)
# Decoding is measured after the shortest and after the longest prompt.
DEFAULT_DECODE_TOKENS = 64
DEFAULT_REPEATS = 5
QUICK_REPEATS = 3
QUICK_DECODE_TOKENS = 16
DEFAULT_TRIAL_PASSES = 2
QUICK_TRIAL_PASSES = 1

_LLAMA_BATCHES = (512, 2048)
LLAMA_FORMATS = ("Q4_0", "Q8_0", "BF16", "F16")
_VLLM_BATCHES = (512, 2048, 8192)

Quantity = Literal["prefill", "decode"]
Value = int | bool | str


class EngineName(StrEnum):
    PENSTOCK = "penstock"
    TRANSFORMERS = "transformers"
    LLAMA_CPP = "llama.cpp"
    VLLM = "vllm"


class PeerSystem(StrEnum):
    """What each is called in the results."""

    PENSTOCK = "penstock"
    PENSTOCK_AUTO = "penstock-auto"
    TRANSFORMERS = "transformers"
    LLAMA_FILE = "llama.cpp"
    LLAMA_BEST = "llama.cpp-best-format"
    VLLM = "vllm"

    @property
    def engine(self) -> EngineName:
        return EngineName(self.value.removesuffix("-auto").removesuffix("-best-format"))

    @property
    def label(self) -> str:
        return {
            PeerSystem.PENSTOCK: "Penstock, chunk 512",
            PeerSystem.PENSTOCK_AUTO: "Penstock, auto",
            PeerSystem.TRANSFORMERS: "transformers, whole",
            PeerSystem.LLAMA_FILE: "llama.cpp, this file",
            PeerSystem.LLAMA_BEST: "llama.cpp, its best format",
            PeerSystem.VLLM: "vLLM, bfloat16",
        }[self]

    @property
    def decodes(self) -> bool:
        """Decoding does not depend on how the prompt was read, so one system of Penstock is enough."""
        return self is not PeerSystem.PENSTOCK_AUTO


OURS = (PeerSystem.PENSTOCK, PeerSystem.PENSTOCK_AUTO)
# They run in environments of their own, where there are any.
PEER_ENGINES = (EngineName.LLAMA_CPP, EngineName.VLLM)


@dataclass(frozen=True)
class Candidate:
    """An engine with settings of its own: a process."""

    engine: EngineName
    values: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, engine: EngineName, **values: Value) -> "Candidate":
        return cls(engine, tuple(values.items()))

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.values)

    @property
    def label(self) -> str:
        parts = []
        for name, value in self.values:
            if name == "flash":
                parts.append(f"flash {'on' if value else 'off'}")
            else:
                parts.append(str(value) if name == "format" else f"{name} {value}")
        return f"{self.engine.value} ({', '.join(parts)})" if parts else self.engine.value


@dataclass(frozen=True)
class PeerWorkload:
    """What is run. Chunks of Penstock are 512 tokens, or its own choice."""

    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    decode_tokens: int = DEFAULT_DECODE_TOKENS  # after the first
    repeats: int = DEFAULT_REPEATS
    trial_passes: int = DEFAULT_TRIAL_PASSES  # of each setting tried before the rounds; the best counts
    seed: int = 0

    @property
    def decode_lengths(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((min(self.lengths), max(self.lengths))))

    @property
    def most_tokens(self) -> int:
        """The longest prompt with what is generated after it."""
        return max(self.lengths) + self.decode_tokens + 1


def penstock_candidate(system: PeerSystem, weights: str | None) -> Candidate:
    chunk: Value = 512 if system is PeerSystem.PENSTOCK else "auto"
    if weights is None:
        return Candidate.of(EngineName.PENSTOCK, chunk=chunk)
    return Candidate.of(EngineName.PENSTOCK, chunk=chunk, weights=weights)


def llama_candidates(format_name: str | None, batches: Sequence[int] = _LLAMA_BATCHES) -> list[Candidate]:
    """Its batch sizes with flash attention and without; on the file as it is, or in another format."""
    return [llama_candidate(format_name, batch, flash) for batch in batches for flash in (True, False)]


def llama_candidate(format_name: str | None, batch: int, flash: bool) -> Candidate:
    if format_name is None:
        return Candidate.of(EngineName.LLAMA_CPP, batch=batch, flash=flash)
    return Candidate.of(EngineName.LLAMA_CPP, format=format_name, batch=batch, flash=flash)


def vllm_candidates() -> list[Candidate]:
    return [Candidate.of(EngineName.VLLM, batch=batch) for batch in _VLLM_BATCHES]
