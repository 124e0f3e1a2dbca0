"""Exercises of notebook 05, the ring on processes: 5a ring_pass, 5b ring_exchange, 5c ring; predictions and the quiz.

Answers stand in files, because other processes import them: ``ring_pass("ring_pass.py", pool)``. They run on a
simulated network first, which finds a deadlock at once, and then on real processes with a short timeout.
"""

from __future__ import annotations

import re
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ...costs.ring import published_backward_bytes, ring_bytes
from ...launch.pool import LaunchError, Pool, address
from ...masks import Mask, causal, full
from ...worlds import SimulatedWorld
from ...worlds.simulated import DeadlockError
from ...worlds.world import PerRank
from ..records import load
from ..rendezvous import Mistake, Rendezvous
from . import gradients, oracle, simulate
from .checker import Checker, Result, Wrong, difference, has_blank, parts, raised, returned, trying
from .gradients import Given
from .mistakes import Reason
from .oracle import numbers
from .predictions import Prediction, Quiz

SHORT = 5.0  # seconds after which a message that does not come is an error, on real processes
LONG = 15.0  # seconds for a whole run of an answer on real processes

# ---- Answers in files -----------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """Functions of a learner's file, or functions as they are, for tests.

    given: a path such as "ring_pass.py", or the functions.  names: what they are called.
    """

    given: Any
    names: tuple[str, ...]

    def __call__(self) -> Any:
        return self.load()

    def load(self) -> list[Callable]:
        """The functions, from the file as it is now. Raises Wrong for a file that fails."""
        if not isinstance(self.given, str):
            return self.functions
        text = Path(self.given).read_text()
        where = {"input": f"{self.given}, when it is imported", "where": "the line that the message names"}
        try:
            module = types.ModuleType(Path(self.given).stem)
            exec(compile(text, self.given, "exec"), module.__dict__)
        except Mistake:
            raise
        except SyntaxError as error:
            cause = "a function that awaits begins with `async def`" if "await" in error.msg else "a typing error"
            raise Wrong(f"line {error.lineno} is not Python: {error.msg}", cause=cause, **where) from None
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            cause = "a name without its import: a file of its own knows nothing of the notebook"
            raise Wrong(f"the file raises {text}", cause=cause, **where) from None
        for name in self.names:
            if not callable(getattr(module, name, None)):
                raise Wrong(
                    f"the file has no function {name}",
                    "the names of the functions in the file",
                    f"it must be called {name}, at the top level of the file",
                    input=self.given,
                )
        return [getattr(module, name) for name in self.names]

    def described(self) -> list[tuple[str, str, str]]:
        """How a launched process finds the functions."""
        if isinstance(self.given, str):
            return [address(f"{self.given}:{name}") for name in self.names]
        return [address(f) for f in self.functions]

    @property
    def functions(self) -> list[Callable]:
        return list(self.given) if isinstance(self.given, tuple) else [self.given]


class FileChecker(Checker):
    """A Checker for answers in files, whose last stage runs them on real processes.

    check("ring_pass.py", pool): pool is a ``ringlearn.launch.Pool`` with backend=None; without one, it starts its own.
    """

    def __init__(self, exercise: str, names: tuple[str, ...], processes: Callable, **stages: Callable):
        super().__init__(exercise, **stages, processes=self._on_processes)
        self.names, self._processes, self._pool = names, processes, None

    def __call__(self, answer: Any, pool: Pool | None = None, *, help: int = 1) -> Result:
        if not isinstance(answer, str | tuple) and not callable(answer):
            raise ValueError(f"{self.exercise}: expected the name of your file, such as 'mine.py', got {answer!r}")
        if isinstance(answer, str) and not Path(answer).is_file():
            raise ValueError(f"{self.exercise}: there is no file {answer!r} here; run the cell that writes it first")
        self._pool = pool
        return super().__call__(Answer(answer, self.names), help=help)

    def _unwritten(self, answer: Answer) -> bool:
        if isinstance(answer.given, str):
            return has_blank(Path(answer.given).read_text())
        return any(map(has_blank, answer.functions))

    def _on_processes(self, answer: Answer) -> None:
        if self._pool is not None:
            self._processes(answer, self._pool)
        else:
            with Pool(4, backend=None) as pool:
                self._processes(answer, pool)


def _on_pool(pool: Pool, fn: Callable, *args: Any, input: str) -> list[Any]:
    """pool.run, with what goes wrong in Python or in the process as Wrong."""
    trying(input)
    try:
        return pool.run(fn, *args, timeout=LONG)
    except LaunchError as error:
        report = next(r for r in error.reports if r.status != "returned")
        how = "does not return" if report.status == "hangs" else f"{report.status}: {report.error}"
        raise Wrong(
            f"rank {report.rank} {how}",
            "what a rank does besides messages, such as loops that never end",
            "in the simulation it returned; look for what differs between ranks of different processes",
        ) from None


# ---- 5a, 5b: ring_pass(x, rank, P), ring_exchange(x, rank, P) -> what rank - 1 holds ----


def _simulate(answer: Answer, P: int, tensors: list[Tensor], shown: str, stuck: tuple[str, str]) -> Rendezvous:
    """Run the answer on P simulated ranks and compare; give the network with what happened on it."""
    trying(shown)
    network = Rendezvous(P)
    before = [x.clone() for x in tensors]
    try:
        with network:
            (fn,) = answer.load()
        results = network.run(fn, [(x, rank, P) for rank, x in enumerate(tensors)])
    except Mistake as mistake:
        raise explained(mistake, P, stuck) from None
    except Wrong:
        raise
    except Exception as error:
        raise raised(error, "", "", line=_line(error, fn)) from None
    for rank, (got, x, was) in enumerate(zip(results, tensors, before)):
        returned(got, f"rank {rank}")
        if not torch.equal(x, was):
            raise Wrong(
                f"rank {rank}'s x was overwritten",
                "the tensor that receives",
                "x is received into; receive into a buffer of its own, torch.empty_like(x)",
            )
    for rank, got in enumerate(results):
        _compare(got, before, rank, P, shown)
    return network


def _line(error: Exception, fn: Callable) -> str:
    """The learner's line that raised: "line 9, `dist.send(x)`"; "" if there is none."""
    file = getattr(getattr(fn, "__code__", None), "co_filename", None)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == file:
            return f"line {frame.lineno}" + (f", `{frame.line.strip()}`" if frame.line else "")
    return ""


