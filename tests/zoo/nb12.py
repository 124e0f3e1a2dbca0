"""Answers to the exercises of notebook 12: wrong ones as people write them, and right ones in different words.

WRONG[exercise] is a list of (function, the stage at which it must be rejected, a word that the message must hold).
RIGHT[exercise] is a list of functions that must pass.
"""

from __future__ import annotations

import torch

import ringlearn as rl
from ringlearn.course.checks import nb12

from .edits import registry, slips

WRONG, wrong = registry("12a", "12b", "12c", "12d")


# ---- 12a ----


def bytes_solution(m, S, P, R, anew):
    n, H, G, D = S / P, m.heads, m.kv_heads, m.head_dim
    theta = m.parameters
    held = 12 * theta / R
    wide = 2 * m.width
    heads = 2 * H * D
    kv = 2 * G * D
    layer = 2 * (2 * wide + heads + kv + 2 * m.ffn) + 4 * H
    if anew:
        layer = 2 * m.width
    kept = n * m.layers * layer
    logits = n * 14 * m.vocabulary
    return held + kept + logits


def bytes_tensor_by_tensor(m, S, P, R, anew):
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    layer = {"input": m.width}
    if not anew:
        layer |= {"norm": m.width, "q": q, "k": kv, "v": kv, "out": q, "lse": 2 * m.heads}
        layer |= {"input 2": m.width, "norm 2": m.width, "gate": m.ffn, "up": m.ffn}
    token = 2 * m.layers * sum(layer.values()) + 14 * m.vocabulary
    return S // P * token + (4 + 4 + 4) * m.parameters // R


a12 = slips(wrong, "12a", bytes_solution)
a12("bytes_counts_gradients", "12 bytes, not 16", ("12 * theta", "16 * theta"))
a12("bytes_sharded_over_the_ring", "all R ranks", ("theta / R", "theta / P"))
a12("bytes_not_sharded", "divide by R", ("theta / R", "theta"))
a12("bytes_without_moments", "two moments are missing", ("12 * theta", "4 * theta"))
a12("bytes_without_weights", "the weights are missing", ("12 * theta", "8 * theta"))
a12("bytes_state_in_bf16", "a parameter has 4 bytes", ("12 * theta", "6 * theta"))
a12("bytes_of_one_layer", "there are m.layers", ("m.layers * layer", "layer"))
a12("bytes_in_float32", "2 bytes a number", ("kept = n", "kept = 2 * n"))
a12("bytes_of_all_tokens", "S / P", ("kept = n", "kept = S"))
a12("bytes_never_anew", "its input alone", ("if anew:", "if False:"))
a12("bytes_always_anew", "all of the tensors", ("if anew:", "if True:"))
a12("bytes_without_lse", "lse is missing", ("+ 4 * H", ""))
a12("bytes_lse_in_bf16", "it stays in float32", ("+ 4 * H", "+ 2 * H"))
a12("bytes_kv_with_all_heads", "G heads, not H", ("kv = 2 * G * D", "kv = 2 * H * D"))
a12("bytes_of_k_alone", "two tensors", ("kv = 2 * G * D", "kv = G * D"))
a12("bytes_without_out", "both are kept", ("heads = 2 * H * D", "heads = H * D"))
a12("bytes_of_gate_alone", "gate and up", ("2 * m.ffn", "m.ffn"))
a12("bytes_with_the_product", "makes it again", ("2 * m.ffn", "3 * m.ffn"))
a12("bytes_logits_once", "14 bytes in all", ("14 *", "2 *"))
a12("bytes_logits_float32", "14 bytes in all", ("14 *", "4 *"))
a12("bytes_logits_without_gradient", "their gradient counts", ("14 *", "10 *"))
a12("bytes_keeps_the_norm", "keeps one tensor", ("layer = 2 * m.width", "layer = 2 * wide"))
a12(
    "bytes_of_all_groups",
    "computes one sequence",
    ("held + kept + logits", "held + (kept + logits) * R / P"),
)
a12("bytes_logits_of_all_tokens", "S / P", ("logits = n", "logits = S"))
a12("bytes_without_logits", "they are missing", ("+ logits", ""))
a12("bytes_of_hidden_states", "as wide as the vocabulary", ("m.vocabulary", "m.width"))
a12("bytes_split_over_all_ranks", "S / P tokens", ("S / P", "S / R"))
a12("bytes_in_gib", "GiB", ("held + kept + logits", "(held + kept + logits) / 2**30"))
a12("bytes_returns_parts", "not a number", ("return held + kept + logits", "return [held, kept, logits]"))
a12(
    "bytes_of_the_text",
    "those of Llama 3 8B",
    ("layer = 2 * (2 * wide + heads + kv + 2 * m.ffn) + 4 * H", "layer = 110_720"),
    stage="adversarial",
)
a12("bytes_for_any_width", "no common mistake", ("theta = m.parameters", "theta = 8_030_261_248"), stage="adversarial")
RIGHT = {"12a": [bytes_solution, bytes_tensor_by_tensor]}

