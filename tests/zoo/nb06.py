"""Answers to the exercises of notebook 06, wrong and right. Each wrong one has the stage that must reject it and a word
of the message."""

# ruff: noqa: F821, F841  (a name that a later step of the loop uses; a handle that is dropped)

from __future__ import annotations

from ringlearn import costs
from ringlearn.course import records

from .edits import edited, registry

WRONG, wrong = registry("6a", "6b", "6c")

# ---- 6a ring --------------------------------------------------------------------------------------------------------


async def ring_solution(comm, keys, work):
    last = comm.size - 1
    for step in range(comm.size):
        if step < last:
            arriving = comm.rotate(keys)
        grads = work(comm, keys, step)
        if step > 0:
            grads += await travelling
        travelling = comm.rotate(grads)
        if step < last:
            keys = await arriving
    return await travelling


@wrong("6a", "cost", "37 units, 23 are possible")
async def ring_all_at_once(comm, keys, work):
    """The program that the exercise starts from."""
    for step in range(comm.size):
        if step < comm.size - 1:
            next_keys = await comm.rotate(keys)
        grads = work(comm, keys, step)
        if step > 0:
            grads += found
        found = await comm.rotate(grads)
        if step < comm.size - 1:
            keys = next_keys
    return found


@wrong("6a", "cost", "then await and add")
async def ring_gradients_at_once(comm, keys, work):
    last = comm.size - 1
    found = 0
    for step in range(comm.size):
        if step < last:
            arriving = comm.rotate(keys)
        grads = work(comm, keys, step) + found
        found = await comm.rotate(grads)
        if step < last:
            keys = await arriving
    return found


@wrong("6a", "cost", "further up")
async def ring_keys_posted_after_work(comm, keys, work):
    last = comm.size - 1
    for step in range(comm.size):
        grads = work(comm, keys, step)
        if step > 0:
            grads += await travelling
        if step < last:
            arriving = comm.rotate(keys)
        travelling = comm.rotate(grads)
        if step < last:
            keys = await arriving
    return await travelling


@wrong("6a", "cost", "compute with `work` first")
async def ring_gradients_posted_late(comm, keys, work):
    """The sum is sent only when the next step's work is done."""
    last, grads = comm.size - 1, None
    for step in range(comm.size):
        if step < last:
            arriving = comm.rotate(keys)
        mine = work(comm, keys, step)
        if grads is not None:
            mine += await comm.rotate(grads)
        grads = mine
        if step < last:
            keys = await arriving
    return await comm.rotate(grads)


@wrong("6a", "value", "which keys `work` gets")
async def ring_awaits_all_at_the_end(comm, keys, work):
    last, handles, grads = comm.size - 1, [], 0
    for step in range(comm.size):
        if step < last:
            handles.append(comm.rotate(keys))
        grads = grads + work(comm, keys, step)
        handles.append(comm.rotate(grads))
    for handle in handles:
        arrived = await handle
    return arrived


wrong("6a", "value", "'s contribution is missing")(
    edited(
        ring_solution,
        "ring_adds_after_sending",
        (
            "if step > 0:\ngrads += await travelling\ntravelling = comm.rotate(grads)",
            "following = comm.rotate(grads)\n"
            "if step > 0:\n"
            "    grads = grads + await travelling\n"
            "travelling = following",
        ),
    )
)
# Writes the next sum into the buffer that is still being sent.
wrong("6a", "value", "still sending")(
    edited(
        ring_solution,
        "ring_one_buffer",
        ("last = comm.size - 1", "last, buffer = comm.size - 1, 0 * keys.float()"),
        ("grads = work(comm, keys, step)", "buffer.copy_(work(comm, keys, step))"),
        ("grads += await", "buffer += await"),
        ("comm.rotate(grads)", "comm.rotate(buffer)"),
    )
)


