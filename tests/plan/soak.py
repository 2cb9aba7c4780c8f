"""Long random schedules, `python -m tests.plan.soak --steps 100000`: every promise is checked at every step, by every
policy, with 1 to 5 steps in flight. A broken promise is an AssertionError, with the settings that broke it."""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from penstock.plan import ScheduleConfig, SchedulePolicy
from tests.plan.simulation import Observed, Simulation
from tests.plan.test_schedule_simulation import CONFIG, CROWDED, crowded


def _runs(num_steps: int, depth: int, seed: int) -> Iterator[tuple[ScheduleConfig, Observed]]:
    """So many steps, shared by four policies, with and without a grid, prefixes that are kept, and lack of memory."""
    per_run = -(-num_steps // (2 * len(SchedulePolicy)))
    for place, policy in enumerate(SchedulePolicy):
        for keeps_prefix, grid in ((True, 1), (False, 64)):
            config = replace(CONFIG, policy=policy, grid=grid)
            workload = replace(CROWDED, seed=seed + place, shrink=0.003 if grid == 64 else 0.0)
            limits = crowded(keeps_prefix, 64 if place % 2 else 16)
            try:
                yield config, Simulation(config, limits, workload, depth=depth).run(per_run)
            except AssertionError as error:
                raise AssertionError(f"{error}: depth {depth}, {limits}, {workload}, {config}") from error


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.plan.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="at each depth (%(default)s)")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 5], metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for depth in options.depths:
        begun = time.perf_counter()
        decode_gap = prompt_gap = 0.0
        seen = Observed()
        for config, observed in _runs(options.steps, depth, options.seed):
            seen.counts += observed.counts
            decode_gap = max(decode_gap, observed.longest_decode_gap / config.longest_decode_gap)
            prompt_gap = max(prompt_gap, observed.longest_prompt_gap / config.longest_prompt_gap)
            assert observed.deepest == depth
        print(
            f"depth {depth}: {options.steps:,} steps in {time.perf_counter() - begun:.0f} s, no block lost; waits at "
            f"most {decode_gap:.2f} (decodes) and {prompt_gap:.2f} (prompts) of one step's bounds, {depth} allowed; "
            + ", ".join(f"{number:,} {what}" for what, number in sorted(seen.counts.items())),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
