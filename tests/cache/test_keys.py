"""A key stands for a block's tokens, all before them, the model and those who share: for nothing less."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import BLOCK_TOKENS, KeyChain, root_key


def keys_of(
    tokens: list[int], fingerprint: bytes = b"", salt: str = "", is_long: bool = False
) -> list[bytes]:
    chain = KeyChain(root_key(fingerprint, salt, is_long=is_long))
    chain.extend(tokens)
    return chain.keys


# Few values, so that equal ones are drawn often; the largest token of four bytes is among them.
token_ids = st.sampled_from([0, 1, 256, 2**32 - 1])
prompts = st.lists(token_ids, max_size=3 * BLOCK_TOKENS)
# Text that could run into its neighbour, if the two were just put together.
fingerprints = st.sampled_from([b"", b"\0", b"a", b"ab", b"abc"])
salts = st.sampled_from(["", "\0", "b", "bc", "c", "ß"])


@settings(deadline=None)
@given(data=st.data(), prompt=prompts, fingerprint=fingerprints, salt=salts)
def test_keys_are_equal_just_where_all_before_is(
    data: st.DataObject, prompt: list[int], fingerprint: bytes, salt: str
) -> None:
    other = list(prompt)
    differs = data.draw(st.booleans())
    if prompt and differs:
        other[data.draw(st.integers(0, len(prompt) - 1))] = data.draw(token_ids)
    other_fingerprint = data.draw(st.just(fingerprint) | fingerprints)
    other_salt = data.draw(st.just(salt) | salts)
    is_long = data.draw(st.booleans())
    ours = keys_of(prompt, fingerprint, salt)
    theirs = keys_of(other, other_fingerprint, other_salt, is_long)
    same_root = (fingerprint, salt, False) == (other_fingerprint, other_salt, is_long)
    for index, (one, another) in enumerate(zip(ours, theirs, strict=True)):
        end = (index + 1) * BLOCK_TOKENS
        assert (one == another) == (same_root and prompt[:end] == other[:end])


@settings(deadline=None)
@given(prompt=prompts, data=st.data())
def test_a_chain_that_grows_is_the_chain_of_the_whole(prompt: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(prompt)), max_size=6)))
    chain = KeyChain(root_key(b"model"))
    for before, end in pairwise([0, *cuts, len(prompt)]):
        earlier = list(chain.keys)
        chain.extend(prompt[:end])
        assert chain.keys[: before // BLOCK_TOKENS] == earlier
        assert len(chain.keys) == end // BLOCK_TOKENS
    assert chain.keys == keys_of(prompt, b"model")


def test_equal_blocks_at_two_places_have_two_keys() -> None:
    keys = keys_of([7] * 4 * BLOCK_TOKENS)
    assert len(set(keys)) == 4
    assert root_key(b"") not in keys


@pytest.mark.parametrize(
    ("one", "other"), [(("a", "bc"), ("ab", "c")), (("", "a"), ("a", "")), (("", "\0"), ("", ""))]
)
def test_fingerprint_and_salt_do_not_run_into_each_other(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    assert root_key(one[0].encode(), one[1]) != root_key(other[0].encode(), other[1])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_of_more_than_four_bytes_is_an_error_and_no_key(token: int) -> None:
    with pytest.raises(OverflowError):
        keys_of([token] * BLOCK_TOKENS)
