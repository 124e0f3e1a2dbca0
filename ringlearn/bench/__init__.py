"""How fast is ring attention on this hardware, and how close does it come to what one device can do?

    torchrun --nproc-per-node 2 -m ringlearn.bench --tokens 2048 8192 32768 --json ring.json
    torchrun --nproc-per-node 2 -m ringlearn.bench --tokens 2048 8192 --transport nccl symmetric --overlap
    torchrun --nproc-per-node 2 -m ringlearn.bench --tokens 2048 --graph
    torchrun --nproc-per-node 4 -m ringlearn.bench --tokens 8192 --strategies ring ulysses hybrid double-ring --inner 2
    torchrun --nproc-per-node 2 -m ringlearn.bench --tokens 8192 --compare other.py:attention
    python -m ringlearn.bench --plot ring.json --out ring.png
    python -m ringlearn.bench --decode --help    the same question for decoding, with options of its own

Each row is one way to compute attention; all rows use tensors of the same shapes and are timed in turn:

    one device   SDPA over the tokens of one rank, on every rank at once: what the hardware can do without a ring
    ring         ring attention over the tokens of all ranks, for each transport, layout and kernel requested
    a strategy   the same for the library's other strategies (--strategies); hybrid and double-ring for each --inner
    a function   a function named by --compare, over the tokens of all ranks

What is measured and how to read it: docs/bench.md.
"""
