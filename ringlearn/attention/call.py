"""An attention call over ranks, whatever its strategy: check the arguments, agree on them, run one autograd node."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..kernels import Kernel, tile_kinds, warn_of_reference
from ..layouts import Layout
from ..masks import Mask, full
from ..worlds.comm import no_grad
from ..worlds.uncompiled import uncompiled
from ..worlds.world import PerRank, Shards, World, check_grad_mode
from .inputs import Request, parts, world_of
from .prepared import Call, lengths_of, prepared
from .sinks import gradient_of_sinks
from .strategy import Strategy


def attention_function(**defaults: Any):
    """Make the function that users call out of one that gives the strategy.

    What users call takes the arguments of ``ring_attention`` and, by name, those of the decorated function, which have
    these defaults. If the decorated function raises ValueError, every rank hears of it.
    """

    def decorate(strategy_of: Callable[..., Strategy]):
        def attention(
            q: Shards | Tensor,
            k: Shards | Tensor,
            v: Shards | Tensor,
            mask: Mask = full,
            scale: float | None = None,
            kernel: str | Kernel | None = None,
            *,
            q_start: int = 0,
            return_lse: bool = False,
            sinks: Tensor | None = None,
            softcap: float | None = None,
            alibi: Tensor | Sequence[float] | None = None,
            layout: Layout | None = None,
            world: World | None = None,
            **unsupported: Any,
        ) -> Any:
            own = {name: unsupported.pop(name, default) for name, default in defaults.items()}
            where = q_start, return_lse, layout, world
            given = Request(
                strategy_of.__name__, q, k, v, mask, scale, kernel, *where, sinks, softcap, alibi, unsupported
            )
            return attention_over_ranks(given, partial(strategy_of, **own))

        signature = inspect.signature(attention)
        *shared, unsupported = signature.parameters.values()
        own = inspect.signature(strategy_of).parameters.values()
        own = [x.replace(kind=x.KEYWORD_ONLY, default=defaults[x.name]) for x in own]
        attention = wraps(strategy_of)(attention)
        attention.__signature__ = signature.replace(parameters=[*shared, *own, unsupported])
        return attention

    return decorate


@uncompiled
def attention_over_ranks(request: Request, strategy_of: Callable[[], Strategy]) -> Any:
    """Compute attention over the ranks of a world; if an argument is wrong, every rank raises an error."""
    op, world = request.op, world_of(request)
    plan, problem, same, own = None, None, {}, {}
    try:
        if _casts(request.q):
            request = replace(request, **{name: _autocast(x) for name, x in zip("qkv", request.inputs, strict=True)})
        plan = prepared(request, strategy_of(), world)
        same = plan.same(request.sinks)
        recording = torch.is_grad_enabled()
        of_ranks = [parts(x) for x in request.inputs]
        tensors = [*of_ranks[0], *of_ranks[1], *of_ranks[2], *(() if request.sinks is None else (request.sinks,))]
        own = {
            "requires_grad": recording and any(t.requires_grad for t in tensors),
            "grad mode": recording,
            "inference": any(t.is_inference() for t in tensors),
            "lengths": [of_ranks[0][0].shape[-2], of_ranks[1][0].shape[-2]],
        }
    except Exception as error:  # a TypeError too, or an error in the user's own kernel or layout: all ranks must hear
        problem = error
    known = world.agree(op, same, own, problem)
    needs_grad = any(rank["requires_grad"] for rank in known)
    check_grad_mode(op, known)
    if plan.scores and world.ranks[0] == 0:
        warn_of_reference(op, plan.kernel, plan.scores, *(x[0] for x in of_ranks), tile_kinds(request.mask))
    # From here on every rank knows the same lengths, so an error is the same error on all of them.
    call = plan.call(request, lengths_of(known))
    if call.rows is not None:
        # (B, heads, n, D) to (1, heads, B * n, D): the rows of the batch one after the other, as one sequence.
        of_ranks = [[t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in tensors] for tensors in of_ranks]
    if call.strategy.rotates:
        world.reserve(plan.largest_message(call, of_ranks[1][0], of_ranks[2][0], needs_grad))
    outs, lses = _apply(call, needs_grad, own["requires_grad"], of_ranks, request.sinks)
    if call.rows is not None:
        outs, lses = ([x.unflatten(2, (call.rows, -1)).squeeze(0).transpose(0, 1) for x in xs] for xs in (outs, lses))
    if isinstance(request.q, Tensor):
        return (outs[0], lses[0]) if call.return_lse else outs[0]
    out = request.q.alike(outs)
    return (out, request.q.alike(lses, dim=-1)) if call.return_lse else out


def _casts(x: Any) -> bool:
    """Whether autocast is on for the device of these inputs."""
    if not torch._C._is_any_autocast_enabled():
        return False
    kind = parts(x)[0].device.type if isinstance(x, Tensor | Shards) and parts(x) else "cpu"
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _autocast(x: Shards | Tensor) -> Shards | Tensor:
    """Under autocast, cast as SDPA does: everything but float64 to the autocast dtype."""
    if isinstance(x, Shards):
        return x.map(_autocast)
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64:
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return x.to(torch.get_autocast_dtype(kind))
    return x


def _no_autocast(kind: str) -> AbstractContextManager:
    """Autocast off: programs and kernels keep the dtypes of their inputs."""
    on = torch._C._is_any_autocast_enabled() and torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if on and torch.is_autocast_enabled(kind) else nullcontext()


# --- the autograd node ---------------------------------------------------------------------------------------------


def _apply(
    call: Call, needs_grad: bool, own: bool, tensors: list[list[Tensor]], sinks: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The owned ranks' outputs and their lse, from their q, k and v, and the sinks of all.

    needs_grad, own: whether a rank needs a gradient, and whether one of these tensors does.
    """
    n, flat = len(call.world.ranks), [t for of_ranks in tensors for t in of_ranks]
    if needs_grad and torch.is_grad_enabled():
        # Either every rank has the node or none has, or some rank would wait in the backward for another that never
        # enters it. A rank whose inputs need no gradient gets its node through this empty tensor.
        flows = None if own else torch.empty(0, device=flat[0].device, requires_grad=True)
        results = _Attention.apply(call, flows, sinks, *flat)
    else:
        results = _forward(call, [t.detach() for t in flat])
    return list(results[:n]), list(results[n : 2 * n])


