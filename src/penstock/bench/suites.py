"""The benchmarks there are: which model, which lengths, which systems."""

from dataclasses import dataclass
from enum import StrEnum

from penstock.bench.systems import SystemName

# The benchmark of many users at once. It compares no systems on one prompt: its options and results are its own.
SERVE = "serve"
# The benchmark of chunk sizes against prompt lengths, which has its own, too.
SWEEP = "sweep"


class SuiteName(StrEnum):
    """What each is called on the command line and in the results."""

    PREFILL = "prefill"
    HYBRID = "hybrid"


@dataclass(frozen=True)
class Suite:
    """What is measured where nothing else is asked for."""

    lengths: tuple[int, ...]
    memory_lengths: tuple[int, ...]
    systems: tuple[SystemName, ...]
    long_systems: tuple[SystemName, ...]  # of them, those that read long prompts too
    memory_systems: tuple[SystemName, ...]


_COMPARED = (SystemName.PENSTOCK, SystemName.TRANSFORMERS, SystemName.TRANSFORMERS_CHUNKED)
SUITES = {
    SuiteName.PREFILL: Suite(
        lengths=(512, 2048, 8000),
        memory_lengths=(512, 2048, 8000),
        systems=(
            SystemName.PENSTOCK,
            SystemName.PENSTOCK_WHOLE,
            SystemName.PENSTOCK_UNTILED,
            SystemName.TRANSFORMERS,
            SystemName.TRANSFORMERS_CHUNKED,
        ),
        long_systems=_COMPARED,
        memory_systems=_COMPARED,
    ),
    # Recurrent layers tempt people to read a prompt token by token, so that is run too.
    SuiteName.HYBRID: Suite(
        lengths=(1000, 4000),
        memory_lengths=(2000, 8000),
        systems=(
            SystemName.PENSTOCK,
            SystemName.PENSTOCK_TOKENWISE,
            SystemName.TRANSFORMERS,
            SystemName.TRANSFORMERS_CHUNKED,
        ),
        long_systems=_COMPARED,
        memory_systems=(SystemName.PENSTOCK, SystemName.TRANSFORMERS),
    ),
}
