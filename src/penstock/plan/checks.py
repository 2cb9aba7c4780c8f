"""The one check that every number in this package goes through."""

from penstock.errors import SettingError


def check_int(name: str, value: object, minimum: int) -> int:
    """Return `value` if it is an integer of at least `minimum`. A bool is not an integer, nor is 512.0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise SettingError(f"{name}={value!r} is not accepted: give an integer of at least {minimum}")
    return value
