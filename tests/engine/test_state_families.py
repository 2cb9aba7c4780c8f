"""States beside the delta net's: Mamba-2's and short convolutions' are carried, shared, stored and given up alike. So
are latents beside keys and values."""

from pathlib import Path

import pytest
import torch

from penstock.models.decoder import Decoder
from tests.engine.batching import Sharing, Wish, new_batcher, serve_with
from tests.engine.hybrids import Tape
from tests.engine.test_hybrid_batch import check_two_prompts_and_a_decode
from tests.engine.test_hybrid_bits import assert_same_bits, read
from tests.engine.test_reuse import SCHEDULE, check_all, open_store
from tests.oracle import canon_of, load_model, make_oracle, random_prompt

DTYPES = (torch.float32, torch.bfloat16)
STATES = ("bamba", "falcon_h1", "lfm2")
NAMES = (*STATES, "deepseek_v3")
# On the grid of states; short convolutions and latents have none.
CUTS = ([64], [128], [192, 256], [64, 128, 192, 256], [64, 256])


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(make_oracle(name).folder, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_on_the_grid_and_mixed_steps_keep_all_bits(name: str, dtype: torch.dtype) -> None:
    model, prompt = model_of(name, dtype), random_prompt(300)
    whole = read(model, prompt, [300])
    for ends in CUTS if model.config.mamba else (*CUTS, [1, 2, 7, 100, 101]):
        assert_same_bits(read(model, prompt, [*ends, 300]), whole)
    check_two_prompts_and_a_decode(model, canon_of(model))


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_what_single_tokens_make_of_it(name: str) -> None:
    model, prompt = model_of(name), random_prompt(150)
    whole, single = Tape(model, prompt), read(model, prompt, [*range(1, 100), 100, 150])
    whole.run(150)
    for ours, theirs in zip(single.states(), whole.states(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_hits_and_preemption_change_nothing(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    store = open_store(model, tmp_path)
    batcher = new_batcher(model, SCHEDULE, 64 * 8, strict=True, sharing=Sharing(store))
    # Two of three blocks each grow to five, where there are eight.
    wishes = [Wish(tuple(random_prompt(190, seed=index)), 100) for index in range(2)]
    jobs = serve_with(batcher, wishes)
    assert any(job.num_preemptions for job in jobs)
    check_all(model, wishes, jobs, strict=True)
    (again,) = serve_with(batcher, [wishes[0]])
    assert again.num_cached == 128
    assert torch.equal(again.logits[0], jobs[0].logits[0])
    store.close()
    store = open_store(model, tmp_path)
    batcher = new_batcher(model, SCHEDULE, 64 * 8, strict=True, sharing=Sharing(store))
    (again,) = serve_with(batcher, [wishes[0]])
    assert batcher.status().reuse.disk_tokens == again.num_cached == 128
    assert torch.equal(again.logits[0], jobs[0].logits[0])
    store.close()
