"""The same weights in transformers' own model, in float32: what its logits say of ours."""

import contextlib
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils import logging

from penstock.bench.verify_compare import compare_greedy, compare_logits
from penstock.bench.verify_results import Comparison, Law
from penstock.bench.verify_runs import Subject, Trace
from penstock.measure.transformers_model import load_transformers
from penstock.models.opened import open_weights


def compare_with_transformers(subject: Subject, whole: Trace, path: Path, tolerance: float) -> Comparison:
    """The logits after every token that we have some of, the generated ones included. There is no law of bits between
    two programs."""
    started = time.perf_counter()
    logging.set_verbosity_error()
    with contextlib.closing(open_weights(path)) as source:
        model = load_transformers(source, torch.float32)
    token_ids = torch.tensor([[*subject.prompt, *whole.generated[:-1]]])
    with torch.inference_mode():
        output = model(token_ids, logits_to_keep=torch.tensor(subject.positions), use_cache=False)
    theirs = output.logits[0].float()
    comparison = Comparison(
        "transformers, float32",
        Law(0, tolerance),
        logits=compare_logits(subject.positions, whole.logits, theirs),
        greedy=compare_greedy(subject.positions, whole.logits, theirs),
    )
    return replace(comparison, seconds=time.perf_counter() - started)
