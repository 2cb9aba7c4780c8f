"""`penstock plan` on configurations alone: no weights anywhere."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from penstock.cache import BLOCK_TOKENS, BlockPool
from penstock.cache.space import CacheSpace
from penstock.cache.tensors import CacheSpec, CacheTensors, KVSpec
from penstock.errors import SettingError
from penstock.frontends import plan_plot
from penstock.frontends.plan import PlannedModel, expected_workspace, plan, read_model, table
from penstock.models.decoder import workspace_for
from penstock.plan.memory import WeightBits
from penstock.plan.prompt_plan import Plan, make_plan
from penstock.plan.step import Workspace
from penstock.plan.weight_settings import resolve_weights
from tests.models.builders import SHAPE, gguf_metadata, hf_config, hf_model, write_gguf
from tests.models.test_gguf_file import float_tensors

app = typer.Typer()
app.command()(plan)

QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}
HYBRID = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262_144,
}
GEMMA_3_27B = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "query_pre_attn_scalar": 168,
}
GPT_OSS_120B = {"model_type": "gpt_oss"}  # transformers' defaults
MIB = 1 << 20


def folder_of(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.stdout, done.stderr


def plan_of(tmp_path: Path, config: dict[str, Any], prompt_tokens: int, **settings: Any) -> Plan:
    known = read_model(str(folder_of(tmp_path, config))).config
    return make_plan(
        known,
        prompt_tokens,
        workspace=workspace_for(known, Workspace(settings.pop("kernels", "native"))),
        model="m",
        dtype="bfloat16",
        **settings,
    )


def test_a_table_for_a_model_that_no_machine_here_could_load(tmp_path: Path) -> None:
    huge = {**QWEN3_8B, "hidden_size": 16_384, "intermediate_size": 53_248, "num_hidden_layers": 126}
    huge |= {"num_attention_heads": 128, "num_key_value_heads": 8}
    status, out, _ = run("--model", folder_of(tmp_path, huge), "--prompt-tokens", 100_000)
    assert status == 0
    lines = out.splitlines()
    assert "100,000 tokens" in lines[0]
    assert "weights" in lines[1]
    assert "TiB" in lines[1] or "GiB" in lines[1]
    titles = next(line for line in lines if "chunks" in line and "peak" in line)
    assert all(title in titles for title in ("hidden", "MLP", "activations", "saved"))
    (chosen,) = [line for line in lines if line.startswith("->")]
    assert chosen.split()[1] == "512"
    assert "chosen: chunk 512, the default" in out
    assert all("whole" not in line or "0.0%" in line for line in lines)


def test_a_budget_that_is_too_small_names_one_that_is_not(tmp_path: Path) -> None:
    arguments = ["--model", folder_of(tmp_path, QWEN3_8B), "--prompt-tokens", 20_000, "--dtype", "bfloat16"]
    status, out, error = run(*arguments, "--memory", "1GiB")
    assert status == 1
    assert "chosen: none" in out
    assert error.count("\n") == 1
    assert error.startswith("penstock: no chunk fits 1.0 GiB: weights take 15.3 GiB")
    least = int(error.split("(")[1].split()[0])
    assert run(*arguments, "--memory", least)[0] == 0
    assert run(*arguments, "--memory", least - 1)[0] == 1
    typed = error.split("would do is ")[1].split()[0]
    assert run(*arguments, "--memory", typed)[0] == 0


def test_a_gpu_is_planned_with_its_own_kernels_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("PENSTOCK_KERNELS", raising=False)
    gpu = torch.device("cuda:0")
    workspace = expected_workspace(gpu)
    assert (workspace.kernels, workspace.tile_size, workspace.row_floor) == ("cuda", 1024, 512)
    here, there = WeightBits(6.0, 10.0, is_tied=True), WeightBits(4.625, 6.5625, is_tied=True)
    known, asked = PlannedModel(None, here, there), resolve_weights(environ={})  # type: ignore[arg-type]
    settled = known.settled(asked, "bfloat16", gpu)
    assert (settled.name, settled.reason) == ("auto", "auto: as the file has them")
    assert known.bits(settled.name, "bfloat16", gpu) == there
    plain = known.settled(asked, "float32", gpu)
    assert plain.name == "f32"
    assert "these kernels do not compute" in plain.reason
    monkeypatch.setenv("PENSTOCK_KERNELS", "torch")
    assert expected_workspace(gpu).kernels == "torch"
    assert known.settled(asked, "bfloat16", gpu).name == "bf16"


@pytest.mark.parametrize(("config", "gib"), [(GEMMA_3_27B, 11.2), (GPT_OSS_120B, 4.6)])
def test_keys_and_values_behind_windows_take_no_memory(
    config: dict[str, Any], gib: float, tmp_path: Path
) -> None:
    """A prompt of 131,072 tokens in chunks of 2,048: what a sequence takes at most of the pools of a cache with one
    layer of each kind, all others being like these, and what is planned."""
    num_tokens, chunk = 131_072, 2048
    _, out, _ = run(
        "--model", folder_of(tmp_path, config), "--prompt-tokens", num_tokens, "--chunk", chunk, "--json"
    )
    assert json.loads(out)["kv_cache_bytes"] / 2**30 == pytest.approx(gib, rel=0.02)

    shape = read_model(str(tmp_path)).config
    assert shape.window is not None
    full = KVSpec(1, shape.num_kv_heads, shape.head_dim, torch.bfloat16)
    specs = (full, replace(full, window=shape.window.size))
    tensors = CacheTensors.of(CacheSpec(specs), [num_tokens // BLOCK_TOKENS] * 2, 1, torch.device("cpu"))
    space = CacheSpace(tensors, tuple(BlockPool(group.num_blocks) for group in tensors.kv_groups), None)
    sequence, most = space.new_sequence(), [0, 0]
    for start in range(0, num_tokens, chunk):
        sequence.reserve(start, [start + chunk])
        most = [
            max(old, pool.num_blocks - pool.num_free) for old, pool in zip(most, space.pools, strict=True)
        ]
        sequence.commit(start + chunk)
        sequence.slide()
    layers = (shape.num_full_layers, shape.window.num_layers)
    taken = sum(
        number * BLOCK_TOKENS * spec.bytes_per_token * count
        for number, spec, count in zip(most, specs, layers, strict=True)
    )
    assert taken / 2**30 == pytest.approx(gib, rel=0.02)


def test_json_has_the_table(tmp_path: Path) -> None:
    status, out, _ = run(
        "--model", folder_of(tmp_path, HYBRID), "--prompt-tokens", 5000, "--memory", "8GiB", "--json"
    )
    assert status == 0
    written = json.loads(out)
    (chosen,) = [row for row in written["rows"] if row["is_chosen"]]
    assert chosen["chunk"] == written["chosen"]
    for row in written["rows"]:
        assert row["activation_bytes"] == sum(row["activation_parts"].values())
        fixed = written["weights_bytes"] + written["kv_cache_bytes"] + written["recurrent_bytes"]
        assert row["total_bytes"] == fixed + row["activation_bytes"]


def test_parts_that_nothing_has_are_no_columns(tmp_path: Path) -> None:
    assert "recurrent" not in table(plan_of(tmp_path, QWEN3_8B, 5000))[0]
    assert "recurrent" in table(plan_of(tmp_path, HYBRID, 5000))[0]


def test_a_configuration_comes_as_folder_file_or_gguf(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, QWEN3_8B)
    assert read_model(str(folder)).config == read_model(str(folder / "config.json")).config
    renamed = tmp_path / "qwen.json"
    renamed.write_text(json.dumps(QWEN3_8B))
    assert read_model(str(renamed)).config == read_model(str(folder)).config


def test_a_gguf_file_tells_by_its_header(tmp_path: Path) -> None:
    tensors = float_tensors(hf_model("llama"), "llama")
    path = write_gguf(tmp_path / "tiny.gguf", gguf_metadata(hf_config("llama")), tensors)
    status, out, _ = run("--model", path, "--prompt-tokens", 20, "--json")
    assert status == 0
    written = json.loads(out)
    assert written["rows"][-1]["chunk"] == 20
    assert read_model(str(path)).config.hidden_size == SHAPE["hidden_size"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--prompt-tokens", "0"], 2, "--prompt-tokens 0 is not accepted"),
        (
            ["--prompt-tokens", "200000"],
            2,
            "--prompt-tokens 200000 is not accepted: the model's context is 131072",
        ),
        (["--prompt-tokens", "9", "--chunk", "-1"], 2, "--chunk -1 is not accepted"),
        (["--prompt-tokens", "9", "--decodes", "-1"], 2, "--decodes -1 is not accepted"),
        (["--prompt-tokens", "9", "--memory", "8GB"], 2, "give 8GiB"),
        (["--prompt-tokens", "9", "--device", "gpu"], 2, "--device 'gpu' is not accepted"),
        (["--prompt-tokens", "9", "--device", "cuda:99"], 2, "--device 'cuda:99' is not accepted here"),
        (["--prompt-tokens", "9", "--memory", "lots"], 2, "--memory 'lots' is not accepted"),
        (["--prompt-tokens", "9", "--plot", "out.gif"], 2, "--plot 'out.gif' is not accepted"),
        (["--prompt-tokens", "9", "--plot", "no/such/out.png"], 2, "there is no folder no/such"),
    ],
)
def test_what_is_refused_in_one_line(tmp_path: Path, arguments: list[str], status: int, said: str) -> None:
    done, out, error = run("--model", folder_of(tmp_path, QWEN3_8B), *arguments)
    assert (done, out) == (status, "")
    assert error.startswith("penstock: ")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"model_type": "gpt9"}', "gpt9"),
        (None, "no config.json"),
    ],
)
def test_a_model_that_cannot_be_read(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    status, _, error = run("--model", tmp_path, "--prompt-tokens", 10)
    assert status == 3
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["nowhere", "x" * 3000], ids=len)
def test_a_model_that_is_not_there(tmp_path: Path, name: str) -> None:
    status, _, error = run("--model", tmp_path / name, "--prompt-tokens", 10)
    assert status == 3
    assert "there is no model" in error


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for ending, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"plan{ending}"
        status, out, _ = run(
            "--model",
            folder_of(tmp_path, HYBRID),
            "--prompt-tokens",
            9000,
            "--memory",
            "4GiB",
            "--plot",
            path,
        )
        assert status == 0
        assert f"picture: {path}" in out
        assert path.read_bytes().startswith(start)


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_plot, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="pip install matplotlib"):
        plan_plot.require_plotting(tmp_path / "out.png")


STAGED = ["--prompt-tokens", "32768", "--stages"]


def test_stages_as_text_and_json(tmp_path: Path) -> None:
    arguments = ["--model", folder_of(tmp_path, QWEN3_8B), *STAGED, "4", "--link", "10Gb/s"]
    status, out, _ = run(*arguments, "--speed", "26000")
    assert status == 0
    assert "4 stages, 10 Gb/s between them" in out
    assert "one answer gains nothing" in out.lower()
    status, out, _ = run(*arguments, "--speed", "26000", "--json")
    written = json.loads(out)
    assert [row["num_stages"] for row in written["times"]] == [1, 2, 4]
    assert sum(stage["end"] - stage["start"] for stage in written["stages"]) == 36
    assert all(stage["fits"] is None for stage in written["stages"])
    status, out, _ = run(*arguments)
    assert (status, "Times need a speed" in out) == (0, True)


def test_unequal_machines_as_they_are_typed(tmp_path: Path) -> None:
    arguments = ["--model", folder_of(tmp_path, QWEN3_8B), *STAGED, "2", "--json"]
    status, out, _ = run(*arguments, "--memory", "7GiB,20GiB", "--speed", "60,120", "--dtype", "bfloat16")
    written = json.loads(out)
    assert (status, [stage["fits"] for stage in written["stages"]]) == (0, [True, True])
    assert written["times"][0]["first_token_s"] < 32_768 / 110
    status, out, error = run(*arguments, "--memory", "7GiB,20GiB", "--layers", "30,6")
    assert (status, json.loads(out)["stages"][0]["fits"], error.count("\n")) == (1, False, 1)


def test_step_times_of_a_profile(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text('{"coefficients": {"constant": 0.001, "per_token": 0.001, "per_decode": 0.003}}')
    arguments = ["--model", folder_of(tmp_path, QWEN3_8B), *STAGED, "2", "--profile", profile]
    status, out, _ = run(*arguments, "--chunk", "0", "--json")
    written = json.loads(out)
    assert (status, written["times"][0]["first_token_s"]) == (0, pytest.approx(32.769))
    assert [row["num_streams"] for row in written["decodes"]] == [1, 8]
    for content in ("{", "{}", '{"coefficients": {"constant": -1}}', '{"coefficients": {"other": 1}}'):
        profile.write_text(content)
        status, out, error = run(*arguments)
        assert (status, out, error.count("\n")) == (2, "", 1)
        assert "it holds no step times; give a file that `penstock tune --json` wrote" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stages", "0"], "--stages 0 is not accepted"),
        (["--stages", "37"], "--stages 37 is not accepted: the model has 36 layers; give 1 to 36"),
        (["--stages", "2", "--link", "10G"], "--link '10G' is not accepted: bits or bytes a second?"),
        (["--link", "10Gb/s"], "--link '10Gb/s' needs --stages"),
        (["--speed", "10"], "--speed '10' needs --stages"),
        (["--stages", "3", "--layers", "18,18"], "with --stages 3: give 3 numbers"),
        (["--layers", "18,17"], "sum to the model's 36 layers"),
        (["--layers", "18,x"], "--layers 'x' is not accepted"),
        (["--stages", "3", "--memory", "8GiB,8GiB"], "one value for all stages, or 3"),
        (["--stages", "2", "--memory", "8GB"], "give 8GiB"),
        (["--stages", "2", "--speed", "fast"], "--speed 'fast' is not accepted"),
        (["--stages", "2", "--speed", "nan"], "--speed 'nan' is not accepted"),
        (["--stages", "2", "--profile", "no/such.json"], "No such file"),
        (["--stages", "2", "--speed", "9", "--profile", "x.json"], "contradicts --speed"),
        (["--stages", "2", "--plot", "out.png"], "--plot 'out.png' contradicts --stages 2"),
    ],
)
def test_stages_that_are_refused_in_one_line(tmp_path: Path, arguments: list[str], said: str) -> None:
    done, out, error = run(
        "--model", folder_of(tmp_path, QWEN3_8B), "--prompt-tokens", 1000, "--device", "cpu", *arguments
    )
    assert (done, out, error.count("\n")) == (2, "", 1)
    assert said in error


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; import typer; from penstock.frontends.plan import plan; "
        "app = typer.Typer(); app.command()(plan); app(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "--prompt-tokens" in done.stdout
