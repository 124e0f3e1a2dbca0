"""Run a learner's rank program on simulated ranks, and say in a sentence whatever goes wrong.

    ran = run(program, P, *shards, positions, mask, input="S = 10, P = 4, causal")
    ran.results[rank], ran.world.trace, ran.held(rank, "in flight"), ran.hides(rank)

Every failure is a Wrong: an exception (with the learner's own line), a deadlock, a message that nobody awaits or
receives, a write to a buffer in flight, a forgotten ``await``. Matrix products are noted in the trace as compute
events, so the virtual clock runs for a program that uses no kernel of the library.
"""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ...worlds.memory import Counting, Memory
from ...worlds.simulated import DeadlockError, InFlightError, SimulatedWorld
from ...worlds.trace import Hardware
from .checker import Wrong, difference, raised, returned, trying
from .mistakes import Reason

PACKAGES = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))  # whose lines no learner wrote

# ---- Running --------------------------------------------------------------------------------------------------------


class Ran(NamedTuple):
    """What a program returned on each rank, and the world that it ran in."""

    results: list[Any]
    world: SimulatedWorld

    def held(self, rank: int, component: str) -> int:
        """The most bytes of a component, such as "in flight", that a rank held at one time."""
        return self.world.memory.most(rank).get(component, 0)

    def hides(self, rank: int) -> list[tuple[str, bool]]:
        """For each message that a rank sent: whether it computed anything between posting and awaiting it."""
        events = self.world.trace.select(rank=rank)
        found = []
        for begin, event in enumerate(events):
            if event.kind == "send":
                waits = (i for i, e in enumerate(events) if i > begin and (e.kind, e.name) == ("wait", event.name))
                end = next(waits, begin)
                found.append((event.name, any(e.kind == "compute" for e in events[begin:end])))
        return found

    def seconds(self) -> float:
        """Of the virtual clock: when the last rank is done."""
        return self.world.trace.makespan()


class TooManyMessages(RuntimeError):
    """A program that goes on sending; it would never end."""


class _World(SimulatedWorld):
    """A simulated world that notes matrix products, and does not run for ever."""

    def __init__(self, size: int | tuple[int, int], **options: Any):
        super().__init__(size, **options)
        self.memory = _Watching(self)
        self.most_messages = 20 * self.size + 20

    def _next_message(self, source: int, to: int, sending: bool):
        if self._channels[source, to, sending] >= self.most_messages:
            raise TooManyMessages(f"more than {self.most_messages} messages from rank {source} to rank {to}")
        return super()._next_message(source, to, sending)


class _Watching(Memory):
    def __init__(self, world: _World):
        super().__init__(world.size)
        self.world = world

    def counting(self, rank: int) -> _Products:
        return _Products(self, rank)


