"""A model cut into stages on several machines: which layers lie where, and how long a prompt takes to flow through.

Chunks of a prompt follow each other: while a stage has chunk i, the one before it has chunk i + 1. The last stage has
the output head and samples; token ids go back to the first with the next step. Stages and links are numbered from 0;
link s leads from stage s to stage s + 1. Times are seconds, sizes bytes, rates bytes a second; work is counted in
multiply-adds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf, prod

from penstock.errors import MemoryExhaustedError, SettingError
from penstock.plan.chunks import ChunkedPrefillConfig, num_prefill_chunks, prefill_chunk_span
from penstock.plan.memory import WeightBits, kv_token_bytes, state_slot_bytes, vocabulary_bytes, weight_bytes
from penstock.plan.model import ModelConfig
from penstock.plan.step import StepShape, pasts_of_chunk
from penstock.plan.step_time import StepTimeCoefficients
from penstock.plan.units import format_bytes

# What a stage adds to each step, whatever the step: a header that is read, a message that is sent.
STEP_OVERHEAD_S = 2e-4
# What a step costs, whatever its tokens, where only a machine's speed is known. It is 1.5 ms for an 8B on an H200.
STEP_S = 2e-3
# Sums in another order differ in their last bits.
_ALIKE = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Machine:
    """What a stage runs on: memory for weights and cache (None: enough), and speed, in any unit that all share."""

    memory_bytes: int | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.speed < inf:
            raise SettingError("speed", self.speed, "a number above 0")


@dataclass(frozen=True, slots=True)
class Link:
    """From one stage to the next: bytes a second (infinite: as good as none), and seconds that a byte is under way,
    during which others may follow it."""

    bytes_per_s: float = inf
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise SettingError("link", self.bytes_per_s, "a rate above 0")
        if not 0 <= self.delay_s < inf:
            raise SettingError("delay_s", self.delay_s, "a number of seconds, 0 or more")

    def busy_s(self, num_bytes: int) -> float:
        """How long a message keeps others from being sent."""
        return num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class PartCosts:
    """What the parts of a model take: bytes in memory with their share of the cache, and work for a token. The
    embedding lies on the first stage, the head on the last; where they are one (`is_tied`), a single stage has it
    once, and of several the first and the last each have it."""

    layer_bytes: tuple[int, ...]
    layer_work: tuple[float, ...]
    embedding_bytes: int = 0
    head_bytes: int = 0
    head_work: float = 0.0  # that a token of a prompt has on average; most rows of a prompt have no logits
    is_tied: bool = False

    def __post_init__(self) -> None:
        if not self.layer_work or len(self.layer_bytes) != len(self.layer_work):
            raise SettingError(
                "layer_work", self.layer_work, f"{len(self.layer_bytes)} numbers, at least one"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layer_work)

    @cached_property
    def work(self) -> float:
        """Of the whole model."""
        return sum(self.layer_work) + self.head_work

    @classmethod
    def of_model(
        cls,
        config: ModelConfig,
        *,
        dtype_bytes: int = 2,
        bits: WeightBits | None = None,
        cache_tokens: int = 0,
        num_slots: int = 0,
        past: float = 0.0,
        head_share: float = 0.0,
    ) -> "PartCosts":
        """Of a model with a cache of so many tokens and recurrent states, for tokens that see `past` others on
        average, and of which a share has logits (1 for decodes). Of the others the last layer makes what later tokens
        need, and no more."""
        vocabulary = vocabulary_bytes(config, dtype_bytes, bits)
        is_tied = bits is not None and bits.is_tied
        around = (1 if is_tied else 2) * vocabulary
        layer_bytes, layer_work = [], []
        for index in range(config.num_layers):
            layer = config.of_layers(index, index + 1)
            held = weight_bytes(layer, dtype_bytes, bits) - around
            if index < config.num_layers - 1:
                held -= config.hidden_size * dtype_bytes  # the last norm
            held += cache_tokens * kv_token_bytes(layer, dtype_bytes)
            layer_bytes.append(held + num_slots * state_slot_bytes(layer, dtype_bytes))
            layer_work.append(work_of_token(layer) + past * work_of_pair(layer))
        read_in = work_of_reading_in(layer)
        layer_work[-1] = read_in + head_share * (layer_work[-1] - read_in)
        return cls(
            tuple(layer_bytes),
            tuple(layer_work),
            vocabulary,
            vocabulary,
            head_share * config.vocab_size * config.hidden_size,
            is_tied,
        )

    def vocabulary_bytes(self, start: int, end: int) -> int:
        """Embedding and head, as far as they lie with the layers [start, end)."""
        is_first, is_last = start == 0, end == self.num_layers
        return self.embedding_bytes * is_first + self.head_bytes * (
            is_last and not (is_first and self.is_tied)
        )


def work_of_token(config: ModelConfig) -> float:
    """Multiply-adds of a token with the weights of all layers. Head and embedding are left out."""
    hidden = config.hidden_size
    work = config.num_attention_weights
    work += config.num_dense_layers * 3 * config.intermediate_size * hidden
    if net := config.recurrent:
        rule = 3 * prod(net.matrix_shape)
        work += net.num_layers * ((net.projected_size + net.value_size) * hidden + rule)
    if experts := config.experts:
        widths = (experts.num_active or experts.num_experts) * experts.intermediate_size
        widths += experts.shared_intermediate_size
        work += experts.num_layers * (3 * widths + experts.num_experts) * hidden
    return float(work)


def work_of_reading_in(config: ModelConfig) -> float:
    """Multiply-adds of a token that make what later tokens need of it: projections, and states."""
    work = config.num_attention_layers * config.num_projected * config.hidden_size
    if net := config.recurrent:
        work += net.num_layers * (net.projected_size * config.hidden_size + 3 * prod(net.matrix_shape))
    return float(work)


def work_of_pair(config: ModelConfig) -> float:
    """Multiply-adds of a token with one token that it sees: scores and values of all attention layers."""
    num_full, full = config.num_full_layers, config.kv_heads(windowed=False)[1]
    elements = num_full * full + (config.num_attention_layers - num_full) * config.head_dim
    return 2.0 * config.num_heads * elements


def coefficients_of_speed(
    config: ModelConfig, tokens_per_s: float, prompt_tokens: int
) -> StepTimeCoefficients:
    """Times of steps on a machine that reads a prompt of this length, whole, at this speed: attention and products
    share what a step's constant leaves of the time as they share the work. Decodes are not known."""
    if not 0 < tokens_per_s < inf:
        raise SettingError("speed", tokens_per_s, "tokens a second, above 0")
    tokens, past = work_of_token(config), work_of_pair(config)
    whole_s = prompt_tokens / tokens_per_s
    constant = min(STEP_S, whole_s / 2)
    unit = (whole_s - constant) / (prompt_tokens * tokens + pasts_of_chunk(prompt_tokens, 0) * past)
    return StepTimeCoefficients(constant, tokens * unit, past * unit)


