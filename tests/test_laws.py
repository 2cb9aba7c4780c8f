"""Laws about the code as a whole, beside who imports whom."""

import ast
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.models import OptionInfo

import penstock
from penstock.engine.sampler import SamplingParams
from penstock.frontends import options
from penstock.frontends.generate import generate
from penstock.frontends.plan import plan
from penstock.frontends.serve import serve
from penstock.frontends.server.bodies import GenerationBody
from penstock.frontends.tune import tune
from penstock.frontends.verify import verify

ROOT = Path(penstock.__file__).parent
DECLARED = [value for value in vars(options).values() if isinstance(value, OptionInfo)]


def option(command: Any, name: str) -> Any:
    return signature(command).parameters[name].default


@pytest.mark.parametrize("command", [generate, serve], ids=lambda command: command.__name__)
def test_an_engines_options_are_those_that_are_declared_once(command: Any) -> None:
    used = {id(parameter.default) for parameter in signature(command).parameters.values()}
    assert DECLARED
    assert {id(value) for value in DECLARED} <= used


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (plan, ("dtype", "weights", "device")),
        (tune, ("model", "dtype", "device", "threads")),
        (verify, ("device", "threads")),
    ],
)
def test_other_commands_share_them(command: Any, names: tuple[str, ...]) -> None:
    for name in names:
        assert option(command, name) is option(generate, name)


def test_options_are_called_as_the_settings() -> None:
    keywords = set(penstock.plan.EngineKeywords.__annotations__)
    parameters = set(get_type_hints(generate))
    assert keywords - parameters == {"reuse_tokens"}


def test_generate_has_every_sampling_parameter() -> None:
    assert {field.name for field in fields(SamplingParams)} <= set(get_type_hints(generate))


def test_the_server_has_every_sampling_parameter() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert names - set(GenerationBody.model_fields) == {"bad_sequences"}  # which are texts there: `bad_words`


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_error_text_is_parsed(path: Path) -> None:
    """What handles an error asks for its fields: no regular expression, and no replacing, over its text."""
    for handler in ast.walk(ast.parse(path.read_text())):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        for call in ast.walk(handler):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                is_parsing = call.func.attr in (
                    "replace",
                    "fullmatch",
                    "match",
                    "search",
                    "sub",
                    "removeprefix",
                )
                names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
                assert not (is_parsing and handler.name in names), f"{path}:{call.lineno}"


@pytest.mark.parametrize("name", ["frontends/exits.py", "frontends/server/errors.py", "errors.py"])
def test_what_presents_errors_has_no_regular_expressions(name: str) -> None:
    imported = [
        alias.name
        for node in ast.walk(ast.parse((ROOT / name).read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    assert "re" not in imported
