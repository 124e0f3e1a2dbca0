"""Decoding: the newest queries of a sequence attend to keys and values that are shared out over ranks.

In the order of reading: ``ownership`` says which rank holds which token, ``cache`` holds them, ``local`` is attention
to the tokens of one rank (``gpu`` is the same in Triton), ``exchange`` merges the partial results of all, and ``call``
is what users call. ``prefill`` is for many new tokens after a cached prefix.
"""

from .cache import KVCache
from .call import decode_attention
from .exchange import EXCHANGES
from .ownership import Ownership
from .prefill import PASSES, prefill_attention

__all__ = ["EXCHANGES", "PASSES", "KVCache", "Ownership", "decode_attention", "prefill_attention"]
