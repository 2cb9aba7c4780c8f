"""Values stay as they are made: whoever holds one, on whichever thread, need not copy it."""

import importlib
import inspect
import pkgutil
from dataclasses import is_dataclass
from typing import Any

from penstock import engine


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
