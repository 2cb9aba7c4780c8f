"""What a prompt takes on a pipeline of stages: memory of each, time to the first token, and what to know of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.errors import MemoryExhaustedError
from penstock.plan.chunks import ChunkedPrefillConfig
from penstock.plan.grids import DEFAULT_CHUNK_SIZE, STATE_GRID
from penstock.plan.memory import ActivationModel, WeightBits, kv_token_bytes, state_slot_bytes
from penstock.plan.model import ModelConfig
from penstock.plan.pipeline import (
    Ends,
    Link,
    Machine,
    PartCosts,
    PipelineClock,
    PipelineStep,
    Stage,
    cut_layers,
    decode_rate,
    link_speed,
    prompt_steps,
    run_pipeline,
    stages_of,
)
from penstock.plan.prompt_plan import DTYPE_BYTES, check_length
from penstock.plan.step import StepShape, Workspace
from penstock.plan.step_time import StepTimeCoefficients
from penstock.plan.units import format_rate

# A prompt is tried in chunks of 128 to 8,192, but in no more of them than this.
_MOST_CHUNKS = 4096
# Fewer machines that come this near are as good.
_AS_GOOD = 1.05
# Answers that would fill the stages.
_STREAMS_PER_STAGE = 4


@dataclass(frozen=True)
class StageNeeds:
    """The layers [start, end) of one stage, what they hold in bytes, and their share of the time: 1 is that of the
    whole model on the fastest machine."""

    start: int
    end: int
    weights_bytes: int
    kv_cache_bytes: int
    recurrent_bytes: int
    activation_bytes: int
    share: float
    memory_bytes: int | None  # that its machine has

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.recurrent_bytes + self.activation_bytes

    @property
    def fits(self) -> bool | None:
        return None if self.memory_bytes is None else self.total_bytes <= self.memory_bytes


@dataclass(frozen=True)
class StageTime:
    """So many stages, the chunk that they are fastest with, and the time to the first token, for which the fastest
    machine alone takes `speed_up` times as long. The slowest stage computes for a share of it, `busy`."""

    num_stages: int
    chunk: int
    first_token_s: float
    speed_up: float
    busy: float
    is_link_bound: bool


@dataclass(frozen=True)
class DecodeTimes:
    """Seconds from one token of an answer to its next, with so many answers at once: on the fastest machine alone,
    and through all stages."""

    num_streams: int
    alone_s: float
    token_s: float


@dataclass(frozen=True)
class StagePlan:
    """What a prompt takes. `times` and `decodes` are empty where nothing is known of the machines' speed."""

    model: str
    dtype: str
    kernels: str
    prompt_tokens: int
    num_decodes: int
    chunk: int
    link_bytes_per_s: float | None  # None: no link is told of
    token_bytes: int  # that cross a link
    link_tokens_per_s: float | None
    stages: tuple[StageNeeds, ...]
    times: tuple[StageTime, ...] = ()
    decodes: tuple[DecodeTimes, ...] = ()  # of one answer, and of many
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageQuestion:
    """A prompt, machines in the order of their stages, and the link between each two of them. `coefficients` are
    those of a machine of speed 1, the fastest; None: nothing is known of speed."""

    config: ModelConfig
    prompt_tokens: int
    machines: tuple[Machine, ...]
    workspace: Workspace
    link: Link | None = None
    model: str = ""
    dtype: str = "bfloat16"
    bits: WeightBits | None = None
    chunk: int | None = None
    layers: tuple[int, ...] | None = None  # of each stage; None: the best cut
    num_decodes: int = 0
    coefficients: StepTimeCoefficients | None = None

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def cache_tokens(self) -> int:
        return (1 + self.num_decodes) * self.prompt_tokens

    @property
    def num_slots(self) -> int:
        """Recurrent states: each step in flight writes one of its own, and one is in each stage and on each link."""
        num_ahead = 2 * (len(self.machines) - 1)
        return (1 + self.num_decodes) * (ChunkedPrefillConfig().num_state_slots + num_ahead)

    @property
    def token_bytes(self) -> int:
        """The residual of a token, which is all that crosses a link."""
        return self.config.hidden_size * self.dtype_bytes

    @property
    def sizes(self) -> list[int]:
        """Chunk sizes to choose from."""
        grid = STATE_GRID if self.config.has_state else 1
        if self.chunk is not None:
            return [min(-(-(self.chunk or self.prompt_tokens) // grid) * grid, self.prompt_tokens)]
        powers = (1 << power for power in range(7, 14))
        found = [size for size in powers if size < self.prompt_tokens <= _MOST_CHUNKS * size]
        return found or [min(1 << 13, self.prompt_tokens)]


def make_stage_plan(question: StageQuestion) -> StagePlan:
    """The cut, what each stage holds, and the clock for 1, 2, 4, ... and all stages, with the chunk that each is
    fastest with. Raises where no cut fits the memory that is given."""
    config, link = question.config, question.link
    check_length(config, question.prompt_tokens)
    times = _times(question)
    sizes = question.sizes
    preferred = times[-1].chunk if times else max(min(sizes), DEFAULT_CHUNK_SIZE)
    chunk, stages = _fitting(question, sorted((size for size in sizes if size <= preferred), reverse=True))
    plan = StagePlan(
        model=question.model,
        dtype=question.dtype,
        kernels=question.workspace.kernels,
        prompt_tokens=question.prompt_tokens,
        num_decodes=question.num_decodes,
        chunk=chunk,
        link_bytes_per_s=link.bytes_per_s if link else None,
        token_bytes=question.token_bytes,
        link_tokens_per_s=link_speed(link, question.token_bytes) if link else None,
        stages=tuple(
            _needs(question, stage, machine, chunk)
            for stage, machine in zip(stages, question.machines, strict=True)
        ),
        times=times,
        decodes=_decodes(question, stages),
    )
    notes = [*_notes(plan), *_cut_note(question, stages)]
    return replace(plan, notes=tuple(notes))


def _costs(question: StageQuestion, *, past: float, head_share: float = 0.0) -> PartCosts:
    return PartCosts.of_model(
        question.config,
        dtype_bytes=question.dtype_bytes,
        bits=question.bits,
        cache_tokens=question.cache_tokens,
        num_slots=question.num_slots,
        past=past,
        head_share=head_share,
    )


def _cut(
    question: StageQuestion, machines: Sequence[Machine], steps: Sequence[PipelineStep] = ()
) -> tuple[Stage, ...]:
    """Layers as they are given; else the best cut, for the prompt's steps where they are known."""
    costs = _costs(question, past=question.prompt_tokens / 2)
    if question.layers is not None and len(machines) == len(question.machines):
        return stages_of(costs, question.layers, machines)
    return cut_layers(costs, machines, Ends.of(steps) if steps else None)


def _steps(question: StageQuestion, chunk: int) -> tuple[PipelineStep, ...]:
    """Of the prompt; none where nothing is known of speed."""
    if question.coefficients is None:
        return ()
    return prompt_steps(question.coefficients, question.prompt_tokens, chunk, question.token_bytes)


def _fitting(question: StageQuestion, sizes: Sequence[int]) -> tuple[int, tuple[Stage, ...]]:
    """The first chunk size with which a cut fits, and the cut. Layers that are given may fit with none."""
    activations = ActivationModel(question.config, question.dtype_bytes, question.workspace)
    for chunk in sizes:
        # Activations of a step are about the same on every stage, however many layers it has.
        step = activations.largest_step(question.prompt_tokens, chunk, num_decodes=question.num_decodes)
        room = [
            machine
            if machine.memory_bytes is None
            else replace(machine, memory_bytes=max(machine.memory_bytes - step.peak_bytes, 0))
            for machine in question.machines
        ]
        try:
            stages = _cut(question, room, _steps(question, chunk))
        except MemoryExhaustedError:
            if chunk == sizes[-1]:
                raise
        else:
            if chunk == sizes[-1] or all(stage.fits is not False for stage in stages):
                return chunk, stages
    raise AssertionError("there are no sizes")


def _needs(question: StageQuestion, stage: Stage, machine: Machine, chunk: int) -> StageNeeds:
    layers, dtype_bytes = question.config.of_layers(stage.start, stage.end), question.dtype_bytes
    num_tokens, num_decodes = question.prompt_tokens, question.num_decodes
    step = StepShape.of_chunk(
        chunk,
        num_tokens - chunk,
        num_decodes=num_decodes,
        decode_pasts=num_decodes * num_tokens,
        is_last=True,
    )
    if stage.end < question.config.num_layers:
        step = replace(step, num_logits=0)
    kv = question.cache_tokens * kv_token_bytes(layers, dtype_bytes)
    states = question.num_slots * state_slot_bytes(layers, dtype_bytes)
    return StageNeeds(
        start=stage.start,
        end=stage.end,
        weights_bytes=stage.held_bytes - kv - states,
        kv_cache_bytes=kv,
        recurrent_bytes=states,
        activation_bytes=ActivationModel(layers, dtype_bytes, question.workspace).step_bytes(step),
        share=stage.share,
        memory_bytes=machine.memory_bytes,
    )


def _clock(
    question: StageQuestion, machines: Sequence[Machine], steps: Sequence[PipelineStep]
) -> PipelineClock:
    """Of the best cut; one machine is the fastest."""
    if len(machines) == 1:
        return run_pipeline(steps, [1.0], overhead_s=0.0)
    shares = [stage.share for stage in _cut(question, machines, steps)]
    return run_pipeline(steps, shares, question.link)


def _times(question: StageQuestion) -> tuple[StageTime, ...]:
    """Memory left aside: that is the cut's."""
    if question.coefficients is None:
        return ()
    machines = [replace(machine, memory_bytes=None) for machine in question.machines]
    steps = {size: _steps(question, size) for size in question.sizes}
    rows: list[StageTime] = []
    counts = {len(machines)}
    if len(set(machines)) == 1:
        counts |= {1 << power for power in range(len(machines).bit_length())}
    for count in sorted({1, *counts}):
        clocks = {size: _clock(question, machines[:count], steps[size]) for size in steps}
        chunk = min(clocks, key=lambda size: clocks[size].seconds)
        clock = clocks[chunk]
        rows.append(
            StageTime(
                num_stages=count,
                chunk=chunk,
                first_token_s=clock.seconds,
                speed_up=(rows[0].first_token_s if rows else clock.seconds) / clock.seconds,
                busy=max(clock.stage_busy_s) / clock.seconds,
                is_link_bound=clock.is_link_bound,
            )
        )
    return tuple(rows)


def _decodes(question: StageQuestion, stages: Sequence[Stage]) -> tuple[DecodeTimes, ...]:
    """One answer, and enough of them to fill the stages."""
    times, num_stages = question.coefficients, len(question.machines)
    if times is None or not times.per_decode:
        return ()
    costs = _costs(question, past=question.prompt_tokens, head_share=1.0)
    layers = [len(stage.layers) for stage in stages]
    shares = [stage.share for stage in stages_of(costs, layers, question.machines)]
    found = []
    for num_streams in (1, _STREAMS_PER_STAGE * num_stages):
        alone, together = (
            decode_rate(
                times,
                parts,
                question.link or Link(),
                num_streams=num_streams,
                past=question.prompt_tokens,
                token_bytes=question.token_bytes,
            )
            for parts in ([1.0], shares)
        )
        found.append(DecodeTimes(num_streams, alone.token_s, together.token_s))
    return tuple(found)


def _cut_note(question: StageQuestion, stages: Sequence[Stage]) -> Iterator[str]:
    """A server that is told nothing cuts for prompts that follow each other."""
    own, usual = (
        ",".join(str(len(stage.layers)) for stage in cut)
        for cut in (stages, _cut(question, [stage.machine for stage in stages]))
    )
    if own != usual:
        yield f"this cut, --layers {own}, is for one prompt at a time; for many that follow each other it is {usual}"


def _notes(plan: StagePlan) -> Iterator[str]:
    """What to know before machines are bought."""
    num_stages = len(plan.stages)
    link = "the link"
    if plan.link_bytes_per_s is not None:
        link = f"a link of {format_rate(plan.link_bytes_per_s)}"
        yield (
            f"{link} carries {plan.link_tokens_per_s:,.0f} tokens/s of {plan.token_bytes:,} bytes: stages on "
            f"machines that read faster than that alone bring nothing"
        )
    slowest = max(stage.share for stage in plan.stages)
    if num_stages > 1 and slowest * num_stages > 1.1:
        yield (
            f"the slowest stage takes {slowest:.1%} of the time that the fastest machine takes alone: "
            f"{num_stages} stages are at most {1 / slowest:.1f}x as fast"
        )
    if plan.times and num_stages > 1:
        last = plan.times[-1]
        if last.speed_up <= 1:
            why = f": {link} binds" if last.is_link_bound else ""
            yield f"{num_stages} stages are slower than the fastest machine alone{why}"
        elif last.is_link_bound:
            yield f"{num_stages} stages wait for {link}"
        best = min(row.first_token_s for row in plan.times)
        fewest = next(row for row in plan.times if row.first_token_s <= _AS_GOOD * best)
        if 1 < fewest.num_stages < num_stages:
            yield f"{fewest.num_stages} stages are as good: more bring less than 5%"
    if num_stages > 1:
        more = "each of its tokens passes all stages one after the other"
        if plan.decodes:
            one, many = plan.decodes
            more += f", {1e3 * one.token_s:.2f} ms instead of {1e3 * one.alone_s:.2f}"
            more += f"; {many.num_streams} answers at once are {many.alone_s / many.token_s:.2f}x as fast"
        yield f"one answer gains nothing from stages: {more}"