# ---- 12b ----


def seconds_solution(m, S, P, products, attention, anew):
    forwards = 1 + anew
    linear = 2 * (m.parameters - m.embedding) * S
    pairs = S * S / 2
    scores = 4 * pairs * m.heads * m.head_dim * m.layers
    a = (forwards + 2) * linear
    b = (forwards + 2.5) * scores
    return a / P / products + b / P / attention


def seconds_factor_by_factor(m, S, P, products, attention, anew):
    """Forward, backward and, if need be, the forward once more, of one GPU."""
    token = 2 * (m.parameters - m.embedding)
    forward = token * S / P / products, 2 * m.layers * m.heads * m.head_dim * S * (S + 1) / P / attention
    backward = 2 * forward[0], 2.5 * forward[1]
    return sum(forward) * (2 if anew else 1) + sum(backward)


b12 = slips(wrong, "12b", seconds_solution)
b12("seconds_without_mask", "causal mask", ("S * S / 2", "S * S"))
b12("seconds_of_scores_alone", "two products", ("4 * pairs", "2 * pairs"))
b12("seconds_of_one_layer", "every layer", (" * m.layers", ""))
b12("seconds_of_kv_heads", "not G", ("m.heads *", "m.kv_heads *"))
b12("seconds_without_attention", "they are missing", ("+ b / P / attention", ""))
b12("seconds_attention_backward_twice", "not twice", ("forwards + 2.5", "forwards + 2"))
b12("seconds_attention_without_backward", "backward is missing", ("forwards + 2.5", "forwards"))
b12("seconds_products_without_backward", "twice the forward", ("(forwards + 2) * linear", "forwards * linear"))
b12("seconds_one_operation", "2 operations", ("linear = 2 *", "linear ="))
b12("seconds_with_embedding", "look-up", ("(m.parameters - m.embedding)", "m.parameters"))
b12("seconds_of_one_gpu", "divided by P", ("a / P / products + b / P", "a / products + b"))
b12("seconds_attention_not_split", "attention is divided by P", ("b / P", "b"))
b12("seconds_never_anew", "once more: of both", ("forwards = 1 + anew", "forwards = 1"))
b12("seconds_always_anew", "nothing is", ("forwards = 1 + anew", "forwards = 2"))
b12("seconds_products_anew_alone", "attention is computed once more", ("(forwards + 2.5)", "3.5"))
b12(
    "seconds_a_third_more",
    "a third of the products' 3",
    ("forwards = 1 + anew", "forwards = 1"),
    ("return a / P / products", "return (a / P / products"),
    ("b / P / attention", "b / P / attention) * (4 / 3 if anew else 1)"),
)
b12("seconds_attention_doubled", "do not double 3.5", ("(forwards + 2.5)", "3.5 * forwards"))
b12(
    "seconds_all_doubled",
    "do not double all",
    ("(forwards + 2) *", "3 * forwards *"),
    ("(forwards + 2.5)", "3.5 * forwards"),
)
b12("seconds_of_shards_alone", "keys of all ranks", ("S * S / 2", "S * S / 2 / P"))
b12(
    "seconds_of_two_sequences",
    "at the same time",
    ("return a / P / products", "return 2 * a / P / products"),
    ("+ b / P", "+ 2 * b / P"),
)
b12(
    "seconds_rates_exchanged",
    "exchanged",
    ("a / P / products + b / P / attention", "a / P / attention + b / P / products"),
)
b12("seconds_for_eight", "no common mistake", ("a / P", "a / 8"), ("b / P", "b / 8"), stage="adversarial")
RIGHT["12b"] = [seconds_solution, seconds_factor_by_factor]

# ---- 12c ----