def _forward(call: Call, flat: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the forward program: the owned ranks' outputs in the input dtype, their lse, and what the backward needs."""
    n = len(call.world.ranks)
    q, k, v = (PerRank(flat[i * n : (i + 1) * n]) for i in range(3))
    with no_grad(), _no_autocast(q[0].device.type):
        strategy, spec = call.strategy, call.spec
        program = strategy.forward if spec.sinks is None else strategy.forward_with_sinks
        results = call.world.run(program, q, k, v, spec)
        partials, *kept = zip(*results, strict=True)
        return *(p.out.to(t.dtype) for p, t in zip(partials, q, strict=True)), *(p.lse for p in partials), *chain(*kept)


class _Attention(torch.autograd.Function):
    """All ranks that this process owns as one node: its inputs are all their q, k and v.

    One node per process cannot deadlock in the autograd engine, however many ranks it simulates.
    """

    @staticmethod
    def forward(ctx, call, flows, sinks, *flat):
        results = _forward(call, flat)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sinks, *flat, *results)
        return results[: 2 * len(call.world.ranks)]

    @staticmethod
    def backward(ctx, *grads):
        call, (sinks, *saved) = ctx.call, ctx.saved_tensors
        world, strategy, n = call.world, call.strategy, len(call.world.ranks)
        q, k, v, out, lse, *kept = (PerRank(saved[i : i + n]) for i in range(0, len(saved), n))
        dout = PerRank(torch.zeros_like(o) if g is None else g for g, o in zip(grads[:n], out, strict=True))
        dlse = PerRank(grads[n:])
        # Only where the gradient of lse travels must a rank know about the others before it begins.
        asks = strategy.moves_dlse and call.return_lse
        own = {"dlse": any(g is not None for g in dlse)}
        known = world.agree(f"backward of {call.op}", {}, own, later=not asks)
        unasked = len(known) * n < world.size  # without the check a rank does not know about the others
        if asks and (unasked or any(rank["dlse"] for rank in known)):
            dlse = PerRank(torch.zeros_like(x) if g is None else g for g, x in zip(dlse, lse, strict=True))
        with no_grad(), _no_autocast(q[0].device.type):
            results = world.run(strategy.backward, dout, q, k, v, out, lse, dlse, *kept, call.spec)
            flat = [
                g.to(t.dtype) for i, x in enumerate((q, k, v)) for g, t in zip((r[i] for r in results), x, strict=True)
            ]
            if ctx.needs_input_grad[2]:
                shares = [gradient_of_sinks(*rows, sinks) for rows in zip(dout, out, lse, dlse, strict=True)]
                flat.append(sum(shares[1:], start=shares[0]).to(sinks.dtype))
        world.conclude()
        if torch.is_grad_enabled():  # create_graph=True: a second differentiation must not be silently wrong
            used = *saved[: 3 * n], *(t for t in (sinks, *grads) if t is not None)
            flat = list(_NoDoubleBackward.apply(call.op, len(flat), *flat, *used))
        dsinks = flat.pop() if ctx.needs_input_grad[2] else None
        return None, None, dsinks, *flat


class _NoDoubleBackward(torch.autograd.Function):
    """The identity, with a backward that refuses a second differentiation."""

    @staticmethod
    def forward(ctx, op, n, *tensors):
        ctx.op = op
        return tuple(t.clone() for t in tensors[:n])

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            f"{ctx.op}: a gradient of its gradient is not supported; for second derivatives use dense attention "
            f"(SDPA's math backend), or drop create_graph=True"
        )
