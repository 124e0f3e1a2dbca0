"""What the processes of test_train.py run."""

from __future__ import annotations

import os
import shutil
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
        shutil.copytree(folder / "two", folder / rank)
    try:
        train(parse([*argv, "--save", str(folder / rank)]))
    except ValueError as error:
        return str(error)


def refusals(folder, argv):
    """What a rank says when one of the two has a problem, by a part of what is expected."""
    first = os.environ["RANK"] == "0"
    write = checkpoint.dcp.save

    def full(state, **options):
        if not first:
            state["full"] = _Full()
        return write(state, **options)

    def said(*more):
        try:
            return str(train(parse([*argv, *more])))
        except (ValueError, OSError) as error:
            return str(error)

    told = {
        "--lr: expected the same on all ranks": said("--lr", "0.1" if first else "0.2"),
        "--dp: expected the same on all ranks": said("--dp", "1" if first else "2"),
        "this user may write": said("--record", str(folder)),
    }
    checkpoint.dcp.save = full
    told["No space left on rank 1"] = said("--steps", "1", "--save", str(folder / "full"))
    checkpoint.dcp.save = write
    (folder / "full" / "latest.new").mkdir(exist_ok=True)
    told["Is a directory"] = said("--steps", "1", "--save", str(folder / "full"))
    return told


class _Full:
    """What cannot be written."""

    def __reduce__(self):
        raise OSError("No space left on rank 1")


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
