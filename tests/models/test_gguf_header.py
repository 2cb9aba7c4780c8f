"""No file, however damaged, makes a reader crash, hang or allocate without bound."""

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from penstock.errors import ModelError, ModelFileError
from penstock.models.gguf.header import read_header
from penstock.models.opened import open_model
from tests.models.builders import TOKENIZER, gguf_metadata, hf_model, load_tensor, write_gguf
from tests.models.test_gguf_file import float_tensors


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole model with a tokenizer, of which the header is a large part."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = hf_model("llama", vocab_size=265, **sizes)
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    metadata = gguf_metadata(model.config) | TOKENIZER | {"general.alignment": 32}
    return write_gguf(path, metadata, float_tensors(model, "llama")).read_bytes()


def try_everything(path: Path) -> bool:
    """Open and load all, within bounds of time and memory. False when it was refused."""
    complaint = ""
    tracemalloc.start()
    start = time.thread_time()
    try:
        opened = open_model(path)
        for name in opened.source.names():
            load_tensor(opened.source, name)
        opened.tokenizer.decode(opened.tokenizer.encode("a ab <s> é", add_special_tokens=True))
        opened.source.close()
        return True
    except ModelError as error:
        complaint = str(error)
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert time.thread_time() - start < 5
        assert peak < 64 << 20
        assert "\n" not in complaint
        assert len(complaint) < 1000


def test_the_whole_file_loads(tmp_path: Path, small_gguf: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small_gguf)
    assert try_everything(path)


def test_truncation_anywhere_is_an_error(tmp_path: Path, small_gguf: bytes) -> None:
    path = tmp_path / "model.gguf"
    rng = random.Random(0)
    ends = {*range(64), *rng.sample(range(len(small_gguf)), 150), len(small_gguf) - 32 * 4}
    for end in sorted(ends):
        path.write_bytes(small_gguf[:end])
        assert not try_everything(path), end


def test_flipped_bytes_give_an_error_or_a_model(tmp_path: Path, small_gguf: bytes) -> None:
    path = tmp_path / "model.gguf"
    rng = random.Random(1)
    header_bytes = small_gguf.index(b"output_norm.weight") + 100
    outcomes = []
    for _ in range(400):
        damaged = bytearray(small_gguf)
        for _ in range(rng.choice([1, 1, 1, 3, 20])):
            value = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            damaged[rng.randrange(header_bytes)] = value
        path.write_bytes(damaged)
        outcomes.append(try_everything(path))
    assert 0 < sum(outcomes) < len(outcomes)


def test_overwritten_numbers_give_an_error_or_a_model(tmp_path: Path, small_gguf: bytes) -> None:
    """Whole 64-bit fields, aligned with nothing, set to what overflows and what is merely large."""
    path = tmp_path / "model.gguf"
    rng = random.Random(2)
    for _ in range(200):
        at = rng.randrange(8, small_gguf.index(b"output_norm.weight") + 100)
        value = rng.choice([0, 1 << 63, (1 << 64) - 1, 1 << 40, 1 << 31, len(small_gguf)])
        path.write_bytes(small_gguf[:at] + struct.pack("<Q", value) + small_gguf[at + 8 :])
        try_everything(path)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_bytes(
    *,
    keys: bytes = b"",
    num_keys: int = 0,
    tensors: bytes = b"",
    num_tensors: int = 0,
    data: int = 0,
    version: int = 3,
) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + keys + tensors
    return header + bytes(-len(header) % 32 + data)


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def array(kind: int, count: int) -> bytes:
    return string("key") + struct.pack("<IIQ", 9, kind, count)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "ends within its header"),
        (b"GGML" + bytes(100), "not a GGUF file"),
        (gguf_bytes(version=1), "version 1"),
        (gguf_bytes(version=4), "version 4"),
        (gguf_bytes(version=3 << 24), "big-endian"),
        (gguf_bytes(num_keys=1 << 63), "metadata keys"),
        (gguf_bytes(num_tensors=1 << 63), "tensors are more"),
        (gguf_bytes(keys=struct.pack("<Q", 1 << 62), num_keys=1, data=100), "ends within"),
        (gguf_bytes(keys=string("k") + struct.pack("<I", 99), num_keys=1), "unknown type 99"),
        (gguf_bytes(keys=array(4, 1 << 60), num_keys=1, data=100), "values are more"),
        (gguf_bytes(keys=array(8, 1 << 60), num_keys=1, data=100), "strings are more"),
        (gguf_bytes(keys=array(9, 1), num_keys=1, data=100), "nested type 9"),
        (gguf_bytes(keys=(string("k") + struct.pack("<IB", 0, 1)) * 2, num_keys=2, data=100), "twice"),
        (
            gguf_bytes(keys=string("general.alignment") + struct.pack("<II", 4, 24), num_keys=1),
            "alignment is 24",
        ),
        (
            gguf_bytes(keys=string("general.alignment") + struct.pack("<II", 4, 0), num_keys=1),
            "alignment is 0",
        ),
        (gguf_bytes(tensors=tensor("t", []), num_tensors=1, data=100), "0 dimensions"),
        (gguf_bytes(tensors=tensor("t", [1] * 5), num_tensors=1, data=100), "5 dimensions"),
        (gguf_bytes(tensors=tensor("t", [0, 4]), num_tensors=1, data=100), "impossible shape"),
        (gguf_bytes(tensors=tensor("t", [1 << 62, 1 << 62]), num_tensors=1, data=100), "impossible shape"),
        (gguf_bytes(tensors=tensor("t", [33], 2), num_tensors=1, data=100), "impossible shape"),
        (gguf_bytes(tensors=tensor("t", [4], 4), num_tensors=1, data=100), "unknown type 4"),
        (gguf_bytes(tensors=tensor("t", [4], 0, 1 << 63), num_tensors=1, data=100), "beyond the file"),
        (gguf_bytes(tensors=tensor("t", [4], 0, 8), num_tensors=1, data=100), "misplaced"),
        (gguf_bytes(tensors=tensor("t", [8]) + tensor("u", [8]), num_tensors=2, data=100), "misplaced"),
        (
            gguf_bytes(tensors=tensor("t", [8]) + tensor("t", [8], 0, 32), num_tensors=2, data=100),
            "'t' is there twice",
        ),
    ],
)
def test_each_check_has_its_words(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=words):
        read_header(path)


def test_a_vast_sparse_file_costs_neither_time_nor_memory(tmp_path: Path) -> None:
    """A header that claims a billion strings, in a file that has the room for them."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(keys=array(8, 1 << 30), num_keys=1))
    os.truncate(path, 1 << 40)
    assert not try_everything(path)


def test_values_are_read_as_written(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "a.int": -3,
        "a.uint": 7,
        "a.float": 0.5,
        "a.bool": True,
        "a.text": "héllo",
        "a.strings": ["x", "", "▁"],
        "a.numbers": [1, 2, 3],
    }
    tensors = {"t": (np.arange(6, dtype=np.float32).reshape(2, 3), Kind.F32)}
    header = read_header(write_gguf(tmp_path / "model.gguf", values, tensors))
    assert header.metadata["general.architecture"] == "llama"
    read = {
        key: value.tolist() if isinstance(value := header.metadata[key], np.ndarray) else value
        for key in values
    }
    assert read == values
    assert header.tensors["t"].shape == (2, 3)
    assert header.tensors["t"].num_bytes == 24
