"""From what goes wrong to errors in the shape of OpenAI's API."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from typing import Any

from starlette.exceptions import HTTPException

from penstock.errors import (
    CacheFullError,
    ContextLengthError,
    MemoryExhaustedError,
    ModelError,
    PenstockError,
    PromptError,
    QueueFullError,
    RequestFailedError,
    ServiceClosedError,
    SettingError,
    assigned,
)
from penstock.models.reading import shortened

# When to try again if the queue is full: by then some request will usually have ended.
RETRY_AFTER_S = 1
CLIENT_GONE = 499
SHUTTING_DOWN = "the request was cancelled: the server is shutting down; send it again"
# Status and code of errors that have no parameter, or are about the prompt; the first kind that fits.
_ANSWERS: dict[type[PenstockError], tuple[int, str]] = {
    ContextLengthError: (400, "context_length_exceeded"),
    PromptError: (400, "invalid_prompt"),
    ModelError: (400, "model_error"),  # such as a chat for a model without a chat template
    QueueFullError: (429, "queue_full"),
    ServiceClosedError: (503, "service_unavailable"),
    MemoryExhaustedError: (503, "out_of_memory"),
    CacheFullError: (503, "cache_full"),
}
# Parameters that the engine calls otherwise.
_PARAMETERS = {"json_format": "response_format", "bad_sequences": "bad_words"}
# Of the HTTP request that is being answered.
request_id: ContextVar[str] = ContextVar("request_id", default="of no name")
_log = logging.getLogger("penstock.server")


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is an error. `param` is the parameter that is wrong."""

    status: int
    message: str
    _: KW_ONLY
    code: str
    param: str | None = None
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def content(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


@contextmanager
def errors_about(prompt_param: str) -> Iterator[None]:
    """Penstock's errors as answers to a request whose prompt is in the parameter `prompt_param`."""
    try:
        yield
    except PenstockError as error:
        raise as_api_error(error, prompt_param) from error


def as_api_error(error: PenstockError, prompt_param: str | None = None) -> ApiError:
    """What to answer for an error that came up while a request was prepared: it is about what the client sent."""
    if isinstance(error, SettingError):
        param = None if error.setting is None else _parameter(error.setting)
        message = error.message(lambda name, value: assigned(_parameter(name), value))
        return ApiError(400, message, code="invalid_value", param=param)
    for kind, (status, code) in _ANSWERS.items():
        if isinstance(error, kind):
            headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else None
            param = prompt_param if status == 400 else None
            return ApiError(status, str(error), code=code, param=param, headers=headers)
    return internal(error, str(error))


def _parameter(setting: str) -> str:
    return _PARAMETERS.get(setting, setting)


def as_failure(error: PenstockError) -> ApiError:
    """What to answer for an error that ended a request on its way: what is not about the request is the server's."""
    match error:
        case SettingError() | PromptError() | MemoryExhaustedError() | ServiceClosedError():
            return as_api_error(error)
        case RequestFailedError():  # the engine has told of it
            return ApiError(500, str(error), code="internal_error")
        case _:
            return internal(error, str(error))


def internal(
    error: Exception, message: str = "the server failed on this request, which is its own fault"
) -> ApiError:
    """What to answer for an error that is the server's; the log has its traceback."""
    _log.error("request %s failed", request_id.get(), exc_info=error)
    return ApiError(500, message, code="internal_error")


def cancelled() -> ApiError:
    """For a request that was cancelled, though not by its client."""
    return ApiError(503, SHUTTING_DOWN, code="service_unavailable")


def client_gone() -> ApiError:
    """Nobody reads this; the number is what proxies log for a client that hung up."""
    return ApiError(CLIENT_GONE, "the client has gone", code="client_closed_request")


def as_http_error(method: str, path: str, error: HTTPException) -> ApiError:
    """What to answer for a path, or a method, that there is not."""
    headers, path = error.headers, shortened(path)
    if error.status_code == 405:
        allowed = (headers or {}).get("Allow", "another method")
        message = f"{method} {path} is not accepted: use {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers=headers)
    if error.status_code == 404:
        detail = "" if error.detail == "Not Found" else f": {error.detail}"
        return ApiError(404, f"there is no {path} here{detail}", code="not_found", headers=headers)
    return ApiError(error.status_code, str(error.detail), code="http_error", headers=headers)
