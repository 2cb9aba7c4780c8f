"""The arithmetic of memory, summed over many random models and steps. `penstock verify --memory` measured it: sums
change only with a tensor that the engine holds."""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from penstock.plan import ChunkedPrefillConfig, DeltaNetShape, ExpertsShape, ModelShape, peak_memory_estimate
from penstock.plan.activation import step_phases
from penstock.plan.admission import WindowRoom
from penstock.plan.memory import WeightBits, kv_cache_bytes, kv_token_bytes, state_slot_bytes, weight_bytes
from penstock.plan.model import (
    DeltaNetConfig,
    ExpertsConfig,
    LatentConfig,
    MambaConfig,
    ModelConfig,
    ShortConvConfig,
    WindowConfig,
    input_size,
)
from penstock.plan.pipeline import work_of_pair, work_of_reading_in, work_of_token
from penstock.plan.step import KernelKind, StepShape, Workspace

KERNELS: tuple[KernelKind, ...] = ("torch", "native", "cuda")


def random_shape(random: Random) -> ModelShape:
    num_layers, num_kv_heads = random.randint(2, 8), random.choice([1, 2, 4, 8])
    num_key_heads = random.choice([1, 4, 16])
    net = DeltaNetShape(
        random.randint(1, num_layers),
        num_key_heads,
        num_key_heads * random.choice([1, 2]),
        random.choice([16, 128]),
        random.choice([16, 64, 128]),
        random.randint(1, 5),
    )
    experts = ExpertsShape(
        random.randint(1, num_layers),
        random.choice([4, 64, 128]),
        random.choice([100, 768]),
        random.choice([0, 500]),
    )
    return ModelShape(
        num_layers,
        random.choice([64, 576, 4096]),
        random.choice([100, 1536, 12_288]),
        num_kv_heads * random.choice([1, 3, 4]),
        num_kv_heads,
        random.choice([64, 128, 256]),
        random.choice([1000, 32_000, 151_936]),
        gated_attention=random.random() < 0.4,
        delta_net=net if random.random() < 0.4 else None,
        experts=experts if random.random() < 0.4 else None,
    )


def random_step(random: Random) -> StepShape:
    num_tokens = random.choice([0, 1, 17, 100, 256, 700, 2100, 5000])
    num_decodes = random.choice([0, 1, 5, 40] if num_tokens else [1, 5, 40])
    return StepShape.of_chunk(
        num_tokens,
        random.choice([0, 300, 512, 5000]),
        num_decodes=num_decodes,
        decode_pasts=num_decodes * random.choice([1, 50, 3000]),
        is_last=random.random() < 0.5,
    )


def random_workspace(random: Random, kernels: KernelKind) -> Workspace:
    return Workspace(
        kernels,
        tile_size=random.choice([0, 128, 512, 1024]),
        num_threads=random.choice([1, 2, 8]),
        row_floor=random.choice([1, 8, 512]),
        row_slab=random.choice([0, 0, 128]),
        row_grid=random.choice([8, 64]),
        expert_slab=random.choice([0, 32]),
        head_rows=random.choice([8, 32]),
        feed_rows=random.choice([0, 128, 2560]),
        head_norm=random.random() < 0.5,
        float32_norm=random.random() < 0.5,
        rotary_dim=random.choice([0, 0, 32]),
        num_active_experts=random.choice([0, 2, 8]),
        joins_past=random.random() < 0.5,
        library_bytes=random.choice([0, 1 << 20]),
    )


