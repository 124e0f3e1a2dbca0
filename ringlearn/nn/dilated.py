"""Dilated attention as a layer, with the sub-LayerNorm and the initialisation of MAGNETO.

MAGNETO puts a second LayerNorm into every sublayer, before its last projection, and scales the first values of all
projections but those of queries and keys with the depth, so that the first updates of a deep model stay bounded:

    x  +  W_out LN( Attention(W_q LN(x), W_k LN(x), W_v LN(x)) )

The inner LN is the sub-LayerNorm; the outer one and the residual belong to the block around the layer.

Source: Wang et al. 2022, "Foundation Transformers" (MAGNETO), figure 2 and sections 2 and 3. Ding et al. 2023,
"LongNet", use it with dilated attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from ..attention import dilated_attention
from ..attention.dilated.rows import check_mask, configure
from ..layouts import Layout
from ..masks import Mask, full
from ..worlds import Shards
from ..worlds.world import World
from .inputs import check_activations, check_heads, check_sizes
from .layers import join_heads, split_heads
from .split import each


def magneto_gain(layers: int) -> float:
    """The gain with which MAGNETO initialises value and output projections: sqrt(log(2 layers)).

    layers: the depth of an encoder or a decoder; a model with both has different gains. Raises ValueError unless it is
    an int >= 1.

    >>> round(magneto_gain(12), 3)
    1.783
    """
    (layers,) = check_sizes("DilatedAttention", layers=layers)
    return math.sqrt(math.log(2 * layers))


class DilatedAttention(nn.Module):
    """Multi-head dilated self-attention: projections, ``rl.dilated_attention``, sub-LayerNorm, output projection.

    width: of the model.  heads: H, which divides width.  segment_lengths, dilation_rates, mask: as for
    ``rl.dilated_attention``.  kv_heads: G, fewer key/value heads (grouped-query attention); H if None.
    layers: how many layers the model has, for the initialisation.  bias: whether the projections have a bias.

    Raises ValueError if the arguments do not fit together.

    >>> import torch, ringlearn as rl
    >>> layer = DilatedAttention(64, 8, segment_lengths=[16, 64], dilation_rates=[1, 4], mask=rl.causal, layers=12)
    >>> x = torch.randn(2, 100, 64)
    >>> out = layer(rl.SimulatedWorld(3).shard(x, layout=rl.zigzag))
    >>> torch.allclose(out.unshard(), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        mask: Mask = full,
        kv_heads: int | None = None,
        layers: int = 1,
        bias: bool = True,
    ):
        super().__init__()
        width, heads, kv_heads = check_heads("DilatedAttention", width, heads, kv_heads)
        configurations = configure("DilatedAttention", segment_lengths, dilation_rates)
        check_mask("DilatedAttention", mask)
        self.width, self.head_dim, self.mask = width, width // heads, mask
        self.segment_lengths, self.dilation_rates = zip(*((c.segment, c.rate) for c in configurations), strict=True)
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.sub_norm = nn.LayerNorm(width)
        self.out_proj = nn.Linear(width, width, bias=bias)
        self._gain = magneto_gain(layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """MAGNETO's initialisation: Xavier normal, with gain 1 for queries and keys, otherwise sqrt(log(2 layers))."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            gain = 1.0 if projection in (self.q_proj, self.k_proj) else self._gain
            nn.init.xavier_normal_(projection.weight, gain=gain)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        self.sub_norm.reset_parameters()

    def forward(
        self, x: Tensor | Shards, *, layout: Layout | None = None, world: World | None = None
    ) -> Tensor | Shards:
        """(B, S, width) in and out: a tensor on one device, Shards, or this rank's tokens with layout and world."""
        check_activations("DilatedAttention", x, self.width)
        q, k, v = (
            each(lambda t, p=p: split_heads(p(t), self.head_dim), x) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = dilated_attention(
            q, k, v, self.segment_lengths, self.dilation_rates, self.mask, layout=layout, world=world
        )
        return each(lambda t: self.out_proj(self.sub_norm(join_heads(t))), out)

    def extra_repr(self) -> str:
        """What print(module) shows in addition to the projections."""
        return (
            f"segment_lengths={self.segment_lengths}, dilation_rates={self.dilation_rates}, mask={self.mask}, "
            f"head_dim={self.head_dim}"
        )
