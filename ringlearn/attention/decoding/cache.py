"""One layer's keys and values, shared out over the ranks of a world."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...fingerprint import checksum, shown, whole_number
from ...worlds.comm import Comm
from ...worlds.uncompiled import uncompiled
from ...worlds.world import PerRank, Shards, World, describe
from . import gpu
from .newest import own_rows
from .ownership import Ownership

BLOCK = 4096  # slots that the readable kernel looks at together, so that its scores stay small


class KVCache:
    """The keys and values of one layer for a batch of growing sequences, shared out over the ranks of a world.

    world: its ranks hold the cache.  batch: B sequences, each with its own length.  heads: G key/value heads.
    dim: D_k, and also D_v unless v_dim is given.  capacity: the most tokens that each sequence can have.
    interleave: K, how many neighbouring tokens a rank owns before the next rank's turn; see ``Ownership``.
    dtype: float64, float32, bfloat16 or float16.
    page, pages: without them every sequence has room for ``capacity`` tokens from the start. With page=, a rank holds
    pages of that many tokens; a sequence takes another page when it needs one, and returns those that ``truncate``
    frees. pages= is how many there are on a rank for all sequences together (if None, enough for all at full capacity).
    Kernels read through the table that says which sequence has which page, so nothing is ever gathered or moved.

    Attributes: k, v: for each rank of this process (pages, G, page, D_k) and (pages, G, page, D_v).
    table: (B, pages of a sequence) int32, the pages of each sequence in order, the same on every rank; 0 where
    there is none yet. Without page= each sequence has one page that holds all its slots: sequence b has page b.
    lengths_on_device: int32 (B,), for kernels.

    Every rank makes the same calls with the same arguments. In a world with check=True the arguments, including their
    values, are compared before anything changes: a mistake raises ValueError on every rank and leaves the cache
    unchanged.

    A decode step (``append`` and ``decode_attention``) can be captured as a CUDA graph, whose replays append further
    tokens; ``reserve`` room for them first. Nothing is compared in a replay, and tokens for which there is no room are
    lost: the next call that asks for ``lengths`` reads them from the device, and raises ValueError if tokens were lost.

    >>> import torch, ringlearn as rl
    >>> cache = rl.KVCache(rl.SimulatedWorld(2), batch=1, heads=2, dim=8, capacity=100, interleave=4)
    >>> prompt = cache.world.shard(torch.randn(1, 2, 37, 8), torch.randn(1, 2, 37, 8), layout=rl.zigzag)
    >>> cache.append(*prompt)
    >>> cache.append(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8))
    >>> cache.lengths, cache.local_lengths(0), cache.local_lengths(1)
    ((38,), (20,), (18,))
    """

    def __init__(
        self,
        world: World,
        batch: int,
        heads: int,
        dim: int,
        capacity: int,
        *,
        v_dim: int | None = None,
        interleave: int = 16,
        dtype: torch.dtype = torch.float32,
        page: int | None = None,
        pages: int | None = None,
    ):
        if not isinstance(world, World):
            raise ValueError(f"KVCache: expected a SimulatedWorld or a DistributedWorld, got {world!r}")
        sizes = {"batch": batch, "heads": heads, "dim": dim, "capacity": capacity, "interleave": interleave}
        sizes |= {"v_dim": dim if v_dim is None else v_dim}
        sizes, problem = _whole_sizes(sizes | {"page": page, "pages": pages}, dtype)
        world.agree("KVCache", {name: str(x) for name, x in (sizes | {"dtype": dtype}).items()}, {}, problem)
        batch, heads, dim, capacity, interleave, v_dim, page, pages = sizes.values()
        self.world, self.batch, self.heads, self.dim, self.v_dim = world, batch, heads, dim, v_dim
        self.capacity, self.dtype = capacity, dtype
        self.ownership = Ownership(world.size, interleave)
        self._lengths = [0] * batch
        # All ranks have as many slots as rank 0, which owns the first block of each round, so the most tokens: then the
        # table is the same everywhere, and a pool is full on all ranks or on none.
        slots = self.ownership.count(0, capacity)
        self.paged, self.page = page is not None, min(page or slots, slots)
        columns = -(-slots // self.page)
        self.pages = pages or batch * columns
        self._free = list(range(self.pages))[::-1]  # the next one is at the end
        self._taken: list[list[int]] = [[] for _ in range(batch)]
        self._promised = [0] * batch  # the lengths that each sequence has been given pages for in advance
        self._captured = False  # whether replays of a graph may have appended what the host does not know of
        on_device, shape = {"device": world.device}, (self.pages, heads, self.page)
        with torch.inference_mode(False):  # so that it can be written to under it and outside of it
            # One row more than there are: what other ranks own is written there, so that no rank has to ask its device.
            self._rows = [
                [torch.zeros(prod(shape) + 1, d, dtype=dtype, **on_device) for _ in world.ranks]
                for d in (dim, self.v_dim)
            ]
            self.k, self.v = (PerRank(rows[:-1].view(*shape, rows.shape[1]) for rows in r) for r in self._rows)
            self.table = torch.zeros(batch, columns, dtype=torch.int32, **on_device)
            self.lengths_on_device, self._room = (torch.zeros(batch, dtype=torch.int32, **on_device) for _ in range(2))
            self._table = torch.zeros(batch, columns, dtype=torch.int64)  # the same for the host, which need not wait
        if not self.paged:
            self._reserve([1] * batch)

    def __repr__(self) -> str:
        return (
            f"KVCache({self.batch} sequences of {min(self.lengths)} to {max(self.lengths)} tokens, capacity "
            f"{self.capacity}, {self.heads} heads, {self.dtype}, over {self.world.size} ranks in blocks of "
            f"{self.ownership.interleave})"
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each sequence has, on all ranks together."""
        self._recount()
        return tuple(self._lengths)

    def _recount(self) -> None:
        """Learn from the device what replays of a captured graph have appended."""
        if not self._captured or self.capturing:
            return
        counted, room = self.lengths_on_device.tolist(), self._room.tolist()
        self._set([min(length, most) for length, most in zip(counted, room, strict=True)])
        for b, (length, most) in enumerate(zip(counted, room, strict=True)):
            if length > most:
                raise ValueError(
                    f"KVCache: replays of a graph gave sequence {b} {length} tokens, there was room for {most}, so the "
                    f"last {length - most} are lost; call cache.reserve(tokens) for all of them before the replays"
                )

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured, to be replayed later."""
        return self.world.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def local_lengths(self, rank: int) -> tuple[int, ...]:
        """How many tokens of each sequence a rank owns."""
        return tuple(self.ownership.count(rank, length) for length in self.lengths)

    def whole(self, index: int) -> tuple[Tensor, Tensor]:
        """k (B, G, n, D_k) and v (B, G, n, D_v): all slots in use on the index-th rank of this process.

        If the cache is in pages, they are a copy.
        """
        stop = max(self.local_lengths(self.world.ranks[index]))
        k, v = self.k[index], self.v[index]
        if self.paged:
            table = self.table[:, : -(-stop // self.page)].long()
            k, v = (x[table].transpose(1, 2).flatten(2, 3) for x in (k, v))
        return k[:, :, :stop], v[:, :, :stop]

    def blocks(self, index: int, start: int, stop: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Slots start to stop of the index-th rank of this process, block by block: a block's first slot, its k and v.

        They may begin before start and end after stop, with whole pages. Reading pages makes a copy of some of them.
        """
        k, v = self.k[index], self.v[index]
        if not self.paged:
            for a in range(start, stop, BLOCK):
                yield a, k[:, :, a : min(stop, a + BLOCK)], v[:, :, a : min(stop, a + BLOCK)]
            return
        together, end = max(1, BLOCK // self.page), -(-stop // self.page)
        for a in range(start // self.page, end if start < stop else 0, together):
            table = self.table[:, a : min(end, a + together)].long()
            # (B, pages, G, page, D) to (B, G, pages * page, D)
            yield a * self.page, *(x[table].transpose(1, 2).flatten(2, 3) for x in (k, v))

    # Changes

    @uncompiled
    def append(self, k: Tensor | Shards, v: Tensor | Shards, counts: Sequence[int] | None = None) -> None:
        """Add tokens at the end of every sequence.

        k: (B, G, T, D_k), v: (B, G, T, D_v), either plain tensors, the same on every rank, as when the newest tokens
        are decoded; or ``Shards`` of any layout, as after a prefill, which travel to their owners in one
        exchange.
        counts: how many of the T tokens each sequence gets, from the first on; all if None. This lets you pad a batch
        of prompts of unequal lengths on the right.

        Raises ValueError on every rank, and changes nothing, if the arguments do not fit, differ between ranks, or
        would exceed the capacity.
        """
        op, problem, same, new = "KVCache.append", None, {}, []
        capturing = self.capturing
        try:
            n = self._check(op, k, v)
            if capturing and (counts is not None or isinstance(k, Shards)):
                raise ValueError(f"{op}: in a CUDA graph expected tensors and no counts, as all sequences grow alike")
            new = self._lengths if capturing else self._new_lengths(op, n, counts)
            if self.world.check:
                same = {"cached lengths": str(self._lengths), "lengths afterwards": str(new), "n": str(n)}
                same["kind"] = type(k).__name__
                if isinstance(k, Shards):
                    same["layout"] = describe(k.layout, k.length, self.world.size)
                elif not capturing:
                    same |= {"values of k": checksum(k), "values of v": checksum(v)}
        except Exception as error:  # the other ranks must hear of it
            problem = error
        self.world.agree(op, same, {}, problem)
        with torch.no_grad():
            if capturing:
                self._captured = True
                self.world.run(_keep_own, k, v, PerRank(range(len(self.world.ranks))), self, None)
                self.lengths_on_device.add_(n)
                return
            try:
                self._reserve(new)
                if isinstance(k, Shards):
                    self.world.run(_share_out, k, v, self.k, self.v, _Move(self, new, k))
                else:
                    some = None if counts is None else torch.tensor(list(counts), device=self.world.device)
                    self.world.run(_keep_own, k, v, PerRank(range(len(self.world.ranks))), self, some)
                self._set(new)  # until now nobody sees what was written, so a failed exchange spoils nothing
            finally:
                self._reserve(self._lengths)

    @uncompiled
    def reserve(self, tokens: int) -> None:
        """Give every sequence the pages for that many more tokens now; it keeps them until a ``truncate``.

        A CUDA graph that appends finds them in the table. Without pages there is always room up to the capacity, and
        this only checks that it is enough.
        Raises ValueError on every rank, and changes nothing, if there is not enough room or if the ranks differ.
        """
        op, problem, new = "KVCache.reserve", None, []
        try:
            n = whole_number(tokens)
            if n is None or n < 0:
                raise ValueError(f"{op}: expected tokens to be an int >= 0, got {tokens!r}")
            new = self._new_lengths(op, n, None)
        except Exception as error:
            problem = error
        self.world.agree(op, {"lengths afterwards": str(new)}, {}, problem)
        self._promised = new
        self._reserve(self._lengths)

    @uncompiled
    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forget all but the first tokens of each sequence, for instance when proposed tokens were not accepted.

        lengths: the new length of each sequence, or one number for all; at most the present lengths.
        Raises ValueError on every rank, and changes nothing, if they do not fit or differ between ranks.
        """
        op, problem, new = "KVCache.truncate", None, []
        try:
            self._recount()
            one = whole_number(lengths)
            new = _whole_numbers(lengths) if one is None else [one] * self.batch
            if len(new) != self.batch or any(a is None or not 0 <= a <= b for a, b in zip(new, self._lengths)):
                raise ValueError(
                    f"{op}: expected a length from 0 to the present one for each of {self.batch} sequences, which have "
                    f"{_few(self._lengths)} tokens, got {lengths!r:.80}"
                )
        except Exception as error:
            problem = error if isinstance(error, ValueError) else ValueError(f"{op}: {error}")
        self.world.agree(op, {"cached lengths": str(self._lengths), "lengths": str(new)}, {}, problem)
        self._set(new)
        self._promised = [0] * self.batch
        self._reserve(new)

    @contextmanager
    def restored_on_failure(self) -> Iterator[None]:
        """What is done within appends tokens and attends to them. If that fails, the cache forgets them again.

        Otherwise the same step, made once more, would append them a second time, and be wrong without a word.
        """
        before = None if self.capturing else self.lengths
        try:
            yield
        except BaseException:
            if before is not None:
                self._set(before)
                self._reserve(before)
            raise

    def _set(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self.lengths_on_device.copy_(torch.tensor(self._lengths, dtype=torch.int32))

    # Pages

    def _needed(self, length: int) -> int:
        """How many pages a sequence of so many tokens has, on every rank as many as on the one with the most tokens."""
        return -(-self.ownership.count(0, length) // self.page) if self.paged else 1

    def _reserve(self, lengths: Sequence[int]) -> None:
        """Let every sequence have the pages that it needs or was promised, no more; there are enough of them."""
        for b, (length, taken) in enumerate(zip(lengths, self._taken, strict=True)):
            needed = self._needed(max(length, self._promised[b]))
            if len(taken) != needed:
                self._room[b] = min(self.capacity, self.ownership.room(needed * self.page))
            while len(taken) > needed:
                self._free.append(taken.pop())
            while len(taken) < needed:
                self.table[b, len(taken)] = self._table[b, len(taken)] = self._free[-1]
                taken.append(self._free.pop())

    # Checks

    def _check(self, op: str, k: Any, v: Any) -> int:
        """How many tokens come. Raises ValueError for what does not fit into this cache."""
        if isinstance(k, Shards) != isinstance(v, Shards):
            raise ValueError(
                f"{op}: expected k and v to be two Shards or two tensors, got {type(k).__name__} and {type(v).__name__}"
            )
        if isinstance(k, Shards):
            if k.world is not self.world or v.world is not self.world:
                raise ValueError(f"{op}: expected shards of the cache's own world; shard them with cache.world.shard")
            if k.layout != v.layout or k.length != v.length:
                raise ValueError(
                    f"{op}: expected k and v of one layout and length, got k in {k.layout} of {k.length} and v in "
                    f"{v.layout} of {v.length}; shard them in one call, world.shard(k, v, layout=...)"
                )
        for name, x, d in (("k", k, self.dim), ("v", v, self.v_dim)):
            for t in x.tensors if isinstance(x, Shards) else [x]:
                if (
                    not isinstance(t, Tensor)
                    or t.dim() != 4
                    or (*t.shape[:2], t.shape[3]) != (self.batch, self.heads, d)
                ):
                    got = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
                    raise ValueError(
                        f"{op}: expected {name} of shape ({self.batch}, {self.heads}, T, {d}), as the cache was made "
                        f"for, got {got}"
                    )
                if t.dtype != self.dtype or t.device.type != self.world.device.type:
                    raise ValueError(
                        f"{op}: expected {name} in {self.dtype} on {self.world.device}, as the cache is, got {t.dtype} "
                        f"on {t.device}; convert it with .to(), or make the cache with its dtype"
                    )
        if isinstance(k, Shards):
            return k.length
        if k.shape[2] != v.shape[2]:
            raise ValueError(f"{op}: expected as many keys as values, got k {tuple(k.shape)} and v {tuple(v.shape)}")
        return k.shape[2]

    def check_room(self, tokens: int) -> None:
        """Raise ValueError unless every sequence has room for that many more tokens."""
        self._new_lengths("KVCache", tokens, None)

    def _new_lengths(self, op: str, n: int, counts: Sequence[int] | None) -> list[int]:
        self._recount()
        given, counts = counts, [n] * self.batch if counts is None else _whole_numbers(counts)
        if len(counts) != self.batch or any(c is None or not 0 <= c <= n for c in counts):
            raise ValueError(
                f"{op}: expected counts from 0 to T = {n}, one for each of {self.batch} sequences, got {given!r:.80}"
            )
        new = [length + count for length, count in zip(self._lengths, counts)]
        full = next((b for b, length in enumerate(new) if length > self.capacity), None)
        if full is not None:
            raise ValueError(
                f"{op}: sequence {full} has {self._lengths[full]} tokens and would have {new[full]}, the capacity is "
                f"{self.capacity}; truncate it, or make a cache with a larger capacity"
            )
        needed = sum(max(0, self._needed(length) - len(taken)) for length, taken in zip(new, self._taken))
        if self.paged and needed > len(self._free):
            raise ValueError(
                f"{op}: {needed} more pages of {self.page} tokens are needed on each rank, {len(self._free)} of "
                f"{self.pages} are free; truncate a sequence that is done, or make a cache with more pages"
            )
        return new


class _Move:
    """Which tokens of an append of shards go where: from positions alone, so that ranks know it without asking."""

    def __init__(self, cache: KVCache, new: Sequence[int], k: Shards):
        self.cache, self.ownership, self.k = cache, cache.ownership, k
        self.lengths = torch.tensor(cache.lengths)
        self.counts = torch.tensor(new) - self.lengths

    def tokens(self, to: int, source: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a rank gets of the tokens that rank ``source`` holds: sequence, row and slot of each."""
        places = self.k.layout.positions(self.k.length, self.ownership.ranks, source)
        positions = self.lengths[:, None] + places
        mine = (places < self.counts[:, None]) & (self.ownership.owner(positions) == to)
        b, row = mine.nonzero(as_tuple=True)
        return b, row, self.ownership.slot(positions[b, row])

    def write(self, store: Tensor, tokens: tuple[Tensor, Tensor, Tensor], values: Tensor) -> None:
        """Put values (tokens, heads, D) where they belong in a rank's pages."""
        (b, _, slot), page = tokens, self.cache.page
        store[self.cache._table[b, slot // page], :, slot % page] = values


async def _keep_own(comm: Comm, k: Tensor, v: Tensor, index: int, cache: KVCache, counts: Tensor | None) -> None:
    """Every rank has the new tokens and keeps those that it owns. Nothing here waits for the device."""
    where = cache.table, cache.lengths_on_device, cache._room, counts
    if gpu.can_append(k):
        gpu.append(k, v, cache.k[index], cache.v[index], *where, comm.rank, cache.ownership)
        return
    rows = own_rows(k.shape[2], cache.heads, cache.page, cache.pages, *where, comm.rank, cache.ownership).flatten()
    for store, new in zip(cache._rows, (k, v), strict=True):
        store[index].index_copy_(0, rows, new.reshape(-1, new.shape[-1]))


async def _share_out(comm: Comm, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, move: _Move) -> None:
    """Every rank has a shard of the new tokens and sends each token to its owner."""
    sends, receives = {}, {}
    for other in range(comm.size):
        b, row, _ = move.tokens(other, source=comm.rank)
        sends[other] = k[b, :, row], v[b, :, row]
        arriving = len(move.tokens(comm.rank, source=other)[0])
        receives[other] = (arriving, k.shape[1], k.shape[3]), (arriving, v.shape[1], v.shape[3])
    received = await comm.exchange(sends, receives, name="share out the cache")
    for other, (ks, vs) in received.items():
        tokens = move.tokens(comm.rank, source=other)
        move.write(k_cache, tokens, ks), move.write(v_cache, tokens, vs)


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _whole_numbers(values: Any) -> list[int | None]:
    """Each as an int, None for what is no integer; nothing of what is no list."""
    try:
        return [whole_number(x) for x in values]
    except TypeError:
        return []


def _whole_sizes(given: dict[str, Any], dtype: Any) -> tuple[dict[str, Any], ValueError | None]:
    """The sizes of a cache as ints, and what is wrong with them and its dtype. page and pages may be None."""
    sizes = {name: None if x is None and name in ("page", "pages") else whole_number(x) for name, x in given.items()}
    if given["pages"] is not None and given["page"] is None:
        said = f"got pages={given['pages']!r} without page=, the number of tokens of a page; give both"
        return given, ValueError(f"KVCache: {said}")
    for name, size in sizes.items():
        if (
            given[name] is not None
            and (size is None or size < 1)
            or given[name] is None
            and name not in ("page", "pages")
        ):
            return given, ValueError(f"KVCache: expected {name} to be an int >= 1, got {shown(given[name])}")
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return given, ValueError(f"KVCache: expected float64, float32, bfloat16 or float16, got dtype={dtype!r}")
    return sizes, None
