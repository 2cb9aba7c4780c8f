"""A step of many requests: what was planned of it, how it is run, and what it gave."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.cache.space import CacheSpace
from penstock.engine.batch import SpanInput, build_batch
from penstock.engine.explain import ChunkRecord
from penstock.engine.graphs import record_passes
from penstock.engine.job import Job
from penstock.engine.lookahead import LookAhead
from penstock.engine.sampling import Choice, sample_rows
from penstock.engine.status import SpanRecord, StepRecord
from penstock.errors import is_out_of_memory
from penstock.kernels.device import device_kind
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder
from penstock.plan.grids import RowLaw
from penstock.plan.sizing import SizeDecision
from penstock.plan.step import PlannedSpan, RequestId, SpanKind, StepPlan


@dataclass(frozen=True)
class Step:
    """A step that was planned, and for which the cache has room set aside; why it reads as much as it does, and what
    is expected of it."""

    plan: StepPlan
    inputs: tuple[SpanInput, ...]
    started_s: float
    decision: SizeDecision | None = None
    predicted_s: float | None = None
    predicted_bytes: int | None = None

    def record(self, index: int, start_s: float, seconds: float) -> StepRecord:
        """What is kept of it once it is committed."""
        return StepRecord(
            index=index,
            start_s=start_s,
            seconds=seconds,
            spans=tuple(
                SpanRecord(planned.request_id, planned.kind, planned.span.start, planned.span.end)
                for planned in self.plan.spans
            ),
            num_held_decodes=self.plan.num_held_decodes,
            preempted=tuple(
                preemption.request_id for preemption in self.plan.preemptions if preemption.was_running
            ),
        )

    def explain(self, chunk: PlannedSpan, num_prompt: int, seconds: float) -> ChunkRecord:
        """What is kept of one of its chunks, of a prompt of `num_prompt` tokens."""
        span, decision = chunk.span, self.decision
        assert decision is not None  # of a step that reads
        is_end = span.end == num_prompt and len(span) < decision.size
        return ChunkRecord(
            start=span.start,
            end=span.end,
            past=span.start,
            rule="end" if is_end else decision.rule,
            predicted_s=self.predicted_s,
            measured_s=seconds,
            predicted_bytes=self.predicted_bytes,
            num_decodes=sum(other.kind is SpanKind.DECODE for other in self.plan.spans),
            because=decision.because,
        )


@dataclass(frozen=True)
class StepOutcome:
    """What a step gave: a choice, or an error of its own, for each request that samples; or the step's error."""

    choices: dict[RequestId, Choice | Exception] = field(default_factory=dict)
    error: Exception | None = None


@dataclass(frozen=True)
class Launched:
    """A forward pass that the device computes, or is done with: its logits, where a request samples, and how to wait
    for it. Or the error that kept it from being launched."""

    logits: Tensor | None = None
    wait: Callable[[], None] | None = None
    error: Exception | None = None


class StepRunner:
    """Runs steps of one model over one cache. It changes nothing but the cache's tensors, and decides nothing.

    A step is launched and then finished; others may be launched in between. The step after one of decodes is made
    ready while that one is computed, and can be launched before it is settled.
    """

    def __init__(
        self,
        model: Decoder,
        canon: RowLaw,
        space: CacheSpace,
        *,
        strict: bool = False,
        looks_ahead: bool = False,
        keeps_logits: bool = False,
    ) -> None:
        record_passes(model)
        self._model = model
        self._device = device_kind(model.device)
        self._canon = canon
        self._tensors = space.tensors
        self._strict = strict
        self._ahead = LookAhead(model, space, is_wanted=looks_ahead)
        self._keeps_logits = keeps_logits
        self.logits: Tensor | None = None  # [rows, vocab] of the last step that sampled, where they are kept

    def launch(self, step: Step) -> Launched:
        """Start the forward pass. A GPU's is not done when this returns."""
        try:
            logits = self._ahead.take(step.inputs)
            if logits is None:
                logits = self._forward(self._batch(step.inputs))
            # Of a step that samples, the tokens are waited for.
            return Launched(logits, self._device.marker() if logits is None else None)
        except Exception as error:
            return Launched(error=self._recoverable(error))

    def finish(self, step: Step, launched: Launched, jobs: Sequence[Job]) -> StepOutcome:
        """Wait for the pass, and choose a token for each of the jobs: those that sample, in the step's order."""
        if launched.error is not None:
            return StepOutcome(error=launched.error)
        logits = launched.logits
        try:
            if logits is None:
                if launched.wait is not None:
                    launched.wait()
                return StepOutcome()
            choices = sample_rows(logits, jobs, lambda: self._ahead.expect_after(step.inputs, self._batch))
        except Exception as error:
            return StepOutcome(error=self._recoverable(error))
        if self._keeps_logits:
            self.logits = logits
        return StepOutcome({job.id: choice for job, choice in zip(jobs, choices, strict=True)})

    def launch_next(self, jobs: Sequence[Job], outcome: StepOutcome) -> None:
        """Launch the step that follows the one in which these jobs sampled, all that it had, if it is plain that they
        decode on."""
        tokens: list[int] = []
        for job in jobs:
            choice = outcome.choices.get(job.id)
            if not isinstance(choice, Choice) or not job.goes_on(choice.token):
                return
            tokens.append(choice.token)
        self._ahead.launch(tokens, self._forward)

    def _recoverable(self, error: Exception) -> Exception:
        """The error of a step that can be undone, with its memory given back; others are raised."""
        if is_out_of_memory(error):
            self._device.release(error)
        elif isinstance(error, torch.AcceleratorError):
            raise error  # the device does nothing more, for anybody
        return error

    def _batch(self, inputs: Sequence[SpanInput]) -> ForwardBatch:
        return build_batch(inputs, canon=self._canon, strict=self._strict)

    def _forward(self, batch: ForwardBatch) -> Tensor | None:
        return self._model.forward(batch, self._tensors)
