"""Before any payload moves, every rank hears of every mismatch, and of every rank's problem, within moments."""

import programs
import pytest
import torch

from ringlearn import fingerprint
from ringlearn.launch.pool import Pool
from ringlearn.worlds.distributed import agreement

P = 3


@pytest.fixture(scope="module")
def heard(pool: Pool) -> list[dict[str, programs.Told]]:
    return pool.run(programs.mismatches, timeout=100)


CASES = {
    "mask": "ring_attention: mask: expected the same on all ranks, got ranks 0, 2: full; rank 1: causal",
    "my mask": "ranks 0, 2: sliding_window(2); rank 1: sliding_window(3)",
    "layout": "ranks 0, 2: contiguous; rank 1: zigzag",
    "scale": "scale: expected the same on all ranks, got ranks 0, 2: 0.25; rank 1: 0.5",
    "kernel": "kernel: expected the same on all ranks, got ranks 0, 2: sdpa; rank 1: reference",
    "shape": "expected the same on all ranks, got ranks 0, 2: 1, 2, 2, 4, 4; rank 1: 1, 1, 1, 4, 4",
    "dtype": "dtype: expected the same on all ranks, got ranks 0, 2: torch.float32; rank 1: torch.float64",
    "width of what is put together": "shape but for the sequence: expected the same on all ranks, got ranks 0, 2: (3,)",
    "dtype of what is put together": "unshard: dtype: expected the same on all ranks, got ranks 0, 2: torch.float32",
    "values": "values of tensor 0: expected the same on all ranks, got ranks 0, 2: ",
    "order": "the ranks are in different calls: ranks 0, 2: ring_attention; rank 1: shard. Every rank must",
    "program": "the ranks are in different calls: ranks 0, 2: run of addresses; rank 1: run of _pass_on",
}


@pytest.mark.parametrize("case", CASES)
def test_a_mismatch_is_an_error_on_every_rank(heard: list[dict[str, programs.Told]], case: str) -> None:
    """Rank 1's call is new to it, those of the others are not: nobody may skip the exchange because of that."""
    for rank in range(P):
        kind, text, seconds = heard[rank][case]
        assert kind == "ValueError", f"rank {rank}: {kind} {text}"
        assert CASES[case] in text
        assert seconds < 4  # an exchange, not a timeout


def test_the_problem_of_one_rank_is_an_error_on_every_rank(heard: list[dict[str, programs.Told]]) -> None:
    own = heard[1]["problem"]
    assert own[0] == "ValueError" and own[1].startswith("ring_attention: expected a mask")
    for rank in (0, 2):
        kind, text, seconds = heard[rank]["problem"]
        assert kind == "ValueError" and seconds < 4
        assert text == f"ring_attention: rank 1 raised ValueError: {own[1].removeprefix('ring_attention: ')}"


def test_any_kind_of_error_before_the_call_is_an_error_on_every_rank(heard: list[dict[str, programs.Told]]) -> None:
    assert heard[1]["kind of error"][:2] == ("TypeError", "a mistake")
    for rank in (0, 2):
        assert heard[rank]["kind of error"][0] == "ValueError" and heard[rank]["kind of error"][2] < 4


def test_values_that_differ_come_with_the_remedy(heard: list[dict[str, programs.Told]]) -> None:
    assert all("src=0" in rank["values"][1] and "manual_seed" in rank["values"][1] for rank in heard)


def test_the_world_is_still_good_afterwards(heard: list[dict[str, programs.Told]]) -> None:
    assert [rank["in the end"][:2] for rank in heard] == [("", "")] * P


def test_long_texts_are_cut_and_compared_whole(pool: Pool) -> None:
    for equal, different, long in pool.run(programs.long_texts, timeout=60):
        assert equal[0] == ""
        assert different[0] == "ValueError" and "field 3" in different[1] and "rank 1" in different[1]
        assert "digest" in different[1] and len(different[1]) < 4096
        assert long[0] == "ValueError" and "at most 4096 bytes" in long[1]


def test_one_rank_that_says_too_much_is_an_error_on_every_rank(pool: Pool) -> None:
    for rank, (kind, text, seconds) in enumerate(pool.run(programs.one_says_too_much, timeout=60)):
        assert kind == "ValueError" and "at most 4096 bytes" in text and seconds < 4
        assert ("rank 1 raised" in text) == (rank != 1)


def test_what_may_differ_is_known_to_all(pool: Pool) -> None:
    for rank, (all_know, unchecked, problem) in enumerate(pool.run(programs.known_to_all, timeout=60)):
        assert all_know == [{"rank": r} for r in range(P)]
        assert unchecked == [{"rank": rank}]  # check=False: no exchange, and "a" differed
        assert problem[0] == ("ValueError" if rank == 1 else "")


def test_what_is_heard_after_the_call_is_an_error_on_every_rank_too(pool: Pool) -> None:
    for rank, (known, (kind, text, _)) in enumerate(pool.run(programs.heard_later, timeout=60)):
        assert known == [{"rank": rank}]
        assert kind == "ValueError" and "in different calls: rank 0: three; ranks 1, 2: two" in text


def test_ranks_that_make_different_worlds_are_told(pool: Pool) -> None:
    for kind, text, _ in pool.run(programs.different_worlds, timeout=60):
        assert (
            kind == "ValueError"
            and "check: expected the same on all ranks, got ranks 0, 2: True; rank 1: False" in text
        )


def test_a_message_has_one_size_whatever_it_says() -> None:
    short = agreement.encode("call", {}, {}, None)
    long = agreement.encode("call", {f"{i}": "x" * 3000 for i in range(20)}, {"own": 1}, ValueError("y" * 10000))
    assert short.shape == long.shape == (agreement.SIZE,)
    assert agreement.decode(long)["own"] == {"own": 1}
    assert agreement.decode(long)["problem"][0] == "ValueError"


def test_texts_that_look_the_same_are_told_apart_by_their_digests() -> None:
    records = [agreement.decode(agreement.encode("call", {"a": "x" * 5000 + end}, {}, None)) for end in "yz"]
    with pytest.raises(ValueError, match=r"rank 0: x+\.\.\. \(5001 characters\) \(digest \w+\); rank 1: x+"):
        agreement.compare(records, 0, None)


def test_a_field_that_one_rank_does_not_have_is_a_difference() -> None:
    records = [agreement.decode(agreement.encode("call", same, {}, None)) for same in ({"a": "1"}, {})]
    with pytest.raises(ValueError, match="a: expected the same on all ranks, got rank 0: 1; rank 1: nothing"):
        agreement.compare(records, 1, None)


def test_a_checksum_sees_every_bit_and_every_position() -> None:
    x = torch.randn(1000)
    known = {fingerprint.checksum(x)}
    for i in (0, 1, 500, 999):
        y = x.clone()
        y.view(torch.int32)[i] ^= 1
        known.add(fingerprint.checksum(y))
    known.add(fingerprint.checksum(x.flip(0)))
    known.add(fingerprint.checksum(x.roll(2)))  # the same 8-byte words in another order
    known.add(fingerprint.checksum(x[:999]))
    assert len(known) == 8
    assert fingerprint.checksum(x.view(10, 100).t().contiguous().t()) == fingerprint.checksum(x)  # values, not strides
    assert fingerprint.checksum(torch.zeros(0)) == fingerprint.checksum(torch.zeros(0))
    assert fingerprint.checksum(torch.ones(3, dtype=torch.bfloat16)) != fingerprint.checksum(torch.zeros(3))