@wrong("6a", "value", "never awaited")
async def ring_awaits_its_send_only(comm, keys, work):
    """Posts send and receive apart, and awaits the send."""
    following, previous, last = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, comm.size - 1
    for step in range(comm.size):
        if step < last:
            sent = comm.send(keys, following)
            comm.recv(keys.shape, previous, keys.dtype)
        grads = work(comm, keys, step)
        if step < last:
            await sent
    return grads


ring_keys_awaited_in_the_last_step = edited(
    ring_solution,
    "ring_keys_awaited_in_the_last_step",
    ("if step < last:\nkeys = await arriving", "keys = await arriving"),
)
wrong("6a", "value", "awaited under the same `if`")(ring_keys_awaited_in_the_last_step)
ring_awaits_twice = edited(
    ring_keys_awaited_in_the_last_step,
    "ring_awaits_twice",
    ("keys = await arriving", "if step < last:\n    await arriving\n    keys = await arriving"),
)


@wrong("6a", "value", "deadlock")
async def ring_only_rank_0_waits(comm, keys, work):
    last = comm.size - 1
    for step in range(comm.size):
        if step < last and comm.rank == 0:
            arriving = comm.rotate(keys)
        grads = work(comm, keys, step)
        if step < last and comm.rank == 0:
            keys = await arriving
    return grads


@wrong("6a", "value", "async def")
def ring_without_async(comm, keys, work):
    return work(comm, keys, 0)


@wrong("6a", "value", "returns None")
async def ring_returns_nothing(comm, keys, work):
    await ring_solution(comm, keys, work)


@wrong("6a", "adversarial", "contribution is missing")
async def ring_only_three_ranks(comm, keys, work):
    if comm.size == 3:
        return await ring_solution(comm, keys, work)
    return work(comm, keys, 0)


ring_keys_at_once = edited(
    ring_solution, "ring_keys_at_once", ("arriving =", "following = await"), ("await arriving", "following")
)
ring_gradients_before_work = edited(
    ring_solution,
    "ring_gradients_before_work",
    (
        "grads = work(comm, keys, step)\nif step > 0:\ngrads += await travelling",
        "found = await travelling if step > 0 else 0\ngrads = work(comm, keys, step) + found",
    ),
)
# Awaits the next keys, and goes on with the old ones.
ring_keys_never_move = edited(ring_solution, "ring_keys_never_move", ("keys = await", "await"))
ring_uses_the_handle = edited(
    ring_solution, "ring_uses_the_handle", ("grads += await travelling", "grads += travelling")
)
ring_forgets_to_add = edited(ring_solution, "ring_forgets_to_add", ("grads += await", "await"))
# P - 1 hops of gradients: they end one rank before home.
ring_stays_away_from_home = edited(
    ring_solution,
    "ring_stays_away_from_home",
    ("travelling = comm.rotate(grads)", ""),
    (
        "if step < last:\nkeys = await arriving",
        "if step < last:\n    travelling = comm.rotate(grads)\n    keys = await arriving",
    ),
    ("return await travelling", "return grads"),
)
ring_last_never_awaited = edited(ring_solution, "ring_last_never_awaited", ("return await travelling", "return grads"))
ring_returns_the_handle = edited(
    ring_solution, "ring_returns_the_handle", ("return await travelling", "return travelling")
)
ring_keys_once_too_often = edited(
    ring_solution,
    "ring_keys_once_too_often",
    ("last = comm.size - 1", ""),
    ("if step < last:\narriving = comm.rotate(keys)", "arriving = comm.rotate(keys)"),
    ("if step < last:\nkeys = await arriving", "keys = await arriving"),
)
ring_sends_keys_in_float32 = edited(
    ring_solution, "ring_sends_keys_in_float32", ("last =", "keys, last = keys.float(),")
)
ring_gradients_awaited_in_step_0 = edited(
    ring_solution,
    "ring_gradients_awaited_in_step_0",
    ("last = comm.size - 1", "last, travelling = comm.size - 1, None"),
    (
        "grads = work(comm, keys, step)\nif step > 0:\ngrads += await travelling",
        "grads = work(comm, keys, step) + await travelling",
    ),
)


