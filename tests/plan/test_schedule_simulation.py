"""Every promise of the schedule, checked at every step of long random runs. A scheduler that breaks one is caught."""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from random import Random
from typing import Any

import pytest

from penstock.plan import (
    BatchScheduler,
    CacheLimits,
    ChunkSizer,
    ScheduleConfig,
    SchedulePolicy,
    SizeRules,
    StepPlan,
    batch_scheduler,
)
from penstock.plan.admission import choose_admissions
from penstock.plan.batch_scheduler import share_chunks
from penstock.plan.policy import Turns
from tests.plan.simulation import Observed, Simulation, Workload

CONFIG = ScheduleConfig(
    chunk_size=256,
    max_running=6,
    max_waiting=12,
    max_chunk_steps=5,
    max_decode_steps=4,
    max_overtakes=3,
)
# 2,560 tokens: one long prompt, or a few answers.
CROWDED = Workload(most_prompt=2000, most_answer=400)
AMPLE = CacheLimits(num_blocks=10_000, block_tokens=64, keeps_prefix=True)


def crowded(keeps_prefix: bool, block_tokens: int) -> CacheLimits:
    return CacheLimits(2560 // block_tokens, block_tokens, keeps_prefix)


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_crowded_steps_keep_every_promise(policy: SchedulePolicy) -> None:
    seen: list[Observed] = []
    for seed, (keeps_prefix, grid) in enumerate([(True, 1), (True, 64), (False, 1), (False, 64)]):
        config = replace(CONFIG, policy=policy, grid=grid)
        workload = replace(CROWDED, seed=seed, shrink=0.01 if grid == 64 else 0.0)
        simulation = Simulation(config, crowded(keeps_prefix, 64 if seed % 2 else 16), workload)
        seen.append(simulation.run(10_000))
    for observed in seen:
        assert observed.counts["finished"] > 100
        assert min(observed.counts[what] for what in ("preempted", "replay", "cancelled", "refused")) > 3
    assert seen[1].counts["shrunk"] > 0
    assert seen[0].counts["gave more"] > 10  # of what they held while they waited
    # The bounds are what happens at the worst, not more than that.
    assert max(observed.longest_decode_gap for observed in seen) == config.longest_decode_gap
    assert max(observed.most_overtakes for observed in seen) == config.max_overtakes


@pytest.mark.parametrize("depth", range(2, 6))
@pytest.mark.parametrize("policy", SchedulePolicy)
def test_several_steps_in_flight_keep_every_promise(policy: SchedulePolicy, depth: int) -> None:
    """Waits are no longer than those of one step at a time, `depth` times, and no block is lost."""
    config = replace(CONFIG, policy=policy, grid=64 if depth % 2 else 1)
    workload = replace(CROWDED, seed=depth, shrink=0.003 if depth % 2 else 0.0)
    limits = crowded(depth in (2, 5), 16 if depth < 4 else 64)
    observed = Simulation(config, limits, workload, depth=depth).run(10_000)
    assert observed.deepest == depth
    assert min(observed.counts[what] for what in ("finished", "preempted", "replay")) > 5
    if policy is SchedulePolicy.MIXED:
        assert observed.longest_decode_gap == depth


def test_sizes_are_learned_with_steps_in_flight() -> None:
    sizer = ChunkSizer(SizeRules(target_itl_s=0.25))
    config = replace(CONFIG, chunk_size=2048, auto_chunk=True)
    observed = Simulation(config, crowded(True, 64), CROWDED, sizer, depth=3).run(4_000)
    assert observed.deepest == 3
    assert sum(wait > 1.25 * 0.25 for wait in observed.waits_s) < 0.05 * len(observed.waits_s)


def test_plans_are_what_they_were() -> None:
    """A digest of all plans of short runs: who runs, how far, and who gives way changes only where it is meant to."""
    found = {}
    for policy in SchedulePolicy:
        for depth, keeps_prefix, grid in ((1, True, 1), (1, False, 64), (3, True, 64)):
            config = replace(CONFIG, policy=policy, grid=grid, step_tokens=300 if grid == 1 else None)
            workload = replace(CROWDED, seed=depth, shrink=0.003)
            simulation = Simulation(config, crowded(keeps_prefix, 16), workload, depth=depth)
            simulation.run(1_500)
            found[f"{policy} {depth} {grid}"] = simulation.digest.hexdigest()[:12]
    assert found == PLANS


PLANS = {
    "prefill-first 1 1": "c0c4ac36fd55",
    "prefill-first 1 64": "db56dcbce07b",
    "prefill-first 3 64": "13525ef32ba1",
    "interleaved 1 1": "c4bcf917e49b",
    "interleaved 1 64": "2a93113a47c6",
    "interleaved 3 64": "795f5d6e03bd",
    "decode-priority 1 1": "9cf80ebdfa59",
    "decode-priority 1 64": "ac9eef484f65",
    "decode-priority 3 64": "863e9acd7812",
    "mixed 1 1": "f773e5f71884",
    "mixed 1 64": "e23ab8868001",
    "mixed 3 64": "dacc29fd6348",
}


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_where_there_is_room_one_waits_for_a_place_only(policy: SchedulePolicy) -> None:
    config = replace(CONFIG, policy=policy)
    observed = Simulation(config, AMPLE, Workload(seed=3)).run(8_000)
    assert observed.longest_decode_gap == config.longest_decode_gap
    assert observed.longest_prompt_gap == config.longest_prompt_gap
    assert observed.most_overtakes == observed.num_preemptions == 0
    assert observed.most_of_crowded_bound == 0
    assert 0.2 < observed.most_of_start_bound <= 1


@pytest.mark.parametrize("policy", [policy for policy in SchedulePolicy if policy != "prefill-first"])
@pytest.mark.parametrize("grid", [1, 64])
@pytest.mark.parametrize("bound", ["target_itl_s", "decode_gap_s"])
def test_automatic_budgets_keep_every_promise_and_the_target(
    policy: SchedulePolicy, grid: int, bound: str
) -> None:
    target_s = 0.25
    sizer = ChunkSizer(SizeRules(**{"grid": grid, bound: target_s}))  # type: ignore[arg-type]
    config = replace(CONFIG, policy=policy, chunk_size=2048, grid=grid, auto_chunk=True)
    workload = replace(CROWDED, seed=grid, shrink=0.003)
    observed = Simulation(config, crowded(grid == 1, 64), workload, sizer).run(8_000)
    assert observed.counts["finished"] > 50
    assert observed.counts["preempted"] > 10
    assert len(observed.waits_s) > 300
    assert sum(wait > 1.25 * target_s for wait in observed.waits_s) < 0.05 * len(observed.waits_s)
    assert sorted(observed.waits_s)[len(observed.waits_s) // 2] > 0.3 * target_s  # and it is made use of


def test_any_settings_keep_the_promises() -> None:
    random = Random(0)
    for seed in range(40):
        grid = random.choice([1, 1, 16, 48, 64])
        chunk_size = (
            random.choice([0, 1, 7, 64, 100, 192, 500, 512, 1024]) * grid // (64 if grid == 64 else 1)
        )
        chunk_size = -(-chunk_size // grid) * grid
        max_running = random.randint(1, 20)
        config = ScheduleConfig(
            policy=random.choice(list(SchedulePolicy)),
            chunk_size=chunk_size,
            step_tokens=random.choice([None, max_running + grid + random.randint(0, 600)])
            if chunk_size
            else None,
            max_running=max_running,
            max_waiting=random.randint(1, 20),
            max_chunk_steps=random.randint(1, 8),
            max_decode_steps=random.randint(1, 8),
            max_overtakes=random.randint(0, 4),
            grid=grid,
        )
        limits = CacheLimits(random.randint(20, 80), random.choice([16, 64]), random.random() < 0.5)
        workload = Workload(seed, most_prompt=800, most_answer=200, shrink=random.choice([0, 0.01]))
        Simulation(config, limits, workload, depth=1 + seed % 5).run(600)


# Schedulers that break a promise.


def never_takes_chunks(self: Turns) -> bool:
    return True


def never_takes_decodes(self: Turns) -> bool:
    return False


def admits_whoever_fits(waiting: Any, num_places: int, num_room: int, *rest: Any) -> Any:
    return choose_admissions(waiting, num_places, num_room, 10**9)


def ignores_the_budget(wants: Any, budget: int | None, *, min_share: int, grid: int) -> list[int]:
    return share_chunks(wants, None if budget is None else budget + 64, min_share=min_share, grid=grid)


def ignores_the_grid(wants: Any, budget: int | None, *, min_share: int, grid: int) -> list[int]:
    return share_chunks(wants, budget and budget - 1, min_share=min_share, grid=1)


def serves_only_the_first(wants: Any, budget: int | None, *, min_share: int, grid: int) -> list[int]:
    served = share_chunks(wants[:1], budget, min_share=min_share, grid=grid)
    return [*served, *(want.start for want in wants[1:])]


def loses_a_block(abort: Callable[..., None]) -> Callable[..., None]:
    def broken(self: BatchScheduler, plan: StepPlan) -> None:
        abort(self, plan)
        self._requests[plan.spans[0].request_id].num_held += 1

    return broken


def forgets_a_span(issue: Callable[..., StepPlan]) -> Callable[..., StepPlan]:
    def broken(self: BatchScheduler, choices: Any, *rest: Any, **more: Any) -> StepPlan:
        return issue(self, choices[:3], *rest, **more)

    return broken


def takes_from_the_oldest(preempt: Callable[..., None]) -> Callable[..., None]:
    def broken(self: BatchScheduler, *rest: Any) -> None:
        self._requests = dict(reversed(self._requests.items()))
        preempt(self, *rest)
        self._requests = dict(reversed(self._requests.items()))

    return broken


MIXED = SchedulePolicy.MIXED


@pytest.mark.parametrize(
    ("policy", "grid", "target", "name", "broken", "message"),
    [
        (SchedulePolicy.DECODE_PRIORITY, 1, Turns, "takes_decodes", never_takes_chunks, "for its next chunk"),
        (SchedulePolicy.INTERLEAVED, 1, Turns, "takes_decodes", never_takes_chunks, "for its next chunk"),
        (
            SchedulePolicy.PREFILL_FIRST,
            1,
            Turns,
            "takes_decodes",
            never_takes_decodes,
            "decode waits too long",
        ),
        (MIXED, 1, Turns, "takes_decodes", never_takes_decodes, "a decode is left out"),
        (MIXED, 1, batch_scheduler, "_by_turn", attrgetter("arrival"), "for its next chunk"),
        (MIXED, 1, batch_scheduler, "choose_admissions", admits_whoever_fits, "overtaken too often"),
        (MIXED, 1, batch_scheduler, "share_chunks", ignores_the_budget, "more than the budget"),
        (MIXED, 64, batch_scheduler, "share_chunks", ignores_the_grid, "off the grid"),
        (MIXED, 1, batch_scheduler, "share_chunks", serves_only_the_first, "for its next chunk"),
        (MIXED, 1, BatchScheduler, "abort", loses_a_block(BatchScheduler.abort), "a block is lost"),
        (MIXED, 1, BatchScheduler, "_issue", forgets_a_span(BatchScheduler._issue), None),
        (MIXED, 1, BatchScheduler, "_admit", lambda self, max_running: None, "nothing to run"),
        (
            MIXED,
            1,
            BatchScheduler,
            "_preempt_newest",
            takes_from_the_oldest(BatchScheduler._preempt_newest),
            "the oldest was preempted",
        ),
    ],
)
def test_a_scheduler_that_breaks_a_promise_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    policy: SchedulePolicy,
    grid: int,
    target: Any,
    name: str,
    broken: Any,
    message: str,
) -> None:
    monkeypatch.setattr(target, name, broken)
    simulation = Simulation(replace(CONFIG, policy=policy, grid=grid), crowded(True, 64), CROWDED)
    with pytest.raises(AssertionError, match=message):
        simulation.run(25_000)
