"""A rank that dies, stops, raises or never comes: every rank hears of it in time, and who, where and why."""

import signal

import programs
import pytest

from ringlearn.launch.pool import LaunchError, Pool

pytestmark = pytest.mark.alone  # they look at the clock

P, TIMEOUT = 3, 3.0
LIMIT = TIMEOUT + 2


def check(told: list[programs.Told], rank: int, cause: str, limit: float = LIMIT) -> None:
    """The failed call names the cause within the limit; the next one says that the world is broken, and why."""
    (kind, text, seconds), (later_kind, later_text, later_seconds) = told
    assert kind == "WorldError", f"rank {rank}: {kind} {text}"
    assert cause in text.splitlines()[0], f"rank {rank}: {text}"
    assert f"This is rank {rank}." in text
    assert seconds < limit, f"rank {rank} heard of it after {seconds:.1f} s"
    assert later_kind == "WorldError" and cause in later_text and later_seconds < 1
    if rank != 1:
        assert later_text.startswith("this world failed in an earlier call")


def test_a_killed_peer(pool: Pool) -> None:
    with pytest.raises(LaunchError, match="rank 1 ended: killed by SIGKILL") as caught:
        pool.run(programs.killed_peer, 1, TIMEOUT, timeout=40)
    victim = caught.value.reports[1]
    assert victim.status == "ended" and signal.SIGKILL.name in victim.error
    assert "is in rotate 2 of run of ring_with" in victim.last
    for rank in (0, 2):
        told = caught.value.reports[rank].value
        check(told, rank, "rank 1 shows no sign of life")
        assert "it is in rotate 2 of run of ring_with" in told[0][1]
        assert told[0][2] < TIMEOUT  # a closed connection is noticed at once


def test_a_stopped_peer(pool: Pool) -> None:
    for rank, told in enumerate(pool.run(programs.stalled_peer, 1, TIMEOUT, timeout=40)):
        check(told, rank, "rank 1 shows no sign of life", LIMIT + 1 if rank == 1 else LIMIT)
        assert "it is in rotate 2 of run of ring_with" in told[0][1]
        assert "noticed it in rotate 3 of run of ring_with: no message for 3 s" in told[0][1]


def test_a_peer_that_is_killed_while_others_wait_in_a_collective_of_torch(pool: Pool) -> None:
    with pytest.raises(LaunchError, match="rank 1 ended: killed by SIGKILL") as caught:
        pool.run(programs.lost_in_a_collective, 1, TIMEOUT, signal.SIGKILL, timeout=40)
    for rank in (0, 2):
        check(caught.value.reports[rank].value, rank, "rank 1 shows no sign of life")


def test_a_peer_that_is_stopped_while_others_wait_in_a_collective_of_torch(pool: Pool) -> None:
    """Nothing can wake them: the monitor says why, and ends them."""
    with pytest.raises(LaunchError) as caught:
        pool.run(programs.lost_in_a_collective, 1, 1.0, signal.SIGSTOP, timeout=40)
    for rank in (0, 2):
        report = caught.value.reports[rank]
        assert report.status == "ended" and "ringlearn: rank 1 shows no sign of life: killed, stopped" in report.output
        assert f"This is rank {rank}, which last was in the watched part of the program; ending it." in report.output


def test_a_peer_that_is_killed_in_a_world_of_some_is_named_by_its_number_among_all(pool: Pool) -> None:
    with pytest.raises(LaunchError, match="rank 2 ended: killed by SIGKILL") as caught:
        pool.run(programs.lost_in_a_world_of_some, TIMEOUT, timeout=40)
    for rank in (0, 1):
        (kind, text, _), _ = caught.value.reports[rank].value
        assert kind == "WorldError" and text.startswith("rank 2 shows no sign of life"), text
        assert f"This is rank {rank}." in text


