"""Continue a text with a language model whose keys and values are shared out over ranks.

    python -m ringlearn.generate                                            one device
    python -m ringlearn.generate --simulate 4 --tokens 4096                 four ranks in this process
    torchrun --nproc-per-node 4 -m ringlearn.generate --tokens 65536        four processes (gloo), or four GPUs (NCCL)
    python -m ringlearn.generate --load run1 --prompt "import os"           a model that ringlearn.train has saved
    torchrun --nproc-per-node 2 -m ringlearn.generate --model FOLDER --prompt-file book.txt --dtype bfloat16

The ranks read the prompt together, with ring attention, and each keeps its part of the keys and values: a prompt may be
longer than one of them could hold. Then every rank computes the newest token, whose attention they share, and rank 0
chooses the next one. The program prints the text as it is generated, the time to the first token, and tokens per
second.

Without --load or --model it uses a small model with random weights, which shows the mechanics and writes nonsense.
"""
