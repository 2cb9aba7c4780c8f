"""Steps of the engine on a GPU: decodes, alone and together, and a chunk with decodes beside it."""

from collections.abc import Callable

from penstock.bench.gpu_device import milliseconds
from penstock.bench.gpu_job import GpuJob
from penstock.bench.gpu_models import Subject
from penstock.bench.gpu_requests import Requests, tokens_to_last
from penstock.bench.gpu_results import Figure, Unit
from penstock.bench.gpu_workload import DecodeCase, GpuModel, MixedCase, Section
from penstock.bench.timing import rounds
from penstock.engine.run import Run
from penstock.errors import PenstockError
from penstock.plan import ChunkedPrefillConfig

_WARM_UP_STEPS = 10
_STEPS_IN_A_ROW = 10
_CHUNK = 2048
# Rounds of mixed steps for each repeat that is asked for: a step is short.
_MIXED_ROUNDS = 4
_MIXED_WARM_UPS = 3


def measure_decodes(job: GpuJob) -> None:
    """Each step is planned, run, sampled from and committed, a few in a row: the device may be ahead within them."""
    for model in dict.fromkeys(case.model for case in job.plan.decodes):
        subject = job.subject(model)
        for case in job.plan.decodes:
            if case.model is model:
                with job.attempt(case.label):
                    time_steps = _alone if case.num_sequences == 1 else _together
                    times = time_steps(job, subject, case)
                    job.ledger.figure(Figure(Section.DECODE, case.label, "ms", tuple(times)))
        del subject


def _alone(job: GpuJob, subject: Subject, case: DecodeCase) -> list[float]:
    num_steps = _WARM_UP_STEPS + job.plan.decode_steps + _STEPS_IN_A_ROW
    run = Run(
        subject.model,
        job.prompt(case.model, case.past),
        config=ChunkedPrefillConfig(_CHUNK),
        canon=subject.canon,
        max_tokens=num_steps + 2,  # the first comes with the prompt; one more, so that it does not end
    )
    while not run.generated:
        run.step()
    return _timed(job, run.step)


def _together(job: GpuJob, subject: Subject, case: DecodeCase) -> list[float]:
    num_steps = _WARM_UP_STEPS + job.plan.decode_steps + _STEPS_IN_A_ROW
    requests = _decoding(job, subject, case.model, case.num_sequences, case.past, num_steps)
    return _timed(job, requests.step)


def _timed(job: GpuJob, step: Callable[[], object]) -> list[float]:
    """Milliseconds of a step, in each of some rows of them."""
    for _ in range(_WARM_UP_STEPS):
        step()

    def some() -> None:
        for _ in range(_STEPS_IN_A_ROW):
            step()

    num_rows = -(-job.plan.decode_steps // _STEPS_IN_A_ROW)
    return [milliseconds(job.device, some) / _STEPS_IN_A_ROW for _ in range(num_rows)]


def measure_mixed(job: GpuJob, case: MixedCase) -> None:
    """A step with both, one of as many tokens of a prompt, the decodes alone, taking turns. None is committed: each
    is run again and again where it stands."""
    subject = job.subject(case.model)
    # So many steps while the prompt is read up to there, then the one that is measured.
    num_steps = -(-case.past // (case.chunk - case.num_decodes)) + 2
    given = (job, subject, case.model, case.num_decodes, case.decode_past, num_steps)
    both = _decoding(*given, case.chunk, _num_read(case), looks_ahead=False)
    decodes = _decoding(*given, looks_ahead=False)
    chunk = Requests(subject, case.chunk, 1, _num_read(case))
    for requests in (both, chunk):
        reader = requests.add("reading", job.prompt(case.model, _num_read(case) - 1), 1)
        # As near to that past as steps end: those that make room for decodes read less.
        while reader.cache.num_tokens < case.past - case.chunk // 2:
            requests.step()
    turns = [
        ("both", _again(both, case.chunk)),
        ("chunk", _again(chunk, case.chunk)),
        ("decodes", _again(decodes, case.num_decodes)),
    ]
    for _, work in _MIXED_WARM_UPS * turns:
        work()
    times: dict[str, list[float]] = {name: [] for name, _ in turns}
    for order in rounds(turns, _MIXED_ROUNDS * job.repeats):
        for name, work in order:
            times[name].append(milliseconds(job.device, work))

    def report(what: str, unit: Unit, values: list[float]) -> None:
        job.ledger.figure(Figure(Section.MIXED, f"{case.label}, {what}", unit, tuple(values)))

    decoding = f"{case.num_decodes} decodes"
    report("of a prompt", "ms", times["chunk"])
    report(f"{decoding} alone", "ms", times["decodes"])
    report(f"{decoding} among them", "ms", times["both"])
    report(f"{decoding} among them, over none", "x", _over(times["both"], times["chunk"]))
    apart = [first + second for first, second in zip(times["chunk"], times["decodes"], strict=True)]
    report(f"{decoding} among them, over both apart", "x", _over(times["both"], apart))


def _num_read(case: MixedCase) -> int:
    """Tokens of a prompt whose end is not in the chunk that is measured, wherever that begins, and of the answer."""
    return case.past + 2 * case.chunk + 2


def _decoding(
    job: GpuJob,
    subject: Subject,
    model: GpuModel,
    num_sequences: int,
    past: int,
    num_steps: int,
    chunk: int = _CHUNK,
    other_tokens: int = 0,
    looks_ahead: bool | None = None,
) -> Requests:
    """Requests that all decode, and will for so many steps; with room for another, of `other_tokens`, in steps of no
    more tokens than its chunk."""
    max_tokens = tokens_to_last(num_steps, num_sequences, past, chunk)
    num_tokens = num_sequences * (past + max_tokens) + other_tokens
    requests = Requests(
        subject,
        chunk,
        num_sequences + (other_tokens > 0),
        num_tokens,
        step_tokens=chunk if other_tokens else None,
        looks_ahead=looks_ahead,
    )
    requests.begin_decodes(job.prompt(model, num_sequences * past), num_sequences, max_tokens)
    return requests


def _again(requests: Requests, num_tokens: int) -> Callable[[], object]:
    step = requests.begin()
    found = sum(len(item.span) for item in step.inputs)
    if found != num_tokens:
        raise PenstockError(f"the step that is measured has {found} tokens; it should have {num_tokens}")
    return lambda: requests.run(step)


def _over(first: list[float], second: list[float]) -> list[float]:
    return [one / other for one, other in zip(first, second, strict=True)]
