"""Models that transformers' code runs have its answers, and keep the laws: chunked is whole, batched is alone, a hit
is a miss."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.llm import LLM
from penstock.engine.self_check import check_chunks
from penstock.errors import ModelError, ModelFileError, SettingError
from penstock.kernels.interface import select_kernels
from penstock.kernels.probe import measure
from penstock.measure.verify import Checks, verify
from penstock.models.by_transformers.folder import TransformersFolder
from penstock.models.decoder import Decoder
from penstock.models.opened import open_model
from penstock.plan.policy import ScheduleConfig
from tests.byte_models import TEMPLATE, byte_backend
from tests.engine.batching import Wish, serve
from tests.engine.test_families import CHUNKS, NUM_TOKENS
from tests.engine.test_parity import relative_error
from tests.oracle import NUM_GREEDY, canon_of, random_prompt, run_prompt
from tests.small import small_model

CPU = torch.device("cpu")
# Windows, sinks, and keys of another size than values; windows and gated attention; learned positions and transposed
# weights; latent attention that arrives expanded; a router of two passes.
FAMILIES = ("mimo_v2_flash", "afmoe", "gpt2", "minicpm3", "phimoe")


@cache
def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return TransformersFolder(folder).decoder(select_kernels(CPU), dtype, CPU)


def logits_of(model: Decoder, prompt: list[int], **chunks: Any) -> torch.Tensor:
    logits = run_prompt(model, prompt, **chunks).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_its_answer_is_transformers_in_any_chunks(family: str) -> None:
    oracle, prompt = small_model(family), random_prompt(NUM_TOKENS, 256)
    model, tokens = loaded(oracle.folder), oracle.greedy(prompt, NUM_GREEDY)
    whole = logits_of(model, prompt)
    assert relative_error(whole, oracle.logits(prompt)) < 1e-4
    for chunks in CHUNKS:
        run = run_prompt(model, prompt, **chunks, max_tokens=NUM_GREEDY)
        assert run.logits is not None
        assert torch.equal(run.logits, whole), chunks
        while run.finish_reason is None:
            run.step()
        assert run.generated == tokens, chunks


@pytest.mark.parametrize("family", [*FAMILIES[:2], "phimoe", "mellum"])  # routers of float32 and bfloat16
def test_it_keeps_its_bits_in_bfloat16(family: str) -> None:
    model, prompt = loaded(small_model(family).folder, torch.bfloat16), random_prompt(NUM_TOKENS, 256)
    whole = logits_of(model, prompt)
    for chunks in CHUNKS[2:]:
        assert torch.equal(logits_of(model, prompt, **chunks), whole), chunks


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
# The last has widths of half a vector, and activations that are torch's.
@pytest.mark.parametrize("family", [*FAMILIES[:2], "gpt_bigcode"])
def test_what_runs_beside_it_changes_nothing(family: str, strict: bool) -> None:
    model = loaded(small_model(family).folder)
    wishes = [
        Wish(tuple(random_prompt(length, 256, seed=length)), num_tokens, arrives)
        for length, num_tokens, arrives in ((150, 6, 0), (1, 9, 0), (64, 4, 2), (200, 5, 3))
    ]
    together = serve(model, wishes, ScheduleConfig(chunk_size=64), strict=strict)
    for wish, job in zip(wishes, together, strict=True):
        (alone,) = serve(
            model, [Wish(wish.prompt, wish.max_tokens)], ScheduleConfig(chunk_size=128), strict=strict
        )
        assert job.generated == alone.generated
        assert torch.equal(job.logits[0], alone.logits[0])
        if strict:
            assert all(map(torch.equal, job.logits, alone.logits))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family that is not Penstock's own, with a tokenizer."""
    family: str = getattr(request, "param", "phi")
    place = tmp_path_factory.mktemp("models") / family
    shutil.copytree(small_model(family).folder, place)
    byte_backend().save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return place


# The others' values are smaller than their keys, with windows and without.
@pytest.mark.parametrize("folder", ["phi", "mimo_v2_flash", "minicpm3"], indirect=True)
def test_a_prefix_from_memory_or_disk_changes_nothing(folder: Path, tmp_path: Path) -> None:
    prompt = random_prompt(300, 256)
    settings: dict[str, Any] = {"dtype": "float32", "chunk": 64, "threads": 1}
    with LLM(folder, cache_dir=tmp_path, **settings) as llm:
        assert llm.model.config.by_transformers
        assert llm.same_bits
        cold = llm.generate(prompt, max_tokens=5)
    for kept in ({"cache_dir": tmp_path}, {"reuse_tokens": 1000}):
        with LLM(folder, **kept, **settings) as llm:
            first = llm.generate(prompt, max_tokens=5)
            assert (first.usage.cached_tokens, first.token_ids) == (
                256 * ("cache_dir" in kept),
                cold.token_ids,
            )
            warm = llm.generate(prompt, max_tokens=5)
            assert (warm.usage.cached_tokens, warm.token_ids) == (256, cold.token_ids)


def test_verify_proves_it(folder: Path) -> None:
    llm = LLM(folder, dtype="float32", chunk=64, threads=1)
    checks = Checks(chunks=(7, 64), overlap=0, max_tokens=3, with_transformers=True)
    found = verify(llm, random_prompt(100, 256), checks, lambda text: None)
    assert found.passed, found.comparisons


def test_what_it_lacks_is_refused(folder: Path, smollm2_path: Path) -> None:
    for lacking in ({"weights": "int8", "dtype": "bfloat16"}, {"stages": 2}):
        with pytest.raises(SettingError, match="transformers' code runs"):
            LLM(folder, **lacking)
    with pytest.raises(SettingError, match="GGUF"):
        open_model(smollm2_path, "transformers")
    with pytest.raises(ModelError, match="not supported"):
        open_model(folder, "penstock")


def test_weights_are_taken_strictly(tmp_path: Path) -> None:
    shutil.copytree(small_model("phi").folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes in ({"num_hidden_layers": 4}, {"intermediate_size": 200}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ModelFileError):
            TransformersFolder(tmp_path).decoder(select_kernels(CPU), torch.float32, CPU)


def test_a_model_that_sees_where_chunks_end_is_refused_at_load() -> None:
    model = TransformersFolder(small_model("phi").folder).decoder(select_kernels(CPU), torch.float32, CPU)
    canon, found = canon_of(model), measure(model.kernels, model.probe_shapes, model.dtype, CPU)
    assert check_chunks(model, canon, found) == found
    layer = model._model.model.layers[1]
    layer.register_forward_hook(lambda module, args, out: out + 0.3 * out.roll(1, dims=1))
    with pytest.raises(ModelError, match="other logits than whole"):
        check_chunks(model, canon, found)
