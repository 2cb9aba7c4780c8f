"""What is run: real text or random tokens, in several lengths, through several systems, so many times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.bench.suites import Suite
from penstock.bench.systems import SystemName
from penstock.bench.timing import Pass
from penstock.plan.model import ModelConfig

DEFAULT_DECODE_TOKENS = 32
DEFAULT_MEMORY_REPEATS = 3

# A pass over a long prompt takes so long that only the systems of most interest run it, and fewer times.
LONG_TOKENS = 4000
_REPEATS = 5
_LONG_REPEATS = 3
# So does one of these over any prompt.
SLOW = (SystemName.PENSTOCK_TOKENWISE,)
# How fast a system decodes does not depend on how it read the prompt, so one of each engine is enough.
DECODING = (SystemName.PENSTOCK, SystemName.TRANSFORMERS)

# Importing, loading and warming up, for the estimate of a measurement in a process of its own.
_PROCESS_START_S = 6.0


@dataclass(frozen=True)
class Case:
    """A prompt length, and how many times each system reads it."""

    prompt_tokens: int
    rounds: Mapping[SystemName, int]


def plan_timings(
    suite: Suite, lengths: Sequence[int], repeats: int | None = None, *, full: bool = False
) -> list[Case]:
    """The cases to time. `full` runs every system at every length, and as often at the long ones."""
    cases = []
    for length in lengths:
        is_short = full or length < LONG_TOKENS
        names = suite.systems if is_short else suite.long_systems
        usual = _REPEATS if is_short else _LONG_REPEATS
        cases.append(
            Case(length, {name: repeats or (_LONG_REPEATS if name in SLOW else usual) for name in names})
        )
    return cases


def plan_memory(suite: Suite, lengths: Sequence[int], repeats: int = DEFAULT_MEMORY_REPEATS) -> list[Case]:
    """The cases whose growth is measured: Penstock's, which has a bar, several times, the others' once."""
    return [
        Case(length, {name: repeats if name is SystemName.PENSTOCK else 1 for name in suite.memory_systems})
        for length in lengths
    ]


def estimate_s(
    config: ModelConfig,
    warm_up: Mapping[SystemName, Pass],
    timings: Sequence[Case],
    memory: Sequence[Case],
    decode_tokens: int,
) -> float:
    """About how long the cases will take, given how long each system took to warm up.

    A token's time is taken to grow with the prompt as its arithmetic does: the weights it is multiplied with,
    and the keys and values it attends to."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = config.hidden_size * (2 * query + 2 * key + 3 * config.intermediate_size)
    # Per token of the prompt; layers without attention do not grow with it.
    attention_share = query / weights * len(config.attention_layers) / config.num_layers

    def pass_s(name: SystemName, prompt_tokens: int, num_decoded: int) -> float:
        known = warm_up[name]
        growth = (1 + prompt_tokens * attention_share) / (1 + known.prompt_tokens * attention_share)
        prefill_s = known.first_token_s / known.prompt_tokens * prompt_tokens * growth
        speed = known.decode_tokens_per_s
        return prefill_s + (num_decoded / speed * growth if speed else 0.0)

    timing_s = sum(
        num_rounds * pass_s(name, case.prompt_tokens, decode_tokens if name in DECODING else 0)
        for case in timings
        for name, num_rounds in case.rounds.items()
    )
    memory_s = sum(
        num_rounds * (_PROCESS_START_S + pass_s(name, case.prompt_tokens, 0))
        for case in memory
        for name, num_rounds in case.rounds.items()
    )
    return timing_s + memory_s
