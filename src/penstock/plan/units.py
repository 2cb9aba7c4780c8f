"""Numbers as people read them."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: int) -> str:
    """Bytes in binary units: 512 B, 1.5 KiB, 3.3 GiB."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = 1
    # By the rounded number, so that one byte short of 1 MiB reads 1.0 MiB and not 1024.0 KiB.
    while round(num_bytes / 1024**power, 1) >= 1024 and power < len(_UNITS) - 1:
        power += 1
    return f"{num_bytes / 1024**power:.1f} {_UNITS[power]}"