def _compare(got: Any, tensors: list[Tensor], rank: int, P: int, shown: str) -> None:
    want = tensors[(rank - 1) % P]
    if isinstance(got, Tensor) and got.shape == want.shape and torch.equal(got, want):
        return
    whose = [r for r in range(P) if isinstance(got, Tensor) and torch.equal(got, tensors[r])]
    what = difference("the result", got, want, 0) or "the result has another dtype"
    cause = "compare with: received = a buffer like x, filled by one receive from (rank - 1) % P"
    if not isinstance(got, Tensor):
        cause = (
            "dist.recv and dist.irecv fill the buffer that they are given, and return the sender's rank or a handle: "
            "return the buffer"
        )
    if whose:
        what = f"rank {rank} returns what rank {whose[0]} holds, expected what rank {(rank - 1) % P} holds"
        cause = "the messages go the other way: send to (rank + 1) % P, receive from (rank - 1) % P"
        if whose[0] == rank:
            cause = (
                "a rank returns its own x, or its neighbour has sent back what it received: send x, return the buffer"
            )
        elif P > 2 and whose[0] != (rank + 1) % P:
            cause = "x is sent on after another message was received into it: send what was given, and only that"
    else:
        what = f"rank {rank}: {what}"
    raise Wrong(what, "who sends to whom, from which tensor, into which", cause)