def random_family(random: Random) -> ModelConfig:
    """Of every kind of layer, each in its place."""
    num_layers = random.randint(2, 9)
    places = random.sample(range(num_layers), num_layers)
    some = tuple(sorted(places[: random.randint(1, num_layers - 1)]))
    others = tuple(sorted({*places} - {*some}))
    heads = (len(some), 2, 4, 16, 32, 4)
    net: dict[str, Any] = random.choice(
        [
            {},
            {"delta_net": DeltaNetConfig(*heads, layers=some)},
            {"mamba": MambaConfig(*heads, layers=some, norm_groups=random.randint(0, 2))},
            {"mamba": MambaConfig(*heads, layers=some, conv_bias=False, beside_attention=True)},
            {"short_conv": ShortConvConfig(len(some), 24, 3, bias=random.random() < 0.5, layers=some)},
        ]
    )
    attention: dict[str, Any] = random.choice(
        [
            {},
            {"latent": LatentConfig(16, 8, 12, 20, query_rank=random.choice([0, 24]))},
            {"full_heads": (1, 64), "gated_attention": random.random() < 0.5},
        ]
    )
    if (
        random.random() < 0.5
        and (not net or "beside_attention=True" in str(net))
        and "latent" not in attention
    ):
        attention["window"] = WindowConfig(random.choice([1, 65, 200]), len(some), some)
    if random.random() < 0.2 and net and "window" not in attention:
        attention["feeding_layers"] = others[: len(others) // 2]
    fed: dict[str, Any] = {}
    if random.random() < 0.5 and "feeding_layers" not in attention:
        shared = random.choice([0, 80])
        fed["experts"] = ExpertsConfig(len(others), 8, 40, shared, random.choice([0, 2]), layers=others)
    return ModelConfig(num_layers, 96, 200, 4, 2, 32, 1000, **net, **attention, **fed)


@pytest.mark.parametrize("kernels", KERNELS)
def test_sums_of_families_are_those_written_down(kernels: KernelKind) -> None:
    """Cut in two as well: the parts are the whole."""
    random, found = Random(kernels), Counter[str]()
    for _ in range(400):
        config, dtype_bytes = random_family(random), random.choice([2, 4])
        sums = sums_of(config, dtype_bytes)
        cut = random.randint(1, config.num_layers - 1)
        first, last = config.of_layers(0, cut), config.of_layers(cut, config.num_layers)
        for name in ("attention", "full", "dense", "weights.attention", "state", "work"):
            assert sums_of(first, dtype_bytes)[name] + sums_of(last, dtype_bytes)[name] == sums[name], name
        assert first.attention_layers + tuple(cut + index for index in last.attention_layers) == (
            config.attention_layers
        )
        found.update(sums)
        workspace = replace(
            random_workspace(random, kernels),
            expert_places=random.choice([0, 1, 64, 500]),
            unpacked_bytes=random.choice([0, 1 << 16]),
            avoided_rows=random.choice([(), (16, 24)]),
        )
        for phase in step_phases(config, random_step(random), dtype_bytes=dtype_bytes, workspace=workspace):
            found[f"{phase.phase} bytes"] += phase.peak_bytes
    assert dict(sorted(found.items())) == FAMILIES[kernels]


def sums_of(config: ModelConfig, dtype_bytes: int) -> dict[str, int]:
    return {
        "attention": config.num_attention_layers,
        "full": config.num_full_layers,
        "dense": config.num_dense_layers,
        "head": config.largest_head,
        "projected": config.num_projected,
        "net": 0 if config.recurrent is None else input_size(config.recurrent),
        "weights.attention": config.num_attention_weights,
        "weights": weight_bytes(config, dtype_bytes),
        "kv": kv_token_bytes(config, dtype_bytes),
        "cache": kv_cache_bytes(config, 3000, dtype_bytes, 0),
        "cache.steps": kv_cache_bytes(config, 3000, dtype_bytes, 130, 3) + kv_cache_bytes(config, 0, 2, 64),
        "kept": 0 if config.window is None else WindowRoom(3, 130, 2).num_blocks(config.window.size, 64, 999),
        "state": state_slot_bytes(config, dtype_bytes),
        "work": int(work_of_token(config)),
        "work.reading": int(work_of_reading_in(config)),
        "work.pair": int(work_of_pair(config)),
    }


@pytest.mark.parametrize("kernels", KERNELS)
def test_steps_hold_what_was_measured(kernels: KernelKind) -> None:
    random, found = Random(kernels), Counter[str]()
    for _ in range(1500):
        phases = step_phases(
            random_shape(random),
            random_step(random),
            dtype_bytes=random.choice([1, 2, 4]),
            workspace=random_workspace(random, kernels),
            logits_dtype_bytes=random.choice([2, 4]),
        )
        for phase in phases:
            found[phase.phase] += phase.peak_bytes
            found.update({f"{phase.phase}.{part}": size for part, size in phase.parts.items() if size})
    assert dict(sorted(found.items())) == STEPS[kernels]


def test_prompts_weights_and_states_take_what_was_measured() -> None:
    random, found = Random(5), Counter[str]()
    for _ in range(300):
        shape, dtype_bytes = random_shape(random), random.choice([1, 2, 4])
        found["kv"] += kv_token_bytes(shape, dtype_bytes)
        found["state"] += state_slot_bytes(shape, dtype_bytes)
        found["weights"] += weight_bytes(shape, dtype_bytes)
        bits = WeightBits(random.choice([4.5, 8.5]), 6.5625, is_tied=random.random() < 0.5)
        found["quantised"] += weight_bytes(shape, dtype_bytes, bits)
        config = ChunkedPrefillConfig(chunk_size := random.choice([0, 64, 512]), chunk_size // 4)
        estimate = peak_memory_estimate(
            shape,
            random.choice([0, 10, 1000, 3000]),
            config,
            dtype_bytes=dtype_bytes,
            kv_dtype_bytes=random.choice([None, 1]),
            fused_attention=random.random() < 0.5,
            workspace=random_workspace(random, random.choice(KERNELS)),
        )
        found["full"] += estimate.full_bytes
        found["chunked"] += estimate.chunked_bytes
        found["recurrent"] += estimate.chunked.recurrent_bytes
        found["scores"] += estimate.chunked.attention_scores_bytes
        found["chunks"] += estimate.num_chunks
    assert dict(sorted(found.items())) == PROMPTS


STEPS: dict[str, dict[str, int]] = {
    "torch": {
        "attention": 49_992_106_192,
        "attention.attention": 30_646_683_072,
        "attention.hidden": 10_670_321_472,
        "attention.input": 3_785_325_264,
        "attention.projection": 4_889_776_384,
        "delta_net": 20_890_297_504,
        "delta_net.delta_net": 10_647_195_584,
        "delta_net.hidden": 4_587_733_824,
        "delta_net.input": 1_414_716_064,
        "delta_net.projection": 4_240_652_032,
        "head": 14_418_152_912,
        "head.hidden": 292_294_144,
        "head.input": 3_433_194_112,
        "head.logits": 10_692_664_656,
        "mlp": 70_679_612_800,
        "mlp.attention": 4_191_171_328,
        "mlp.delta_net": 211_917_824,
        "mlp.hidden": 25_147_054_656,
        "mlp.input": 3_897_414_992,
        "mlp.mlp": 37_232_054_000,
        "start": 21_471_681_936,
        "start.hidden": 14_397_179_968,
        "start.input": 7_074_501_968,
    },
    "native": {
        "attention": 41_124_425_472,
        "attention.attention": 20_142_075_200,
        "attention.hidden": 8_155_273_600,
        "attention.input": 3_922_813_056,
        "attention.projection": 8_904_263_616,
        "delta_net": 19_484_583_328,
        "delta_net.delta_net": 9_663_016_768,
        "delta_net.hidden": 4_826_648_832,
        "delta_net.input": 1_377_294_880,
        "delta_net.projection": 3_617_622_848,
        "head": 13_792_892_272,
        "head.hidden": 272_440_832,
        "head.input": 3_571_062_560,
        "head.logits": 9_949_388_880,
        "mlp": 64_645_251_624,
        "mlp.attention": 4_699_369_216,
        "mlp.delta_net": 86_285_312,
        "mlp.hidden": 17_437_805_440,
        "mlp.input": 4_036_057_344,
        "mlp.mlp": 38_385_734_312,
        "start": 19_231_188_736,
        "start.hidden": 12_079_451_648,
        "start.input": 7_151_737_088,
    },
    "cuda": {
        "attention": 61_171_108_240,
        "attention.attention": 49_151_188_864,
        "attention.hidden": 5_618_846_528,
        "attention.input": 4_467_519_440,
        "attention.projection": 1_933_553_408,
        "delta_net": 16_754_673_224,
        "delta_net.delta_net": 7_135_493_616,
        "delta_net.hidden": 4_086_837_376,
        "delta_net.input": 1_453_270_168,
        "delta_net.projection": 4_079_072_064,
        "head": 15_959_793_368,
        "head.hidden": 256_408_320,
        "head.input": 6_054_724_232,
        "head.logits": 9_648_660_816,
        "mlp": 49_339_589_828,
        "mlp.attention": 3_169_774_976,
        "mlp.delta_net": 90_989_568,
        "mlp.hidden": 14_681_721_920,
        "mlp.input": 6_540_835_560,
        "mlp.mlp": 24_856_267_804,
        "start": 15_979_783_912,
        "start.hidden": 10_108_929_536,
        "start.input": 5_870_854_376,
    },
}
PROMPTS = {
    "chunked": 12_527_586_720,
    "chunks": 2_547,
    "full": 21_895_906_880,
    "kv": 3_241_600,
    "quantised": 92_833_178_684,
    "recurrent": 121_442_688,
    "scores": 2_150_760_744,
    "state": 61_366_160,
    "weights": 294_703_710_208,
}

FAMILIES: dict[str, dict[str, int]] = {
    "torch": {
        "attention": 1_523,
        "attention bytes": 2_652_511_280,
        "cache": 1_473_408_000,
        "cache.steps": 3_996_171_264,
        "delta_net bytes": 2_477_419_440,
        "dense": 1_471,
        "full": 1_386,
        "head": 17_088,
        "head bytes": 727_171_648,
        "kept": 998,
        "kv": 438_656,
        "mlp bytes": 2_142_258_988,
        "net": 101_680,
        "projected": 110_704,
        "start bytes": 1_470_539_728,
        "state": 6_634_496,
        "weights": 1_101_400_352,
        "weights.attention": 62_687_616,
        "work": 214_555_776,
        "work.pair": 499_968,
        "work.reading": 66_852_864,
    },
    "native": {
        "attention": 1_429,
        "attention bytes": 2_061_262_800,
        "cache": 1_384_320_000,
        "cache.steps": 3_672_941_568,
        "delta_net bytes": 2_465_678_592,
        "dense": 1_466,
        "full": 1_278,
        "head": 17_312,
        "head bytes": 743_271_344,
        "kept": 1_004,
        "kv": 402_048,
        "mlp bytes": 2_021_924_880,
        "net": 102_416,
        "projected": 115_744,
        "start bytes": 1_406_894_848,
        "state": 6_552_992,
        "weights": 1_093_317_968,
        "weights.attention": 58_541_440,
        "work": 209_652_352,
        "work.pair": 465_408,
        "work.reading": 64_843_008,
    },
    "cuda": {
        "attention": 1_423,
        "attention bytes": 3_021_267_128,
        "cache": 1_337_472_000,
        "cache.steps": 3_569_986_560,
        "delta_net bytes": 2_122_229_840,
        "dense": 1_376,
        "full": 1_286,
        "head": 16_768,
        "head bytes": 673_278_608,
        "kept": 915,
        "kv": 391_040,
        "mlp bytes": 1_513_115_432,
        "net": 104_040,
        "projected": 107_688,
        "start bytes": 1_164_822_968,
        "state": 6_185_568,
        "weights": 1_041_107_936,
        "weights.attention": 57_669_120,
        "work": 207_145_728,
        "work.pair": 463_872,
        "work.reading": 62_204_160,
    },
}
