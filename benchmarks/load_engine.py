"""Penstock's service under load, in a process of its own: see `benchmarks/workers/load_engines.py`."""

from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.workers.load_engines import Engine, Watch
from penstock.engine import llm as module
from penstock.engine.events import Event, Failed, Finished, GenerationRequest, TokenGenerated
from penstock.engine.graphs.decode import FollowingDecodes
from penstock.engine.sampling import Sampling
from penstock.engine.service import Service, ServiceConfig
from penstock.measure.random_weights import RandomWeights
from penstock.models.decoder import Decoder
from penstock.models.opened import OpenedModel
from penstock.models.text.tokenizer import SpecialTokens, Tokenizer
from penstock.plan.policy import ScheduleConfig


class DeviceLog:
    """When a GPU began and ended what the engine gave it, pass by pass and draw by draw."""

    def __init__(self) -> None:
        self._events: list[tuple[bool, torch.cuda.Event]] = []

    def watch(self, owner: type, name: str) -> None:
        work = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            self._mark(is_begin=True)
            try:
                return work(*given, **named)
            finally:
                self._mark(is_begin=False)

        setattr(owner, name, watched)

    def _mark(self, *, is_begin: bool) -> None:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append((is_begin, event))

    def take_idle_share(self) -> float | None:
        """Of the time from the first pass to the end of the last, that in which nothing was there to be run."""
        events, self._events = self._events, []
        if not events:
            return None
        torch.cuda.synchronize()
        gaps_ms = [
            before.elapsed_time(after)
            for (was_begin, before), (is_begin, after) in pairwise(events)
            if is_begin and not was_begin
        ]
        whole_ms = events[0][1].elapsed_time(events[-1][1])
        return float(sum(gaps_ms) / whole_ms)


class Penstock(Engine):
    def load(
        self,
        model: str,
        settings: dict[str, Any],
        budget: int,
        max_running: int,
        cache_tokens: int,
        device: str,
        strict: bool | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
        backend.decoder = decoders.ByteLevel()
        opened = OpenedModel(
            RandomWeights(model, settings, torch.device(device)), Tokenizer(backend, SpecialTokens(), None)
        )
        with (
            patch.object(module, "resolve_model", Path),
            patch.object(module, "open_model", lambda path, impl: opened),
        ):
            llm = module.LLM("random", dtype="bfloat16", device=device, chunk=budget)
        schedule = ScheduleConfig(
            chunk_size=llm.most_chunk, grid=llm.chunk.grid, max_running=max_running, max_waiting=4096
        )
        rest = {} if strict is None else {"strict": strict}
        config = ServiceConfig(schedule=schedule, cache_tokens=cache_tokens, reuse=False, **rest)
        self._service = Service(llm, config)
        self.vocab_size = settings["vocab_size"]
        self._service.wait_until_ready()
        self._log = DeviceLog()
        if torch.device(device).type == "cuda":
            for owner, name in ((Decoder, "forward"), (FollowingDecodes, "launch"), (Sampling, "__init__")):
                self._log.watch(owner, name)
        return {"about": f"{llm.model.kernels.name}, {self._service.schedule}"}

    def run(self, *given: Any, **named: Any) -> dict[str, Any]:
        self._log.take_idle_share()
        return {**super().run(*given, **named), "idle_share": self._log.take_idle_share()}

    def submit(self, prompt: list[int], num_tokens: int) -> Watch:
        watch = Watch()

        def listen(event: Event) -> None:
            if isinstance(event, TokenGenerated):
                watch.token()
            elif isinstance(event, Finished):
                watch.end(None if event.reason == "length" else f"ended with {event.reason}")
            elif isinstance(event, Failed):
                watch.end(str(event.error))

        self._service.submit(GenerationRequest(prompt, num_tokens, ignore_eos=True), listen)
        return watch
