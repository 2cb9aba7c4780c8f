"""Where blocks are kept: the argument, else the environment, else nowhere."""

from pathlib import Path

import pytest

from penstock.errors import SettingError
from penstock.plan import CACHE_DIR_VARIABLE, CACHE_SIZE_VARIABLE, StoreSettings, resolve_store

GIB = 1 << 30
DIR, SIZE = CACHE_DIR_VARIABLE, CACHE_SIZE_VARIABLE


@pytest.mark.parametrize(
    ("cache_dir", "cache_size", "environ", "expected"),
    [
        (None, None, {}, None),
        (None, None, {DIR: "", SIZE: ""}, None),
        (None, None, {SIZE: "1GiB"}, None),
        ("/a", None, {}, StoreSettings(Path("/a"), 10 * GIB, "argument", "default")),
        (Path("/a"), 4096, {DIR: "/b"}, StoreSettings(Path("/a"), 4096, "argument", "argument")),
        (".", "2G", {SIZE: "1GiB"}, StoreSettings(Path(), 2 * GIB, "argument", "argument")),
        (None, None, {DIR: "/b", SIZE: "1GiB"}, StoreSettings(Path("/b"), GIB, "environment", "environment")),
        (None, "5MiB", {DIR: "/b"}, StoreSettings(Path("/b"), 5 << 20, "environment", "argument")),
    ],
)
def test_argument_then_environment_then_default(
    cache_dir: str | None,
    cache_size: int | str | None,
    environ: dict[str, str],
    expected: StoreSettings | None,
) -> None:
    assert resolve_store(cache_dir, cache_size, environ=environ) == expected


def test_the_real_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIR, "~/kept")
    monkeypatch.setenv("HOME", "/home/somebody")
    found = resolve_store(None, None)
    assert found is not None
    assert found.folder == Path("/home/somebody/kept")


@pytest.mark.parametrize(
    ("cache_dir", "cache_size", "environ", "named"),
    [
        (None, "1GiB", {}, "cache_size='1GiB' needs cache_dir or PENSTOCK_CACHE_DIR"),
        (None, 4096, {DIR: ""}, DIR),
        ("", None, {}, "cache_dir=''"),
        ("a\0b", None, {}, "cache_dir="),
        (7, None, {}, "cache_dir=7"),
        ("/a", "10GB", {}, "cache_size='10GB'"),
        ("/a", 0, {}, "cache_size=0"),
        ("/a", True, {}, "cache_size=True"),
        ("/a", None, {SIZE: "much"}, f"{SIZE}='much'"),
        (None, None, {SIZE: "much"}, f"{SIZE}='much'"),
        ("~no-such-user-here/x", None, {}, "cache_dir='~no-such-user-here/x'"),
    ],
)
def test_what_is_not_accepted_is_named(
    cache_dir: str | None, cache_size: int | str | None, environ: dict[str, str], named: str
) -> None:
    with pytest.raises(SettingError) as caught:
        resolve_store(cache_dir, cache_size, environ=environ)
    assert named in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
