"""No file, however damaged, makes Penstock fail otherwise than by an error of one line, hang or take much memory:
each kind in a process that the system holds to 1 GiB more than it began with, and to 10 seconds a case."""

import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.models.by_transformers.config import transformers_config
from penstock.models.hf.config import family_defaults, hf_model_config
from penstock.models.hf.families import FAMILIES, MULTIMODAL
from penstock.models.opened import open_model
from penstock.models.reading import Fields
from penstock.models.text import chat
from penstock.models.text.chat import ChatTemplate
from tests.models.builders import hf_model, load_tensor
from tests.models.test_chat import HOSTILE, MESSAGES, TEMPLATES
from tests.models.test_gguf_header import small_gguf  # noqa: F401
from tests.models.test_tokenizer import MULTIPLYING, byte_level_backend, save_folder

LIMIT_S = 10
MAX_GROWTH_BYTES = 1 << 30
Case = Callable[[], object]


def damaged_gguf(folder: Path, whole: bytes) -> Path:
    """200 files; the sound one."""
    rng = random.Random(3)
    header_bytes = whole.index(b"output_norm.weight") + 100
    for index in range(200):
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
    for index in range(100):
        damaged = folder / f"{index:03}"
        damaged.mkdir()
        for file in sound.iterdir():
            os.link(file, damaged / file.name)
        name = names[index % len(names)]
        content = (sound / name).read_bytes()
        (damaged / name).unlink()
        if name == "model.safetensors":
            at = rng.randrange(2000)
            end = rng.choice([at, len(content), len(content), len(content)])  # cut short, now and then
            at = rng.choice([at, at, at, 0, 7])  # of the header's length, too
            content = (
                content[:at] + rng.choice([b"0", b"9", b"[", b'"', b"\xff", b"{}"]) + content[at + 1 : end]
            )
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


def files(sound: Path, corpus: Path) -> Iterator[Case]:
    def load_all(path: Path) -> None:
        opened = open_model(path)
        for name in opened.source.names():
            load_tensor(opened.source, name)
        ids = opened.tokenizer.encode("a ab <s> é" * 14, add_special_tokens=True)
        opened.tokenizer.decode(ids)
        opened.source.close()

    for path in (sound, *sorted(corpus.iterdir())):
        yield partial(load_all, path)


# What a family's keys may be damaged to, and keys that not all families have a default of.
ODD: list[Any] = [None, True, 0, 1, -1, 2, 7, 64, 1 << 20, 1 << 31, 10**400, 1e308, 5e-324, 0.5, float("nan")]
ODD += ["", "auto", "rope", "yarn", [], [0], [1, 2], [0.0, 10**400], {}, {"a": {}}, ["conv"] * 4]
ODD += [{"rope_type": kind, "factor": 4.0, "alpha": 2.0} for kind in ("dynamic", "yarn", "linear", "llama3")]
OTHER_KEYS = [
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "layer_types",
    "head_dim",
    "partial_rotary_factor",
]
OTHER_KEYS += ["tie_embedding", "time_step_limit", "text_config", "no_rope_layers", "mlp_only_layers"]
OTHER_KEYS += ["full_attention_interval", "block_ff_dim", "is_causal"]
SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def configurations(sound: Path, corpus: Path) -> Iterator[Case]:
    """Of every family, one or two keys of which are changed; and some that were found so."""

    def read(values: dict[str, Any]) -> None:
        hf_model_config(Fields("config.json", values), Fields("generation_config.json", {}))

    yield partial(read, {"model_type": "llama"})
    rng = random.Random(5)
    names = [*FAMILIES, *(name for name, text in MULTIMODAL.items() if text in FAMILIES)]
    for _ in range(2500):
        name = rng.choice(names)
        values = {**family_defaults(MULTIMODAL.get(name, name)), **rng.choice([{}, SMALL])}
        for _ in range(rng.choice([1, 1, 2])):
            key = rng.choice([*values, *OTHER_KEYS])
            values[key] = (
                changed(values[key], rng) if key in values and rng.random() < 0.3 else rng.choice(ODD)
            )
        yield partial(read, {**values, "model_type": name})
    ntk = {"rope_type": "dynamic", "alpha": 2.0}
    yield partial(read, {"model_type": "hunyuan_v1_dense", "head_dim": 2, "rope_parameters": ntk})
    yield partial(read, {"model_type": "lfm2", "block_ffn_dim_multiplier": 1e308})
    absurd = Fields("config.json", {"model_type": "gpt_neox", "num_hidden_layers": 10**9})
    yield partial(transformers_config, absurd, absurd, "gpt_neox", Fields("generation_config.json", {}))
    bamba = {"model_type": "bamba", "num_hidden_layers": 4000}
    yield partial(read, {**bamba, "attn_layer_indices": [1], "time_step_limit": [0, 10**400]})
    yield partial(read, {**bamba, "attn_layer_indices": [4096] * 1_000_000})