class _Products(Counting):
    """Also notes each matrix product, and each attention kernel, as a compute event of the running rank."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None and not self.memory._paused:
            flops = formula(*args, **(kwargs or {}), out_val=result)
            self.memory.world._comms[self.rank].compute(func.overloadpacket.__name__, float(flops))
        return result


def run(
    program: Callable,
    world_size: int | tuple[int, int],
    *args: Any,
    input: str,
    where: str = "",
    cause: str = "",
    shapes: tuple[str, str] | None = None,
    hardware: Hardware | None = None,
    instead: Sequence[tuple[str, str, str]] = (),
) -> Ran:
    """Run a rank program on a simulated world: what each rank returned, or Wrong.

    args: PerRank arguments give each rank its own, anything else goes to all. where, cause: what this input is about,
    for an exception that says nothing better. shapes: the same for shapes that do not fit. hardware: of the clock.
    instead: (pattern, where, cause), what to say in place of what is said about a ring's forward, for a symptom and
    cause in which the pattern is found; "" leaves the place to look, or the cause, as it is.
    """
    trying(input)
    world = _World(world_size, hardware=hardware)
    try:
        return Ran(_results(world, program, args, where, cause, shapes), world)
    except Wrong as wrong:
        for pattern, look, why in instead:
            if re.search(pattern, f"{wrong.symptom}\n{wrong.cause}", re.DOTALL):
                raise Wrong(wrong.symptom, look or wrong.where, why or wrong.cause) from wrong
        raise


def _results(
    world: _World, program: Callable, args: tuple, where: str, cause: str, shapes: tuple[str, str] | None
) -> list[Any]:
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        try:
            results = list(world.run(program, *args))
        except Exception as error:
            line = _line(error)
            raise _known(error) or raised(error, where or line, cause, shapes, line, _rank(error)) from error
    forgotten = [str(w.message) for w in noted if "was never awaited" in str(w.message)]
    if forgotten:
        raise Wrong(
            forgotten[0],
            "the calls of `async def` functions",
            "calling one only makes a coroutine; it runs when it is awaited: write `await` before the call",
        )
    coroutines = [rank for rank, result in enumerate(results) if inspect.iscoroutine(result)]
    if coroutines:
        for rank in coroutines:
            results[rank].close()  # or Python warns that it was never awaited
        raise Wrong(
            f"{who(coroutines)} return{'s' * (len(coroutines) == 1)} a coroutine, not a result",
            "the return statement",
            "an `async def` function was called without `await`: return await ...",
        )
    without = [rank for rank, result in enumerate(results) if result is None]
    if 0 < len(without) < len(results):
        raise Wrong(
            f"rank {without[0]} returns None, others do not",
            "what the result is before the loop",
            "a result that starts as None stays None on a rank that computes nothing: start with one that is right for "
            "no key, as rl.identity(shape), or zeros",
        )
    returned(results[0], "rank 0")
    return results


def _rank(error: Exception) -> str:
    """ "on rank 1," from the note that the world leaves."""
    for note in getattr(error, "__notes__", ()):
        found = re.match(r"on simulated rank (\d+) of \d+", note)
        if found:
            return f"on rank {found[1]}"
    return ""


def _line(error: BaseException) -> str:
    """The learner's line that raised, as text; "" if there is none to show."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(PACKAGES) and frame.line:
            return f"the line `{frame.line.strip()}`"
    return ""


class Known(NamedTuple):
    """An exception that gives a mistake away: its type and a pattern of its text, and what to say about it.

    In ``symptom``, {at} is the rank that raised, {text} what the exception says, and {head} its part before the colon
    or semicolon. at_line: whether to look at the learner's own line, where there is one, and at ``where`` otherwise.
    """

    kind: Any
    pattern: str
    symptom: str
    where: str
    cause: str
    at_line: bool = False


KNOWN = (
    Known(
        TypeError,
        "^(?P<what>.*?) the handle of|(?P<uses>not Handle)$",
        "{at} your function {what} a message that has not arrived",
        "what comm.rotate returns",
        "comm.rotate and its like return at once, with a handle; the data is there after `await`, as in "
        "k, v = await arriving",
        at_line=True,
    ),
    Known(
        ValueError,
        "^run: expected a rank program.*, got (?P<what>[^;]*)",
        "your function is no rank program: {what}",
        "its first line",
        "a function that waits for messages begins with `async def`, even where it has nothing to wait for",
    ),
    Known(
        TypeError,
        "'await' expression|can't be awaited",
        "{at} {text}",
        "what stands behind `await`",
        "only a message can be awaited: what comm.rotate returned. A computation needs no await",
        at_line=True,
    ),
    Known(
        TypeError | AttributeError,
        "'coroutine'",
        "{at} {text}",
        "the calls of `async def` functions",
        "calling one, such as comm.all_reduce, only makes a coroutine; the result is there after `await`",
        at_line=True,
    ),
    Known(
        RuntimeError,
        "was awaited before",
        "{at} a message is awaited twice",
        "the awaits",
        "it arrives once: keep what the first await gave, and post another rotate for the next step",
        at_line=True,
    ),
    Known(
        RuntimeError,
        "awaited something that is not a message",
        "{head}",
        "what stands behind `await`",
        "a rank program awaits what comm.rotate returns and nothing else: there is no asyncio here",
    ),
    Known(
        DeadlockError,
        "",
        "deadlock: {waits}",
        "which ranks get to the line with comm.rotate, and how often",
        "a rank that has nothing to compute skips the rotate too, by `continue`, `if` or `break`. It must still pass "
        "on what it holds: skip the computation, never the message",
    ),
    Known(
        InFlightError,
        "",
        "{head}",
        "what is changed in place (+=, copy_, mul_) between rotate and await",
        "the network reads a tensor until the await returns: write to another one, or after the await",
    ),
    Known(
        RuntimeError,
        "never awaited it",
        "{head}",
        "which rotates are awaited, and whether each is",
        "a second rotate is a second message; `continue`, `break` or an early `return` may jump over the await. Keys "
        "and values need P - 1 rotates; the dk, dv of a ring backward need P, and the last is awaited after the loop",
    ),
    Known(
        RuntimeError,
        "disagree on how many",
        "{text}",
        "who sends to whom, and how often",
        "every send needs a receive on the other side; comm.rotate posts both",
    ),
    Known(
        TooManyMessages,
        "",
        "the ranks do not stop: {text}",
        "when the loop ends",
        "a ring of P ranks is done after P - 1 rotates",
    ),
)


