"""What training a transformer keeps in memory, from shapes alone: each rank's activations, and the weights' state.

The counts are for ``rl.nn.Transformer``, and exact if all ranks have the same number of tokens. d = H D is the width.
"""

from __future__ import annotations

from collections.abc import Mapping

WAYS = ("whole", "blocks", "recompute")


def kept_numbers(
    P: int,
    *,
    layers: int,
    H: int,
    G: int,
    D: int,
    vocabulary: int = 256,
    hidden: int | None = None,
    way: str = "blocks",
) -> Mapping[str, float]:
    """How many numbers a rank keeps for the backward for each of its tokens, by purpose.

    A Linear keeps its input, a product both factors, and attention keeps q, k, v, out and lse. On more than one rank
    the ring also keeps the keys and values that arrived last, with which its backward begins.

    way: "whole" keeps everything; "blocks" computes feed-forward and loss in blocks of the sequence, and again in the
    backward (Liu and Abbeel 2023, section 3); "recompute" computes whole layers again and keeps only their inputs.
    hidden: the width inside the feed-forward, by default 4 H D.  Raises ValueError for another way, or sizes below 1.

    >>> sum(kept_numbers(1, layers=2, H=4, G=4, D=8, way="recompute").values()) / 32  # in units of d
    3.0
    >>> kept_numbers(2, layers=1, H=4, G=2, D=8)["attention"] / 32  # q, out twice; k, v twice
    5.125
    """
    if way not in WAYS:
        raise ValueError(f"kept_numbers: expected way to be one of {', '.join(WAYS)}, got {way!r}")
    if min(P, layers, H, G, D, vocabulary) < 1:
        raise ValueError("kept_numbers: expected P, layers, H, G, D and vocabulary of at least 1")
    d, hidden = H * D, hidden or 4 * H * D
    if way == "recompute":
        return {"inputs of layers": layers * d, "last layer's output": d}
    kept = {
        "inputs of layers": layers * d,
        "norms": layers * (2 * d + 1),  # before the gain and after it, and one over the root mean square
        "attention": layers * (3 * d + H + 2 * G * D * (1 if P == 1 else 2)),  # q, out, out with its heads joined; lse
        "sines of RoPE": layers * 2 * D,
        "inputs of feed-forwards": layers * d,
        "last layer's output": d,
    }
    if way == "whole":
        kept["feed-forwards"] = layers * (2 * d + 1 + 2 * hidden)  # their norm; before and after the GELU
        kept["loss"] = 2 * d + 1 + vocabulary  # its norm, and the logarithms of all probabilities
    return kept


def kept_bytes(S: int, P: int, *, B: int = 1, itemsize: int = 4, **sizes) -> int:
    """Bytes of activations that each of P ranks keeps for the backward of B sequences of S tokens.

    itemsize: bytes per number, 4 for float32 and 8 for float64.  sizes: as for ``kept_numbers``.  Tokens and targets,
    8 bytes each, are not counted.

    >>> one, two, four = (kept_bytes(4096, P, layers=2, H=4, G=2, D=16) for P in (1, 2, 4))
    >>> four == two // 2, round(two / one, 2)
    (True, 0.56)
    """
    numbers = dict(kept_numbers(P, **sizes))
    once = numbers.pop("sines of RoPE", 0)  # the same for all sequences
    return round(-(-S // P) * itemsize * (B * sum(numbers.values()) + once))


def weights(*, layers: int, H: int, G: int, D: int, vocabulary: int = 256, hidden: int | None = None) -> int:
    """How many parameters ``rl.nn.Transformer`` has.

    >>> weights(layers=1, H=2, G=1, D=4, vocabulary=10)
    888
    """
    d, hidden = H * D, hidden or 4 * H * D
    return 2 * vocabulary * d + d + layers * (2 * d * d + 2 * d * G * D + 2 * d * hidden + 2 * d)


def state_bytes(parameters: int, ranks: int = 1, *, fsdp: bool = False) -> int:
    """Bytes of float32 weights, their gradients, and the two moments of AdamW, on each rank: 16 for each parameter.

    fsdp: whether these are sharded over the ranks (FSDP2, ZeRO-3). Context parallelism alone does not shard them.

    >>> state_bytes(1_000_000), state_bytes(1_000_000, 4, fsdp=True)
    (16000000, 4000000)
    """
    return 16 * (-(-parameters // ranks) if fsdp else parameters)