def explained(mistake: Mistake, P: int, stuck: Reason = ("", "")) -> Wrong:
    """What is said of a mistake; stuck: where to look and the cause of a deadlock."""
    if "message completed" in str(mistake):
        stuck = POLLED
    where, cause = {
        "deadlock": stuck,
        "endless": ("the loop that never ends", "it waits for something that no message brings"),
        "in flight": (
            "which tensor is sent and which receives, and what is written between a message and its wait()",
            "until wait() returns, the network reads the tensor that is sent: receive into another, "
            "torch.empty_like(...), and change it later",
        ),
        "not arrived": (
            "what stands between a message that is received and the send of the same tensor",
            "what arrives is there only after the wait() of its irecv: wait before it is sent on. If you meant two "
            "tensors, receive into one of its own, torch.empty_like(...)",
        ),
        "dropped": (
            "the handles that isend and irecv return",
            "keep every handle and wait() for it: without one, the message may be cancelled (notebook 05, section 3)",
        ),
        "left over": (
            "how many messages each rank sends and receives, and to and from whom",
            "every send needs a receive on the other side, and every receive a send",
        ),
        "size": (
            "size and dtype of what is sent, and of the buffer that receives",
            "both ends must agree on size and dtype, and real gloo does not check: it reads the bits as another dtype. "
            "Make the buffer with torch.empty_like(x); with uneven parts its size depends on which part it is",
        ),
        "itself": (
            f"whom rank {mistake.rank} of {P} sends to, and from whom it receives",
            "alone there is nobody else: with P = 1 what would arrive is x, and gloo refuses a message to oneself"
            if P == 1
            else "the next rank is (rank + 1) % P, the previous one (rank - 1) % P",
        ),
        "nobody": (
            "the last rank and rank 0",
            "a ring closes: take rank + 1 and rank - 1 modulo P, the number of ranks: (rank + 1) % size",
        ),
        "contiguous": (
            "whether x, and a buffer like x, is contiguous",
            "gloo sends memory as it lies: send x.contiguous(), and receive into a buffer that is contiguous; "
            "torch.empty_like of a transposed tensor is transposed too",
        ),
        "group": (
            "the calls of init_process_group, destroy_process_group, new_group",
            "the checker starts the ranks, and they have joined when your function is called: take the call out",
        ),
        "collective": (
            "the calls of torch.distributed",
            "a collective moves more than one message needs: build this from sends and receives between neighbours",
        ),
    }[mistake.kind]
    return Wrong(str(mistake), where, cause)


