"""Answers to the exercises of notebook 10: wrong ones as people write them, and right ones in different words.

WRONG[exercise] is a list of (function, the stage that must reject it, a word its message must hold at help=2).
RIGHT[exercise] is a list of functions that must pass. The solutions that the notebook shows are taken from the
notebook itself by test_nb10_notebook.py, and must pass too.
"""

from __future__ import annotations

import torch

from .edits import registry

WRONG, wrong = registry("10a", "10b", "10c", "10d")

IGNORE = -100

# ---- 10a ----


def targets_solution(tokens, lengths, positions):
    full = torch.cat([tokens[1:], torch.full((1,), IGNORE)])
    ends = torch.tensor(lengths).cumsum(0) - 1
    full[ends[torch.tensor(lengths) > 0]] = IGNORE
    return [full[p] for p in positions]


def targets_by_documents(tokens, lengths, positions):
    pieces = []
    for document in tokens.split(lengths):
        pieces += [document[1:], torch.full((min(1, len(document)),), IGNORE)]
    return [torch.cat(pieces)[p] for p in positions]


@wrong("10a", "value", "shift first")
def targets_inside_the_shard(tokens, lengths, positions):
    return [torch.cat([tokens[p][1:], torch.full((min(1, len(p)),), IGNORE)]) for p in positions]


@wrong("10a", "value", "shift first")
def targets_rolled_inside_the_shard(tokens, lengths, positions):
    return [tokens[p].roll(-1) for p in positions]


@wrong("10a", "value", "keeps its place")
def targets_shorter(tokens, lengths, positions):
    return [tokens[p][1:] for p in positions]


@wrong("10a", "value", "the document does not")
def targets_of_one_text(tokens, lengths, positions):
    full = torch.cat([tokens[1:], torch.full((1,), IGNORE)])
    return [full[p] for p in positions]


@wrong("10a", "value", "torch.roll")
def targets_rolled(tokens, lengths, positions):
    full = tokens.roll(-1)
    return [full[p] for p in positions]


@wrong("10a", "value", "its own target")
def targets_clamped(tokens, lengths, positions):
    return [tokens[(p + 1).clamp(max=len(tokens) - 1)] for p in positions]


@wrong("10a", "value", "position S has none")
def targets_beyond(tokens, lengths, positions):
    return [tokens[p + 1] for p in positions]


@wrong("10a", "value", "the one before it")
def targets_before(tokens, lengths, positions):
    full = torch.cat([torch.full((1,), IGNORE), tokens[:-1]])
    return [full[p] for p in positions]


@wrong("10a", "value", "nothing is shifted")
def targets_not_shifted(tokens, lengths, positions):
    return [tokens[p] for p in positions]


@wrong("10a", "value", "dealt out in order")
def targets_in_order(tokens, lengths, positions):
    full = torch.cat([tokens[1:], torch.full((1,), IGNORE)])
    full[torch.tensor(lengths).cumsum(0) - 1] = IGNORE
    return list(full.split([len(p) for p in positions]))


@wrong("10a", "value", "one place late")
def targets_marked_late(tokens, lengths, positions):
    full = torch.cat([tokens[1:], torch.full((1,), IGNORE)])
    starts = torch.tensor(lengths).cumsum(0)
    full[starts[starts < len(tokens)]] = IGNORE
    return [full[p] for p in positions]


@wrong("10a", "value", "IGNORE alone")
def targets_marked_by_zero(tokens, lengths, positions):
    return [torch.where(t == IGNORE, 0, t) for t in targets_solution(tokens, lengths, positions)]


@wrong("10a", "adversarial", "empty document")
def targets_marking_empty_documents(tokens, lengths, positions):
    full, start = [], 0
    for n in lengths:
        full += [*tokens[start + 1 : start + n].tolist(), IGNORE]
        start += n
    return [torch.tensor(full)[p] for p in positions]


@wrong("10a", "value", "shift first")
def targets_own_only(tokens, lengths, positions):
    full, found = targets_solution(tokens, lengths, [torch.arange(len(tokens))])[0], []
    for p in positions:
        mine = torch.isin(p + 1, p)
        found.append(torch.where(mine, full[p], IGNORE))
    return found


@wrong("10a", "value", "for each rank a tensor")
def targets_in_one_tensor(tokens, lengths, positions):
    return torch.cat(targets_solution(tokens, lengths, positions))


