"""Results made up of chosen numbers."""

from collections.abc import Mapping, Sequence

from penstock.bench.memory import Growth
from penstock.bench.results import Results, Settings
from penstock.bench.suites import SUITES, SuiteName
from penstock.bench.systems import SystemName
from penstock.bench.timing import Pass
from penstock.measure.machine import Machine

MACHINE = Machine(
    cpu="A processor (x86_64)",
    num_cpus=2,
    num_threads=2,
    memory_bytes=24 * 2**30,
    system="Linux 6",
    python="3.12.1",
    torch="2.13.0",
    transformers="5.22.2",
    penstock="0.1.0",
    commit="0123abc",
    date="2026-01-02T03:04:05+00:00",
    load_average=0.5,
)
MIB = 2**20


def made_up_results(
    seconds: Mapping[tuple[SystemName, int], Sequence[float]],
    decode_s: Mapping[tuple[SystemName, int], Sequence[float]] | None = None,
    activations: Mapping[tuple[SystemName, int], Sequence[float]] | None = None,
    *,
    token_ids: Mapping[SystemName, tuple[int, ...]] | None = None,
    suite: SuiteName = SuiteName.PREFILL,
    dtype: str = "bfloat16",
    chunk: int = 512,
) -> Results:
    """Times to the first token and of decoding in seconds, activations in MiB, by system and length."""
    passes = []
    for (name, length), values in seconds.items():
        for index, value in enumerate(values):
            decoded = (decode_s or {}).get((name, length))
            tokens = (token_ids or {}).get(name, (5, 6, 7) if decoded else (5,))
            passes.append(Pass(name, index, length, tokens, value, decoded[index] if decoded else None))
    growths = [
        Growth(name, length, round((value + length / 64) * MIB), round(length / 64 * MIB))
        for (name, length), values in (activations or {}).items()
        for value in values
    ]
    lengths = tuple(sorted({length for _, length in seconds}))
    measured = tuple(sorted({length for _, length in activations or {}}))
    model = "model.gguf (GGUF, llama, Q4_1)"
    settings = Settings(suite, model, dtype, chunk, lengths, measured, None, 2, 3)
    return Results(MACHINE, settings, tuple(passes), tuple(growths), 12.5)


_FACTORS = {
    SystemName.PENSTOCK: 0.9,
    SystemName.PENSTOCK_WHOLE: 0.92,
    SystemName.PENSTOCK_UNTILED: 0.88,
    SystemName.PENSTOCK_TOKENWISE: 9.0,
    SystemName.TRANSFORMERS: 1.0,
    SystemName.TRANSFORMERS_CHUNKED: 1.2,
}


def good_results(suite: SuiteName = SuiteName.PREFILL, **changes: object) -> Results:
    """Every system of a suite at its lengths, every bar met."""
    seconds, decode_s, activations = {}, {}, {}
    for length in SUITES[suite].lengths:
        base = length / 700 * (1 + length / 8000)
        for name in SUITES[suite].systems:
            seconds[name, length] = [base * _FACTORS[name] * jitter for jitter in (1.0, 1.04, 0.98)]
        decode_s[SystemName.PENSTOCK, length] = [0.05, 0.051, 0.052]
        decode_s[SystemName.TRANSFORMERS, length] = [0.2, 0.21, 0.2]
    for length in SUITES[suite].memory_lengths:
        activations[SystemName.PENSTOCK, length] = [24.0, 25.0, 26.5]
        activations[SystemName.TRANSFORMERS, length] = [length / 20]
        activations[SystemName.TRANSFORMERS_CHUNKED, length] = [30 + length / 100]
    return made_up_results(seconds, decode_s, activations, suite=suite, **changes)  # type: ignore[arg-type]