WORDS = """
{{ }} {% %} {%- -%} {# #} for in endfor if endif set endset macro endmacro = == ( ) [ ] { } : , . | ~ + * ** % -
< ' 'a' x messages messages[0] loop loop.index range( namespace( cycler( 1 0 10**9 1e308 join tojson replace( sort
map( upper __class__ __init__ break continue generation endgeneration raw include import extends block call filter
tools tool_calls 'prb_key' 'prb_alpha' reasoning_content
"""
PIECES = WORDS.split()
# What a call of a tool is written as, which this process reads.
CALLED = (
    "{{% if messages[1].tool_calls %}}{{{{ messages[1].tool_calls[0].function.name }}}}{}{{% else %}}"
    "{{{{ messages[1].content }}}}{{% endif %}}"
)
CALLS = (
    "{{ 'prb_key' * 9999 }}{{ 'prb text' * 9999 }}{{ 'prb_count' * 9999 }}",
    "{{ '{\"a\":' * 10**5 }}",
    "{{ '{\"a\":[' * 300 }}{{ '0,' * 400000 }}",
    "{{ '{' * 10**6 }}",
    "<x>{{ ' ' * 10**6 }}<x>",
)


def templates(sound: Path, corpus: Path) -> Iterator[Case]:
    """Rendered, and asked how calls and thoughts are written."""
    chat.LIMIT_S = 2.0

    def render(template: str) -> None:
        made = ChatTemplate(template, {"eos_token": "</s>"})
        assert made.calls
        assert made.thoughts is None or made.thoughts.closing
        made.render(MESSAGES)

    yield partial(render, TEMPLATES[0])
    rng = random.Random(0)
    for _ in range(200):
        whole = rng.choice([*TEMPLATES, HOSTILE[0]])
        at = rng.randrange(len(whole))
        template = whole[:at] + rng.choice(PIECES) + whole[at + rng.randrange(9) :]
        yield partial(render, rng.choice([template, " ".join(rng.choices(PIECES, k=rng.randrange(1, 20)))]))
    for written in CALLS:
        yield partial(render, CALLED.format(written))


KINDS: dict[str, Callable[[Path, Path], Iterator[Case]]] = {
    "gguf": files,
    "folders": files,
    "configurations": configurations,
    "templates": templates,
}


def run(kind: str, sound: str, corpus: str) -> None:
    """Prints how many cases there were, and how many were refused. What hangs is ended by the system."""
    cases = KINDS[kind](Path(sound), Path(corpus))
    next(cases)()  # what is loaded and started once does not count
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_GROWTH_BYTES,) * 2)
    num_cases = num_refused = 0
    for case in cases:
        signal.alarm(LIMIT_S)
        num_cases += 1
        try:
            case()
        except PenstockError as error:
            said = str(error)
        except Exception as error:
            raise AssertionError(f"{case}"[:3000]) from error
        else:
            continue
        assert len(said.splitlines()) == 1, said
        assert len(said) < 1500, said
        assert "memory" not in said.lower() or kind == "templates", said
        num_refused += 1
    signal.alarm(0)
    print(num_cases, num_refused)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_an_error_of_one_line(tmp_path: Path, small_gguf: bytes, kind: str) -> None:  # noqa: F811
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    damage = {"gguf": damaged_gguf, "folders": damaged_folders}.get(kind)
    sound = damage(corpus, small_gguf) if damage else corpus
    code = "import sys; from tests.models.test_fuzz import run; run(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, kind, str(sound), str(corpus)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    num_cases, num_refused = map(int, done.stdout.split())
    assert num_cases / 8 < num_refused < num_cases
