"""A model that says what it is told to: only its logits are a double, all that comes after them is real."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from penstock.engine.job import Job
from penstock.engine.llm import LLM
from penstock.engine.sampling import Choice


@contextmanager
def scripted(llm: LLM, text: str | Callable[[Job], str]) -> Iterator[None]:
    """While it lasts, the script's next token is the likeliest, where it is allowed; after the script, an end. The
    script may be each request's own."""
    ends = sorted(llm.eos_ids)
    choose = Job.choose
    scripts: dict[str, list[int]] = {}

    def told(job: Job, logits: torch.Tensor) -> Choice:
        if job.id not in scripts:
            own = text if isinstance(text, str) else text(job)
            scripts[job.id] = llm.tokenizer.encode(own, add_special_tokens=False)
        script = scripts[job.id]
        wanted = script[job.num_generated] if job.num_generated < len(script) else next(iter(ends), 0)
        logits = logits.clone()
        logits[wanted] = 1e9
        return choose(job, logits)

    with (
        mock.patch.object(Job, "choose", told),
        mock.patch.object(Job, "needs_logits", property(lambda job: True)),
    ):
        yield
