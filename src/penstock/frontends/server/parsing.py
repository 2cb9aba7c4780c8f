"""From the bytes of a body to its parameters, or to an error that names the one that is wrong."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from penstock.frontends.server.bodies import Body
from penstock.frontends.server.limits import MAX_CONTAINERS, has_too_many_containers
from penstock.frontends.server.problems import ApiError
from penstock.models.reading import shortened

# A message of a rule about several parameters begins with the one to change.
_FIRST_NAME = re.compile(r"([a-z][a-z_]*)[ =]")

_Body = TypeVar("_Body", bound=Body)


def parse(raw: bytes, kind: type[_Body]) -> _Body:
    if has_too_many_containers(raw):
        raise ApiError(
            400,
            f"the body has more than {MAX_CONTAINERS} lists and objects in it: this server takes no more; send less",
            code="invalid_value",
        )
    try:
        # Refuses NaN, text that is no Unicode and deep nesting, besides what is no JSON.
        value = from_json(raw, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not accepted: give a JSON object", code="invalid_json")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _api_error(error.errors(include_url=False)[0], kind) from None


def _api_error(error: Mapping[str, Any], kind: type[Body]) -> ApiError:
    param = _path(error["loc"])
    match error["type"]:
        case "missing":
            return ApiError(400, f"{param} is missing", code="missing_required_parameter", param=param)
        case "unknown_parameter" | "unsupported_parameter" as code:
            param = _path((*error["loc"], error["ctx"]["name"]))
            said = f"unknown parameter: {param}"
            if code == "unsupported_parameter":
                said = f"{param} is not supported: {error['ctx']['reason']}"
            return ApiError(400, said, code=code, param=param)
    reason = str(error["msg"]).removeprefix("Value error, ").replace("Input should", "it should")
    if param is None:
        named = _FIRST_NAME.match(reason)
        known = named is not None and named[1] in kind.model_fields
        return ApiError(
            400, reason, code="invalid_value", param=named[1] if named is not None and known else None
        )
    is_type = str(error["type"]).endswith("_type")
    message = f"{param}={_shown(error['input'])} is not accepted: {reason}"
    return ApiError(400, message, code="invalid_type" if is_type else "invalid_value", param=param)


def _path(location: tuple[int | str, ...]) -> str | None:
    """`messages[0].content`; None for the body itself."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return shortened(path.removeprefix("."), 100) or None


def _shown(value: object) -> str:
    match value:
        case dict():
            return "{...}"
        case list():
            return "[...]"
        case _:
            return shortened(repr(value[:100] if isinstance(value, str) else value), 60)
