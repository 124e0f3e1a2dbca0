"""Notebook 05 as a learner leaves it: solved with its own solutions, with guesses made."""

from __future__ import annotations

import pytest
import torch
from course import read, solutions
from notebook_rules import NotebookRules
from zoo.nb05 import exchange_itself

import ringlearn as rl
from ringlearn.course.checks import nb05
from ringlearn.course.records import load
from ringlearn.course.rendezvous import Mistake, Rendezvous

pytestmark = pytest.mark.alone  # it starts processes and gives them a second or two


class TestNotebook(NotebookRules):
    NUMBER = "05"
    ANSWERS = [3, "slower", 5, 4]
    QUIZ = [8, 128, 6, 2, 19]
    SPOILERS = {
        "predict-turns": (r"3 turns", r"three turns|third turn", r"P \\bmod 2"),
        "exercise-5a": (r"rank % 2 == 0", r"if rank % 2"),
        "exercise-5b": (r"in dist\.batch", r"P2POp\(dist\.i(send|recv), "),
        "exercise-5c": (r"await arriving", r"await travelling", r"rl\.merge\("),
        "predict-two": (r"slower(?!\"`)", r"1\.50", r"times as fast", r"host (is|has|rules|needs)"),
        "predict-memory": (r"[Hh]olds 5", r"five (such )?tensors", r"5\.03", r"own halves"),
        "predict-agreement": (r"expected the same", r"(four|4)( ranks)? raise", r"all of them, before"),
        "quiz": (r"\b19\b:", r"6 MB", r"its two neighbours"),
    }


def test_the_files_that_learners_fill_in_are_blank_and_the_solutions_are_whole():
    cells = {cell.id: cell.source for cell in read("05").cells}
    for exercise, file in (("5a", "ring_pass.py"), ("5b", "ring_exchange.py"), ("5c", "my_ring.py")):
        assert cells[f"exercise-{exercise}"].splitlines()[0] == f"%%writefile {file}"
        assert "..." in cells[f"exercise-{exercise}"] and "..." not in solutions(read("05"))[exercise]
        assert f'("{file}", pool)' in cells[f"check-{exercise}"]


def test_the_solutions_of_notebooks_03_and_04_pass_unchanged(tmp_path):
    imports = "import torch\nimport ringlearn as rl\nfrom ringlearn.flash import attend, attend_backward\n"
    file = tmp_path / "my_ring.py"
    file.write_text("\n\n".join([imports, solutions(read("03"))["3b"], solutions(read("04"))["4a"]]))
    result = nb05.ring(str(file))  # which starts processes of its own
    assert result, result.message


def test_what_the_captions_say_of_the_record_is_so():
    """Small messages all take the same time: from 64 KiB to 64 MiB, a thousand times as much, it does not double. Two
    GPUs are slower at 8,192 tokens and nearly twice as fast at 65,536, with half the memory."""
    record = load(nb05.RECORD)
    small = [row["ms"] for row in record["transfers"] if row["mib"] <= 64]
    assert max(small) < 2 * min(small)
    ring = {row["tokens"]: row["peak_mib"] for row in record["scaling"] if row["gpus"] == 2}
    assert all(0.45 < ring[r["tokens"]] / r["peak_mib"] < 0.55 for r in record["plain"] if r["tokens"] > 10_000)
    assert nb05.two_gpus(record, 8192) < 1 and nb05.two_gpus(record, 65536) > 1.7
    assert [row["gpus"] for row in record["scaling"]] == [1] * 3 + [2] * 3
    assert all(1e-3 < error < 5e-3 for error in record["error"].values())  # bfloat16's


def test_the_pictures_are_stored_as_pictures():
    shown = {cell.id: [o.get("data", {}) for o in cell.outputs] for cell in read("05").cells if "outputs" in cell}
    for cell in ("picture-orders", "scaling"):
        assert any("image/png" in data for data in shown[cell]), cell


def test_what_the_text_says_of_messages_over_nccl_is_so():
    """Sends first on all ranks, and isend beside irecv, hang with large messages only; batches and pairs never do."""
    results = load("2026-11-28-order-2-h200.json")["results"]
    hangs = {(row["case"], row["bytes"]) for row in results if not row["ended"]}
    assert hangs == {("all send first", 2**28), ("isend, irecv, wait for both", 2**28)}
    for case in ("batch_isend_irecv", "even ranks send first"):
        assert all(row["right"] for row in results if row["case"] == case)
    for case in ("batch, no wait", "batch, receive into x"):
        assert not all(row["right"] for row in results if row["case"] == case)


def test_the_pictures_are_drawn_from_runs_and_records():
    pytest.importorskip("matplotlib")
    figure = rl.viz.processes.orders(4)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == [
        "all send, then receive: no end",
        "even ranks send first: 2 turns",
        "post all, then wait: 1 turn",
    ]
    assert len(figure.axes[0].patches) == 4
    assert "3 turns" in rl.viz.processes.orders(5).axes[1].get_title(loc="left")
    figure = rl.viz.processes.scaling(load(nb05.RECORD))
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    record = load(nb05.RECORD)
    assert heights == [row["forward_backward_ms"] for row in record["plain"] + record["scaling"]]


def test_the_simulated_network_leaves_torch_as_it_was():
    import torch.distributed as dist

    before = dist.isend, dist.P2POp, dist.get_rank
    network = Rendezvous(3)
    results = network.run(exchange_itself, [(torch.tensor([float(rank)]), rank, 3) for rank in range(3)])
    assert [float(x) for x in results] == [2, 0, 1] and network.turns == 1
    with pytest.raises(Mistake, match="itself"):
        network.run(exchange_itself, [(torch.ones(1), rank, 1) for rank in range(1)] * 3)
    assert (dist.isend, dist.P2POp, dist.get_rank) == before
