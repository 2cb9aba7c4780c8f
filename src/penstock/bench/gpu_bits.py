"""The same bits on a GPU: a prompt in many chunkings, alone and beside decodes, against the whole of it alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.bench.gpu_job import GpuJob
from penstock.bench.gpu_models import Subject
from penstock.bench.gpu_requests import Requests, tokens_to_last
from penstock.bench.gpu_results import Fact
from penstock.bench.gpu_workload import BitsCase, GpuModel, Section
from penstock.cache import SequenceCache
from penstock.cache.space import CacheSpace
from penstock.engine.run import Run
from penstock.measure.traces import kv_of, states_of
from penstock.plan import ChunkedPrefillConfig


@dataclass(frozen=True)
class _Left:
    """What a prompt left behind, by name: logits after it, its keys and values, its states."""

    parts: dict[str, tuple[Tensor, ...]]

    @classmethod
    def of(cls, logits: Tensor, cache: SequenceCache, space: CacheSpace, num_tokens: int) -> "_Left":
        layers = kv_of(cache, space, 0, num_tokens)
        parts = {
            "logits": (logits.to("cpu", copy=True),),
            "keys and values": tuple(part for layer in layers for part in (layer.keys, layer.values)),
        }
        states = states_of(cache, space)
        return cls({**parts, "states": states} if states else parts)


def measure_bits(job: GpuJob, model: GpuModel) -> None:
    case = job.plan.bits
    subject = job.subject(model, num_hidden_layers=case.num_layers)
    prompt = job.prompt(model, case.prompt_tokens)
    label = f"{model}, {case.num_layers} layers"
    job.ledger.fact(Fact(Section.BITS, f"{label}: the probe finds the laws to hold", subject.found.same_bits))
    whole = _alone(subject, prompt, 0)
    chunks = case.chunks if subject.model.config.has_state else (*case.chunks, *case.off_grid_chunks)
    for chunk in (*sorted(chunks), 0):
        how = f"chunk {chunk:,}" if chunk else "whole"
        if chunk:
            _compare(job, f"{label}, {how}, alone", _alone(subject, prompt, chunk), whole)
        beside = _beside(job, subject, model, prompt, chunk, case)
        _compare(job, f"{label}, {how}, beside {case.num_decodes} decodes", beside, whole)


def _compare(job: GpuJob, name: str, left: _Left, whole: _Left) -> None:
    for what, tensors in left.parts.items():
        holds = all(
            torch.equal(ours, theirs) for ours, theirs in zip(tensors, whole.parts[what], strict=True)
        )
        job.ledger.fact(Fact(Section.BITS, f"{name}: same {what} as whole", holds))


def _alone(subject: Subject, prompt: Sequence[int], chunk: int) -> _Left:
    run = Run(
        subject.model,
        prompt,
        config=ChunkedPrefillConfig(chunk),
        canon=subject.canon,
        max_tokens=2,  # a run that ends frees its cache
    )
    while not run.generated:
        run.step()
    assert run.logits is not None
    return _Left.of(run.logits, run.cache, run.space, len(prompt))


def _beside(
    job: GpuJob, subject: Subject, model: GpuModel, prompt: Sequence[int], chunk: int, case: BitsCase
) -> _Left:
    """The others decode before the prompt arrives, and until it is read."""
    num_steps = -(-len(prompt) // chunk) if chunk else 1
    max_tokens = tokens_to_last(num_steps, case.num_decodes, case.decode_past, chunk)
    num_tokens = len(prompt) + 2 + case.num_decodes * (case.decode_past + max_tokens)
    requests = Requests(subject, chunk, 1 + case.num_decodes, num_tokens)
    requests.begin_decodes(
        job.prompt(model, case.num_decodes * case.decode_past), case.num_decodes, max_tokens
    )
    reader = requests.watch("reading", prompt, 2)
    while not reader.num_generated:
        requests.step()
    assert reader.logits is not None
    return _Left.of(reader.logits, reader.cache, requests.space, len(prompt))
