"""The checkers of notebook 12 reject every wrong answer of the zoo at the right stage, and pass every right one."""

from __future__ import annotations

import pytest
import torch
from zoo.rules import ZooRules

import ringlearn as rl
from ringlearn.course.checks import nb12
from ringlearn.plan import memory, model, step_seconds
from ringlearn.plan.hardware import FORWARD


class TestZoo(ZooRules):
    NUMBER = "12"


@pytest.mark.parametrize("anew, kept", [(True, "checkpoints"), (False, "activations")])
def test_the_parts_are_the_planners(anew, kept):
    planned = memory(nb12.LLAMA, nb12.setup(8, 16, anew), nb12.TOKENS)
    parts = nb12.bytes_by_part(nb12.LLAMA, nb12.TOKENS, 8, 16, anew)
    want = [planned["weights"] + planned["optimizer"], planned[kept], planned["logits and loss"]]
    assert list(parts.values()) == want


@pytest.mark.parametrize("name, P, anew", [("llama-3.1-8b", 8, True), ("llama-2-7b", 4, False)])
def test_the_seconds_are_the_planners(name, P, anew):
    given = model(name), nb12.TOKENS, P, nb12.PRODUCTS, nb12.ATTENTION, anew
    planned = step_seconds(given[0], nb12.setup(P, P, anew), nb12.TOKENS, nb12.H100)
    want = planned["matrix products"] + planned["attention"]
    # The exercise computes the output layer anew, too, and attention's forward at the rate of both.
    if anew:
        products, attention = nb12._Time(*given).pieces
        head = 2 * nb12.TOKENS * given[0].embedding / P / nb12.PRODUCTS
        want += planned["recomputation"] + head + attention * (1 - 1 / FORWARD)
    assert nb12._Time(*given).want == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("borders, P", [([[0, 5, 12], [0, 8, 12]], 3), ([[0, 4, 11, 13]], 4)])
def test_what_a_rank_reads_is_what_the_library_gives_it(borders, P):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'ringlearn[transformers]'")
    from hf_programs import make_model

    from ringlearn.nn.hugging_face import split

    batch = nb12._batch(borders, P)
    batch = batch._replace(rows=batch.rows % 61)  # the vocabulary of the model
    parts = [nb12.part_of(batch, rank) for rank in range(len(borders) * P)]
    for row, cuts in enumerate(borders):
        ids, cuts = batch.rows[row : row + 1], torch.tensor(cuts)
        given = {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts, "labels": ids}
        found = split(make_model(), rl.SimulatedWorld(P), ids, **given)
        names = found["input_ids"], found["position_ids"], found.targets
        mine = parts[row * P : (row + 1) * P]
        assert [x[0].tolist() for x in names] == [[n for part in mine for n in part[i]] for i in range(3)]