def _known(error: Exception) -> Wrong | None:
    """What is said of an exception that gives its mistake away."""
    text = str(error)
    for known in KNOWN:
        found = re.search(known.pattern, text)
        if not isinstance(error, known.kind) or not found:
            continue
        line = _line(error)
        if "'coroutine'" in known.pattern:
            traceback.clear_frames(error.__traceback__)  # it goes now: its warning is not for the next check
        words = {"what": "uses"} | {name: part for name, part in found.groupdict().items() if part}
        words |= {"at": _rank(error), "text": text, "head": re.split("[:;]", text)[0], "waits": _waits(text)}
        symptom = known.symptom.format(**words)
        return Wrong(symptom, line if known.at_line and line else known.where, known.cause)
    return _misfit(text) if isinstance(error, ValueError) else None


def _waits(text: str) -> str:
    """Of what a DeadlockError says: who waits for what, the first two of them, and who has returned."""
    lines = [line.strip() for line in text.splitlines()[1:] if line.startswith("  ")]
    done = [line.partition("[")[2].rstrip("]") for line in lines if line.startswith("ranks that have returned")]
    waits = [line for line in lines if not line.startswith("ranks that")]
    more = f", and {len(waits) - 2} more wait" if len(waits) > 2 else ""
    return f"{'; '.join(waits[:2])}{more}" + (f"; ranks that have returned: {done[0]}" if done else "")


def _misfit(text: str) -> Wrong | None:
    """A message whose two ends do not fit."""
    ends = r"(rank \d+ expects shapes (.*?)) of torch\.(\w+) from (rank \d+), which sent (.*?) of torch\.(\w+)"
    found = re.search(ends, text)
    if not found:
        return None
    expects, due, dtype, source, sent, other = found.groups()
    if due == sent:
        symptom = f"{expects.partition(' expects')[0]} expects {dtype} from {source}, which sent {other}"
        return Wrong(symptom, *DTYPES)
    where, cause = next((said for name, said in LENGTHS.items() if text.startswith(name)), LENGTHS["rotate"])
    if text.startswith("all_to_all") and _other_heads(expects, sent):
        cause = "rows agree, heads do not: from each rank come as many heads of q, k, v as the plan gives to this one"
    return Wrong(f"{expects} from {source}, which sent {sent}", where, cause)


def _other_heads(*shapes: str) -> bool:
    """Whether two texts with a list of shapes agree in the rows, dim 2, of the first and differ in its heads, dim 1."""
    dims = [re.search(r"\[\(\d+, (\d+), (\d+)", text) for text in shapes]
    return all(dims) and dims[0][1] != dims[1][1] and dims[0][2] == dims[1][2]


DTYPES = (
    "the dtype of what each rank sends",
    "what is made anew, as by torch.zeros(()), is float32 whatever the rest is. Make it like what the others send: "
    "torch.zeros_like(x), x.new_zeros(()), or an empty sum, which keeps the dtype",
)

