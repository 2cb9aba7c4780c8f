"""Faults that are planted in a model on its way: verify must notice each, and say where it begins."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.cache.tensors import KV
from penstock.engine.llm import LLM
from penstock.kernels.reference.kernels import TorchKernels
from penstock.kernels.spans import AttentionWork, WrittenPlaces
from tests.measure.verifying import Verify, plant


def on_kernels(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[LLM], None]:
    """A change that puts another function in the place of one of the kernels."""

    def change(llm: LLM) -> None:
        setattr(llm.model.kernels, name, make(getattr(llm.model.kernels, name)))

    return change


def test_a_key_that_is_dropped_at_a_tiles_edge(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dropped for every chunk size alike: decodes, which know no tiles, and transformers tell."""
    monkeypatch.setenv("PENSTOCK_KERNELS", "torch")

    def change(llm: LLM) -> None:
        assert isinstance(llm.model.kernels, TorchKernels)
        llm.canon = replace(llm.canon, tile_size=64)
        attend_tile = llm.model.kernels.attend_tile

        def dropping(queries: Tensor, offset: int, past: KV | None, own: KV, scale: float) -> Tensor:
            shorter = None if past is None else KV(past.keys[:-1], past.values[:-1])
            return attend_tile(queries, offset, shorter, own, scale)

        monkeypatch.setattr(llm.model.kernels, "attend_tile", dropping)

    plant(monkeypatch, change)
    found = verify("llama", "--chunks", "1,30", "--reference", "transformers", status=1)
    assert found.passes("chunks of 30")
    assert found.passes("token by token")
    for name in ("token by token, as decodes", "transformers, float32"):
        assert found.first_break(name) == ("logits", 64, "beyond the tolerance")


