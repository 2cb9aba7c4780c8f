"""What is measured to tune a model: which steps, which whole prompts, how often. Plain arithmetic."""

from dataclasses import dataclass

from penstock.measure.steps import StepSpec
from penstock.plan.config import STATE_GRID

MIN_ROUNDS = 3
MOST_ROUNDS = 9
MOST_CHUNK = 2048
# What beside a chunk decodes, each after so many tokens.
DECODES = (1, 4, 16)
DECODE_PAST = 128
_MOST_PAST = 16_384
# A token after a long past takes longer than those that the speed was measured with.
_PAST_FACTOR = 1.4
# Tokens whose reading takes about as long as a decode beside nothing.
_DECODE_TOKENS = 16


@dataclass(frozen=True)
class TunePlan:
    steps: tuple[StepSpec, ...]
    step_rounds: int
    chunks: tuple[int, ...]  # of the whole prompts
    prompt_lengths: tuple[int, ...]
    prompt_rounds: int
    memory_tokens: int  # the prompt whose memory is measured in fresh processes; 0: none is

    @property
    def longest_past(self) -> int:
        return max(step.long_past for step in self.steps)

    @property
    def num_tokens(self) -> float:
        """About how many tokens' time it takes, memory aside."""
        return (
            self.longest_past
            + self.step_rounds * _step_cost(self.steps)
            + self.prompt_rounds * self._prompt_cost
        )

    @property
    def _prompt_cost(self) -> float:
        return _PAST_FACTOR * len(self.chunks) * sum(self.prompt_lengths)


def plan_tuning(context: int, tokens_per_s: float, seconds: float, *, quick: bool = False) -> TunePlan:
    """A plan that takes about so long on a machine of this speed; never fewer than three rounds, which may take
    longer."""
    plan = _plan(context, quick=quick)
    if not quick and plan.num_tokens > seconds * tokens_per_s:
        plan = _plan(context, quick=True)
    spare = seconds * tokens_per_s - plan.num_tokens
    per_round = _step_cost(plan.steps) + plan._prompt_cost
    rounds = min(MIN_ROUNDS + max(int(spare / per_round), 0), MOST_ROUNDS)
    return TunePlan(plan.steps, rounds, plan.chunks, plan.prompt_lengths, rounds, plan.memory_tokens)


def _plan(context: int, *, quick: bool) -> TunePlan:
    room = context - 2  # a token is generated after the longest prompt
    sizes = (128, 512, 1024) if quick else (64, 128, 256, 512, 1024, 2048)
    chunks = tuple(size for size in sizes if size <= min(room // 2, MOST_CHUNK)) or (max(room // 2, 1),)
    shares = (0.0, 3 / 8) if quick else (0.0, 1 / 8, 3 / 8, 3 / 4)
    pasts = sorted({_on_grid(share * min(room, _MOST_PAST)) for share in shares})
    decode_past = min(DECODE_PAST, room // 2)
    steps = [StepSpec(chunk, past) for past in pasts for chunk in chunks if past + chunk <= room]
    beside = sorted({chunks[len(chunks) // 4], chunks[len(chunks) // 2]})
    for num_decodes in DECODES:
        steps.append(StepSpec(0, 0, num_decodes, decode_past))
        steps += [StepSpec(chunk, 0, num_decodes, decode_past) for chunk in beside]
    steps += [StepSpec(0, 0, 1, past) for past in pasts if past > decode_past]
    lengths = {min(room, 1024)} if quick else {min(room, 1024), min(room, 3072)}
    whole = (
        tuple(size for size in (128, 256, 512, 1024, 2048) if size <= min(max(lengths), MOST_CHUNK)) or chunks
    )
    memory_tokens = 0 if quick else min(room, MOST_CHUNK)
    return TunePlan(tuple(steps), MIN_ROUNDS, whole, tuple(sorted(lengths)), MIN_ROUNDS, memory_tokens)


def _on_grid(num_tokens: float) -> int:
    return int(num_tokens) // STATE_GRID * STATE_GRID


def _step_cost(steps: tuple[StepSpec, ...]) -> float:
    return sum(
        step.num_tokens * (_PAST_FACTOR if step.past else 1.0) + _DECODE_TOKENS * (step.num_decodes > 0)
        for step in steps
    )