@dataclass(frozen=True)
class Stage:
    """The layers [start, end) on a machine: what they hold, and their share of the work over its speed. Over all
    stages of machines of speed 1 the shares sum to 1."""

    start: int
    end: int
    held_bytes: int
    share: float
    machine: Machine

    @property
    def layers(self) -> range:
        return range(self.start, self.end)

    @property
    def fits(self) -> bool | None:
        """None where nothing is known of its memory."""
        memory = self.machine.memory_bytes
        return None if memory is None else self.held_bytes <= memory


def stages_of(costs: PartCosts, layers: Sequence[int], machines: Sequence[Machine]) -> tuple[Stage, ...]:
    """The stages of a cut that is given as numbers of layers, whether they fit or not."""
    text = ",".join(map(str, layers))
    if len(layers) != len(machines):
        raise SettingError("layers", text, f"{len(machines)} numbers, one for each stage")
    if min(layers) < 1 or sum(layers) != costs.num_layers:
        raise SettingError(
            "layers", text, f"numbers of at least 1 that sum to the model's {costs.num_layers} layers"
        )
    ends = (0, *accumulate(layers))
    return tuple(
        _stage(costs, start, end, machine)
        for (start, end), machine in zip(pairwise(ends), machines, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Ends:
    """What the first and the last chunk of a prompt take, as shares of all: a stage has its first chunk when those
    before it are done with it, and those after it have the last one still to do."""

    first: float = 0.0
    last: float = 0.0

    @classmethod
    def of(cls, steps: Sequence["PipelineStep"]) -> "Ends":
        total = sum(step.seconds for step in steps)
        return cls(steps[0].seconds / total, steps[-1].seconds / total)


def cut_layers(costs: PartCosts, machines: Sequence[Machine], ends: Ends | None = None) -> tuple[Stage, ...]:
    """The cut whose slowest stage is done as soon as can be, of those that fit every machine's memory; of several
    such the most even, and then the one with fewer layers on earlier stages: chunks take longer as their past grows,
    so what comes after the slowest stage costs more than what comes before it.

    Without `ends`, chunks follow each other without end, and the slowest stage is all that counts. With those of one
    prompt, what other stages have to do before its first and after its last chunk counts, too, at the machines' mean
    speed. Every stage has at least one layer. Machines stay in their order.
    """
    num_layers, num_stages = costs.num_layers, len(machines)
    if not 1 <= num_stages <= num_layers:
        raise SettingError(
            "stages", num_stages, f"1 to {num_layers}", because=f"the model has {num_layers} layers"
        )

    ends = ends or Ends()
    speed = sum(machine.speed for machine in machines) / num_stages
    # Shares of the time: before the layer of this number, and from it on.
    before_s = [work / costs.work / speed for work in accumulate(costs.layer_work, initial=0.0)]
    after_s = [1 / speed - share for share in before_s]
    # By start and number of layers.
    works = [list(accumulate(costs.layer_work[start:])) for start in range(num_layers)]
    sizes = [list(accumulate(costs.layer_bytes[start:])) for start in range(num_layers)]

    def best(latest: float, *, is_even: bool) -> _Cut:
        """The soonest that all stages are done, or the least sum of squares of their shares."""
        reached = {0: _Cut(0.0, ())}
        for index, machine in enumerate(machines):
            room = inf if machine.memory_bytes is None else machine.memory_bytes
            is_last = index == num_stages - 1
            first_end = num_layers if is_last else index + 1
            after: dict[int, _Cut] = {}
            for end in range(first_end, num_layers - num_stages + index + 2):
                for start in range(end - 1, -1, -1):
                    if (before := reached.get(start)) is None:
                        continue
                    share = _share(costs, works[start][end - start - 1], is_last, machine)
                    if share > latest or (end in after and not is_even and share > _ALIKE * after[end].value):
                        break  # more layers take longer still
                    held = sizes[start][end - start - 1] + costs.vocabulary_bytes(start, end)
                    done = share + ends.first * before_s[start]
                    done += 0.0 if is_last else ends.last * after_s[end]
                    if held > room or done > latest:
                        continue
                    value = before.value + share**2 if is_even else max(before.value, done)
                    cut = _Cut(value, (*before.ends, end))
                    if end not in after or cut.order < after[end].order:
                        after[end] = cut
            reached = after
        if num_layers not in reached:
            raise MemoryExhaustedError(_no_cut(costs, machines))
        return reached[num_layers]

    even = best(best(inf, is_even=False).value, is_even=True)
    layers = [end - start for start, end in pairwise((0, *even.ends))]
    return stages_of(costs, layers, machines)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Of the first layers: where its stages end, and how bad it is."""

    value: float
    ends: tuple[int, ...]

    @property
    def order(self) -> tuple[float, tuple[int, ...]]:
        """Sums of squares in another order differ in their last bits: these count as equal."""
        return float(f"{self.value:.12e}"), self.ends


def _share(costs: PartCosts, layers_work: float, is_last: bool, machine: Machine) -> float:
    return (layers_work + costs.head_work * is_last) / costs.work / machine.speed


def _stage(costs: PartCosts, start: int, end: int, machine: Machine) -> Stage:
    held = sum(costs.layer_bytes[start:end]) + costs.vocabulary_bytes(start, end)
    share = _share(costs, sum(costs.layer_work[start:end]), end == costs.num_layers, machine)
    return Stage(start, end, held, share, machine)


def _no_cut(costs: PartCosts, machines: Sequence[Machine]) -> str:
    known = [machine.memory_bytes for machine in machines if machine.memory_bytes is not None]
    needed = sum(costs.layer_bytes) + costs.embedding_bytes + costs.head_bytes
    return (
        f"no cut into {len(machines)} stages fits: weights and cache take {format_bytes(needed)} in all, the largest "
        f"layer {format_bytes(max(costs.layer_bytes))}, the embedding on the first stage "
        f"{format_bytes(costs.embedding_bytes)}, the head on the last {format_bytes(costs.head_bytes)}; "
        f"{len(known)} machines have {format_bytes(sum(known))} together"
    )


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """A step: how long one machine of speed 1 takes for all layers, and what crosses each link."""

    seconds: float
    hop_bytes: int = 0


@dataclass(frozen=True)
class PipelineClock:
    """When the last stage ends each step, counted from the first one's start; how long stages compute and links
    carry."""

    end_s: tuple[float, ...]
    stage_busy_s: tuple[float, ...]
    link_busy_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """To the end of the last step: the time to the first token, if the steps are a prompt's chunks."""
        return self.end_s[-1] if self.end_s else 0.0

    @property
    def is_link_bound(self) -> bool:
        """Whether some link is busier than every stage."""
        return max(self.link_busy_s, default=0.0) > max(self.stage_busy_s)


def run_pipeline(
    steps: Sequence[PipelineStep],
    shares: Sequence[float],
    link: Link | None = None,
    *,
    overhead_s: float = STEP_OVERHEAD_S,
    depth: int | None = None,
    return_s: float = 0.0,
) -> PipelineClock:
    """The pipeline's clock: stage s takes `shares[s]` of a step's seconds, and `overhead_s`.

    A stage has one step at a time, a link one message. With `depth`, a step begins `return_s` after the one that many
    before it has ended: steps in flight are bounded, or decodes of so many groups of requests wait for their own
    tokens. O(steps x stages).
    """
    link = link or Link()
    if not shares:
        raise SettingError("shares", shares, "one for each stage")
    if depth is not None and depth < 1:
        raise SettingError("depth", depth, "an integer of at least 1")
    stage_free = [0.0] * len(shares)
    link_free = [0.0] * len(shares)  # the last is no link
    stage_busy, carried = [0.0] * len(shares), 0.0
    ends: list[float] = []
    last, delay = len(shares) - 1, link.delay_s
    for index, step in enumerate(steps):
        hop = link.busy_s(step.hop_bytes)
        seconds = step.seconds
        carried += hop
        arrived = 0.0 if depth is None or index < depth else ends[index - depth] + return_s
        for stage, share in enumerate(shares):
            free, took = stage_free[stage], share * seconds + overhead_s
            end = (arrived if arrived > free else free) + took
            stage_free[stage] = end
            stage_busy[stage] += took
            if stage < last:
                free = link_free[stage]
                sent = (end if end > free else free) + hop
                link_free[stage] = sent
                arrived = sent + delay
        ends.append(stage_free[last])
    return PipelineClock(tuple(ends), tuple(stage_busy), (carried,) * last)


def least_seconds(
    steps: Sequence[PipelineStep],
    shares: Sequence[float],
    link: Link | None = None,
    *,
    overhead_s: float = STEP_OVERHEAD_S,
) -> float:
    """What no pipeline is faster than: every stage has all steps one after the other, after the first has come to it
    and before the last has left those after it; every link has all messages, after the first stage's first step and
    before the stages after it have the last."""
    link = link or Link()
    if not steps:
        return 0.0
    hops = [link.busy_s(step.hop_bytes) for step in steps]
    total, carried = sum(step.seconds for step in steps), sum(hops)
    first, final = steps[0].seconds, steps[-1].seconds
    bounds = []
    for stage, share in enumerate(shares):
        before = sum(shares[:stage]) * first + stage * (overhead_s + link.delay_s + hops[0])
        num_after = len(shares) - 1 - stage
        after = sum(shares[stage + 1 :]) * final + num_after * (overhead_s + link.delay_s + hops[-1])
        bounds.append(before + share * total + len(steps) * overhead_s + after)
        if num_after:
            reach = before + share * first + overhead_s
            later = after - hops[-1]  # which the link's own messages have
            bounds.append(reach + carried + later)
    return max(bounds)


def prompt_steps(
    coefficients: StepTimeCoefficients, prompt_tokens: int, chunk: int, token_bytes: int
) -> tuple[PipelineStep, ...]:
    """The chunks of a prompt as steps; `token_bytes` cross a link for each token: its residual."""
    config = ChunkedPrefillConfig(chunk)
    spans = (
        prefill_chunk_span(index, prompt_tokens, config)
        for index in range(num_prefill_chunks(prompt_tokens, config))
    )
    return tuple(
        PipelineStep(coefficients.seconds(StepShape.of_chunk(len(span), span.start)), len(span) * token_bytes)
        for span in spans
    )


@dataclass(frozen=True)
class DecodeRate:
    """Tokens of `num_streams` answers: seconds from one token of an answer to its next, and all tokens a second."""

    num_streams: int
    token_s: float
    tokens_per_s: float


def decode_rate(
    coefficients: StepTimeCoefficients,
    shares: Sequence[float],
    link: Link,
    *,
    num_streams: int,
    past: int,
    token_bytes: int,
    overhead_s: float = STEP_OVERHEAD_S,
) -> DecodeRate:
    """Answers dealt into as many groups as there are stages, or fewer where there are not as many: a step has one
    group, and its next waits for this one's tokens. One stream has one step in flight, so stages bring it nothing."""
    num_groups = min(num_streams, len(shares))
    sizes = [len(range(group, num_streams, num_groups)) for group in range(num_groups)]
    rounds = 4 * len(shares) + 8  # until it runs evenly
    steps = [
        PipelineStep(
            coefficients.seconds(StepShape(0, num_decodes=size, decode_pasts=size * past)),
            size * token_bytes,
        )
        for _ in range(rounds)
        for size in sizes
    ]
    back = link.delay_s if len(shares) > 1 else 0.0
    overhead = overhead_s if len(shares) > 1 else 0.0
    clock = run_pipeline(steps, shares, link, overhead_s=overhead, depth=num_groups, return_s=back)
    middle = rounds // 2 * num_groups
    token_s = (clock.end_s[-1] - clock.end_s[middle - 1]) / (rounds - rounds // 2)
    return DecodeRate(num_streams, token_s, num_streams / token_s if token_s else inf)


def link_speed(link: Link, token_bytes: int) -> float:
    """Tokens a second that a link carries. Machines that read faster gain nothing from being joined by it."""
    return link.bytes_per_s / token_bytes
