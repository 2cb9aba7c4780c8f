"""Hybrids and mixtures of experts give transformers' answer, at any chunk size and on any way through the prompt."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.hybrids import MIXTURES, MODELS, Snapshot, Tape, assert_all_free, hybrid, hybrid_oracle
from tests.engine.test_parity import relative_error
from tests.oracle import NUM_GREEDY, random_prompt, run_prompt

# Of the convolution's taps and the delta rule's blocks: one fewer, as many, one more. 0 is the whole prompt.
CHUNK_SIZES = (1, 2, 3, 4, 5, 63, 64, 65)
NAMES = (*MODELS, *MIXTURES)


@pytest.fixture(scope="module", params=NAMES, ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check(name: str, num_tokens: int, chunk_sizes: Iterable[int], num_decodes: int = 1) -> None:
    """The logits after the prompt, and the tokens that follow."""
    prompt = random_prompt(num_tokens)
    logits = hybrid_oracle(name).logits(prompt)
    tokens = hybrid_oracle(name).greedy(prompt, num_decodes) if num_decodes > 1 else [int(logits.argmax())]
    for chunk_size in chunk_sizes:
        run = run_prompt(hybrid(name), prompt, chunk_size=chunk_size, max_tokens=num_decodes)
        assert run.logits is not None
        assert relative_error(run.logits, logits) < 1e-4, chunk_size
        while run.finish_reason is None:
            run.step()
        assert run.generated == tokens, chunk_size


@pytest.mark.parametrize("num_tokens", CHUNK_SIZES)
def test_short_prompts(name: str, num_tokens: int) -> None:
    sizes = (*(size for size in CHUNK_SIZES if size <= num_tokens), 0)
    check(name, num_tokens, sizes, NUM_GREEDY if num_tokens in (1, 3, 64) else 1)


def test_several_hundred_tokens(name: str) -> None:
    check(name, 261, (1, 4, 63, 65, 127, 0), NUM_GREEDY)


def test_more_than_a_thousand_tokens(name: str) -> None:
    """Two tiles of attention are full, and end within chunks and between them."""
    check(name, 1077, (5, 64, 127, 512, 0))


@pytest.mark.parametrize(("chunk_size", "overlap"), [(64, 1), (7, 4), (100, 37), (128, 64), (3, 1)])
def test_overlap(name: str, chunk_size: int, overlap: int) -> None:
    """Tokens that run again begin with the state before them, not with the one after."""
    prompt = random_prompt(200)
    run = run_prompt(hybrid(name), prompt, chunk_size=chunk_size, overlap=overlap)
    assert run.logits is not None
    assert relative_error(run.logits, hybrid_oracle(name).logits(prompt)) < 1e-4


@settings(max_examples=16, deadline=None)
@given(data=st.data())
def test_any_way_through_the_prompt(data: st.DataObject) -> None:
    """Uneven spans, steps that fail and are tried again, snapshots, and ways back to them."""
    name = data.draw(st.sampled_from(sorted(MODELS)))
    prompt = random_prompt(data.draw(st.integers(1, 400)), seed=data.draw(st.integers(0, 3)))
    tape = Tape(hybrid(name), prompt, num_generated=NUM_GREEDY)
    snapshots: list[Snapshot] = []
    ways_back = data.draw(st.integers(0, 3))
    while tape.cache.num_tokens < len(prompt):
        start = tape.cache.num_tokens
        move = data.draw(st.sampled_from(["run", "run", "run", "fail", "snapshot", "restore"]))
        if move == "snapshot" and len(snapshots) < 4:
            snapshots.append(tape.snapshot())
        elif move == "restore" and snapshots and ways_back:
            ways_back -= 1
            chosen = data.draw(st.integers(0, len(snapshots) - 1))
            tape.restore(snapshots[chosen])
            # What came after it is given up, blocks and all.
            for dropped in snapshots[chosen + 1 :]:
                dropped.release()
            del snapshots[chosen + 1 :]
        else:
            longest = data.draw(st.sampled_from([1, 4, 70, 400]))
            end = data.draw(st.integers(start + 1, min(start + longest, len(prompt))))
            tape.run(end, fails=move == "fail")
    oracle = hybrid_oracle(name)
    assert tape.logits is not None
    assert relative_error(tape.logits, oracle.logits(prompt)) < 1e-4
    failures = data.draw(st.frozensets(st.integers(0, NUM_GREEDY - 1), max_size=4))
    assert tape.generate(NUM_GREEDY, failures=failures) == oracle.greedy(prompt, NUM_GREEDY)
    for snapshot in snapshots:
        snapshot.release()
    tape.cache.free()
    assert_all_free(tape.space)


def test_bfloat16_error_is_that_of_the_dtype(name: str) -> None:
    """Chunked against whole in bfloat16 differs by no more than whole bfloat16 does from float32."""
    prompt = random_prompt(300)
    exact = hybrid_oracle(name).logits(prompt)
    model = hybrid(name, torch.bfloat16)
    whole = run_prompt(model, prompt).logits
    assert whole is not None
    allowed = float((whole - exact).abs().max())
    assert allowed < 0.2 * float(exact.abs().max())
    for chunk_size in (7, 64, 100):
        chunked = run_prompt(model, prompt, chunk_size=chunk_size).logits
        assert chunked is not None
        assert float((chunked - whole).abs().max()) <= allowed
