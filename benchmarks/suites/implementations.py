"""A family that runs both ways: by transformers' code, over Penstock's own."""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.harness import OURS, Bar, Bench, Results
from benchmarks.suite import Suite, number
from penstock.kernels.device import chosen_device
from penstock.kernels.interface import select_kernels
from penstock.kernels.probe import probe
from penstock.measure.prompts import random_tokens
from penstock.measure.steps import StepSpec, StepTimer
from penstock.models.loading import load_decoder
from penstock.models.opened import open_weights
from penstock.plan.settings import ModelImpl

STEPS = "a step"
THEIRS = "by transformers' code"
# What transformers' code may take, of Penstock's own time.
MOST = {"chunk": 1.3, "decode": 1.7}
_LABELS = {name: f"{name}, {THEIRS} over Penstock's own" for name in MOST}
# SmolLM2's shape.
_SHAPE = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

    bench.describe("SmolLM2's shape, random weights", options, "chunk", "past", "layers")
    device, dtype = chosen_device(options.device), getattr(torch, options.dtype)
    torch.manual_seed(1)
    vocab_size = int(_SHAPE["vocab_size"])
    impls: dict[str, ModelImpl] = {OURS: "penstock", THEIRS: "transformers"}
    with TemporaryDirectory(prefix="penstock-impl-") as folder:
        made = LlamaForCausalLM(LlamaConfig(**_SHAPE, num_hidden_layers=options.layers)).to(dtype)
        made.save_pretrained(folder)
        specs = {
            "chunk": StepSpec(options.chunk, options.past),
            "decode": StepSpec(0, 0, num_decodes=1, decode_past=options.past),
        }
        prompt = random_tokens(vocab_size, options.past + options.chunk)
        timers = {}
        for system, model_impl in impls.items():
            source = open_weights(Path(folder), model_impl)
            model = load_decoder(source, select_kernels(device), dtype, device)
            canon = probe(model.kernels, model.probe_shapes, dtype, device).bind(model.kernels)
            timers[system] = StepTimer(model, canon, prompt, list(specs.values()))
    for name, spec in specs.items():
        for index in range(
            -options.warm_up, (options.repeats or options.rounds) * (1 if name == "chunk" else 8)
        ):
            for system, timer in timers.items():
                milliseconds = 1e3 * timer.seconds(spec)
                if index >= 0:
                    bench.results.add(STEPS, name, "ms", milliseconds, system=system, round_index=index)
        bench.results.add_ratio(_LABELS[name], STEPS, name, THEIRS, OURS, as_name="ratio")


def _bars(results: Results) -> list[Bar]:
    return results.ratio_bars({_LABELS[name]: (most, False) for name, most in MOST.items()})


IMPLEMENTATIONS = Suite(
    "A family that runs both ways: a chunk and a decode by transformers' code, in turns with Penstock's own.",
    _measure,
    _bars,
    repeats="rounds of chunks, each with 8 decodes",
    takes=("--dtype", "--device", "--threads"),
    options={
        "--chunk": number(2048, "tokens of the chunk"),
        "--past": number(512, "tokens before it, and before the decode"),
        "--layers": number(30, "layers of the model"),
        "--rounds": number(5, "rounds"),
        "--warm-up": number(1, "rounds before those that count"),
    },
)
