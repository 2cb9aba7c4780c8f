"""A prompt among others: requests that read and decode beside it, in the same steps."""

from collections.abc import Sequence

from torch import Tensor

from penstock.bench.verify_runs import Recorder, Subject, Trace
from penstock.engine.batcher import Batcher
from penstock.engine.events import GenerationRequest
from penstock.engine.job import Job
from penstock.engine.sampling import Choice
from penstock.engine.space import CacheSpace
from penstock.engine.step import Step
from penstock.plan import STATE_GRID
from penstock.plan.policy import ScheduleConfig

_CHUNK = 256
_MAX_RUNNING = 4
_SUBJECT = "subject"


class _Job(Job):
    """A request whose logits are kept."""

    logits: Tensor | None = None  # [vocab], of the last choice
    needs_logits = True

    def choose(self, logits: Tensor) -> Choice:
        self.logits = logits
        return super().choose(logits)


def run_batched(
    subject: Subject, forced: Sequence[int], *, strict: bool = False, is_alone: bool = False
) -> Trace:
    """The prompt through the batcher of a service. Beside it one request decodes from the start, one reads its own
    prompt at the same time, and one arrives when the prompt has been read; unless it `is_alone`."""
    recorder = Recorder(subject, forced)
    has_state = subject.model.config.has_state
    schedule = ScheduleConfig(
        chunk_size=_CHUNK, max_running=_MAX_RUNNING, grid=STATE_GRID if has_state else 1
    )
    requests = {
        _SUBJECT: GenerationRequest(subject.prompt, subject.num_generated + 1, ignore_eos=True),
        **({} if is_alone else _others(subject)),
    }
    num_tokens = sum(len(each.token_ids) + each.max_tokens for each in requests.values())
    space = CacheSpace.for_tokens(
        recorder.model, num_tokens + _MAX_RUNNING * _CHUNK, num_slots=2 * _MAX_RUNNING
    )
    batcher = Batcher(recorder.model, subject.canon, space, schedule, strict=strict)
    jobs = {name: _new_job(subject, space, name, request) for name, request in requests.items()}
    for name in ("decoding", _SUBJECT, "reading"):
        if name in jobs:
            batcher.add(jobs[name])
            if name == "decoding":
                while not jobs[name].num_generated:
                    _step(batcher, recorder)
    job = jobs[_SUBJECT]
    while not recorder.is_done:
        if job.num_generated == 1 and "arriving" in jobs:
            batcher.add(jobs.pop("arriving"))
        num_generated = job.num_generated
        _step(batcher, recorder)
        if job.num_generated > num_generated:
            assert job.logits is not None
            job.tokens[-1] = recorder.take(job.logits, job.cache, space)
    trace = recorder.trace(job.cache, space, keeps_bits=True)
    batcher.cancel_all()
    return trace


def _others(subject: Subject) -> dict[str, GenerationRequest]:
    """Parts of the same text, in another order and of other lengths."""
    prompt, room = subject.prompt, subject.model.config.max_position
    third = max(len(prompt) // 3, 1)
    prompts = {
        "decoding": prompt[-third:],
        "reading": prompt[::-1][: 2 * third],
        "arriving": prompt[third:] + prompt[:third],
    }
    return {
        name: GenerationRequest(
            tokens, min(room - len(tokens), len(prompt) // 64 + subject.num_generated + 8), ignore_eos=True
        )
        for name, tokens in prompts.items()
    }


def _new_job(subject: Subject, space: CacheSpace, name: str, request: GenerationRequest) -> _Job:
    cache = space.new_sequence()
    return _Job(name, request, cache, subject.tokenizer, frozenset(), None, lambda event: None, 0.0)


def _step(batcher: Batcher, recorder: Recorder) -> None:
    step = batcher.begin()
    assert step is not None, "requests wait, and nothing runs"
    recorder.model.rows = _rows_of_subject(step)
    outcome = batcher.run(step)
    if outcome.error is not None:
        raise outcome.error
    batcher.settle(step, outcome)
    batcher.notices.clear()


def _rows_of_subject(step: Step) -> range:
    start = 0
    for planned in step.plan.spans:
        end = start + len(planned.span)
        if planned.request_id == _SUBJECT:
            return range(start, end)
        start = end
    return range(0)
