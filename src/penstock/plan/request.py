"""The unit of work of a step: a range of one request's tokens."""

from dataclasses import dataclass

from penstock.errors import SettingError
from penstock.plan.checks import check_int


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range [start, end) of a request's tokens, never empty. A decode is a span of length 1."""

    start: int
    end: int

    def __post_init__(self) -> None:
        check_int("start", self.start, 0)
        check_int("end", self.end, 0)
        if self.end <= self.start:
            raise SettingError("end", self.end, "an end above the start", beside={"start": self.start})

    def __len__(self) -> int:
        return self.end - self.start
