"""Before the rounds: each engine's settings are tried, and the best are taken, for every length and for decoding."""

from collections.abc import Callable, Iterable, Sequence

from penstock.bench.peers_process import Answered, PeerError
from penstock.bench.peers_results import Choice, Trial
from penstock.bench.peers_workers import Workers
from penstock.bench.peers_workload import (
    LLAMA_FORMATS,
    Candidate,
    PeerSystem,
    PeerWorkload,
    llama_candidate,
    llama_candidates,
)
from penstock.measure.prompts import shuffled_rounds

Say = Callable[[str], None]

# Less than this is noise, and another process for its sake would only take memory.
_MIN_GAIN = 1.03
_DECODE_TOKENS = 16
# Longer prompts are read once.
_LONG_TOKENS = 4000
# Of each format, all taking turns: everything that follows rests on this choice.
_FORMAT_PASSES = 3


class Picker:
    """Tries candidates and remembers all trials."""

    def __init__(self, workers: Workers, prompt: Sequence[int], workload: PeerWorkload, say: Say) -> None:
        self._workers = workers
        self._prompt = prompt
        self._workload = workload
        self._say = say
        self.trials: list[Trial] = []

    def pick(self, system: PeerSystem, candidates: Sequence[Candidate]) -> list[Choice]:
        """A choice for every length. Candidates that fail are left out; where all do, so does this."""
        trials = self._try_all(candidates, self._workload.lengths)
        return choose(system, trials, self._workload)

    def pick_format(self, like: Sequence[Choice]) -> list[Choice]:
        """llama.cpp's formats with the settings that are best for the file as it is; then settings for the best."""
        probe = like[len(like) // 2]
        settings = probe.prefill.settings
        batch, flash = settings["batch"], settings["flash"]
        formats = {llama_candidate(name, batch, flash): name for name in LLAMA_FORMATS}
        tried = self._try_in_turns(list(formats), probe.prompt_tokens)
        reading = formats[min(tried, key=lambda trial: trial.first_token_s).candidate]
        decoding = formats[max(tried, key=lambda trial: trial.decode_tokens_per_s).candidate]
        self._say(f"llama.cpp's best format: {reading} for prompts, {decoding} for decoding")
        trials = self._try_all(llama_candidates(reading), self._workload.lengths)
        if decoding != reading:
            more = llama_candidates(decoding, (batch,))
            trials += self._try_all(more, self._workload.decode_lengths)
        return choose(PeerSystem.LLAMA_BEST, trials, self._workload)

    def _try_in_turns(self, candidates: Sequence[Candidate], length: int) -> list[Trial]:
        """All of them side by side, pass by pass, so that what slows the machine for a while slows no single one.
        Those that fail are left out; where all do, so does this."""
        passes: dict[Candidate, list[Answered]] = {candidate: [] for candidate in candidates}
        failures: dict[Candidate, PeerError] = {}
        try:
            for order in shuffled_rounds(candidates, _FORMAT_PASSES, self._workload.seed):
                for candidate in [each for each in order if each not in failures]:
                    try:
                        passes[candidate].append(self._pass(candidate, length))
                    except PeerError as error:
                        self._say(f"left out: {error}")
                        failures[candidate] = error
        finally:
            self._workers.close()
        found = [
            self._trial(candidate, length, passes[candidate])
            for candidate in candidates
            if candidate not in failures
        ]
        if not found:
            raise next(iter(failures.values()))
        self.trials += found
        return found

    def _try_all(self, candidates: Sequence[Candidate], lengths: Sequence[int]) -> list[Trial]:
        found: list[Trial] = []
        failure: PeerError | None = None
        for candidate in candidates:  # one process at a time
            try:
                found += [self._try(candidate, length) for length in lengths]
            except PeerError as error:
                self._say(f"left out: {error}")
                failure = error
                found = [trial for trial in found if trial.candidate != candidate]
            finally:
                self._workers.close()
        if failure is not None and not found:
            raise failure
        self.trials += found
        return found

    def _try(self, candidate: Candidate, length: int) -> Trial:
        num_passes = 1 if length >= _LONG_TOKENS else self._workload.trial_passes
        return self._trial(candidate, length, [self._pass(candidate, length) for _ in range(num_passes)])

    def _pass(self, candidate: Candidate, length: int) -> Answered:
        return self._workers.generate(candidate, self._prompt[:length], _DECODE_TOKENS + 1)

    def _trial(self, candidate: Candidate, length: int, passes: Sequence[Answered]) -> Trial:
        """What disturbs a pass makes it slower, never faster: the best counts."""
        first_token_s = min(each.first_token_s for each in passes)
        decode = max(each.decode_tokens_per_s or 0.0 for each in passes)
        self._say(
            f"tried {candidate.label}, {length:,} tokens: "
            f"prefill {length / first_token_s:,.0f} tokens/s, decode {decode:.1f}"
        )
        return Trial(candidate, length, first_token_s, decode)


def choose(system: PeerSystem, trials: Sequence[Trial], workload: PeerWorkload) -> list[Choice]:
    """The candidate that is best on the whole, but where another is better by more than noise. For decoding the one
    that read the prompt, but for the same."""
    reading = _by_length(trials, workload.lengths, lambda trial: trial.first_token_s)
    usual = _usual(reading, workload.lengths)
    choices = []
    for length in workload.lengths:
        prefill = _best(reading[length], usual)
        decode = None
        if system.decodes and length in workload.decode_lengths:
            decoding = _by_length(trials, [length], lambda trial: 1 / max(trial.decode_tokens_per_s, 1e-9))
            decode = _best(decoding[length], prefill)
        choices.append(Choice(system, length, prefill, decode))
    return choices


def _by_length(
    trials: Iterable[Trial], lengths: Sequence[int], cost: Callable[[Trial], float]
) -> dict[int, dict[Candidate, float]]:
    found: dict[int, dict[Candidate, float]] = {length: {} for length in lengths}
    for trial in trials:
        if trial.prompt_tokens in found:
            found[trial.prompt_tokens][trial.candidate] = cost(trial)
    return found


def _usual(costs: dict[int, dict[Candidate, float]], lengths: Sequence[int]) -> Candidate:
    """Of those that were tried at every length, the one that loses least to the best of each."""
    everywhere = set.intersection(*(set(costs[length]) for length in lengths))
    best = {length: min(costs[length].values()) for length in lengths}
    order = list(costs[lengths[0]])
    return min(
        sorted(everywhere, key=order.index),
        key=lambda candidate: sum(costs[length][candidate] / best[length] for length in lengths),
    )


def _best(costs: dict[Candidate, float], usual: Candidate) -> Candidate:
    best = min(costs, key=lambda candidate: costs[candidate])
    return usual if costs[usual] <= _MIN_GAIN * costs[best] else best