def test_an_exception_while_others_wait_in_a_collective_of_torch(pool: Pool) -> None:
    try:
        told = [str(told) for told in pool.run(programs.raised_beside_a_collective, 1, 60.0, timeout=40)]
    except LaunchError as error:  # the monitor was faster than the end of rank 1, which closes its connections
        told = [str(report.value or report.output) for report in error.reports]
    assert "'KeyError'" in told[1]
    for rank in (0, 2):
        assert "rank 1 raised KeyError in the watched part of the program: 'a bug of mine'" in told[rank]


def test_a_rank_that_has_left_the_watched_part_is_not_missed(pool: Pool) -> None:
    with pytest.raises(LaunchError, match="rank 0 ended: killed by SIGKILL") as caught:
        pool.run(programs.done_with_watching, 1.0, timeout=40)
    assert [caught.value.reports[rank].value for rank in (1, 2)] == ["done", "done"]


def test_a_peer_that_computes_for_too_long(pool: Pool) -> None:
    for rank, told in enumerate(pool.run(programs.busy_peer, 1, TIMEOUT, timeout=40)):
        check(told, rank, "rank 1 sends nothing; it is in rotate 2 of run of ring_with, computing")


def test_a_rank_that_is_done_and_has_ended_is_not_to_blame(pool: Pool) -> None:
    told = pool.run(programs.busy_peer_beside_one_that_has_ended, 1, 1.0, timeout=40)
    assert told[0] == ""
    assert told[2].startswith("rank 1 sends nothing; it is in run of _sends_late, computing")


def test_an_exception_in_one_rank_s_program(pool: Pool) -> None:
    for rank, told in enumerate(pool.run(programs.raising_peer, 1, TIMEOUT, timeout=40)):
        if rank == 1:
            assert told[0][:2] == ("KeyError", "'a bug of mine'")  # its own error, as it is
            assert told[1][0] == "WorldError" and "rank 1 raised KeyError" in told[1][1]
        else:
            cause = "rank 1 raised KeyError in rotate 2 of run of ring_with: 'a bug of mine'"
            check(told, rank, cause, limit=TIMEOUT)


def test_a_backward_that_one_rank_never_enters(pool: Pool) -> None:
    for rank, told in enumerate(pool.run(programs.absent_backward, 1, TIMEOUT, timeout=40)):
        check(told, rank, "rank 1 never entered backward of ring_attention; it last did ring_attention, finished")


def test_a_rank_that_has_ended(pool: Pool) -> None:
    for rank, (kind, text, seconds) in enumerate(pool.run(programs.absent_forever, 1, TIMEOUT, timeout=40)):
        if rank != 1:
            assert kind == "WorldError" and seconds < LIMIT
            assert "rank 1 never entered run of ring_with; it has ended; it last did run of ring_with" in text


def test_a_rank_that_makes_no_world(pool: Pool) -> None:
    for rank, (kind, text, seconds) in enumerate(pool.run(programs.never_made, 1, TIMEOUT, timeout=40)):
        if rank != 1:
            assert kind == "WorldError" and seconds < LIMIT
            assert "ranks [1] did not come within 3 s" in text


def test_ctrl_c_on_one_rank(pool: Pool) -> None:
    for rank, told in enumerate(pool.run(programs.interrupted, 1, 20.0, timeout=40)):
        if rank == 1:
            assert told[0][0] == "KeyboardInterrupt"
            assert told[0][2] < 1.5  # not at the end of the wait: the timeout is 20 s
            assert told[1][0] == "WorldError" and "rank 1 raised KeyboardInterrupt" in told[1][1]
        else:
            check(told, rank, "rank 1 raised KeyboardInterrupt in rotate 3 of run of ring_with", limit=4)


def test_a_new_world_on_the_same_processes_is_fine(pool: Pool) -> None:
    assert pool.run(programs.fresh_world_after, TIMEOUT, timeout=40) == [True] * P


def test_worlds_that_are_not_held_leave_no_threads(pool: Pool) -> None:
    for before, during, after in pool.run(programs.threads, timeout=40):
        assert during == before + 3  # a monitor, a waiter, and one that asks the store
        assert after == before