# A message -> where it is said what arrives, and what to say there.
LENGTHS = {
    "rotate": (
        "length= of comm.rotate",
        "shards differ in length. What arrives next is what rank - 1 holds now, the shard of (source - 1) % P: "
        "length=len(positions[...])",
    ),
    "all_gather": (
        "lengths= of comm.all_gather",
        "shards differ in length. How many rows each rank has: lengths=[len(p) for p in positions]",
    ),
    "all_to_all": (
        "shapes= of comm.all_to_all",
        "shards differ in length. What arrives from rank r has as many rows as rank r sends: say so in shapes[r]",
    ),
}


# ---- What came out --------------------------------------------------------------------------------------------------


def wrong_ranks(name: str, got: Sequence[Any], want: Sequence[Tensor], tolerance: float) -> dict[int, str]:
    """For each rank whose result differs from what it should be: how, in words. Empty if all are right."""
    found = {rank: difference(name, g, w, tolerance) for rank, (g, w) in enumerate(zip(got, want, strict=True))}
    return {rank: problem for rank, problem in found.items() if problem}


def check_shapes(
    rank: int,
    names: Sequence[str],
    got: Sequence[Any],
    likes: Sequence[Tensor],
    reason: Callable[[str, Tensor | None, Tensor], Reason],
) -> None:
    """Wrong unless a rank's results have the shapes of others.

    reason(name, tensor, the other one): where to look and the cause; None for what is no tensor of as many dims.
    """
    for name, x, like in zip(names, got, likes, strict=True):
        if not isinstance(x, Tensor) or x.shape != like.shape:
            what = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}, not a tensor"
            known = x if isinstance(x, Tensor) and x.ndim == like.ndim else None
            symptom = f"on rank {rank} {name} {what}, expected shape {tuple(like.shape)}"
            raise Wrong(symptom, *reason(name, known, like))


def who(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 0 and 1", "no rank"."""
    ranks = list(ranks)
    if not ranks:
        return "no rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def check_messages(ran: Ran, messages: int, nbytes: Sequence[int], *, where: str = "", cause: str = "") -> None:
    """Wrong unless every rank sent so many messages, all of them to rank + 1, with so many bytes in all.

    nbytes: for each rank. where, cause: for a number of messages that is not the expected one.
    """
    trace, P = ran.world.trace, ran.world.size
    for rank in range(P):
        sent = trace.select("send", rank)
        others = sorted({e.peer for e in sent} - {(rank + 1) % P})
        if others:
            raise Wrong(
                f"the values are right, but rank {rank} sends to {who(others)}",
                "who a rank sends to",
                "in a ring a rank sends to rank + 1 only, as comm.rotate does: each link carries the same",
            )
        if len(sent) != messages:
            look = where or "the last step"
            why = cause or "after the last computation nobody needs what would arrive: P shards, P - 1 hops"
            if len(sent) == 2 * messages:
                look = "what each rotate sends"
                why = "two tensors travel apart, and each pays a latency: rotate(k, v) sends both in one message"
            what = f"the values are right, but rank {rank} sends {len(sent)} messages where {messages} are enough"
            raise Wrong(what, look, why)
    shard = "k and v of one shard, in the dtype that they came in and with their G heads, and nothing else"
    check_bytes(ran, nbytes, lambda sent: ("what is in each message", shard))


def check_bytes(ran: Ran, nbytes: Sequence[int], reason: Callable[[int], Reason]) -> None:
    """Wrong unless each rank sent so many bytes; reason(bytes): where to look and the cause for another number."""
    for rank, enough in enumerate(nbytes):
        sent = ran.world.trace.bytes_sent(rank)
        if sent != enough:
            due = f"{enough:,} are enough" if sent > enough else f"{enough:,} are expected"
            raise Wrong(f"the values are right, but rank {rank} sends {sent:,} bytes; {due}", *reason(sent))


def check_hidden(ran: Ran) -> None:
    """Wrong unless every rank computes between posting and awaiting each of its messages."""
    for rank in range(ran.world.size):
        late = [name for name, hidden in ran.hides(rank) if not hidden]
        if late:
            raise Wrong(
                f"the values are right, but on rank {rank} nothing is computed while {late[0]} is on its way",
                "what stands between comm.rotate and its await",
                "rotate and await stand side by side. Post the rotate, compute with what is here, then await: what is "
                "posted before you compute travels in the meantime",
            )
