"""A model with windows in most layers: prompts and decodes beside transformers, and attention by kind of layer."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import OURS
from benchmarks.suites.gpu.job import Job
from benchmarks.suites.gpu.models import Subject
from benchmarks.suites.gpu.plan import CHUNK, WINDOWS, PrefillCase
from benchmarks.suites.gpu.prompts import PEER, load_peer, measure_prefill
from benchmarks.suites.windows import SHARE, attention_works, measure_share
from penstock.engine.run import Run
from penstock.plan import ChunkedPrefillConfig

_WARM_UP_STEPS, _STEPS_IN_A_ROW = 10, 10


def measure_windows(job: Job, errors: list[str]) -> None:
    """Of one model; all but attention takes turns with transformers."""
    cases = job.plan.prefills[WINDOWS]
    subject, peer = job.subject(cases[0].model), load_peer(job, cases)
    space = subject.space(max(case.prompt_tokens for case in cases))
    for case in cases:
        with job.attempt(case.label, errors):
            measure_prefill(job, case, subject, space, peer, ratio=True)
        with job.attempt(decode_label(case), errors):
            _measure_decodes(job, case, subject, peer)
        with job.attempt(SHARE, errors):
            _measure_attention(job, case, subject)


def decode_label(case: PrefillCase) -> str:
    return f"{case.model}, decode after {case.prompt_tokens:,} tokens"


def _measure_decodes(job: Job, case: PrefillCase, subject: Subject, peer: Any) -> None:
    """Rows of some steps after a prompt, in turns."""
    prompt = job.prompt(case.model, case.prompt_tokens)
    num_steps = _WARM_UP_STEPS + (job.repeats + 1) * _STEPS_IN_A_ROW
    run = Run(
        subject.model,
        prompt,
        config=ChunkedPrefillConfig(CHUNK),
        canon=subject.canon,
        max_tokens=num_steps + 2,
    )
    while not run.generated:
        run.step()
    turns: dict[str, Callable[[], object]] = {OURS: run.step}
    if peer is not None:
        turns[PEER] = _peer_steps(peer, prompt, case.chunk)
    rows = {name: _in_a_row(step, _STEPS_IN_A_ROW) for name, step in turns.items()}
    for step in turns.values():
        _in_a_row(step, _WARM_UP_STEPS)()
    times = job.time_turns(rows, dict.fromkeys(rows, job.repeats))
    per_step = {name: [value / _STEPS_IN_A_ROW for value in values] for name, values in times.items()}
    job.figures(decode_label(case), per_step, ratio=True)


def _in_a_row(step: Callable[[], object], count: int) -> Callable[[], None]:
    def some() -> None:
        for _ in range(count):
            step()

    return some


@torch.inference_mode()
def _peer_steps(model: Any, prompt: Any, chunk: int) -> Callable[[], object]:
    """What decodes one token more with transformers, whose prompt has been read."""
    known, token = None, None
    for part in torch.split(torch.tensor([prompt], device=model.device), chunk or len(prompt), dim=1):
        output = model(input_ids=part, past_key_values=known, use_cache=True, logits_to_keep=1)
        known, token = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)

    @torch.inference_mode()
    def step() -> int:
        nonlocal token
        output = model(input_ids=token, past_key_values=known, use_cache=True)
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        return int(token)

    return step


def _measure_attention(job: Job, case: PrefillCase, subject: Subject) -> None:
    config = subject.model.config
    assert config.window is not None
    works = attention_works(
        subject.model.kernels,
        job.device,
        job.dtype,
        case.prompt_tokens,
        case.chunk,
        config.window.size,
        (config.num_heads, config.num_kv_heads, config.head_dim),
    )
    times, shares = measure_share(works, job.repeats)
    for name, values in times.items():
        job.figure(f"{case.model}, attention of some chunks, {name}", "ms", values)
    job.figure(f"{case.model}, {SHARE}", "x", shares)