async def ring_first_step_apart(comm, keys, work):
    """The own block before the loop; new tensors in place of sums in place."""
    arriving = comm.rotate(keys) if comm.size > 1 else None
    travelling = comm.rotate(work(comm, keys, 0))
    for step in range(1, comm.size):
        keys = await arriving
        if step < comm.size - 1:
            arriving = comm.rotate(keys)
        share = work(comm, keys, step)
        travelling = comm.rotate(share + await travelling)
    return await travelling


async def ring_by_send_and_recv(comm, keys, work):
    following, previous, last = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, comm.size - 1

    def swap(x):
        return comm.exchange({following: (x,)}, {previous: (tuple(x.shape),)}, finish=lambda got: got[previous][0])

    grads = 0
    for step in range(comm.size):
        if step < last:
            arriving = swap(keys)
        grads = work(comm, keys, step) + (await travelling if step else 0)
        travelling = swap(grads)
        if step < last:
            keys = await arriving
    return await travelling


# ---- 6b threshold ---------------------------------------------------------------------------------------------------


def threshold_solution(H, G, itemsize, tflops, gbit, causal, backward):
    per_token = (itemsize + 4) / 5 if backward else itemsize / 2
    return (2 if causal else 1) * per_token * G / H * tflops * 1e12 / (gbit * 1e9 / 8)


def threshold_by_library(H, G, itemsize, tflops, gbit, causal, backward):
    given = dict(flops=tflops * 1e12, bandwidth=gbit * 125e6)
    return costs.hiding_threshold(H, G, **given, itemsize=itemsize, causal=causal, backward=backward)


