"""The numbers that a layer is written with, where nobody gives others: constants, and defaults of what is called.

What most of them do shows in times and limits, not in results. So a layer's tests name them all: a change is meant.
"""

import ast
import importlib
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


def numbers_of(layer: ModuleType) -> dict[str, set[str]]:
    """All that are neither 0 nor false, and where: module and name, or module, function and parameter."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for info in pkgutil.walk_packages(layer.__path__, f"{layer.__name__}."):
        module, path = importlib.import_module(info.name), info.name.removeprefix(f"{layer.__name__}.")
        for name, value in (*_constants(module), *_defaults(module)):
            if _is_number(value):
                found[repr(value)].add(f"{path}.{name}")
    return dict(found)


def _is_number(value: object) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(part, int | float) for part in value)
    return isinstance(value, int | float) and bool(value)


def _constants(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """That are written as numbers in the module, or in a class of it."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    owners: list[ast.Module | ast.ClassDef] = [tree]
    for owner in owners + [node for node in tree.body if isinstance(node, ast.ClassDef)]:
        values = vars(module) if isinstance(owner, ast.Module) else vars(vars(module)[owner.name])
        prefix = "" if isinstance(owner, ast.Module) else f"{owner.name}."
        for node in owner.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            if any(
                isinstance(part, ast.Constant) and _is_number(part.value) for part in ast.walk(node.value)
            ):
                names = [
                    part.id
                    for part in ast.walk(node)
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
                ]
                yield from ((prefix + name, values[name]) for name in names if name in values)


def _defaults(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, function in _functions(module):
        for parameter in inspect.signature(function).parameters.values():
            yield f"{name}.{parameter.name}", parameter.default


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
