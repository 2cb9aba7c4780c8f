"""Chat templates, rendered as transformers renders them: Jinja in a sandbox."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import CodeType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from penstock.errors import ModelFileError, PromptError
from penstock.models.reading import first_line
from penstock.models.text.sandbox import BoundedEnvironment

# What a template may spend, see `BoundedEnvironment`: so much, and more where it is given more.
_BUDGET = 64 << 20
_BUDGET_PER_CHARACTER = 32


class ChatTemplate:
    """A template and the special tokens that it may name, such as `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        values = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
        }
        num_given = sum(len(str(text)) for message in messages for text in message.values())
        environment = _environment(_BUDGET + _BUDGET_PER_CHARACTER * num_given)
        try:
            template = jinja2.Template.from_code(environment, self._code, environment.globals)
            parts = []
            for part in template.generate(values):
                environment.spend(len(part))
                parts.append(part)
            return "".join(parts)
        except _Refusal as error:
            raise PromptError(
                f"the model's chat template refuses these messages: {first_line(error)}"
            ) from error
        except Exception as error:  # the template is the file's code, and may fail in any way
            raise ModelFileError(f"the model's chat template fails: {first_line(error)}") from error

    @cached_property
    def _code(self) -> CodeType:
        return _environment(_BUDGET).compile(self.source)


def _environment(budget: int) -> BoundedEnvironment:
    environment = BoundedEnvironment(
        budget,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = environment.paid(_to_json)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Refusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only passes them through."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_pass_through"), [], [], body).set_lineno(line)

    def _pass_through(self, caller: Callable[[], str]) -> str:
        return caller()


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
