"""No file, however damaged, makes a reader crash, hang or allocate without bound."""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
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
from tests.models.test_tokenizer import MULTIPLYING, byte_level_backend, save_folder


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


# Allocations of torch and of Rust are not seen by tracemalloc, but the system refuses them. A hang ends by a signal.
LIMITED = """
import resource, signal, sys
from pathlib import Path
from penstock.errors import ModelError
from penstock.models.opened import open_model
from tests.models.builders import load_tensor

def try_all(folder):
    refused = 0
    for path in sorted(Path(folder).iterdir()):
        signal.alarm(10)
        try:
            opened = open_model(path)
            for name in opened.source.names():
                load_tensor(opened.source, name)
            ids = opened.tokenizer.encode("a ab <s> é" * 14, add_special_tokens=True)
            opened.tokenizer.decode(ids)
            opened.source.close()
        except ModelError as error:
            assert "memory" not in str(error).lower(), (path, error)
            assert len(str(error).splitlines()) == 1, (path, error)
            refused += 1
    return refused

open_model(Path(sys.argv[1]))  # what is loaded and started once does not count
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
print(try_all(sys.argv[2]))
"""


def damaged_gguf(folder: Path, whole: bytes) -> Path:
    """300 files; the sound one."""
    rng = random.Random(3)
    header_bytes = whole.index(b"output_norm.weight") + 100
    for index in range(300):
        at = rng.randrange(8, header_bytes)
        value = rng.choice([1 << 63, (1 << 64) - 1, 1 << 40, 1 << 31, 1 << 24, rng.randrange(1 << 64)])
        width, code = rng.choice([(8, "<Q"), (4, "<I"), (1, "<B")])
        damage = struct.pack(code, value % (1 << 8 * width))
        (folder / f"{index:03}.gguf").write_bytes(whole[:at] + damage + whole[at + width :])
    sound = folder.with_name("whole.gguf")
    sound.write_bytes(whole)
    return sound


STEPS: list[Any] = [
    *(content for _, content in MULTIPLYING),
    *({"type": kind} for kind in ("NFKC", "Lowercase", "ByteLevel", "Fuse", "Whitespace", "Sequence", "No")),
    *(
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in ("(a+)+$", "(", "")
    ),
    *({"type": "Prepend", "prepend": text} for text in ("", "a", "a" * 60)),
    *({"type": "Replace", "pattern": {"String": old}, "content": "aaa"} for old in ("", "a", "é")),
]
VALUES: list[Any] = [None, True, 0, -1, 7, 1e308, 10**30, "", "a" * 10_000, [], [[]], {}, {"type": "a"}]
VALUES += [["<s>"], *STEPS]


def changed(value: Any, rng: random.Random) -> Any:
    """A JSON value with one part of it replaced by another."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        keys = list(value if isinstance(value, dict) else range(len(value)))
        key = rng.choice(keys)
        copy = value.copy()
        copy[key] = changed(value[key], rng)
        return copy
    if isinstance(value, int) and rng.random() < 0.5:
        return value * rng.choice([0, -1, 2, 1 << 20])
    return rng.choice(VALUES)


def damaged_folders(folder: Path, _: bytes) -> Path:
    """Folders in each of which one file is not what it was: the configuration, the tokenizer, the weights."""
    sound = folder.with_name("whole")
    hf_model("llama", vocab_size=400).save_pretrained(sound)
    config = {"bos_token": "<s>", "added_tokens_decoder": {"0": {"content": "<s>", "special": True}}}
    save_folder(sound, byte_level_backend(), {**config, "additional_special_tokens": ["ab"]})
    names = ("config.json", "tokenizer.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    rng = random.Random(4)
    for index in range(150):
        damaged = folder / f"{index:03}"
        damaged.mkdir()
        for file in sound.iterdir():
            os.link(file, damaged / file.name)
        name = names[index % len(names)]
        content = (sound / name).read_bytes()
        (damaged / name).unlink()
        if name == "model.safetensors":
            at = rng.randrange(2000)
            content = content[:at] + rng.choice([b"0", b"9", b"[", b'"', b"\xff", b"{}"]) + content[at + 1 :]
        elif name == "tokenizer.json" and rng.random() < 0.5:
            part = rng.choice(["normalizer", "pre_tokenizer", "post_processor", "decoder"])
            content = json.dumps({**json.loads(content), part: rng.choice(STEPS)}).encode()
        else:
            content = json.dumps(changed(json.loads(content), rng)).encode()
        (damaged / name).write_bytes(content)
    # What is small on disk and large in memory.
    large = '{"a": [' + "{}," * (10 << 20) + "0]}", "[" * (1 << 20), '{"a": ' + "9" * 5000 + "}"
    for index, text in enumerate(large):
        damaged = folder / f"large-{index}"
        shutil.copytree(sound, damaged)
        (damaged / "tokenizer.json").write_text(text)
    return sound


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("damage", [damaged_gguf, damaged_folders])
def test_damaged_files_take_little_memory_of_any_kind(
    tmp_path: Path, small_gguf: bytes, damage: Callable[[Path, bytes], Path]
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    sound = damage(corpus, small_gguf)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(sound), str(corpus)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert 50 < int(done.stdout) < len(list(corpus.iterdir()))


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