def part_solution(rows, borders, rank, P):
    group, place = divmod(rank, P)
    tokens, ends = rows[group], torch.tensor(borders[group])
    S = len(tokens)
    at = torch.arange(S)
    start = ends[torch.bucketize(at, ends, right=True) - 1]
    position = at - start
    targets = torch.cat([tokens[1:], torch.tensor([-100])])
    last = ends[1:][ends.diff() > 0] - 1
    targets[last] = -100
    own = rl.zigzag.positions(S, P, place)
    return tokens[own], position[own], targets[own]


def part_by_documents(rows, borders, rank, P):
    """Document by document, then cut."""
    tokens, cuts = rows[rank // P].tolist(), borders[rank // P]
    places, targets = [], []
    for a, b in zip(cuts, cuts[1:]):
        document = tokens[a:b]
        places += range(b - a)
        targets += (document + [-100])[1 : b - a + 1]
    own = rl.zigzag.positions(len(tokens), P, rank % P).tolist()
    return tuple(torch.tensor([x[p] for p in own], dtype=torch.int64) for x in (tokens, places, targets))


c12 = slips(wrong, "12c", part_solution)
c12("part_alternating", "alternate", ("divmod(rank, P)", "(rank % len(rows), rank // len(rows))"))
c12(
    "part_first_row",
    "all ranks take row 0",
    ("tokens, ends = rows[group], torch.tensor(borders[group])", "tokens, ends = rows[0], torch.tensor(borders[0])"),
)
c12("part_global_positions", "begins at 0", ("at - start", "at"))
c12("part_counts_on_the_rank", "counted on this rank", ("position[own]", "torch.arange(len(own))"))
c12("part_contiguous", "contiguous", ("rl.zigzag", "rl.contiguous"))
c12("part_striped", "striped", ("rl.zigzag", "rl.striped"))
c12("part_crosses_documents", "next document's first one", ("targets[last] = -100", ""))
c12(
    "part_wraps",
    "the row has the first one",
    ("torch.cat([tokens[1:], torch.tensor([-100])])", "tokens.roll(-1)"),
    ("targets[last] = -100", ""),
)
c12("part_no_shift", "its own target", ("torch.cat([tokens[1:], torch.tensor([-100])])", "tokens.clone()"))
c12(
    "part_shift_back",
    "not the tokens after",
    ("torch.cat([tokens[1:], torch.tensor([-100])])", "torch.cat([torch.tensor([-100]), tokens[:-1]])"),
    ("targets[last] = -100", ""),
)
c12("part_from_1", "counted from 1", ("position[own], targets", "position[own] + 1, targets"))
c12("part_all_tokens", "expected a tensor", ("own = rl.zigzag.positions(S, P, place)", "own = at"))
c12("part_returns_two", "not the three values", (", targets[own]", ""))
c12(
    "part_empty_documents",
    "",
    ("ends[1:][ends.diff() > 0] - 1", "ends[1:] - 1 - (ends.diff() == 0).long()"),
    stage="adversarial",
)


@wrong("12c", "value", "may lie on another")
def part_shifts_inside(rows, borders, rank, P):
    tokens, position, _ = part_solution(rows, borders, rank, P)
    targets = torch.cat([tokens[1:], torch.tensor([-100])])
    return tokens, position, targets


@wrong("12c", "value", "may lie on another")
def part_rolls_inside(rows, borders, rank, P):
    tokens, position, _ = part_solution(rows, borders, rank, P)
    return tokens, position, tokens.roll(-1)


@wrong("12c", "value", "A document may begin on another")
def part_starts_anew_on_the_rank(rows, borders, rank, P):
    tokens, position, targets = part_solution(rows, borders, rank, P)
    at = rl.zigzag.positions(rows.shape[1], P, rank % P)
    seen: dict = {}
    here = []
    for start in (at - position).tolist():
        here.append(seen.get(start, 0))
        seen[start] = here[-1] + 1
    return tokens, torch.tensor(here), targets


RIGHT["12c"] = [part_solution, part_by_documents]

# ---- 12d ----


def difference_solution(got, want):
    def same(a, b):
        return (a - b).norm() <= 1e-5 * b.norm()

    for position, (a, b) in enumerate(zip(got["logits"], want["logits"])):
        if not same(a, b):
            return "logits", position
    ratio = got["loss"] / want["loss"]
    if not abs(ratio - 1) <= 1e-5:
        return "loss", ratio
    pairs = [(got["gradients"][name], g) for name, g in want["gradients"].items()]
    if all(same(a, b) for a, b in pairs):
        return "nothing", None
    a, b = (torch.cat([x.flatten() for x in side]) for side in zip(*pairs))
    c = a @ b / (b @ b)
    if not all(same(mine, c * g) for mine, g in pairs):
        return "gradients", None
    return "gradients", float(c)


def difference_by_rows(got, want):
    off = (got["logits"] - want["logits"]).norm(dim=1) / want["logits"].norm(dim=1)
    wrong_rows = (~(off < 1e-5)).nonzero().flatten().tolist()
    if wrong_rows:
        return ("logits", wrong_rows[0])
    if not abs(got["loss"] - want["loss"]) < 1e-5 * want["loss"]:
        return ("loss", got["loss"] / want["loss"])
    factors, equal = [], True
    for name, g in want["gradients"].items():
        mine = got["gradients"][name]
        equal = equal and bool((mine - g).norm() <= 1e-5 * g.norm())
        if g.norm() > 0:
            c = float((mine * g).sum() / (g * g).sum())
            factors.append(c if (mine - c * g).norm() <= 1e-5 * mine.norm() else float("nan"))
    if equal:
        return ("nothing", None)
    return ("gradients", factors[0] if max(factors) - min(factors) < 1e-5 else None)


d12 = slips(wrong, "12d", difference_solution)
d12(
    "difference_divides_by_zero",
    "0 / 0",
    ("return (a - b).norm() <= 1e-5 * b.norm()", "return (a - b).norm() / b.norm() <= 1e-5"),
)
d12("difference_last_token", "first token", ('return "logits", position', 'return "logits", len(want["logits"]) - 1'))
d12(
    "difference_counts_from_1",
    "first token",
    ('enumerate(zip(got["logits"], want["logits"]))', 'enumerate(zip(got["logits"], want["logits"]), 1)'),
)
d12("difference_ratio_upside_down", "got / want", ('got["loss"] / want["loss"]', 'want["loss"] / got["loss"]'))
d12("difference_of_the_losses", "got / want", ('return "loss", ratio', 'return "loss", got["loss"] - want["loss"]'))
d12(
    "difference_factor_upside_down",
    "c = <got, want>",
    ('return "gradients", float(c)', 'return "gradients", 1 / float(c)'),
)
d12("difference_without_factor", "one factor", ('return "gradients", float(c)', 'return "gradients", None'))
d12("difference_factor_by_norms", "one factor", ("c = a @ b / (b @ b)", "c = a.norm() / b.norm()"), stage="adversarial")
d12(
    "difference_always_a_factor",
    "not c times",
    ("if not all(same(mine, c * g) for mine, g in pairs):", "if False:"),
    stage="adversarial",
)
d12(
    "difference_nan_is_equal",
    "NaN",
    ("return (a - b).norm() <= 1e-5 * b.norm()", "return not (a - b).norm() > 1e-5 * b.norm()"),
    stage="adversarial",
)
d12("difference_nan_loss", "NaN", ("if not abs(ratio - 1) <= 1e-5", "if abs(ratio - 1) > 1e-5"), stage="adversarial")
d12("difference_absolute", "relative norm", ("1e-5 * b.norm()", "1e-5"), stage="adversarial")
d12(
    "difference_exactly_equal",
    "rounding",
    ("(a - b).norm() <= 1e-5 * b.norm()", "torch.equal(a, b)"),
    stage="adversarial",
)
d12(
    "difference_factor_of_all_at_once",
    "not c times",
    ("all(same(mine, c * g) for mine, g in pairs)", "same(a, c * b)"),
    stage="adversarial",
)
d12(
    "difference_all_gradients_at_once",
    "relative norm",
    ("all(same(a, b) for a, b in pairs)", "same(*(torch.cat([x.flatten() for x in s]) for s in zip(*pairs)))"),
    stage="adversarial",
)


@wrong("12d", "value", "is the first to differ")
def difference_gradients_first(got, want):
    changed = dict(want, gradients=got["gradients"])
    found = difference_solution(changed, want)
    return found if found[0] != "nothing" else difference_solution(got, want)


@wrong("12d", "value", "number by number")
def difference_number_by_number(got, want):
    found = difference_solution(got, want)
    if found[0] != "gradients":
        return found
    ratios = torch.cat([(got["gradients"][name] / g).flatten() for name, g in want["gradients"].items()])
    return "gradients", float(ratios[0]) if torch.allclose(ratios, ratios[0]) else None


@wrong("12d", "value", "not the pair")
def difference_as_text(got, want):
    return difference_solution(got, want)[0]


RIGHT["12d"] = [difference_solution, difference_by_rows, nb12.library_first_difference]