def test_a_chunk_that_does_not_see_the_token_before_it(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def blind(queries: Tensor, work: AttentionWork, kv: KV, scale: float) -> Tensor:
            seen = KV(kv.keys.clone(), kv.values.clone())
            for span in work.spans:
                # The last layer runs some rows only: there a chunk begins in the middle.
                if span.is_prompt and span.position and span.end - span.start > 1:
                    seen.keys[span.position - 1] = 0
            return attend(queries, work, seen, scale)

        return blind

    plant(monkeypatch, on_kernels("attend", make))
    found = verify("llama", "--chunks", "40,100", "--overlap", "0", status=1)
    assert found.first_break("chunks of 40") == ("logits", 40, "other bits")
    assert found.first_break("chunks of 100") == ("logits", 100, "other bits")
    cache = found.way("chunks of 100")["cache"]
    assert cache["first_different"] == 100
    assert cache["first_layer"] == 1  # keys of the first layer are of the token alone
    assert "'" in found.way("chunks of 40")["breaks"][0]["token"]
    assert "BROKEN: logits: other bits, first at token 40 '" in found.printed
    assert "FAIL: " in found.printed


def test_a_bit_that_flips_in_the_cache(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one key, in a chunk that is not the whole prompt: far within any tolerance."""

    def make(place_heads: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def flipping(*arguments: Any) -> Tensor:
            queries = place_heads(*arguments)
            kv, places = arguments[4:6]
            assert isinstance(places, WrittenPlaces)
            if places.num_tokens < 120 and any(place.start <= 57 < place.end for place in places.ranges):
                kv.keys[57].view(torch.int32)[0, 0] ^= 1
            return queries

        return flipping

    plant(monkeypatch, on_kernels("place_heads", make))
    found = verify("llama", "--chunks", "50", status=1)
    broken = found.way("chunks of 50")["breaks"]
    assert {"what": "keys and values", "position": 57, "how": "other bits"}.items() <= broken[-1].items()
    assert found.way("chunks of 50")["cache"]["largest_relative"] < 1e-6
    assert found.way("chunks of 50")["cache"]["first_layer"] == 0


@pytest.mark.parametrize(("name", "state"), [("gated_delta_rule", 1), ("causal_conv", 1)])
def test_a_state_that_is_lost_between_chunks(
    name: str, state: int, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the grid that breaks the law of bits, off it the tolerance."""

    def make(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forgetful(*arguments: Tensor) -> Tensor:
            arguments = (*arguments[:state], torch.zeros_like(arguments[state]), *arguments[state + 1 :])
            return kernel(*arguments)

        return forgetful

    plant(monkeypatch, on_kernels(name, make))
    found = verify("qwen3_5_text", "--chunks", "64,100", "--max-tokens", "1", status=1)
    assert found.first_break("chunks of 64") == ("logits", 64, "other bits")
    assert found.first_break("chunks of 100") == ("logits", 100, "beyond the tolerance")
    if name == "gated_delta_rule":
        assert any("recurrent states" in each["what"] for each in found.way("chunks of 64")["breaks"])


def test_the_overlap_notices_keys_that_were_wrong_before(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last key of every chunk but the prompt's last: the next chunk, which overlaps, writes the right one."""

    def make(place_heads: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def careless(*arguments: Any) -> Tensor:
            queries = place_heads(*arguments)
            kv, places = arguments[4:6]
            if places.num_tokens == 48:
                kv.keys[places.ranges[-1].end - 1] += 0.25
            return queries

        return careless

    plant(monkeypatch, on_kernels("place_heads", make))
    found = verify("llama", "--chunks", "120", "--overlap", "16", status=1)
    name = "overlap 16: keys, values computed twice"
    assert found.first_break(name) == ("keys and values", 47, "other bits")
    twice = found.way(name)["cache"]
    wrong = [
        position for position, same in zip(twice["positions"], twice["is_same"], strict=True) if not same
    ]
    assert wrong == [47, 79, 111]
    assert twice["largest_absolute"] >= 0.2499


def test_a_neighbour_that_shines_through(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def leaking(queries: Tensor, work: AttentionWork, kv: KV, scale: float) -> Tensor:
            out = attend(queries, work, kv, scale)
            if len(work.spans) > 1 and any(span.is_prompt for span in work.spans):
                out *= 1 + 1e-6
            return out

        return leaking

    plant(monkeypatch, on_kernels("attend", make))
    found = verify("llama", "--chunks", "40", status=1)
    assert found.passes("chunks of 40")
    what, position, how = found.first_break("batched against alone")
    assert (what, how) == ("logits", "other bits")
    assert position == 0


@pytest.mark.parametrize(("options", "status"), [((), 0), (("--strict",), 1)])
def test_decodes_that_depend_on_their_neighbours(
    options: Sequence[str], status: int, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a strict service promises that they do not."""

    def make(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def leaking(queries: Tensor, work: AttentionWork, kv: KV, scale: float) -> Tensor:
            out = attend(queries, work, kv, scale)
            for span in work.spans if len(work.spans) > 1 else ():
                if not span.is_prompt:
                    out[span.start : span.end] *= 1 + 1e-6
            return out

        return leaking

    plant(monkeypatch, on_kernels("attend", make))
    found = verify("llama", "--chunks", "40", *options, status=status)
    if status:
        assert found.first_break("batched against alone, strict")[1] >= 120


def test_a_way_that_cannot_be_run(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole prompt can: that chunks cannot breaks the law, too. Logits that are no numbers end a run."""

    def make(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def undefined(queries: Tensor, work: AttentionWork, kv: KV, scale: float) -> Tensor:
            out = attend(queries, work, kv, scale)
            return out.fill_(torch.nan) if work.spans[0].position == 80 else out

        return undefined

    plant(monkeypatch, on_kernels("attend", make))
    found = verify("llama", "--chunks", "40,100", status=1)
    assert found.passes("chunks of 100")
    assert not found.passes("chunks of 40")
    assert "nan" in found.way("chunks of 40")["error"]
    assert "it could not be run" in found.printed


def test_a_tolerance_of_ones_own(verify: Verify) -> None:
    assert not verify("qwen3_5_text", "--chunks", "100", "--tolerance", "1e-9", status=1).passes(
        "chunks of 100"
    )
