"""Forms of weights on a GPU, models in each of them, taking turns: prompts, decodes, and what the weights take."""

from collections.abc import Sequence

from benchmarks.suites.gpu.job import Job, over
from benchmarks.suites.gpu.models import Subject, load_subject
from benchmarks.suites.gpu.plan import PLAIN, DecodeCase, PrefillCase
from benchmarks.suites.gpu.prompts import WARM_UPS
from benchmarks.suites.gpu.steps import time_decodes
from penstock.measure.random_weights import MIXTURES, RandomBlocks

TAKEN = "weights"


def measure_weights(job: Job, errors: list[str]) -> None:
    """Model after model. A form that fails is reported; the others go on."""
    for model in dict.fromkeys(case.model for case in job.plan.weights):
        _measure_model(job, errors, model)
        job.free_memory()


def _measure_model(job: Job, errors: list[str], model: str) -> None:
    subjects: dict[str, Subject] = {}
    for form in (PLAIN, *job.plan.forms):
        with job.attempt(f"{model}, {form}", errors):
            subjects[form] = _load(job, model, form)
            taken = subjects[form].model.num_weight_bytes
            job.figure(f"{model}, {form}, {TAKEN}", "GB", [taken / 1e9])
            job.figure(
                against(f"{model}, {TAKEN}", form), "x", [taken / subjects[PLAIN].model.num_weight_bytes]
            )
            job.fact(f"{model}, {form}: the probe finds the laws to hold", subjects[form].found.same_bits)
    for case in (case for case in job.plan.weights if case.model == model):
        with job.attempt(case.label, errors):
            _compare(job, case, subjects)


def _load(job: Job, model: str, form: str) -> Subject:
    if form not in MIXTURES:
        return load_subject(job.weights(model), job.dtype, job.device, form)  # type: ignore[arg-type]
    blocks = RandomBlocks(model, job.plan.models[model], job.device, MIXTURES[form])
    return load_subject(blocks, job.dtype, job.device)


def _compare(job: Job, case: PrefillCase | DecodeCase, subjects: dict[str, Subject]) -> None:
    times: dict[str, Sequence[float]] = {}
    if isinstance(case, PrefillCase):
        prompt, works = job.prompt(case.model, case.prompt_tokens), {}
        for form, subject in subjects.items():
            space = subject.space(case.prompt_tokens)

            def work(subject: Subject = subject, space: object = space) -> object:
                return subject.first_token(space, prompt, case.chunk)  # type: ignore[arg-type]

            works[form] = work
            for _ in range(WARM_UPS):
                work()
        times = dict(job.time_turns(works, dict.fromkeys(works, job.repeats)))
    else:
        times = {form: time_decodes(job, subject, case) for form, subject in subjects.items()}
    for form, values in times.items():
        job.figure(f"{case.label}, {form}", "ms", values)
        if form != PLAIN:
            job.figure(against(case.label, form), "x", over(values, times[PLAIN]))


def against(label: str, form: str) -> str:
    return f"{label}, {form} over {PLAIN}"
