"""Prompts that begin alike go to one replica, others where there is least to do."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.frontends.affinity import PrefixAffinity, Route

IDLE = {"a": 0, "b": 0}


def blocks(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_a_prompt_goes_where_half_of_it_was_read() -> None:
    affinity = PrefixAffinity(most_load=4)
    first = affinity.choose(blocks("1", "2"), IDLE)
    (other,) = IDLE.keys() - {first}
    assert affinity.choose(blocks("1", "2", "3", "4"), {first: 3, other: 0}) == first
    # A key stands for all before it: without its beginning, a block is of no use.
    assert affinity.choose(blocks("0", "2"), {first: 1, other: 0}) == other
    assert affinity.choose(blocks("1", "5", "6"), {first: 1, other: 0}) == other  # a third
    assert affinity.choose(blocks("1", "7", "8"), IDLE) == first  # as free as the other, and it has some


def test_a_replica_that_is_full_shares_what_it_has_read() -> None:
    affinity = PrefixAffinity(most_load=4)
    first = affinity.choose(blocks("1", "2"), IDLE)
    (other,) = IDLE.keys() - {first}
    assert affinity.choose(blocks("1", "2"), {first: 4, other: 3}) == other
    assert affinity.choose(blocks("1", "2"), {first: 3, other: 2}) == other  # both have it now
    assert affinity.choose(blocks("1", "2"), {first: 1, other: 2}) == first


def test_what_a_replica_had_is_lost_with_it() -> None:
    affinity = PrefixAffinity(most_load=4)
    first = affinity.choose(blocks("1", "2"), IDLE)
    (other,) = IDLE.keys() - {first}
    affinity.keep([other, "new"])
    assert affinity.choose(blocks("1", "2"), {"new": 1, other: 0}) == other
    affinity.keep([first, other])
    assert affinity.choose(blocks("1", "2"), {first: 0, other: 1}) == other


def test_a_request_is_a_load_until_its_answer_is_over_and_questions_are_none() -> None:
    affinity = PrefixAffinity(most_load=4)
    long = Route(blocks("1", "2", "3"))
    first, other = affinity.ranked(long, IDLE)
    assert affinity.ranked(Route.aside(), IDLE) == [other, first]
    second = Route(blocks("4"))
    assert affinity.ranked(second, IDLE) == [other, first]
    long.is_over = True
    # Had it still been a load, there were as much to do for both, and the other has fewer blocks.
    third = Route(blocks("5"))
    assert affinity.ranked(third, IDLE) == [first, other]
    assert affinity.ranked(third, IDLE) == [first, other]  # asked again, it is one load
    third.replica = other  # the first had no place
    assert affinity.ranked(Route(blocks("6")), IDLE) == [first, other]


PROMPTS = st.lists(st.sampled_from([blocks(*text) for text in ("", "x", "xy", "xyz", "pqrs", "pq", "uv")]))


@given(st.lists(st.tuples(PROMPTS, st.booleans()), max_size=20))
def test_memory_is_bounded_and_counted(rounds: list[tuple[list[list[bytes]], bool]]) -> None:
    affinity = PrefixAffinity(most_load=2, most_keys=5)
    names = ["a", "b", "c"]
    for prompts, is_replaced in rounds:
        loads = Counter(dict.fromkeys(names, 0))
        for keys in prompts:
            chosen = affinity.choose(keys, loads)
            assert chosen in names
            loads[chosen] += 1
        if prompts and not any(prompts):  # prompts without a block are dealt out evenly
            assert max(loads.values()) - min(loads.values()) <= 1
        if is_replaced:
            names = [*names[1:], names[0] + "'"]
            affinity.keep(names)
        assert len(affinity._owners) <= 5
        counted = Counter(owner for owners in affinity._owners.values() for owner in owners)
        assert +affinity._num_keys == counted
        assert counted.keys() <= set(names)
