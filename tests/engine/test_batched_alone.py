"""Batched is alone: what else is served, cancelled, preempted or fails changes nothing of a request's answer."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.kernels.quantised import Weight
from penstock.kernels.reference.kernels import TorchKernels
from penstock.models.decoder import Decoder
from penstock.models.hf.folder import HfFolder
from penstock.models.loading import load_decoder
from penstock.plan.policy import ScheduleConfig, SchedulePolicy
from tests.engine.batching import RecordingJob, Wish, serve
from tests.engine.hybrids import hybrid
from tests.oracle import LONGROPE, canon_of, load_model, make_oracle, random_prompt

DTYPES = (torch.float32, torch.bfloat16)
# Windows in all layers, and in some.
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, windows": ("mistral", {"sliding_window": 70}),
    "qwen3, some windows": (
        "qwen3",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1},
    ),
}
# Windows and sinks with experts; long requests that are rotated otherwise than short ones.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", {}),
    "phi3, longrope": ("phi3", {"rope": LONGROPE, "original_max_position_embeddings": 120}),
}
# Attention only, experts, a hybrid, a hybrid with experts, and windows.
NAMES = ("llama", "qwen3_moe", "qwen3_5", "qwen3_next", *WINDOWS, *OTHERS)
SEED = 3
LONGEST = 250
VOCAB = 211


def model_of(name: str, dtype: torch.dtype) -> Decoder:
    plain = {"llama": ("llama", {}), **WINDOWS, **OTHERS}
    if name in plain:
        family, settings = plain[name]
        return load_model(make_oracle(family, **settings).folder, dtype)
    return hybrid(name, dtype)


@st.composite
def wishes(draw: st.DrawFn) -> list[Wish]:
    some = []
    for index in range(draw(st.integers(2, 6))):
        length = draw(st.one_of(st.integers(1, LONGEST), st.sampled_from((1, 63, 64, 65, 128))))
        arrives = draw(st.integers(0, 12))
        cancelled = draw(st.one_of(st.none(), st.none(), st.integers(arrives, arrives + 30)))
        prompt = tuple(random_prompt(length, seed=100 * SEED + index))
        some.append(Wish(prompt, draw(st.integers(1, 14)), arrives, cancelled))
    return some


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleConfig:
    chunk_size = draw(st.sampled_from((0, 64, 128, 256)))
    return ScheduleConfig(
        policy=draw(st.sampled_from(list(SchedulePolicy))),
        chunk_size=chunk_size,
        max_running=draw(st.integers(1, 5)),
        max_decode_steps=draw(st.integers(1, 4)),
        max_chunk_steps=draw(st.integers(1, 4)),
    )


def check_is_alone(model: Decoder, wish: Wish, job: RecordingJob, *, strict: bool) -> None:
    plain = Wish(wish.prompt, wish.max_tokens)
    (alone,) = serve(model, [plain], ScheduleConfig(chunk_size=128), strict=strict)
    assert job.outcome == ("length" if len(job.generated) == wish.max_tokens else "cancelled")
    assert job.generated == alone.generated[: len(job.generated)]
    assert len(job.logits) >= len(job.generated)
    if job.logits:
        assert torch.equal(job.logits[0], alone.logits[0])
    if strict:
        for ours, theirs in zip(job.logits, alone.logits, strict=False):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    strict=st.booleans(),
    wishes=wishes(),
    schedule=schedules(),
    num_blocks=st.sampled_from((5, 6, 8, 64)),
    fails=st.sets(st.integers(0, 40), max_size=4),
    runs_out=st.sets(st.integers(0, 40), max_size=3),
    rewinds=st.sets(st.integers(0, 40), max_size=2),
    looks_ahead=st.booleans(),
    depth=st.integers(1, 5),
)
def test_batched_is_alone(
    name: str,
    strict: bool,
    looks_ahead: bool,
    depth: int,
    wishes: list[Wish],
    schedule: ScheduleConfig,
    num_blocks: int,
    fails: set[int],
    runs_out: set[int],
    rewinds: set[int],
) -> None:
    model = model_of(name, torch.float32)
    jobs = serve(
        model,
        wishes,
        schedule,
        cache_tokens=64 * num_blocks,
        strict=strict,
        fails=fails,
        # A chunk halved below the grid of a recurrent state changes its bits, by rounding.
        runs_out=() if model.config.has_state else runs_out,
        rewinds=rewinds,
        looks_ahead=looks_ahead,
        depth=depth,
    )
    for wish, job in zip(wishes, jobs, strict=True):
        check_is_alone(model, wish, job, strict=strict)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_a_preempted_request_goes_on_with_the_same_bits(name: str, dtype: torch.dtype) -> None:
    # Two blocks of 64 tokens too few: the newest is preempted in the middle of its answer, and replays it.
    model = model_of(name, dtype)
    wishes = [Wish(tuple(random_prompt(115 + index, seed=index)), 20) for index in range(3)]
    jobs = serve(model, wishes, ScheduleConfig(chunk_size=64), cache_tokens=64 * 7, strict=True)
    assert sum(job.num_preemptions for job in jobs) > 0
    for wish, job in zip(wishes, jobs, strict=True):
        check_is_alone(model, wish, job, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_in_bfloat16_prompts_keep_their_bits(name: str) -> None:
    model = model_of(name, torch.bfloat16)
    wishes = [
        Wish(tuple(random_prompt(length, seed=length)), 6, arrives)
        for arrives, length in enumerate((200, 1, 64, 333, 90))
    ]
    jobs = serve(model, wishes, ScheduleConfig(chunk_size=128), strict=True)
    for wish, job in zip(wishes, jobs, strict=True):
        check_is_alone(model, wish, job, strict=True)


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "num_kv_heads"), [(5, 18, 5), (5, 18, 1), (3, 130, 3), (7, 10, 1)]
)
def test_rows_that_are_no_whole_vectors_keep_their_bits(
    num_heads: int, head_dim: int, num_kv_heads: int
) -> None:
    """The library sums a row that begins inside a vector in another order."""
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    model = load_model(make_oracle("llama", **heads, hidden_size=num_heads * head_dim).folder)
    assert canon_of(model)
    lengths = (70, 300, 33, 520)
    wishes = [Wish(tuple(random_prompt(n, seed=n)), 8, arrives=2 * i) for i, n in enumerate(lengths)]
    jobs = serve(model, wishes, ScheduleConfig(chunk_size=320), strict=True)
    for wish, job in zip(wishes, jobs, strict=True):
        check_is_alone(model, wish, job, strict=True)


class RowSensitive(TorchKernels):
    """Products of fewer than 16 rows are summed in another order, as vendors' libraries do."""

    name = "row-sensitive"

    def linear(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, is_canonical: bool = True
    ) -> torch.Tensor:
        if x.shape[0] < 16 and x.shape[0] != self.head_rows and weight.shape[0] != VOCAB:
            padded = torch.zeros(16, x.shape[1], dtype=x.dtype)
            padded[: x.shape[0]] = x
            return super().linear(padded, weight, bias)[: x.shape[0]] * (1 + 2**-20 * x.shape[0])
        return super().linear(x, weight, bias)


def test_strict_decodes_keep_their_bits_where_products_of_few_rows_do_not() -> None:
    model = load_decoder(
        HfFolder(make_oracle("llama").folder), RowSensitive(), torch.float32, torch.device("cpu")
    )
    assert canon_of(model).row_floor == 16
    wishes = [Wish(tuple(random_prompt(70, seed=index)), 12, arrives=2 * index) for index in range(4)]

    def differ(strict: bool) -> bool:
        jobs = serve(model, wishes, ScheduleConfig(chunk_size=64), strict=strict)
        alone = [
            serve(model, [Wish(wish.prompt, 12)], ScheduleConfig(chunk_size=64), strict=strict)[0]
            for wish in wishes
        ]
        pairs = [
            pair
            for one, other in zip(jobs, alone, strict=True)
            for pair in zip(one.logits, other.logits, strict=True)
        ]
        return not all(torch.equal(ours, theirs) for ours, theirs in pairs)

    assert differ(strict=False)
    assert not differ(strict=True)
