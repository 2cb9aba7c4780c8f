"""`python -m tests.engine.stages.soak`: workers are killed at random moments, with and without a store on disk; every
answer arrives, with the same tokens."""

import argparse
import os
import random
import signal
import tempfile
import time
from typing import Any

from tests.engine.stages.test_recovery import Asked, processes, serving, undisturbed, wait_for


def soak(num_kills: int, seed: int, **settings: Any) -> None:
    expected, chosen = undisturbed("llama"), random.Random(seed)
    slowest_s, most_again = 0.0, 0
    with serving(stages=3, threads=1, **settings) as service:
        for kill in range(num_kills):
            missed = service.status().reuse.missed_tokens
            asked, when = Asked(service), chosen.randrange(90)
            wait_for(lambda asked=asked, when=when: asked.num_tokens >= when)  # type: ignore[misc]
            time.sleep(chosen.random() * 0.02)
            pid = chosen.choice(processes(service)).pid
            assert pid is not None
            how = signal.SIGSTOP if kill % 5 == 4 else signal.SIGKILL
            os.kill(pid, how)
            began = time.monotonic()
            tokens = asked.tokens()
            assert tokens == expected, f"kill {kill} (seed {seed}, {how.name} at token {when}): other tokens"
            slowest_s = max(slowest_s, time.monotonic() - began)
            most_again = max(most_again, service.status().reuse.missed_tokens - missed)
            service.check_integrity()
    where = "with a store" if settings else "without a store"
    print(
        f"{num_kills} workers lost {where}: all answers the same, none later than {slowest_s:.1f} s; "
        f"at most {most_again} prompt tokens read for one round of requests"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    given = parser.parse_args()
    soak(given.kills, given.seed)
    with tempfile.TemporaryDirectory() as folder:
        soak(given.kills, given.seed, cache_dir=folder)


if __name__ == "__main__":
    main()
