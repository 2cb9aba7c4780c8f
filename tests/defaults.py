"""What is taken where a caller says nothing: defaults of functions and values, as a layer's tests know them."""

import importlib
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


def numbers_by_default(layer: ModuleType) -> dict[str, set[str]]:
    """All that are neither 0 nor false: whose they are, as module, function and parameter."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for info in pkgutil.walk_packages(layer.__path__, f"{layer.__name__}."):
        for name, function in _functions(importlib.import_module(info.name)):
            for parameter in inspect.signature(function).parameters.values():
                if isinstance(parameter.default, int | float) and parameter.default:
                    path = info.name.removeprefix(f"{layer.__name__}.")
                    found[repr(parameter.default)].add(f"{path}.{name}.{parameter.name}")
    return dict(found)


def _functions(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            for method, kept in vars(value).items():
                function = getattr(kept, "__func__", kept)
                if inspect.isfunction(function):
                    yield name if method == "__init__" else f"{name}.{method}", function
