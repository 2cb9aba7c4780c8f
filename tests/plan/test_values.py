"""Values stay as they are made: whoever holds one need not copy it."""

import importlib
import inspect
import pkgutil
from dataclasses import is_dataclass
from typing import Any

from penstock import plan
from penstock.plan.admission import TrackedRequest


def test_every_dataclass_but_a_tracked_request_is_frozen() -> None:
    modules = [
        importlib.import_module(f"penstock.plan.{found.name}")
        for found in pkgutil.iter_modules(plan.__path__)
    ]
    classes: set[Any] = {kind for module in modules for _, kind in inspect.getmembers(module, is_dataclass)}
    changeable = {kind for kind in classes if not kind.__dataclass_params__.frozen}
    assert changeable == {TrackedRequest}
    assert len(classes) > 30
