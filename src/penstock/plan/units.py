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
_RATE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?([kKMGT]?)(i?)(b|bit|B)(/s|ps)?", re.ASCII)
_BARE_RATE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?([kKMGT]?)", re.ASCII)
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


def parse_rate(text: object, name: str = "link") -> float:
    """The bytes a second of a text such as 10Gb/s, 4Mbit/s, 1.2GB/s or 800MiB/s: b is bits, B bytes, and prefixes are
    decimal, as networks have them, unless they are written with an i. `name` is the setting that an error names.

    A rate that says neither bits nor bytes is refused: they differ by eight.
    """
    accepted = "bits or bytes a second, such as 10Gb/s, 4Mb/s or 1.2GB/s"
    if not isinstance(text, str):
        raise SettingError(name, text, accepted)
    if bare := _BARE_RATE.fullmatch(text):
        raise SettingError(
            name, text, f"{bare[1]}{bare[2]}b/s or {bare[1]}{bare[2]}B/s", because="bits or bytes a second?"
        )
    match = _RATE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise SettingError(name, text, accepted)
    number, prefix, binary, unit, per_second = match.groups()
    if per_second is None:
        raise SettingError(name, text, f"{text}/s", because="a rate is of a second")
    factor = (1024 if binary else 1000) ** (" KMGT".index(prefix.upper() or " "))
    bytes_per_s: float = float(number) * factor / (1 if unit == "B" else 8)
    if not bytes_per_s:
        raise SettingError(name, text, accepted, because="nothing would arrive")
    return bytes_per_s


def format_rate(bytes_per_s: float) -> str:
    """Bits a second in decimal units: 4 Mb/s, 2.5 Gb/s."""
    bits, power = 8 * bytes_per_s, 0
    while float(f"{bits:.3g}") >= 1000 and power < 4:
        bits, power = bits / 1000, power + 1
    return f"{float(f'{bits:.3g}'):g} {' kMGT'[power].strip()}b/s"