def _tensors(P: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [numbers(rank, *shape).to(dtype) for rank in range(P)]


ALL_FIRST = (
    "which call each rank makes first",
    "a send ends when its receive has been posted, and a receive when its send has. If all begin with the same one, "
    "nobody gets to the other: let some ranks begin with the other one",
)
POLLED = (
    "the loop around is_completed()",
    "on gloo is_completed() says False until wait() has returned (seen with torch 2.13), so the loop never ends",
)
POSTED_LATE = (
    "what stands before each wait(): has everything been posted by then?",
    "a rank waits for its send before it has posted its receive, and so does everybody. Post both, then wait for both",
)


def _passing(
    exercise: str, stuck: Reason, blocking: bool, best: Callable[[int], int], where: str, cause: str
) -> FileChecker:
    """The checker of a pass: stuck, what to say of a deadlock; where and cause, of more turns than best(P)."""

    def value(answer: Answer) -> None:
        for P in (2, 3, 4, 1, 5):
            network = _simulate(answer, P, _tensors(P, 2), f"P = {P}, x = 2 numbers on each rank", stuck)
            if blocking and not network.blocking:
                raise Wrong(
                    "the values are right, but not all messages are dist.send and dist.recv",
                    "the calls of torch.distributed",
                    "this one is about calls that block; isend and irecv are exercise 5b",
                )

    def adversarial(answer: Answer) -> None:
        P = 3
        for dtype in (torch.bfloat16, torch.int64):
            _simulate(answer, P, _tensors(P, 2, 3, dtype=dtype), f"P = 3, x in {dtype}", stuck)
        turned = [x.t() for x in _tensors(P, 3, 2)]
        _simulate(answer, P, turned, "P = 3, x = a transposed (2, 3) tensor, so not contiguous", stuck)
        _simulate(answer, P, _tensors(P, 0, 4), "P = 3, x without elements, shape (0, 4)", stuck)

    def cost(answer: Answer) -> None:
        for P in (4, 5, 6):
            network = _simulate(answer, P, _tensors(P, 2), f"P = {P}, each message takes one turn", stuck)
            if len(network.transfers) != P:
                raise Wrong(
                    f"the values are right, but {len(network.transfers)} messages were sent, where {P} are enough",
                    "the number of sends on each rank",
                    "each rank sends once, its own x",
                )
            if network.turns > best(P):
                more = f"the values are right, but it takes {network.turns:g} turns, where {best(P)} are enough"
                raise Wrong(more, where, cause)
            if not blocking and not network.batched:
                raise Wrong(
                    "the values are right, but the send and the receive are posted one by one",
                    "the calls that post the messages",
                    "on NCCL the isend and the irecv with the same GPU wait in one queue. With large messages both "
                    "ranks stand in their send, and the receives behind it are never reached: 256 MiB hung (section "
                    "3). Hand both over together: dist.batch_isend_irecv([dist.P2POp(...), dist.P2POp(...)])",
                )

    name = exercise.split()[1]
    return FileChecker(exercise, (name,), _pass_processes, value=value, adversarial=adversarial, cost=cost)


def run_pass(described: tuple[str, str, str], sizes: list[int]) -> str:
    """On a real process: the answer on all ranks, for x of several sizes. What went wrong on this rank, or nothing."""
    from ...launch.child import find

    fn = find(*described, {})
    dist.init_process_group("gloo", timeout=timedelta(seconds=SHORT))
    rank, P = dist.get_rank(), dist.get_world_size()
    for size in sizes:
        x = torch.full((size,), float(rank))
        try:
            got = fn(x, rank, P)
        except Exception as error:
            return f"{4 * size} bytes: {_plain(error)}"
        if not torch.equal(got, torch.full((size,), float((rank - 1) % P))):
            return f"{4 * size} bytes: other values than rank {(rank - 1) % P} sent"
    return ""


def _plain(error: Exception) -> str:
    from ...worlds.distributed.background import plain

    text = plain(error) if isinstance(error, RuntimeError) else str(error)
    return f"{type(error).__name__}: {text}".splitlines()[0]


def _pass_processes(answer: Answer, pool: Pool) -> None:
    shown = f"{pool.world_size} gloo processes, x of 4 bytes and of 16 MiB"
    found = _on_pool(pool, run_pass, answer.described()[0], [1, 4 * 2**20], input=shown)
    first = next((rank for rank, text in enumerate(found) if text), None)
    if first is not None:
        raise Wrong(
            f"rank {first}, {found[first]}",
            "what the simulation cannot see: what else the file does on import, or global variables",
            "each process has its own copy of the file's variables; only messages carry something across",
        )


ring_pass = _passing(
    "5a ring_pass",
    ALL_FIRST,
    True,
    lambda P: 2 + P % 2,
    "which ranks can do something in the first turn",
    "in the first turn only neighbours that begin in different ways can meet; if there is one such pair, its "
    "neighbours go second, the next ones third, and so on. Let every other rank begin the other way",
)
ring_exchange = _passing(
    "5b ring_exchange",
    POSTED_LATE,
    False,
    lambda P: 1,
    "what is posted before the first wait()",
    "all messages can be under way at once: post the send and the receive together, then wait for both",
)

# ---- 5c: ring_forward and ring_backward of notebooks 03 and 04, on processes ----

FORWARD, BACKWARD = "ring_forward", "ring_backward"
STATE = (
    "variables outside of the function, and what a second call finds in them",
    "something is kept from one call to the next: a rank program may use only its arguments and its messages",
)


def _ring_case(S: int, P: int, *, mask: Mask = causal, dtype: torch.dtype = torch.float32, seed: int = 0) -> Given:
    return gradients.of(oracle.shards(S, P, dtype=dtype, seed=seed, mask=mask), seed + 9)


def _after(given: Given, forward: list[tuple[Tensor, Tensor]]) -> tuple[Any, ...]:
    """The backward's arguments, after a forward that gave each rank this out and lse."""
    out, lse = map(PerRank, zip(*forward))
    dout, q, k, v, _, _, *rest = given.args
    return dout, q, k, v, out, lse, *rest


def _of_rank(args: tuple[Any, ...], rank: int) -> list[Any]:
    return [x[rank] if isinstance(x, PerRank) else x for x in args]


def _right(ran: simulate.Ran, given: Given, names: str, want: tuple[Tensor, ...], unlike: Reason) -> None:
    """Wrong unless each rank returned its part of these tensors; unlike: where to look, and the cause, if not."""
    results = [parts(result, names, f"rank {rank} returns") for rank, result in enumerate(ran.results)]
    loose = 1e-5 if given.case.q.dtype == torch.float32 else 2e-2
    for i, (name, whole) in enumerate(zip(names.split(", "), want)):
        due = given.case.split(whole, -1 if name == "lse" else -2)
        wrong = simulate.wrong_ranks(name, [result[i] for result in results], due, loose)
        if wrong:
            are = "is" if len(wrong) == 1 else "are"
            raise Wrong(f"{simulate.who(list(wrong))} {are} wrong: {next(iter(wrong.values()))}", *unlike)


def _forward(fn: Callable, given: Given, where: str = "", cause: str = "") -> simulate.Ran:
    """The forward on simulated ranks, compared with attention by its definition."""
    case = given.case
    ran = simulate.run(fn, case.P, *case.args, input=case.input, where=where, cause=cause)
    unlike = (
        where or f"{FORWARD}: the function that passed in notebook 03",
        cause or "it is not the forward of exercise 3b: its check says more",
    )
    _right(ran, given, "out, lse", (given.out, given.lse), unlike)
    return ran


def _backward(fn: Callable, given: Given, forward: list) -> simulate.Ran:
    ran = simulate.run(fn, given.case.P, *_after(given, forward), input=given.case.input)
    unlike = (
        f"{BACKWARD}: the function that passed in notebook 04; do all ranks post their messages in the same order?",
        "messages between two ranks are matched in the order in which they are posted, whatever is awaited first; or "
        "it is not the backward of notebook 04, whose check says more",
    )
    _right(ran, given, "dq, dk, dv", given.want, unlike)
    return ran


def _ring_adversarial(answer: Answer) -> None:
    forward, _ = answer.load()
    for given in (_ring_case(10, 4), _ring_case(10, 4, seed=3), _ring_case(3, 4), _ring_case(11, 3, mask=full)):
        _forward(forward, given, *STATE)
    _on_another_device(forward, *_ring_case(8, 4).case.args)


class _LooksInside(TorchFunctionMode):
    """Answers `if visible.any():` and the like for meta tensors, which hold nothing to look at: always yes.

    moves: whether one was to be moved to the CPU, which gives one that holds anything there.
    """

    def __init__(self):
        super().__init__()
        self.moves = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (Tensor.__bool__, Tensor.item) and args[0].is_meta:
            return True
        to_cpu = (
            func is Tensor.cpu
            or func is Tensor.to
            and any(
                isinstance(x, str | torch.device) and torch.device(x).type == "cpu"
                for x in (*args[1:], *kwargs.values())
            )
        )
        if to_cpu and args[0].is_meta:
            self.moves = True
            return torch.zeros_like(args[0], device="cpu")
        return func(*args, **kwargs)


def _on_another_device(fn: Callable, *args: Any) -> None:
    """Meta tensors are not on the CPU, and do not mix with those that are: as a GPU's, without a GPU."""
    ranks = range(len(args[0]))
    moved = tree_map_only(Tensor, lambda t: t.to("meta"), [_of_rank(args, rank) for rank in ranks])
    where = "every tensor that is made inside: torch.zeros, torch.empty, torch.full, torch.arange, rl.identity"
    cause = "it is made on the CPU. Say device=q.device, or use torch.zeros_like(q), q.new_zeros(...)"
    trying("tensors on another device than the CPU")
    problem, looks = "", _LooksInside()
    try:
        with looks:
            world = SimulatedWorld(len(moved), device="meta", count_memory=False)
            results = world.run(fn, *map(PerRank, zip(*moved)))
    except Exception as error:
        text = str(error)
        if re.search(r"(?s)(cpu.*meta|meta.*cpu)", text) and "no data" not in text:
            problem = f"tensors of two devices meet: {text.splitlines()[0].partition(', but')[0]}"
        # Anything else: it looks into tensors in a way that meta tensors, which hold nothing, cannot answer.
    else:
        there = {t.device.type for t in tree_leaves(list(results)) if isinstance(t, Tensor)}
        if "cpu" in there:
            problem = "what is returned is on the CPU"
    if looks.moves:
        problem = "a tensor is moved to the CPU"
        where = 'the calls of .cpu() and .to("cpu")'
        cause = (
            "on a GPU it leaves the device: the host waits for it, and it no longer meets the other tensors. What "
            "arrives is on the rank's own device already; leave it there"
        )
    if problem:
        raise Wrong(problem, where, cause)


def _ring_gradient(answer: Answer) -> None:
    forward, backward = answer.load()
    for given in (_ring_case(10, 4), _ring_case(10, 4, seed=3), _ring_case(11, 3, mask=full)):
        _backward(backward, given, _forward(forward, given).results)
    given = _ring_case(8, 4)
    _on_another_device(backward, *_after(given, _forward(forward, given).results))


def _ring_cost(answer: Answer) -> None:
    forward, backward = answer.load()
    given = _ring_case(11, 4, dtype=torch.bfloat16)
    shapes, where = dict(S=11, P=4, G=1, D=4, itemsize=2), "the dtype of what is sent, and the number of hops"
    ran, ranks = _forward(forward, given), range(4)
    came = "k and v, in the dtype in which they came"
    simulate.check_bytes(ran, [ring_bytes(**shapes, rank=r) for r in ranks], lambda sent: (where, came))
    ran = _backward(backward, given, ran.results)
    wide = "k and v as they came, P - 1 hops; dk and dv in float32, P hops: in bfloat16 each hop would round"
    simulate.check_bytes(ran, [published_backward_bytes(**shapes, rank=r) for r in ranks], lambda sent: (where, wide))


def run_ring(described: list[tuple[str, str, str]], cases: list[Given]) -> list[Any]:
    """On a real process: forward and backward of each case on this rank, or what went wrong as a text."""
    from ...launch.child import find
    from ...worlds import DistributedWorld

    loaded: dict[str, float] = {}
    forward, backward = (find(*d, loaded) for d in described)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LONG))
    world = DistributedWorld(timeout=SHORT)
    found: list[Any] = []
    for given in cases:
        try:
            out_lse = world.run(forward, *_of_rank(given.case.args, world.rank))[0]
            everywhere = [out_lse] * world.size  # of which this rank's is taken
            grads = world.run(backward, *_of_rank(_after(given, everywhere), world.rank))[0]
            found.append([*out_lse, *grads])
        except Exception as error:
            return [*found, _plain(error)]
    return found