def threshold_from_one_token(H, G, itemsize, tflops, gbit, causal, backward):
    """Times of a shard of one token: the message grows with n, the compute with its square. Rounded up."""
    operations = (10 if backward else 4) * H / (2 if causal else 1)
    nbytes = 2 * G * (itemsize + 4 if backward else itemsize)
    return -int(-(nbytes * 8 / gbit * 1e3 * tflops / operations) // 1)


def _changed(**constants):
    """The solution with some of its parts replaced."""

    def threshold(H, G, itemsize, tflops, gbit, causal, backward):
        part = {
            "bytes": 2 * G * itemsize,
            "back_bytes": 2 * G * (itemsize + 4),
            "back_operations": 10 * H,
            "operations": 4 * H,
            "flops": tflops * 1e12,
            "bandwidth": gbit * 1e9 / 8,
            "causal": 2.0,
        }
        given = dict(H=H, G=G, itemsize=itemsize, tflops=tflops, gbit=gbit)
        part |= {name: value(**given) if callable(value) else value for name, value in constants.items()}
        nbytes = part["back_bytes"] if backward else part["bytes"]
        operations = part["back_operations"] if backward else part["operations"]
        return nbytes / operations * part["flops"] / part["bandwidth"] * (part["causal"] if causal else 1)

    return threshold


def _named(name, fn):
    fn.__name__ = name
    return fn


threshold_heads_for_groups = _named(
    "heads_for_groups",
    _changed(
        bytes=lambda H, itemsize, **_: 2 * H * itemsize, back_bytes=lambda H, itemsize, **_: 2 * H * (itemsize + 4)
    ),
)
threshold_upside_down = _named(
    "upside_down", lambda H, G, e, t, g, c, b: threshold_solution(G, H, e, t, g, c, b) if H != G else 2400
)
threshold_only_k = _named("only_k", _changed(bytes=lambda G, itemsize, **_: G * itemsize))
threshold_both_directions = _named("both_directions", _changed(bytes=lambda G, itemsize, **_: 4 * G * itemsize))
threshold_multiply_adds = _named("multiply_adds", _changed(operations=lambda H, **_: 2 * H))
threshold_bits = _named("bits", _changed(bandwidth=lambda gbit, **_: gbit * 1e9))
threshold_bits_the_wrong_way = _named("bits_the_wrong_way", _changed(bandwidth=lambda gbit, **_: gbit * 8e9))
threshold_tera_forgotten = _named("tera_forgotten", _changed(flops=lambda tflops, **_: tflops * 1e9))
threshold_head_dim = _named("head_dim", _changed(bytes=lambda G, itemsize, **_: 2 * G * itemsize * 128))
threshold_always_bf16 = _named("always_bf16", _changed(bytes=lambda G, **_: 4 * G))
threshold_no_causal = _named("no_causal", _changed(causal=1.0))
threshold_causal_halves = _named("causal_halves", _changed(causal=0.5))
threshold_dkv_in_input_dtype = _named(
    "dkv_in_input_dtype", _changed(back_bytes=lambda G, itemsize, **_: 4 * G * itemsize)
)
threshold_no_dkv = _named("no_dkv", _changed(back_bytes=lambda G, itemsize, **_: 2 * G * itemsize))
threshold_half_backward = _named("half_backward", _changed(back_bytes=lambda G, itemsize, **_: G * (itemsize + 4)))
threshold_all_float32 = _named("all_float32", _changed(back_bytes=lambda G, **_: 16 * G))
threshold_two_products = _named("two_products", _changed(back_operations=lambda H, **_: 4 * H))
threshold_backward_as_forward = _named(
    "backward_as_forward",
    _changed(back_operations=lambda H, **_: 4 * H, back_bytes=lambda G, itemsize, **_: 2 * G * itemsize),
)
threshold_always_six = _named("always_six", _changed(back_bytes=lambda G, **_: 12 * G))


@wrong("6b", "value", "not a number")
def threshold_as_text(H, G, itemsize, tflops, gbit, causal, backward):
    return f"{threshold_solution(H, G, itemsize, tflops, gbit, causal, backward)} tokens"


@wrong("6b", "value", "return")
def threshold_no_return(H, G, itemsize, tflops, gbit, causal, backward):
    threshold_solution(H, G, itemsize, tflops, gbit, causal, backward)


@wrong("6b", "adversarial", "multiply")
def threshold_causal_and_backward_add(H, G, itemsize, tflops, gbit, causal, backward):
    plain = threshold_solution(H, G, itemsize, tflops, gbit, False, False)
    factor = 1 + causal + ((itemsize + 4) / 5 / (itemsize / 2) - 1 if backward else 0)
    return plain * factor


# ---- 6c read_timeline -----------------------------------------------------------------------------------------------


def _split(events):
    message = [(start, stop) for kind, start, stop in events if kind == "message"]
    compute = [(start, stop) for kind, start, stop in events if kind == "compute"]
    return message, compute


def _lasts(intervals):
    return sum(stop - start for start, stop in intervals)


def _slower(events):
    message, compute = _split(events)
    return "link" if records.length(message) > records.length(compute) else "compute"


def timeline_solution(events):
    times = sorted({t for _, start, stop in events for t in (start, stop)})
    exposed = computing = sending = 0
    for begin, end in zip(times, times[1:]):
        kinds = {kind for kind, start, stop in events if start <= begin and end <= stop}
        if "compute" in kinds:
            computing += end - begin
        if "message" in kinds:
            sending += end - begin
        if kinds == {"message"}:
            exposed += end - begin
    return exposed, "link" if sending > computing else "compute"


def timeline_by_intervals(events):
    message, compute = _split(events)
    return records.length(records.uncovered(message, compute)), _slower(events)


def timeline_by_union(events):
    """Exposed is what messages add to the time that is covered by anything."""
    message, compute = _split(events)
    return records.length(message + compute) - records.length(compute), _slower(events)


@wrong("6c", "value", "exposed is 0")
def timeline_sum_of_messages(events):
    return _lasts(_split(events)[0]), _slower(events)


@wrong("6c", "value", "sticks out")
def timeline_sum_minus_compute(events):
    message, compute = _split(events)
    return max(0, _lasts(message) - _lasts(compute)), _slower(events)


@wrong("6c", "value", "add them up")
def timeline_max_over_events(events):
    message, compute = _split(events)
    sticks_out = [max(0, m[1] - m[0] - (c[1] - c[0])) for m, c in zip(message, compute)]
    return max(sticks_out, default=0), _slower(events)


@wrong("6c", "value", "exposed is 0")
def timeline_longest_message(events):
    return max((b - a for a, b in _split(events)[0]), default=0), _slower(events)


@wrong("6c", "value", "add them up")
def timeline_pairs_by_number(events):
    message, compute = _split(events)
    return sum(max(0, m[1] - c[1]) for m, c in zip(message, compute)), _slower(events)


@wrong("6c", "value", "add them up")
def timeline_pairs_by_length(events):
    """Only lengths, not where they lie."""
    message, compute = _split(events)
    return sum(max(0, (m[1] - m[0]) - (c[1] - c[0])) for m, c in zip(message, compute)), _slower(events)


@wrong("6c", "value", "sticks out")
def timeline_p_hops(events):
    """As if the last step had a message of its own, as long as the others."""
    message, compute = _split(events)
    hops = len(compute)
    length = _lasts(message) / len(message) if message else 0
    work = _lasts(compute) / hops if hops else 0
    return hops * max(0, length - work), _slower(events)


@wrong("6c", "value", "exposed is 0")
def timeline_counts_the_last_hop(events):
    message, compute = _split(events)
    ends = max((stop for _, stop in compute), default=0)
    exposed = records.length(records.uncovered(message, compute))
    return exposed + (_lasts(message) / len(message) if message and ends else 0), _slower(events)


@wrong("6c", "adversarial", "waits for its host")
def timeline_all_idle_time(events):
    message, compute = _split(events)
    begin, end = min((e[1] for e in events), default=0), max((e[2] for e in events), default=0)
    return end - begin - records.length(compute), _slower(events)


@wrong("6c", "adversarial", "time counts once")
def timeline_counts_twice(events):
    message, compute = _split(events)
    exposed = sum(records.length(records.uncovered([m], compute)) for m in message)
    return exposed, _slower(events)


@wrong("6c", "adversarial", "sort them")
def timeline_wants_order(events):
    """Remembers until when something was under way: right if the computing comes first in the list."""
    exposed, covered_until = 0, 0
    for kind, start, stop in events:
        if kind == "message":
            exposed += max(0, stop - max(start, covered_until))
        covered_until = max(covered_until, stop)
    return exposed, _slower(events)


@wrong("6c", "adversarial", "before, between and after")
def timeline_only_after(events):
    """What sticks out at the end of each message, beyond all computing that began before it ended."""
    message, compute = _split(events)
    exposed = 0
    for start, stop in records.merged(message):
        covered = max([c[1] for c in compute if c[0] < stop], default=start)
        exposed += max(0, stop - max(start, covered))
    return exposed, _slower(events)


@wrong("6c", "value", "under way (two at once count once)")
def timeline_bottleneck_by_exposed(events):
    exposed, _ = timeline_solution(events)
    return exposed, "link" if exposed > 0 else "compute"


@wrong("6c", "value", "what is compared")
def timeline_bottleneck_by_count(events):
    exposed, _ = timeline_solution(events)
    message, compute = _split(events)
    return exposed, "link" if len(message) >= len(compute) else "compute"


@wrong("6c", "value", "what is compared")
def timeline_bottleneck_is_the_longest_event(events):
    exposed, _ = timeline_solution(events)
    longest = max(events, key=lambda e: e[2] - e[1], default=("compute", 0, 0))
    return exposed, "link" if longest[0] == "message" else "compute"


@wrong("6c", "adversarial", "two at once count once")
def timeline_bottleneck_counts_overlaps(events):
    exposed, _ = timeline_solution(events)
    message, compute = _split(events)
    return exposed, "link" if _lasts(message) > _lasts(compute) else "compute"


@wrong("6c", "value", "expected 'link'")
def timeline_says_message(events):
    exposed, slower = timeline_solution(events)
    return exposed, "message" if slower == "link" else slower


@wrong("6c", "value", "not the pair (exposed, bottleneck)")
def timeline_one_number(events):
    return timeline_solution(events)[0]


@wrong("6c", "value", "a time, then a word")
def timeline_the_other_way_round(events):
    return timeline_solution(events)[::-1]


@wrong("6c", "adversarial", "one rule for all")
def timeline_counts_on_a_grid(events):
    """Right for whole numbers."""
    last = int(max((stop for _, _, stop in events), default=0)) + 1
    exposed = 0
    for t in range(last):
        kinds = {kind for kind, start, stop in events if start <= t + 0.5 < stop}
        exposed += kinds == {"message"}
    return exposed, _slower(events)


@wrong("6c", "adversarial", "nothing is exposed")
def timeline_fails_without_messages(events):
    message, compute = _split(events)
    assert max(stop for _, stop in message) >= 0
    return timeline_solution(events)


WRONG["6a"] += [
    (ring_keys_at_once, "cost", "await them at the end of the step"),
    (ring_gradients_before_work, "cost", "then await and add"),
    (ring_keys_never_move, "value", "which keys `work` gets"),
    (ring_uses_the_handle, "value", "there after `await`"),
    (ring_forgets_to_add, "value", "'s contribution is missing"),
    (ring_stays_away_from_home, "value", "of another rank's keys"),
    (ring_last_never_awaited, "value", "the last is awaited after the loop"),
    (ring_returns_the_handle, "value", "the last is awaited after the loop"),
    (ring_keys_once_too_often, "cost", "P - 1 hops for them, P for the gradients"),
    (ring_sends_keys_in_float32, "cost", "the keys stay bfloat16"),
    (ring_awaits_twice, "value", "awaited twice"),
    (ring_gradients_awaited_in_step_0, "value", "from step 1 on"),
]
WRONG["6b"] += [
    (threshold_heads_for_groups, "value", "only the G travel"),
    (threshold_upside_down, "value", "only the G travel"),
    (threshold_only_k, "value", "k and v both travel"),
    (threshold_both_directions, "value", "at the same time"),
    (threshold_multiply_adds, "value", "a multiply-add is two operations"),
    (threshold_bits, "value", "8 of them are a byte"),
    (threshold_bits_the_wrong_way, "value", "do not multiply"),
    (threshold_tera_forgotten, "value", "1e12"),
    (threshold_head_dim, "value", "it cancels"),
    (threshold_always_bf16, "value", "itemsize / 2"),
    (threshold_no_causal, "adversarial", "twice as many tokens"),
    (threshold_causal_halves, "adversarial", "twice as many tokens"),
    (threshold_dkv_in_input_dtype, "adversarial", "float32 whatever itemsize"),
    (threshold_no_dkv, "adversarial", "dk, dv travel too"),
    (threshold_half_backward, "adversarial", "its own quotient"),
    (threshold_all_float32, "adversarial", "k, v still with itemsize"),
    (threshold_two_products, "adversarial", "five matrix products where"),
    (threshold_backward_as_forward, "adversarial", "5/2 of the operations"),
    (threshold_always_six, "adversarial", "(itemsize + 4) / 5"),
]

RIGHT = {
    "6a": [ring_solution, ring_first_step_apart, ring_by_send_and_recv],
    "6b": [threshold_solution, threshold_by_library, threshold_from_one_token],
    "6c": [timeline_solution, timeline_by_intervals, timeline_by_union],
}
