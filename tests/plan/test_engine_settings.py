"""All settings of an engine: resolved once, and changed only into new values."""

from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SettingError
from penstock.plan import EngineKeywords, EngineSettings
from penstock.plan.settings import DevicesFound

ENVIRONMENT = {
    "PENSTOCK_PREFILL_CHUNK": "100",
    "PENSTOCK_PREFILL_ALIGN": "0",
    "PENSTOCK_MAX_ACTIVATION": "1MiB",
    "PENSTOCK_WEIGHTS": "bf16",
    "PENSTOCK_ACTIVATIONS": "plain",
    "PENSTOCK_DEVICE": "cuda",
    "PENSTOCK_KERNELS": "torch",
    "PENSTOCK_THREADS": "3",
    "PENSTOCK_CACHE_DIR": "/somewhere",
}
RESOLVED = ("chunk", "align", "max_activation", "weights", "activations", "device", "kernels", "threads")


def test_every_setting_comes_from_argument_environment_or_default() -> None:
    default = EngineSettings.resolve(environ={})
    assert {getattr(default, name).source for name in RESOLVED} == {"default"}
    told = EngineSettings.resolve(environ=ENVIRONMENT)
    assert {getattr(told, name).source for name in RESOLVED} == {"environment"}
    assert (told.chunk.effective, told.max_activation.effective, told.threads.count) == (100, 1 << 20, 3)
    assert told.store is not None
    given = EngineSettings.resolve(
        environ=ENVIRONMENT, chunk=7, align=True, max_activation=5, weights="f32", device="cpu", threads=1
    )
    assert {getattr(given, name).source for name in RESOLVED} == {"argument", "environment"}
    assert (given.chunk.effective, given.weights.name, given.device.name) == (7, "f32", "cpu")
    assert (given.max_activation.requested, told.max_activation.requested) == (5, "1MiB")


def test_reasons_name_an_argument_as_its_user_does() -> None:
    names = {"chunk": "--chunk", "device": "--device"}
    given = EngineSettings.resolve(environ={}, options=names, chunk=7, device="cpu").on(DevicesFound())
    assert (given.chunk.reason, given.device.reason) == ("set by --chunk", "set by --device")
    assert EngineSettings.resolve(environ={}, chunk=7).chunk.reason == "set by argument"
    told = EngineSettings.resolve(environ=ENVIRONMENT, options=names)
    assert told.chunk.reason == "set by PENSTOCK_PREFILL_CHUNK"


def test_keywords_and_fields_are_the_same_settings() -> None:
    names = {field.name for field in fields(EngineSettings)} - {"kernels"}
    of_parts = {"cache_dir", "cache_size", "layers", "mixed", "stage_timeout", "token_file"}
    keywords = set(EngineKeywords.__annotations__) - of_parts | {"store"}
    assert names == {name.replace("_ms", "_s") for name in keywords}
    with pytest.raises(TypeError, match="chunks"):
        EngineSettings.resolve(environ={}, chunks=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("keywords", "setting", "others"),
    [
        ({"overlap": 8, "cache_dir": "/a"}, "overlap", {"cache_dir"}),
        ({"overlap": 8, "reuse_tokens": 64}, "overlap", {"reuse_tokens"}),
        ({"overlap": 8, "chunk": 0}, "overlap", {"chunk_size"}),
        ({"target_itl_ms": 8, "chunk": 10}, "target_itl_ms", {"chunk_size"}),
        ({"dtype": "float32", "weights": "bf16"}, "weights", {"dtype"}),
        ({"activations": "int8", "weights": "bf16"}, "activations", {"weights"}),
        ({"activations": "int8", "dtype": "float32"}, "activations", {"dtype"}),
        ({"activations": "int4"}, "activations", set()),
        ({"dtype": "float16"}, "dtype", set()),
        ({"reuse_tokens": -1}, "reuse_tokens", set()),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(
    keywords: dict[str, Any], setting: str, others: set[str]
) -> None:
    with pytest.raises(SettingError) as caught:
        EngineSettings.resolve(environ={}, **keywords)
    assert (caught.value.setting, set(caught.value.contradicts)) == (setting, others)


def test_devices_models_and_profiles_give_new_values() -> None:
    settings = EngineSettings.resolve(environ={}, overlap=8)
    here = settings.on(DevicesFound(num_cuda=1))
    assert (settings.device.name, here.device.name) == ("auto", "cuda:0")
    assert here.on(DevicesFound()) is here  # settled before
    assert EngineSettings.resolve(environ={}, weights="int4").on(DevicesFound(1)).device.name == "cuda:0"
    native = EngineSettings.resolve(environ={"PENSTOCK_KERNELS": "native"}).on(DevicesFound(1))
    assert native.device.name == "cpu"
    hybrid = here.for_model(has_state=True)
    assert (here.chunk.grid, hybrid.chunk.grid) == (1, 64)
    assert hybrid.tuned(None, 2048).chunk.effective == 2048
    assert hybrid.tuned(700, 2048).chunk.effective == 640
    assert hybrid.tuned(3, 2048).chunk.effective == 64
    assert "overlap" in hybrid.tuned(700, 2048).chunk.reason
    assert "overlap" not in here.for_model(has_state=False).tuned(700, 2048).chunk.reason
    with pytest.raises(FrozenInstanceError):
        settings.overlap = 3  # type: ignore[misc]


def test_a_fixed_chunk_is_nobody_elses_to_choose() -> None:
    settings = EngineSettings.resolve(environ={}, chunk=100)
    assert settings.for_model(has_state=True).tuned(700, 2048).chunk.effective == 128
    assert settings.for_model(has_state=False).tuned(700, 2048).chunk.effective == 100
    assert (
        EngineSettings.resolve(environ={}, chunk=100, align=False).for_model(has_state=True).chunk.effective
        == 100
    )
    small = EngineSettings.resolve(environ={}, overlap=300).tuned(64, 512)
    assert small.config.chunk_size == 301


def test_what_it_computes_in_follows_dtype_and_weights() -> None:
    def computes(**keywords: Any) -> str:
        return EngineSettings.resolve(environ={}, **keywords).computes_in

    assert computes() == "auto"
    assert computes(weights="int8") == "bfloat16"
    assert computes(weights="f32") == "float32"
    assert computes(dtype="float32") == "float32"


def test_the_folder_is_kept_as_it_is() -> None:
    store = EngineSettings.resolve(environ={}, cache_dir=Path("/a"), cache_size="1KiB").store
    assert store is not None
    assert (store.folder, store.max_bytes, store.size_source) == (Path("/a"), 1024, "argument")