def _ring_processes(answer: Answer, pool: Pool) -> None:
    P = pool.world_size
    cases = [_ring_case(10, P), _ring_case(11, P, dtype=torch.bfloat16, seed=3)]
    shown = f"{P} gloo processes, {cases[0].case.input}"
    real = _on_pool(pool, run_ring, answer.described(), cases, input=shown)
    texts = {rank: got[-1] for rank, got in enumerate(real) if isinstance(got[-1], str)}
    if texts:
        rank = min(texts, key=lambda r: (texts[r].startswith("WorldError"), r))
        raise Wrong(
            f"in the simulation it is right; on processes rank {rank} raises {texts[rank]}",
            "variables outside of the functions, and lines that only some ranks run",
            "simulated ranks share one process, and so all variables outside of the function; real ranks share "
            "nothing. Whatever a rank needs comes as an argument or as a message",
        )
    forward, backward = answer.load()
    with _one_thread():
        for n, given in enumerate(cases):
            first = list(SimulatedWorld(P).run(forward, *given.case.args))
            second = list(SimulatedWorld(P).run(backward, *_after(given, first)))
            for rank in range(P):
                simulated = [*first[rank], *second[rank]]
                for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), real[rank][n], simulated):
                    if not torch.equal(a, b):
                        raise Wrong(
                            f"{name} of rank {rank} is not the simulated one, bit for bit",
                            "variables outside of the functions, random numbers, the time",
                            "the same text on the same numbers gives the same bits, unless it depends on "
                            "something else than its arguments and messages",
                            input=f"{P} gloo processes, {given.case.input}",
                        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """As the launched processes compute, so that sums are made in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


ring = FileChecker(
    "5c ring on processes",
    (FORWARD, BACKWARD),
    _ring_processes,
    value=lambda answer: _forward(answer.load()[0], _ring_case(10, 4)),
    adversarial=_ring_adversarial,
    gradient=_ring_gradient,
    cost=_ring_cost,
)

# ---- Predictions and the quiz ----


def turns(P: int, first: Callable[[int, int], bool]) -> int:
    """The turns of one pass by send and recv, where the ranks with first(rank, P) begin with their send."""

    def one(x, rank, P):
        calls = [(dist.send, x, (rank + 1) % P), (dist.recv, torch.empty_like(x), (rank - 1) % P)]
        for act, tensor, peer in calls if first(rank, P) else calls[::-1]:
            act(tensor, peer)

    network = Rendezvous(P)
    network.run(one, [(torch.zeros(1), rank, P) for rank in range(P)])
    return int(network.turns)


def even(rank: int, P: int) -> bool:
    return rank % 2 == 0


async def gather_everything(comm, q, k, v):
    """What some code does on several GPUs: all queries on every rank, and all keys and values gathered."""
    if comm.size > 1:
        k = torch.cat(await comm.all_gather(k), dim=2)
        v = torch.cat(await comm.all_gather(v), dim=2)
    return scaled_dot_product_attention(q, k, v)


def memory_when_gathered(P: int, S: int = 1024, H: int = 4, D: int = 32) -> int:
    """The most bytes that a rank of ``gather_everything`` holds at a time, counted in a simulation."""
    world = SimulatedWorld(P)
    q = torch.zeros(1, H, S, D)
    k, v = (world.shard(torch.zeros(1, H, S, D)).tensors for _ in range(2))
    world.run(gather_everything, q, PerRank(k), PerRank(v))
    return sum(world.memory.peak(0).values())


RECORD = "2026-11-28-multi-gpu-2-h200.json"


def two_gpus(record: dict[str, Any], tokens: int) -> float:
    """How many times faster the record's GPUs are than one that calls SDPA, forward."""
    one, ring = (next(r for r in record[name][::-1] if r["tokens"] == tokens) for name in ("plain", "scaling"))
    return one["forward_ms"] / ring["forward_ms"]


def who_raises(P: int = 4) -> int:
    """How many ranks of a world raise if the last one passes another mask, by comparing what they agree on."""
    from ...worlds.distributed import agreement

    records = [
        agreement.decode(agreement.encode("ring_attention", {"mask": "full" if r == P - 1 else "causal"}, {}, None))
        for r in range(P)
    ]
    raised = 0
    for rank in range(P):
        try:
            agreement.compare(records, rank, None)
        except ValueError:
            raised += 1
    return raised


def who_waits(P: int) -> int:
    """How many ranks wait for ever if rank 0 leaves its loop one rotate early."""

    async def program(comm, x):
        for _ in range(P - 1 - (comm.rank == 0)):
            x = await comm.rotate(x)

    try:
        SimulatedWorld(P, count_memory=False).run(program, torch.zeros(1))
    except DeadlockError as error:
        return len(re.findall(r"^  rank \d+ waits", str(error), re.MULTILINE))
    return 0


predict_turns = Prediction(
    "Turns of five ranks",
    lambda: turns(5, even),
    "Ranks 4 and 0 are neighbours and both even: 4 sends to 0 only when 0 is done with its own send, one turn later.",
)
predict_two_gpus = Prediction(
    "Two GPUs, 8,192 tokens",
    lambda: "slower" if two_gpus(load(RECORD), 8192) < 1 else "faster",
    "The GPUs are done in a fraction of the time, but the host has to start every kernel and every message, and a ring "
    "has more of them. At 32,768 tokens the kernels last long enough.",
)
predict_memory = Prediction(
    "Memory with gathered keys",
    lambda: round(memory_when_gathered(2, S=1024, H=4, D=32) / (1024 * 4 * 32 * 4)),
    "q and out are as large as before, all of k and v are there too, and on top of them each rank's own halves of k "
    "and v.",
)
predict_agreement = Prediction(
    "Ranks that raise",
    who_raises,
    "The ranks compare what they were given before any data moves, so the one that differs and all others know.",
)

quiz = Quiz(
    "Quiz 05",
    (lambda: turns(8, lambda rank, P: rank > 0), "One after another, all the way round: P turns."),
    (
        lambda: ring_bytes(65536, 2, G=8, D=128) // 2**20,
        "One hop of 32,768 tokens: 2 (k and v) x 8 x 32,768 x 128 x 2 bytes.",
        0,
        "MiB",
    ),
    (
        lambda: round(20e-6 * 300e9 / 1e6, 6),
        "Half of the time is latency where V / W = lambda, at V = lambda W.",
        0.05,
        "MB",
    ),
    (
        lambda: who_waits(8),
        "Its two neighbours: one waits to receive from it, the other to be received. The rest have what they need.",
    ),
    (lambda: 2 * 8 + 3, "The third machine has the ranks from 16 on: 2 x 8 + 3."),
)
