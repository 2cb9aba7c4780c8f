"""What transformers' configuration classes assume: `python -m tests.models.hf_defaults` writes the table of it."""

import json
from pathlib import Path

import transformers

import penstock.models.hf
from penstock.models.hf.config import DEFAULT_KEYS, FAMILIES

TABLE = Path(penstock.models.hf.__file__).with_name("defaults.json")


def table() -> str:
    """A line for each family: the class's own attributes, before an object of it derives some from others."""
    lines = []
    for family in FAMILIES:
        config = transformers.CONFIG_MAPPING[family]
        found = {key: getattr(config, key) for key in DEFAULT_KEYS if hasattr(config, key)}
        lines.append(f'"{family}": {json.dumps(found)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    TABLE.write_text(table())
