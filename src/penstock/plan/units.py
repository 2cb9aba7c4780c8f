"""Numbers as people read and write them."""

import re

from penstock.errors import SettingError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# What a unit may be called, in small letters. Of two meanings of a letter, memory has the binary one.
_FACTORS = {"": 1} | {
    name: 1024**power
    for power, unit in enumerate(_UNITS)
    for name in {unit.lower(), unit.lower().removesuffix("b"), unit[0].lower()}
}
_DECIMAL = {"kb": "KiB", "mb": "MiB", "gb": "GiB", "tb": "TiB"}
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", re.ASCII)


def format_bytes(num_bytes: int) -> str:
    """Bytes in binary units: 512 B, 1.5 KiB, 3.3 GiB."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = 1
    # By the rounded number, so that one byte short of 1 MiB reads 1.0 MiB and not 1024.0 KiB.
    while round(num_bytes / 1024**power, 1) >= 1024 and power < len(_UNITS) - 1:
        power += 1
    return f"{num_bytes / 1024**power:.1f} {_UNITS[power]}"


def parse_bytes(text: object, name: str = "memory") -> int:
    """The bytes of a text such as 8GiB, 1.5 GiB, 512M or 4096, in binary units whatever their letters' case, at
    least 1. An int is taken as it is. `name` is the setting that an error names.

    GB is refused: people mean 10^9 or 2^30 by it, and a limit is no place to guess.
    """
    accepted = "bytes with a binary unit, such as 8GiB, 512MiB, 1.5G or 4096"
    if isinstance(text, int) and not isinstance(text, bool):
        num_bytes = text
    elif isinstance(text, str) and (match := _QUANTITY.fullmatch(text)):
        number, unit = match[1], match[2].lower()
        if unit in _DECIMAL:
            raise SettingError(
                name, text, f"{number}{_DECIMAL[unit]}", because=f"{match[2]} may mean two things"
            )
        if unit not in _FACTORS:
            raise SettingError(name, text, accepted, because=f"{match[2]!r} is no unit")
        whole, _, rest = number.partition(".")
        # Exact, and a part of a byte is dropped: never more than was said.
        num_bytes = int(whole + rest) * _FACTORS[unit] // 10 ** len(rest)
    else:
        raise SettingError(name, text, accepted)
    if num_bytes < 1:
        raise SettingError(name, text, accepted, because="it is no byte at all")
    return num_bytes