@wrong("10a", "adversarial", "can be empty")
def targets_by_slices(tokens, lengths, positions):
    full, start = torch.full_like(tokens, IGNORE), 0
    for n in lengths:
        full[start : start + n - 1] = tokens[start + 1 : start + n]
        start += n
    return [full[p] for p in positions]


@wrong("10a", "value", "not a tensor")
def targets_as_numbers(tokens, lengths, positions):
    return [t.tolist() for t in targets_solution(tokens, lengths, positions)]


# ---- 10b ----


async def shared_solution(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    share = losses[counts].sum() / N
    mean = await comm.all_reduce(share.detach())
    return share, mean


async def shared_by_gathering(comm, losses, counts):
    own = torch.tensor([float((losses * counts).sum()), float(counts.sum())], dtype=torch.float64)
    everyone = torch.stack(await comm.all_gather(own))
    total, N = everyone.sum(0).tolist()
    return (losses * counts).sum() / N, total / N


@wrong("10b", "value", "weigh more")
async def shared_own_count(comm, losses, counts):
    share = losses[counts].sum() / counts.sum().clamp(min=1)
    return share, await comm.all_reduce(share.detach())


@wrong("10b", "value", "weigh more")
async def shared_mean_of_means(comm, losses, counts):
    share = losses[counts].sum() / counts.sum().clamp(min=1) / comm.size
    return share, await comm.all_reduce(share.detach())


@wrong("10b", "value", "weigh more")
async def shared_nan(comm, losses, counts):
    share = losses[counts].mean() / comm.size
    return share, await comm.all_reduce(share.detach())


@wrong("10b", "adversarial", "0 by 0")
async def shared_mean_times_count(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    share = losses[counts].mean() * counts.sum() / N
    return share, await comm.all_reduce(share.detach())


@wrong("10b", "value", "P times too large")
async def shared_times_ranks(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    share = losses[counts].sum() / N
    return share * comm.size, await comm.all_reduce(share.detach())


@wrong("10b", "value", "do not count are in the sum")
async def shared_all_tokens(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    share = losses.sum() / N
    return share, await comm.all_reduce(share.detach())


@wrong("10b", "value", "do not count are in the sum")
async def shared_mean_over_all_tokens(comm, losses, counts):
    S = await comm.all_reduce(torch.tensor(len(losses)))
    share = losses.sum() / S
    return share, await comm.all_reduce(share.detach())


@wrong("10b", "value", "number of all tokens")
async def shared_divided_by_all_tokens(comm, losses, counts):
    S = await comm.all_reduce(torch.tensor(len(losses)))
    share = losses[counts].sum() / S
    return share, await comm.all_reduce(share.detach())


@wrong("10b", "value", "not averaged")
async def shared_averaged(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    share = losses[counts].sum() / N / comm.size
    return share, await comm.all_reduce(share.detach())


@wrong("10b", "value", "outside of autograd")
async def shared_reduced_in_autograd(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    loss = await comm.all_reduce(losses[counts].sum()) / N
    return loss, loss.detach()


@wrong("10b", "value", "not divided")
async def shared_sum(comm, losses, counts):
    share = losses[counts].sum()
    return share, await comm.all_reduce(share.detach())


@wrong("10b", "value", "of ranks, not of tokens")
async def shared_over_ranks(comm, losses, counts):
    share = losses[counts].sum() / comm.size
    return share, await comm.all_reduce(share.detach())


@wrong("10b", "adversarial", "float32 whatever the rest is")
async def shared_zero_of_another_dtype(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    share = losses[counts].sum() / N if counts.any() else torch.zeros(())
    return share, await comm.all_reduce(share.detach())


@wrong("10b", "adversarial", "a plain 0 on a rank where nothing counts")
async def shared_zero_without_a_gradient(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    share = losses[counts].sum() / N if counts.any() else torch.zeros((), dtype=losses.dtype)
    return share, await comm.all_reduce(share.detach())


@wrong("10b", "value", "no gradient")
async def shared_detached(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    share = torch.tensor(losses[counts].sum().item() / int(N))
    return share, await comm.all_reduce(share)


@wrong("10b", "adversarial", "enter the backward")
async def shared_zero_where_none_counts(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    share = losses[counts].sum() / N if counts.any() else torch.tensor(0.0, dtype=losses.dtype)
    return share, await comm.all_reduce(share.detach())


@wrong("10b", "adversarial", "early return")
async def shared_absent_where_none_counts(comm, losses, counts):
    if not counts.any():
        return losses.sum() * 0, 0.0
    N = await comm.all_reduce(counts.sum())
    share = losses[counts].sum() / N
    return share, await comm.all_reduce(share.detach())


@wrong("10b", "value", "own share")
async def shared_returns_its_share(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    share = losses[counts].sum() / N
    return share, share.detach()


@wrong("10b", "value", "not averaged")
async def shared_mean_of_shares(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    share = losses[counts].sum() / N
    return share, await comm.all_reduce(share.detach()) / comm.size


@wrong("10b", "value", "share.detach()")
async def shared_mean_with_a_gradient(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    share = losses[counts].sum() / N
    return share, await comm.all_reduce(share)


@wrong("10b", "value", "await")
async def shared_forgets_await(comm, losses, counts):
    N = comm.all_reduce(counts.sum())
    share = losses[counts].sum() / N
    return share, share.detach()


@wrong("10b", "value", "simulated")
async def shared_by_torch_distributed(comm, losses, counts):
    N = counts.sum()
    torch.distributed.all_reduce(N)
    return losses[counts].sum() / N, N


@wrong("10b", "value", "torch.tensor(x)")
async def shared_a_plain_number(comm, losses, counts):
    N = await comm.all_reduce(int(counts.sum()))
    return losses[counts].sum() / N, N


@wrong("10b", "value", "share, mean")
async def shared_returns_the_share_alone(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    return losses[counts].sum() / N


@wrong("10b", "value", ".sum()")
async def shared_each_token(comm, losses, counts):
    N = await comm.all_reduce(counts.sum())
    share = losses * counts / N
    return share, await comm.all_reduce(share.sum().detach())


@wrong("10b", "value", "tensor.sum()")
async def shared_sums_the_mask(comm, losses, counts):
    N = (await comm.all_reduce(counts)).sum()
    share = losses[counts].sum() / N
    return share, await comm.all_reduce(share.detach())


# ---- 10c ----


async def step_solution(comm, micro, max_norm):
    sums = [sum(parts) for parts in zip(*(grads for grads, _ in micro))]
    count = torch.tensor(sum(n for _, n in micro))
    N = await comm.all_reduce(count)
    grads = [await comm.all_reduce(g) / N for g in sums]
    norm = torch.stack([g.norm() for g in grads]).norm()
    return [g * min(1.0, max_norm / float(norm)) for g in grads], norm


async def step_along_both_axes(comm, micro, max_norm):
    """First along cp, then along dp, with everything in one message."""
    flat = sum(torch.cat([*(g.flatten() for g in grads), torch.tensor([float(n)]).double()]) for grads, n in micro)
    for axis in (1, 0):
        flat = await comm.along(axis).all_reduce(flat)
    g = flat[:-1] / flat[-1]
    norm = float(g.norm())
    g = g * (max_norm / norm) if norm > max_norm else g
    parts = g.split([t.numel() for t in micro[0][0]])
    return [part.view(t.shape) for part, t in zip(parts, micro[0][0])], norm


async def step_by_clip_grad_norm(comm, micro, max_norm):
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in micro[0][0]]
    N = await comm.all_reduce(torch.tensor([float(sum(n for _, n in micro))]))
    for i, p in enumerate(parameters):
        p.grad = await comm.all_reduce(torch.stack([grads[i] for grads, _ in micro]).sum(0)) / N.double()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return [p.grad for p in parameters], norm


def step_as(name, count="all", over="all", divide=lambda comm, micro, N: N, cut=None, told=None, each=None):
    """The solution with a part of it replaced."""

    async def answer(comm, micro, max_norm):
        group = {"all": comm, "cp": comm.along(1), "dp": comm.along(0), "none": None}

        async def reduce(x, where):
            return x if group[where] is None else await group[where].all_reduce(x)

        if each is not None:
            micro = [([g * each(n) for g in grads], n) for grads, n in micro]
        sums = [sum(parts) for parts in zip(*(grads for grads, _ in micro))]
        own = [g.clone() for g in sums]
        N = await reduce(torch.tensor(sum(n for _, n in micro)), count)
        grads = [await reduce(g, over) / divide(comm, micro, N) for g in sums]
        norm = torch.stack([g.norm() for g in grads]).norm()
        if cut is not None:
            return cut(grads, norm, max_norm, [g / N for g in own]), norm
        scale = min(1.0, max_norm / float(norm))
        grads = [g * scale for g in grads]
        return grads, norm if told is None else told(grads, norm, micro)

    answer.__name__ = name
    return answer


@wrong("10c", "value", "reduce first")
async def step_clips_first(comm, micro, max_norm):
    N = await comm.all_reduce(torch.tensor(sum(n for _, n in micro)))
    sums = [sum(parts) / N for parts in zip(*(grads for grads, _ in micro))]
    norm = float(torch.stack([g.norm() for g in sums]).norm())
    sums = [g * min(1.0, max_norm / max(norm, 1e-300)) for g in sums]
    grads = [await comm.all_reduce(g) for g in sums]
    return grads, torch.stack([g.norm() for g in grads]).norm()


@wrong("10c", "value", "mean of means")
async def step_mean_of_means(comm, micro, max_norm):
    n = max(sum(n for _, n in micro), 1)
    grads = [await comm.all_reduce(sum(parts) / n) / comm.size for parts in zip(*(grads for grads, _ in micro))]
    norm = torch.stack([g.norm() for g in grads]).norm()
    return [g * min(1.0, max_norm / float(norm)) for g in grads], norm


@wrong("10c", "value", "a mean of its own")
async def step_mean_of_micro_batches(comm, micro, max_norm):
    total = 0
    for grads, n in micro:
        N = await comm.all_reduce(torch.tensor(n))
        flat = torch.cat([g.flatten() for g in grads])
        total = total + await comm.all_reduce(flat) / N.clamp(min=1)
    total = total / len(micro)
    norm = float(total.norm())
    parts = (total * min(1.0, max_norm / norm)).split([g.numel() for g in micro[0][0]])
    return [part.view(g.shape) for part, g in zip(parts, micro[0][0])], norm


@wrong("10c", "value", "only the last")
async def step_last_micro_batch(comm, micro, max_norm):
    return await step_solution(comm, micro[-1:], max_norm)


@wrong("10c", "cost", "once for a step")
async def step_reduces_each_micro_batch(comm, micro, max_norm):
    N, sums = torch.tensor(0), None
    for grads, n in micro:
        N = N + await comm.all_reduce(torch.tensor(n))
        grads = [await comm.all_reduce(g) for g in grads]
        sums = grads if sums is None else [a + b for a, b in zip(sums, grads)]
    grads = [g / N for g in sums]
    norm = torch.stack([g.norm() for g in grads]).norm()
    return [g * min(1.0, max_norm / float(norm)) for g in grads], norm


@wrong("10c", "value", "summed twice")
async def step_sums_twice(comm, micro, max_norm):
    N = await comm.all_reduce(torch.tensor(sum(n for _, n in micro)))
    sums = [sum(parts) for parts in zip(*(grads for grads, _ in micro))]
    grads = [await comm.along(0).all_reduce(await comm.all_reduce(g)) / N for g in sums]
    norm = torch.stack([g.norm() for g in grads]).norm()
    return [g * min(1.0, max_norm / float(norm)) for g in grads], norm


@wrong("10c", "value", "one norm over all")
async def step_largest_norm(comm, micro, max_norm):
    grads, _ = await step_solution(comm, micro, 1e9)
    norm = max(float(g.norm()) for g in grads)
    return [g * min(1.0, max_norm / norm) for g in grads], norm


@wrong("10c", "adversarial", "early return")
async def step_waits_for_tokens(comm, micro, max_norm):
    if sum(n for _, n in micro) == 0:
        return [torch.zeros_like(g) for g in micro[0][0]], 0.0
    return await step_solution(comm, micro, max_norm)


@wrong("10c", "value", "return grads, norm")
async def step_flat(comm, micro, max_norm):
    grads, norm = await step_solution(comm, micro, max_norm)
    return torch.cat([g.flatten() for g in grads]), norm


@wrong("10c", "value", "grads, norm")
async def step_forgets_the_norm(comm, micro, max_norm):
    grads, _ = await step_solution(comm, micro, max_norm)
    return grads


@wrong("10c", "value", "counted several times")
async def step_adds_squares_over_ranks(comm, micro, max_norm):
    grads, norm = await step_solution(comm, micro, max_norm)
    return grads, (await comm.all_reduce(norm**2)).sqrt()


@wrong("10c", "value", "own part: sum first")
async def step_tells_its_own_norm(comm, micro, max_norm):
    own = torch.cat([sum(parts).flatten() for parts in zip(*(grads for grads, _ in micro))])
    return (await step_solution(comm, micro, max_norm))[0], own.norm()


@wrong("10c", "value", "count of its cp group")
async def step_divides_by_its_group(comm, micro, max_norm):
    N = await comm.along(1).all_reduce(torch.tensor(sum(n for _, n in micro)))
    grads = [await comm.all_reduce(sum(parts) / N) for parts in zip(*(grads for grads, _ in micro))]
    norm = torch.stack([g.norm() for g in grads]).norm()
    return [g * min(1.0, max_norm / float(norm)) for g in grads], norm


def _scaled(grads, scale):
    return [g * scale for g in grads]


# ---- 10d ----


def kept_solution(S, P, layers, H, G, D, recompute):
    d = H * D
    if recompute:
        numbers = layers * d + d
    else:
        last = 2 * G * D if P > 1 else 0
        numbers = layers * (3 * d + d + 2 * G * D + last + 2 * d + d) + d
    return 4 * (S // P) * numbers


def kept_to_the_last_number(S, P, layers, H, G, D, recompute):
    d = H * D
    layer = 7 * d + 2 * G * D * (1 + (P > 1)) + H + 1 + 2 * D
    return S / P * 4 * (d + layers * (d if recompute else layer)) + 16 * S / P


def kept_as(name, tokens=lambda S, P: S // P, width=4, layer=None, anew_layer=None, end=lambda d: d):
    """The solution with a part of it replaced: what a layer keeps, (d, kv, P, H, S) -> numbers of a token."""

    def answer(S, P, layers, H, G, D, recompute):
        d, kv = H * D, 2 * G * D
        right = 7 * d + kv * (1 if P == 1 else 2)
        if recompute:
            own = d if anew_layer is None else anew_layer(d, right)
        else:
            own = right if layer is None else layer(d, kv, P, H, S)
        return width * tokens(S, P) * (layers * own + end(d))

    answer.__name__ = name
    return answer


@wrong("10d", "value", "one layer is counted")
def kept_of_one_layer(S, P, layers, H, G, D, recompute):
    return kept_solution(S, P, 1, H, G, D, recompute)


@wrong("10d", "value", "G heads")
def kept_with_wide_keys(S, P, layers, H, G, D, recompute):
    return kept_solution(S, P, layers, H, H, D, recompute)


@wrong("10d", "value", "only their inputs")
def kept_ignores_anew(S, P, layers, H, G, D, recompute):
    return kept_solution(S, P, layers, H, G, D, False)


@wrong("10d", "value", "only their inputs are counted")
def kept_always_anew(S, P, layers, H, G, D, recompute):
    return kept_solution(S, P, layers, H, G, D, True)


@wrong("10d", "value", "d more")
def kept_end_anew_only(S, P, layers, H, G, D, recompute):
    return kept_solution(S, P, layers, H, G, D, recompute) - (not recompute) * 4 * (S // P) * H * D


@wrong("10d", "value", "not a number")
def kept_as_text(S, P, layers, H, G, D, recompute):
    return f"{kept_solution(S, P, layers, H, G, D, recompute)} bytes"


@wrong("10d", "adversarial", "runs its ring again")
def kept_with_the_last_keys_anew(S, P, layers, H, G, D, recompute):
    more = 2 * G * D if recompute and P > 1 else 0
    return kept_solution(S, P, layers, H, G, D, recompute) + 4 * (S // P) * layers * more


WRONG["10c"] += [
    (step_as("step_over_cp", over="cp"), "value", "dp groups"),
    (step_as("step_over_dp", over="dp"), "value", "share a sequence"),
    (step_as("step_over_cp_with_its_count", over="cp", count="cp"), "value", "dp groups"),
    (step_as("step_over_none", over="none"), "value", "of its own tokens"),
    (step_as("step_averaged", divide=lambda comm, micro, N: N * comm.size), "value", "DDP and FSDP2"),
    (
        step_as(
            "step_means_of_means_of_batches",
            each=lambda n: 1 / max(n, 1),
            divide=lambda comm, micro, N: comm.size * len(micro),
        ),
        "value",
        "mean of means",
    ),
    (step_as("step_over_batches_too", divide=lambda comm, micro, N: N * len(micro)), "value", "already"),
    (step_as("step_not_divided", divide=lambda comm, micro, N: 1), "value", "not divided"),
    (step_as("step_own_count", count="none"), "value", "some ranks only"),
    (step_as("step_count_of_cp", count="cp"), "value", "some ranks only"),
    (step_as("step_count_of_dp", count="dp"), "value", "some ranks only"),
    (step_as("step_not_clipped", cut=lambda g, norm, most, own: g), "value", "no clipping"),
    (step_as("step_always_clipped", cut=lambda g, norm, most, own: _scaled(g, most / norm)), "value", "scaled up"),
    (
        step_as(
            "step_clipped_by_tensor", cut=lambda g, norm, most, own: [x * min(1.0, most / float(x.norm())) for x in g]
        ),
        "value",
        "one norm",
    ),
    (
        step_as("step_clipped_by_number", cut=lambda g, norm, most, own: [x.clamp(-most, most) for x in g]),
        "value",
        "each number",
    ),
    (
        step_as(
            "step_adds_norms",
            cut=lambda g, norm, most, own: _scaled(g, min(1.0, most / float(sum(x.norm() for x in g)))),
        ),
        "value",
        "do not add up",
    ),
    (
        step_as("step_squared_norm", cut=lambda g, norm, most, own: _scaled(g, min(1.0, most / float(norm**2)))),
        "value",
        "the root is missing",
    ),
    (
        step_as(
            "step_own_norm",
            cut=lambda g, norm, most, own: _scaled(
                g, min(1.0, most / max(float(torch.stack([x.norm() for x in own]).norm()), 1e-300))
            ),
        ),
        "value",
        "before the sum",
    ),
    (
        step_as("step_tells_the_clipped_norm", told=lambda g, norm, micro: torch.stack([x.norm() for x in g]).norm()),
        "value",
        "before clipping",
    ),
    (step_as("step_tells_norms_added", told=lambda g, norm, micro: sum(x.norm() for x in g)), "value", "do not add up"),
]
WRONG["10d"] += [
    (kept_as("kept_of_all_tokens", tokens=lambda S, P: S), "adversarial", "S / P"),
    (kept_as("kept_in_numbers", width=1), "value", "4 bytes"),
    (kept_as("kept_in_halves", width=2), "value", "2 bytes"),
    (kept_as("kept_without_keys", layer=lambda d, kv, P, H, S: 7 * d), "value", "are missing"),
    (kept_as("kept_without_the_end", end=lambda d: 0), "value", "layers + 1"),
    (kept_as("kept_without_the_last_keys", layer=lambda d, kv, P, H, S: 7 * d + kv), "adversarial", "came last"),
    (kept_as("kept_with_all_keys", layer=lambda d, kv, P, H, S: 7 * d + kv * P), "adversarial", "pass by"),
    (kept_as("kept_keys_twice_alone", layer=lambda d, kv, P, H, S: 7 * d + 2 * kv), "value", "nothing arrives"),
    (kept_as("kept_with_feed_forward", layer=lambda d, kv, P, H, S: 15 * d + kv * (1 + (P > 1))), "value", "GELU"),
    (kept_as("kept_with_scores", layer=lambda d, kv, P, H, S: 7 * d + kv * (1 + (P > 1)) + H * S), "value", "scores"),
    (kept_as("kept_with_logits", end=lambda d: d + 256, anew_layer=lambda d, right: d), "value", "logits"),
    (kept_as("kept_norm_once", layer=lambda d, kv, P, H, S: 5 * d + kv * (1 + (P > 1))), "value", "both factors"),
    (kept_as("kept_out_once", layer=lambda d, kv, P, H, S: 6 * d + kv * (1 + (P > 1))), "value", "one d is missing"),
]

RIGHT = {
    "10a": [targets_solution, targets_by_documents],
    "10b": [shared_solution, shared_by_gathering],
    "10c": [step_solution, step_along_both_axes, step_by_clip_grad_norm],
    "10d": [kept_solution, kept_to_the_last_number],
}
