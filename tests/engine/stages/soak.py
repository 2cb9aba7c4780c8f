"""`python -m tests.engine.stages.soak`: workers are killed or stopped at random moments of a round of requests, with
and without a store on disk; every answer arrives, with the same tokens. With a store, at most the chunks in flight
and one are read again."""

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.engine.events import GenerationRequest
from penstock.engine.service import Service
from tests.engine.stages.test_recovery import CONFIG, STAGE_TIMEOUT_S, Asked, processes, serving, wait_for
from tests.oracle import random_prompt

LENGTHS = (540, 403, 464, 600)
BEGIN = 128  # tokens that prompts have in common
ANSWER = 24
# A process that is started imports its libraries and loads its layers, beside whatever else runs.
RESTART_S = 60.0


def requests_of(seed: int) -> list[GenerationRequest]:
    """Nothing of one round is known from another."""
    begin = random_prompt(BEGIN, vocab_size=256, seed=seed)
    prompts = (random_prompt(num, vocab_size=256, seed=seed + num) for num in LENGTHS)
    return [GenerationRequest((*begin, *own), ANSWER, ignore_eos=True) for own in prompts]


def num_read(service: Service) -> int:
    return service.status().reuse.missed_tokens


def soak(rounds: Sequence[list[GenerationRequest]], seed: int, **settings: Any) -> None:
    chosen = random.Random(seed)
    with serving(stages=1) as service:
        began = time.monotonic()
        expected = [Asked(service, requests).tokens() for requests in rounds]
        undisturbed_s = (time.monotonic() - began) / len(rounds)
    slowest_s, most_again = 0.0, 0
    prompt_tokens = BEGIN + sum(LENGTHS)
    with serving(stages=3, threads=1, **settings) as service:
        assert service.llm.stages is not None
        bound = (service.llm.stages.depth + 1) * CONFIG.schedule.chunk_size  # type: ignore[union-attr]
        for kill, requests in enumerate(rounds):
            before, asked = num_read(service), Asked(service, requests)
            if kill % 2:  # while prompts are read
                when = chosen.randrange(prompt_tokens)
                wait_for(lambda before=before, when=when: num_read(service) - before >= when)  # type: ignore[misc]
            else:
                when = chosen.randrange(len(requests) * ANSWER - 6)
                wait_for(lambda asked=asked, when=when: asked.num_tokens >= when)  # type: ignore[misc]
            pid = chosen.choice(processes(service)).pid
            assert pid is not None
            how = signal.SIGSTOP if kill % 5 == 4 else signal.SIGKILL
            began = time.monotonic()
            os.kill(pid, how)
            tokens = asked.tokens()
            what = f"kill {kill} (seed {seed}, {how.name} at {when})"
            assert tokens == expected[kill], f"{what}: other tokens"
            seconds, again = time.monotonic() - began, num_read(service) - before - prompt_tokens
            assert seconds < STAGE_TIMEOUT_S + RESTART_S + 10 * undisturbed_s, f"{what}: {seconds:.1f} s"
            assert not settings or again <= bound, f"{what}: {again} tokens were read again, {bound} may be"
            slowest_s, most_again = max(slowest_s, seconds), max(most_again, again)
            service.check_integrity()
    where = f"with a store, of {bound} that may be" if settings else "without a store"
    print(
        f"{len(rounds)} workers lost {where}: all answers the same, none later than {slowest_s:.1f} s; at most "
        f"{most_again} of {prompt_tokens} prompt tokens read again",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    given = parser.parse_args()
    rounds = [requests_of(given.seed + 1000 * index) for index in range(given.kills)]
    soak(rounds, given.seed)
    # In memory, where there is such a folder: steps of so small a model are faster than a disk.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        soak(rounds, given.seed, cache_dir=folder)


if __name__ == "__main__":
    main()
