"""Train a byte-level language model whose sequences are split over ranks.

    python -m ringlearn.train --steps 200                                   one device, no ranks
    python -m ringlearn.train --steps 200 --simulate 4                      four ranks in this process
    torchrun --nproc-per-node 4 -m ringlearn.train --steps 200              four processes (gloo), or four GPUs (NCCL)
    torchrun --nproc-per-node 4 -m ringlearn.train --dp 2 --fsdp            two sequences at once, two ranks for each
    torchrun --nproc-per-node 2 -m ringlearn.train --tokens 131072 --dtype bfloat16 --checkpoint-layers
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m ringlearn.train ...
    python -m ringlearn.train --task recall --simulate 4                    with the accuracy by distance

It learns from the source files of Python's standard library, or on a task that needs distant tokens. With the same
options for task, model and optimizer, a run makes the same steps on any number of ranks: with --dtype float64 the
losses agree to nearly all digits. With --save DIR the run is saved there at the end and when it is interrupted
(Ctrl-C); the same command then resumes it, on the same number of ranks or another. If a rank is killed or cut off, the
others end after --timeout seconds.
"""

from .checkpoint import latest, load, save
from .recall import Recall, accuracy_by_distance
from .run import lr_at, train
from .stdlib import StandardLibrary

__all__ = ["Recall", "StandardLibrary", "accuracy_by_distance", "latest", "load", "lr_at", "save", "train"]
