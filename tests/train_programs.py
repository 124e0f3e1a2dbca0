"""What the processes of test_train.py run."""

from __future__ import annotations

import os
import signal
import sys

import torch

from ringlearn.train import checkpoint, train
from ringlearn.train.options import parse


def ranks(*runs):
    """The losses of some runs, one after the other."""
    torch.set_num_threads(1)
    return [train(parse(argv)) for argv in runs]


def folders_of_their_own(folder, argv):
    """What a rank says whose folder is another one than that of the others."""
    rank = os.environ["RANK"]
    if rank == "0":
        (folder / rank / "step-00000001").mkdir(parents=True)
        (folder / rank / "latest").write_text("step-00000001")
    try:
        train(parse([*argv, "--save", str(folder / rank)]))
    except ValueError as error:
        return str(error)


def killed_in_a_save():
    """Train, and be killed when the second checkpoint's files are there in part, before ``latest`` names it."""
    write, saves = checkpoint.dcp.save, []

    def save(state, checkpoint_id, **options):
        saves.append(checkpoint_id)
        if len(saves) == 2:
            write({"model": state["model"]}, checkpoint_id=checkpoint_id, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(state, checkpoint_id=checkpoint_id, **options)

    checkpoint.dcp.save = save
    train(parse(sys.argv[1:]))


if __name__ == "__main__":
    killed_in_a_save()
