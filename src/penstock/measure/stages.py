"""`verify --stages`: a model in any number of stages leaves the bits of one process behind."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256

from penstock.cache.transfer import cache_digests
from penstock.engine.events import Event, Failed, GenerationRequest, TokenGenerated
from penstock.engine.llm import LLM
from penstock.engine.run import Run
from penstock.engine.service import Service, ServiceConfig
from penstock.errors import RequestFailedError
from penstock.files import readable_json
from penstock.machine import usable_cores
from penstock.measure.machine import Machine, this_machine
from penstock.measure.report import table
from penstock.plan import ChunkedPrefillConfig, EngineSettings
from penstock.plan.settings import ThreadsSetting
from penstock.plan.stage_settings import StagesSetting

DEFAULT_STAGE_CHUNKS = (64, 100, 256, 0)
NUM_AT_ONCE, TOKENS_AT_ONCE = 4, 32
_NUM_DECODES = 8


@dataclass(frozen=True)
class StageHash:
    """What one way of running a prompt left behind, in so many stages."""

    stages: int
    way: str
    digest: str
    seconds: float


@dataclass(frozen=True)
class StageResults:
    machine: Machine
    model: str
    num_prompt: int
    hashes: tuple[StageHash, ...]  # of keys and values of all layers, states and logits
    texts: tuple[StageHash, ...]  # of requests that ran at once

    @property
    def passed(self) -> bool:
        return all(len({each.digest for each in found}) == 1 for found in (self.hashes, self.texts))

    def to_json(self) -> str:
        return readable_json({**asdict(self), "passed": self.passed})

    def render(self) -> str:
        rows = [
            {
                "stages": str(each.stages),
                "run": each.way,
                "sha256": each.digest[:16],
                "seconds": f"{each.seconds:.2f}",
            }
            for each in (*self.hashes, *self.texts)
        ]
        verdict = "the same bits for any number of stages" if self.passed else "BITS DIFFER between stages"
        title = f"{self.model}: {self.num_prompt} tokens; keys, values, states and logits of all layers"
        return f"{table(title, rows, num_left=0)}\n\n{verdict}"


def run_digest(llm: LLM, prompt: Sequence[int], chunk: int, *, num_decodes: int = _NUM_DECODES) -> str:
    """Of keys and values of all layers, states, logits and tokens, after a prompt in such chunks and some decodes."""
    grid = llm.chunk.grid
    run = Run(
        llm.model,
        prompt,
        config=ChunkedPrefillConfig(-(-chunk // grid) * grid),
        canon=llm.canon,
        max_tokens=num_decodes + 1,
        stages=llm.stages,
    )
    while len(run.generated) < num_decodes:
        run.step()
    if llm.stages is None:
        slot = run.cache.state.slot if run.cache.state else None
        found = cache_digests(run.space.tensors, run.cache.places, slot)
    else:
        found = llm.stages.caches.digests(run.space, run.cache)
    config = llm.model.config
    assert sum(map(len, found.kv)) == config.num_attention_layers
    assert len(found.states) == (config.recurrent.num_layers if config.recurrent else 0)
    assert run.logits is not None
    logits = sha256(run.logits.cpu().numpy().tobytes()).hexdigest()
    run.cancel()
    return sha256(json.dumps([asdict(found), run.generated, logits]).encode()).hexdigest()


def tokens_at_once(llm: LLM, requests: Sequence[GenerationRequest], config: ServiceConfig) -> list[list[int]]:
    """What requests that run at once generate."""
    tokens: list[list[int]] = [[] for _ in requests]
    failures: list[Failed] = []

    def listener(own: list[int]) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            if isinstance(event, TokenGenerated):
                own.append(event.token)
            elif isinstance(event, Failed):
                failures.append(event)

        return listen

    with Service(llm, config) as service:
        for request, own in zip(requests, tokens, strict=True):
            service.submit(request, listener(own))
        service.close(grace_s=3600)
        service.check_integrity()
    if failures:
        raise RequestFailedError(f"a request failed: {failures[0].error}")
    return tokens


def verify_stages(
    load: Callable[[EngineSettings], LLM],
    settings: EngineSettings,
    counts: Sequence[int],
    prompt_of: Callable[[LLM], list[int]],
    chunks: Sequence[int] = DEFAULT_STAGE_CHUNKS,
    say: Callable[[str], None] = lambda _: None,
) -> StageResults:
    """Load the model in each number of stages. Every stage has as many threads, whatever their number."""
    each = max(1, (settings.threads.count or usable_cores()) // max(counts))
    hashes: list[StageHash] = []
    texts: list[StageHash] = []
    name, num_prompt = "", 0
    for count in counts:
        threads = ThreadsSetting(count * each, "argument", "as many for each stage")
        stages = StagesSetting(count) if count > 1 else None
        with load(replace(settings, stages=stages, threads=threads)) as llm:
            prompt, name = prompt_of(llm), llm.path.name
            num_prompt = len(prompt)
            for chunk in chunks:
                way = f"chunks of {chunk}" if chunk else "whole"
                say(f"{count} stages, {way} ...")
                started = time.perf_counter()
                digest = run_digest(llm, prompt, chunk)
                hashes.append(StageHash(count, way, digest, time.perf_counter() - started))
            say(f"{count} stages, {NUM_AT_ONCE} requests at once ...")
            started = time.perf_counter()
            requests = [
                GenerationRequest(prompt[: len(prompt) - 7 * index], TOKENS_AT_ONCE, ignore_eos=True)
                for index in range(NUM_AT_ONCE)
            ]
            room = NUM_AT_ONCE * (len(prompt) + TOKENS_AT_ONCE + 64)
            found = tokens_at_once(llm, requests, ServiceConfig(cache_tokens=room, strict=True))
            digest = sha256(json.dumps(found).encode()).hexdigest()
            way = f"{NUM_AT_ONCE} requests at once, strict"
            texts.append(StageHash(count, way, digest, time.perf_counter() - started))
    return StageResults(this_machine(), name, num_prompt, tuple(hashes), tuple(texts))
