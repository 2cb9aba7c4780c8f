"""The sandbox of chat templates: Jinja's own keeps a template from reaching out, and here it is kept from taking
time and memory without bound."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2.exceptions
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor
from jinja2.runtime import Context

_STEP = 64  # what a turn of a loop or a call costs, in characters
_WIDE = re.compile(r"\d{6}")  # in a format, a field of a hundred thousand characters or more


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """For one rendering. Characters and list elements that are made, turns of loops and calls are all paid for
    before they happen, out of `budget`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, budget: int = 0, **options: Any) -> None:
        super().__init__(finalize=self._output, **options)
        self._left = budget
        del self.globals["lipsum"]  # whole pages of text
        self.filters = {name: self.paid(function) for name, function in self.filters.items()}
        self.filters[_TURNS] = self._turns

    def spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise jinja2.exceptions.SecurityError("it makes more text, or takes more steps, than any needs")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+":
                self.spend(_size(left) + _size(right))
            case "*" if isinstance(left, int) and isinstance(right, int):
                self.spend(left.bit_length() + right.bit_length())
            case "*":
                self.spend(_size(left) * _number(right) + _size(right) * _number(left))
            case "**" if isinstance(left, int):
                self.spend(left.bit_length() * _number(right))
            case "%" if isinstance(left, str):
                self._check_format(left)
                fields = right if isinstance(right, tuple) else (right,)
                self.spend(len(left) + sum(_size(field) + _number(field) for field in fields))
        return super().call_binop(context, operator, left, right)

    # Named as in Jinja, so that no keyword argument of the template's collides.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self._pay(getattr(__obj, "__name__", ""), (getattr(__obj, "__self__", None), *args), kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in ("expandtabs", "translate") and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            self._check_format(value.__self__)
        return wrapped

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Metered().visit(source), *args, **kwargs)

    def _output(self, value: Any) -> Any:
        self.spend(_size(value))
        return value

    def _turns(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(_STEP)
            yield item

    def paid(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that costs what a call does."""

        @functools.wraps(function)
        def paid(*args: Any, **kwargs: Any) -> Any:
            self._pay(function.__name__.removeprefix("do_"), args, kwargs)
            return function(*args, **kwargs)

        return paid

    def _pay(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """For a call: widths, counts and the like are numbers, and two kinds of text can be multiplied."""
        values = (*args, *kwargs.values())
        self.spend(_STEP + sum(_number(value) for value in values))
        texts = [value for value in values if isinstance(value, str)]
        if name == "format" and texts:
            self._check_format(texts[0])
        if name == "replace" and len(texts) > 2:
            self.spend(
                len(texts[0]) + (texts[0].count(texts[1]) if texts[1] else len(texts[0])) * len(texts[2])
            )
        if name == "join":
            separator = max(map(len, texts), default=0)
            for value in values:
                if isinstance(value, list | tuple):
                    self.spend(sum(_size(item) + separator for item in value))

    def _check_format(self, text: str) -> None:
        if _WIDE.search(text):
            raise jinja2.exceptions.SecurityError("it formats a value in a field that is absurdly wide")


_TURNS = "penstock turns"  # no name that a template could write


class _Metered(jinja2.visitor.NodeTransformer):
    """A template in which loops count their turns and `~` is `+` of texts."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _TURNS)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        texts = [_filtered(part, "string") for part in node.nodes]
        return functools.reduce(lambda left, right: jinja2.nodes.Add(left, right, lineno=node.lineno), texts)


def _filtered(node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Expr:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0
