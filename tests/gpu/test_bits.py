"""What must not change the bits of an answer on a GPU: chunks, other requests, recorded passes."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from penstock.engine.sampler import SamplingParams
from penstock.models.decoder import Decoder
from penstock.plan.policy import ScheduleConfig
from penstock.plan.weight_settings import QUANTISED_WEIGHTS, WeightsName
from tests.engine.batching import RecordingJob, Wish, new_batcher, serve, serve_with
from tests.gpu.cases import over
from tests.gpu.models import KINDS, canon_of, model_of, probed
from tests.oracle import random_prompt, run_prompt

DTYPES = (torch.float32, torch.bfloat16)
# Those that come while others decode, and those that share a pass.
WISHES = [
    Wish(tuple(random_prompt(length, seed=length)), 12, arrives)
    for arrives, length in enumerate((700, 1, 64, 1300, 90, 333))
]


@dataclass(frozen=True)
class BitsCase:
    name: str
    dtype: torch.dtype
    weights: WeightsName = "auto"

    def __str__(self) -> str:
        kept = "" if self.weights == "auto" else f", weights {self.weights}"
        return f"{self.name}, {str(self.dtype).removeprefix('torch.')}{kept}"

    def model(self, *, can_record: bool = True) -> Decoder:
        return model_of(self.name, self.dtype, can_record=can_record, weights=self.weights)


CASES = [
    *(BitsCase(name, dtype) for name in KINDS for dtype in DTYPES),
    *(
        BitsCase(name, torch.bfloat16, weights)
        for name in ("llama", "qwen3_moe")
        for weights in QUANTISED_WEIGHTS
    ),
]


@over(CASES)
def test_the_laws_of_the_probe_hold(case: BitsCase) -> None:
    found = probed(case.model())
    assert found.same_bits, str(found)


@over(CASES)
def test_chunks_change_no_bits(case: BitsCase) -> None:
    model = case.model()
    prompt = random_prompt(3900)  # whole, more than a feed-forward block has at a time
    # Off the grid of a recurrent state, chunks change its bits by rounding.
    sizes = (64, 128, 512, 1024, 2048) if model.config.has_state else (7, 64, 100, 512, 1000, 2048)
    whole = run_prompt(model, prompt, canon=canon_of(model)).logits
    assert whole is not None
    for size in sizes:
        logits = run_prompt(model, prompt, chunk_size=size, canon=canon_of(model)).logits
        assert logits is not None
        assert torch.equal(logits, whole), f"chunks of {size} give other bits than the whole"


@over(CASES)
def test_batched_is_alone(case: BitsCase) -> None:
    model = case.model()
    schedule = ScheduleConfig(chunk_size=256)
    jobs = serve(model, WISHES, schedule, strict=True)
    for wish, job in zip(WISHES, jobs, strict=True):
        (alone,) = serve(model, [Wish(wish.prompt, wish.max_tokens)], schedule, strict=True)
        check_same(job, alone, f"the prompt of {len(wish.prompt)} tokens")


@over(CASES)
def test_steps_that_are_planned_ahead_change_no_bits(case: BitsCase) -> None:
    """Nor those that are launched before the host knows their tokens, where some answers end unforeseen."""
    model, schedule = case.model(), ScheduleConfig(chunk_size=256)
    prompts = [replace(wish, max_tokens=40, arrives=2 * wish.arrives) for wish in WISHES]
    answers = [job.generated for job in serve(model, prompts, schedule, strict=True)]
    wishes = [
        replace(wish, sampling=SamplingParams(stop_token_ids=(tokens[20 + index],))) if index % 2 else wish
        for index, (wish, tokens) in enumerate(zip(prompts, answers, strict=True))
    ]
    theirs = serve(model, wishes, schedule, strict=True)
    for on_host in (True, False):
        batcher = new_batcher(
            model, schedule, 64 * 128, strict=True, looks_ahead=True, plans_ahead=True, depth=2
        )
        with patch.object(RecordingJob, "needs_logits", on_host):
            ours = serve_with(batcher, wishes)
        for wish, job, other in zip(wishes, ours, theirs, strict=True):
            what = f"the prompt of {len(wish.prompt)} tokens"
            assert job.generated == other.generated, f"{what}: {job.generated}, {other.generated}"
            assert job.outcome == other.outcome
            if on_host:
                assert all(map(torch.equal, job.logits, other.logits)), f"{what} has other bits"


@over(CASES)
def test_recorded_is_launched(case: BitsCase) -> None:
    """Passes that are replayed give the bits of those that are launched kernel by kernel."""
    schedule = ScheduleConfig(chunk_size=256)
    # Twice: a pass is recorded when its shape comes again.
    wishes = [*WISHES, *(Wish(wish.prompt, wish.max_tokens, wish.arrives + 60) for wish in WISHES)]
    ours = serve(case.model(), wishes, schedule)
    theirs = serve(case.model(can_record=False), wishes, schedule)
    for wish, recorded, launched in zip(wishes, ours, theirs, strict=True):
        check_same(recorded, launched, f"the prompt of {len(wish.prompt)} tokens")


def check_same(job: RecordingJob, other: RecordingJob, what: str) -> None:
    assert job.outcome == other.outcome == "length", f"{what}: {job.outcome}, {other.outcome}"
    pairs = zip(job.logits, other.logits, strict=True)
    different = [index for index, (ours, theirs) in enumerate(pairs) if not torch.equal(ours, theirs)]
    assert not different, f"{what}: tokens {different} have other bits"
