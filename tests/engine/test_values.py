"""Values stay as they are made: whoever holds one, on whichever thread, need not copy it."""

import importlib
import inspect
import pkgutil
from dataclasses import is_dataclass
from typing import Any

from penstock import engine
from tests.defaults import numbers_by_default

# A caller that says nothing gets nothing: 0, no, none. But for these.
BY_DEFAULT = {
    "1": "run.Run.max_tokens",
    "1.0": "sampler.SamplingParams.repetition_penalty sampler.SamplingParams.top_p",
    "10.0": """
        stages.control.connect.stage_timeout_s stages.control.connect.timeout_s
        stages.pipeline.Pipeline.stage_timeout_s stages.workers.WorkerPlace.open.stage_timeout_s
        stages.workers.WorkerPlace.open.timeout_s
    """,
    "16": "service.ServiceConfig.max_snapshots",
    "2147483648": "sampler._require_int.limit",
    "True": """
        grammar.CallGrammar.grammar.is_parallel reuse.Prefix._snapshot.in_memory
        service.ServiceConfig.reuse stages.pipeline.Pipeline.same_machine
    """,
}


def test_dataclasses_are_frozen_but_for_steps_in_flight_recordings_and_times() -> None:
    names = [found.name for found in pkgutil.walk_packages(engine.__path__, "penstock.engine.")]
    modules = [importlib.import_module(name) for name in names]
    classes: set[Any] = {
        kind
        for module in modules
        for _, kind in inspect.getmembers(module, is_dataclass)
        if kind.__module__.startswith("penstock.engine")
    }
    changeable = {kind.__qualname__ for kind in classes if not kind.__dataclass_params__.frozen}
    assert changeable == {"_InFlight", "Peer", "_Recording", "StageTimes"}
    assert len(classes) > 30


def test_what_a_caller_does_not_say() -> None:
    assert numbers_by_default(engine) == {number: set(names.split()) for number, names in BY_DEFAULT.items()}
