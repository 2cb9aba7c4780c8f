"""Prompts of several lengths, read by several systems in turn: speeds, times, memory, and whether answers agree."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Bench
from benchmarks.models import Subject
from benchmarks.systems import Answer, Spec, growth_of
from penstock.measure.growth import WARM_UP_TOKENS

PREFILLING, DECODING = "prefill", "decode"
FIRST_TOKEN, TOTAL = "time to first token", "time to the last token"
ACTIVATIONS, CACHED = "activation memory", "cached for the prompt"


@dataclass(frozen=True)
class Turn:
    """What a system does once in every round, and the sections that have a figure of it."""

    system: str
    length: int  # of the prompt
    num_tokens: int  # of the answer
    sections: tuple[str, ...]
    by: Any  # what generates: a spec, or an engine's settings

    @property
    def case(self) -> str:
        return f"{self.length:,} tokens"


def read_turns(
    bench: Bench,
    turns: Iterable[tuple[int, Turn]],
    generate: Callable[[Turn], Answer],
    most_spread: float | None = None,
) -> dict[Turn, list[Answer]]:
    """All turns, each with its round. Returns the answers."""
    answers: dict[Turn, list[Answer]] = {}
    for index, turn in turns:
        answer = generate(turn)
        values = {
            PREFILLING: ("tokens/s", turn.length / answer.first_token_s),
            DECODING: ("tokens/s", answer.decode_tokens_per_s),
            FIRST_TOKEN: ("s", answer.first_token_s),
            TOTAL: ("s", answer.total_s),
        }
        for section in turn.sections:
            bench.results.add_row(section, {turn.case: values[section]}, turn.system, index, most_spread)
        answers.setdefault(turn, []).append(answer)
        speeds = ", ".join(f"{each} {values[each][1] or 0:,.2f} {values[each][0]}" for each in turn.sections)
        bench.say(f"round {index + 1}: {turn.system}, {turn.case}: {speeds}")
    return answers


def note_agreement(bench: Bench, answers: Mapping[Turn, Sequence[Answer]], ours: str) -> None:
    """Whether all run the same model: greedy tokens, which differ where two are as good as equal."""
    longest: dict[tuple[int, str], tuple[int, ...]] = {}
    for turn, given in answers.items():
        key = (turn.length, turn.system)
        longest[key] = max(longest.get(key, ()), given[-1].token_ids, key=len)
    for (length, system), theirs in longest.items():
        if system != ours and (length, ours) in longest:
            equal = [one == other for one, other in zip(theirs, longest[length, ours], strict=False)]
            in_a_row = equal.index(False) if False in equal else len(equal)
            bench.results.notes.append(
                f"after {length:,} tokens {system} and {ours} agree on {sum(equal)} of {len(equal)} greedy tokens, "
                f"the first {in_a_row} in a row"
            )


def measure_memory(
    bench: Bench,
    subject: Subject,
    dtype: str,
    specs: Sequence[Spec],
    lengths: Sequence[int],
    own_repeats: int,
) -> None:
    """Each in a fresh process: Penstock's, which has a bar, several times, the others' once."""
    prompt = subject.prompt(max(lengths))
    # What is measured once per machine and kept is then there for all processes alike.
    for spec in specs[:1]:
        growth_of(spec, subject.path, dtype, prompt[:WARM_UP_TOKENS])
    for length in lengths:
        name = f"{length:,} tokens"
        for spec in specs:
            for _ in range(own_repeats if spec.is_ours else 1):
                grown = growth_of(spec, subject.path, dtype, prompt[:length])
                bench.results.add(ACTIVATIONS, name, "MiB", grown.activation_mib, system=spec.label)
                bench.say(f"{name}, memory: {spec.label}: {grown.activation_mib:.1f} MiB and the cache")
            bench.results.add(CACHED, name, "MiB", grown.cache_bytes / 2**20, system=spec.label)
