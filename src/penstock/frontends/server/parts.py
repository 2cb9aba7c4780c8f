"""What bodies and the objects in them have in common."""

from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from penstock.frontends.server.unsupported import Unsupported, only_known


class Part(BaseModel):
    """An object that a client sends: names, types and ranges. It is refused for the first name that is not known."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    unsupported: ClassVar[Unsupported] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, value: Any) -> Any:
        return only_known(value, _names(cls), cls.unsupported) if isinstance(value, dict) else value


@cache
def _names(kind: type[Part]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())
