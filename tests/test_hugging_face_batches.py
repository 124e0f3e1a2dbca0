"""What collators and training loops hand over, for models of transformers: it is right, or refused with a remedy."""

import copy
import logging
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hf_programs import VOCABULARY, gradients, make_batch, make_model, one_device
from oracle import relative
from torch.nn import functional as F

import ringlearn as rl
from ringlearn.hugging_face import split

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'ringlearn[transformers]'")

S, FIRST = 20, torch.zeros(2, 20, dtype=torch.bool)
LENGTHS = [[5, 15], [8, 12]]
POSITIONS = rl.positions_in_documents(torch.arange(S), LENGTHS)
NUMBERS = torch.tensor([[1] * 5 + [2] * 15, [1] * 8 + [2] * 12])


@pytest.fixture(scope="module")
def llama():
    return make_model()


@pytest.fixture(scope="module")
def batch():
    return make_batch(S)


def alone(model, tokens, labels, lengths, count, positions=None):
    """Logits of each document by itself on one device; the sum of the losses over count, and its gradients.

    positions: as the batch says them, since transformers computes the angles of RoPE in float32.
    """
    positions = (torch.arange(S)[None] if positions is None else positions).long().expand(tokens.shape)
    model.set_attn_implementation("sdpa")
    model.zero_grad()
    rows, total = [], 0.0
    for row, wanted, places, of_row in zip(tokens, labels, positions, lengths, strict=True):
        logits, start = [], 0
        for n in of_row:
            piece = slice(start, start + n)
            logits.append(model(row[None, piece], position_ids=places[None, piece], use_cache=False).logits[0])
            total = total + F.cross_entropy(logits[-1][:-1], wanted[piece][1:], reduction="sum")
            start += n
        rows.append(torch.cat(logits))
    (total / count).backward()
    model.set_attn_implementation("ringlearn")
    return torch.stack(rows).detach(), total.item() / count, gradients(model)


def check(model, tokens, labels, lengths, P=3, seen=None, **options):
    """Logits, loss and gradients are those of each document alone. seen: tokens that are no padding."""
    model.zero_grad()
    batch = split(model, rl.SimulatedWorld(P), tokens, labels, **options)
    logits = model(**batch).logits
    loss = batch.loss(logits)
    loss.backward()
    grads = gradients(model)
    wanted = labels if seen is None else labels.masked_fill(~seen, -100)
    count = sum(int((row[a + 1 : b] != -100).sum()) for row, of_row in zip(wanted, lengths, strict=True)
                for a, b in spans(of_row))  # fmt: skip
    assert batch.count == count
    want = alone(model, tokens, wanted, lengths, count, options.get("position_ids"))
    seen = torch.ones_like(tokens, dtype=torch.bool) if seen is None else seen
    assert relative(batch.unshard(logits)[seen], want[0][seen]) < 1e-10
    assert abs(loss.item() - want[1]) < 1e-10
    for name, grad in grads.items():
        assert relative(grad, want[2][name]) < 1e-10, name


def spans(lengths):
    ends = np.cumsum([0, *lengths]).tolist()
    return zip(ends[:-1], ends[1:], strict=True)


# Documents


DIALECTS = {
    "mask=": dict(mask=rl.documents(LENGTHS)),
    "mask= and position_ids": dict(mask=rl.documents(LENGTHS), position_ids=POSITIONS),
    "mask= and the model's own": dict(mask=rl.causal & rl.documents(LENGTHS), position_ids=POSITIONS),
    "position_ids": dict(position_ids=POSITIONS),
    "position_ids and mask=rl.causal": dict(position_ids=POSITIONS, mask=rl.causal),
    "position_ids as int32": dict(position_ids=POSITIONS.int()),
    "attention_mask that numbers": dict(attention_mask=NUMBERS),
    "descending": dict(attention_mask=3 - NUMBERS),
    "numbers that go on through rows": dict(attention_mask=NUMBERS + torch.tensor([[0], [2]])),
    "as floats": dict(attention_mask=NUMBERS.float()),
    "numbers and position_ids": dict(attention_mask=NUMBERS, position_ids=POSITIONS),
    "numbers, position_ids and mask=": dict(
        attention_mask=NUMBERS, position_ids=POSITIONS, mask=rl.documents(torch.tensor(LENGTHS))
    ),
    "ones and mask=": dict(attention_mask=NUMBERS.bool(), position_ids=POSITIONS, mask=rl.documents(LENGTHS)),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_rows_that_are_packed_differently(llama, batch, dialect):
    check(llama, *batch, LENGTHS, **DIALECTS[dialect])


@pytest.mark.parametrize("layout", [rl.contiguous, rl.striped, rl.zigzag], ids=str)
@pytest.mark.parametrize(
    "strategy, P", [(rl.all_gather_attention, 3), (rl.ulysses_attention, 2), (rl.ring_attention, 25)]
)
def test_rows_that_are_packed_differently_over_other_ways_to_split(llama, batch, strategy, P, layout):
    check(llama, *batch, LENGTHS, P=P, position_ids=POSITIONS, strategy=strategy, layout=layout)


def test_windows_within_the_documents_of_each_row(batch):
    model = make_model("Mistral", sliding_window=4)
    got = split(model, rl.SimulatedWorld(3), *batch, position_ids=POSITIONS)
    logits = got.unshard(model(**got).logits)
    # Norms in float32 inside of this model: a last digit may round the other way.
    assert relative(logits, alone(model, *batch, LENGTHS, 1)[0]) < 1e-6


def test_the_model_itself_takes_position_ids_for_documents(llama, batch):
    """What transformers does on one device with position_ids that start anew."""
    got = split(llama, rl.SimulatedWorld(3), *batch, position_ids=POSITIONS)
    want = one_device(llama, *batch, position_ids=POSITIONS)[0]
    assert relative(got.unshard(llama(**got).logits), want) < 1e-10


@pytest.mark.parametrize("left", [True, False], ids=["on the left", "on the right"])
@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32, torch.int32])
def test_padding(llama, batch, left, kind):
    padding = torch.ones(2, S, dtype=kind)
    padding[0, :7] = 0
    lengths = [[7, 13], [20]]
    if not left:
        padding, lengths = padding.flip(1), [[13, 7], [20]]
    check(llama, *batch, lengths, seen=padding != 0, attention_mask=padding)


def test_padding_beside_documents(llama, batch):
    """As Axolotl and LLaMA-Factory pad: zeros at the end, positions there count on or are 0."""
    numbers, positions = NUMBERS.clone(), POSITIONS.clone()
    numbers[0, 17:], positions[0, 17:] = 0, 0
    lengths = [[5, 12, 3], [8, 12]]
    for options in (
        dict(attention_mask=numbers),
        dict(attention_mask=numbers, position_ids=positions),
        dict(attention_mask=numbers, mask=rl.documents(LENGTHS)),
        dict(attention_mask=numbers != 0, mask=rl.documents(LENGTHS), position_ids=positions),
    ):
        check(llama, *batch, lengths, seen=numbers != 0, **options)


def test_positions_as_generate_makes_them_of_padding_on_the_left(llama, batch):
    padding = torch.ones(2, S, dtype=torch.int64)
    padding[0, :7] = 0
    positions = (padding.cumsum(1) - 1).masked_fill(padding == 0, 1)
    check(llama, *batch, [[7, 13], [20]], seen=padding != 0, attention_mask=padding, position_ids=positions)


def test_the_last_token_of_a_document_predicts_nothing(llama, batch):
    got = split(llama, rl.SimulatedWorld(1), batch[0], batch[0], mask=rl.documents(LENGTHS))
    assert (got.targets == -100).nonzero().tolist() == [[0, 4], [0, 19], [1, 7], [1, 19]] and got.count == 36
    got = split(llama, rl.SimulatedWorld(1), batch[0], batch[0], mask=rl.documents([5, 0, 15]))
    assert (got.targets == -100).nonzero().tolist() == [[0, 4], [0, 19], [1, 4], [1, 19]]


def test_one_s_own_mask_may_have_its_reasons_for_positions(llama, batch):
    """Two branches after a prompt, which start at the same position and do not see each other."""
    places = torch.tensor([*range(6), *range(6, 13), *range(6, 13)])
    branches = rl.mask(lambda q, k: ~((q >= 13) & (k >= 6) & (k < 13)))
    got = split(llama, rl.SimulatedWorld(3), *batch, position_ids=places[None], mask=branches)
    logits = got.unshard(llama(**got).logits)
    second = torch.cat([batch[0][:, :6], batch[0][:, 13:]], 1)
    assert relative(logits[:, 13:], one_device(llama, second, second)[0][:, 6:]) < 1e-10


@pytest.mark.parametrize("options, words", [
    (dict(position_ids=POSITIONS, mask=rl.documents([5, 15])), r"in row 1, position_ids begins .* \[8\], .* at \[5\]"),
    (dict(position_ids=POSITIONS, mask=rl.documents([10, 10])), "position_ids contradict the documents: in row 0"),
    (dict(position_ids=POSITIONS, attention_mask=NUMBERS.flip(0)), "position_ids contradict the documents: in row 0"),
    (dict(position_ids=POSITIONS, attention_mask=NUMBERS.bool()),
     r"omit attention_mask, or pass mask=rl.documents\(\[\[5, 15\], \[8, 12\]\]\)"),
    (dict(attention_mask=NUMBERS, mask=rl.documents([5, 15])), "numbers documents differently from mask=: in row 1"),
    (dict(attention_mask=NUMBERS.where(NUMBERS.flip(1) > 1, 1)), "each number of a document in one piece"),
    (dict(attention_mask=1 - NUMBERS), "or of numbers of documents, got torch.int64 from -1 to 0"),
    (dict(attention_mask=NUMBERS / 2), "got torch.float32 from 0.5 to 1.0"),
    (dict(attention_mask=torch.ones(2, 1, S, S)), r"attention_mask like input_ids, \(2, 20\), .*; mark documents"),
    (dict(mask=rl.documents([[5, 15]] * 3)), r"documents for the 2 rows of the batch"),
    (dict(mask=rl.documents([5, 16])), "lengths must add up"),
    (dict(mask=torch.ones(S, S)), "expected mask= to be a mask such as"),
    (dict(position_ids=POSITIONS - 1), "position_ids from 0 on, got -1"),
    (dict(position_ids=POSITIONS.float()), r"position_ids, int64 \(B, S\) or \(1, S\), got"),
])  # fmt: skip
def test_documents_that_contradict_each_other(llama, batch, options, words):
    with pytest.raises(ValueError, match=words) as caught:
        split(llama, rl.SimulatedWorld(2), *batch, **options)
    assert len(str(caught.value)) < 600


def test_batches_of_the_collators_of_transformers(llama):
    from transformers import BatchEncoding, DataCollatorWithFlattening

    documents = [list(range(3, 8)), list(range(9, 24))]
    collated = DataCollatorWithFlattening()([{"input_ids": ids, "labels": ids} for ids in documents])
    got = split(llama, rl.SimulatedWorld(3), **collated)
    assert got.count == 4 + 14
    want = one_device(llama, collated["input_ids"], collated["labels"], position_ids=collated["position_ids"])
    logits = llama(**got).logits
    assert relative(got.unshard(logits), want[0]) < 1e-10 and abs(got.loss(logits).item() - want[1]) < 1e-10
    encoded = BatchEncoding({"input_ids": collated["input_ids"], "attention_mask": torch.ones(1, S)})
    got = split(llama, rl.SimulatedWorld(3), **encoded)
    assert relative(got.unshard(llama(**got).logits), one_device(llama, **encoded_and_labels(encoded))[0]) < 1e-10


def encoded_and_labels(encoded):
    return {"tokens": encoded["input_ids"], "labels": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def test_a_head_of_values_above_a_model(llama, batch):
    """As TRL's value heads are: a module of its own that holds the model, and looks at each token alone."""

    class WithValues(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pretrained_model, self.value = llama, torch.nn.Linear(32, 1).double()

        def forward(self, **arguments):
            return self.value(self.pretrained_model(**arguments, output_hidden_states=True).hidden_states[-1])

    model = WithValues()
    got = split(model, rl.SimulatedWorld(3), batch[0])
    values = got.unshard(model(**got))
    llama.set_attn_implementation("sdpa")
    want = model(input_ids=batch[0])
    llama.set_attn_implementation("ringlearn")
    assert relative(values, want) < 1e-10


# Heads and losses


def test_a_head_that_looks_at_several_tokens_is_refused_and_its_remedy_is_right(batch):
    one = batch[0][:, 0]  # for each row, as these heads want it: refused too, but the head comes first
    for head in ("ForSequenceClassification", "ForQuestionAnswering"):
        for wrong in ({"labels": one}, {"start_positions": one}, {"input_ids": batch[0].double()}):
            with pytest.raises(ValueError, match=f"Llama{head} has a head that may look at several tokens.*AutoModel"):
                split(make_model(model=f"Llama{head}"), rl.SimulatedWorld(2), **{"input_ids": batch[0]} | wrong)
    model = make_model(model="LlamaForSequenceClassification", num_labels=3)
    got = split(model.model, rl.SimulatedWorld(3), batch[0])
    hidden = got.unshard(model.model(**got).last_hidden_state)
    model.set_attn_implementation("sdpa")
    assert relative(model.score(hidden[:, -1]), model(batch[0]).logits) < 1e-10
    with pytest.raises(ValueError, match="GPT2DoubleHeadsModel has a head"):
        split(
            make_model("GPT2", model="GPT2DoubleHeadsModel", n_embd=32, n_layer=1, n_head=4),
            rl.SimulatedWorld(2),
            batch[0],
        )


def test_a_head_that_classifies_each_token(batch):
    tokens, labels = batch
    model, classes = (
        make_model(model="LlamaForTokenClassification", num_labels=5),
        labels.remainder(5).where(labels > 0, -100),
    )
    got = split(model, rl.SimulatedWorld(3), tokens, classes)
    logits = model(**got).logits
    got.loss(logits).backward()
    grads = gradients(model)
    with pytest.raises(ValueError, match="mean over one rank's tokens; use batch.loss"):
        model(**got, labels=got.targets)
    model.zero_grad()
    model.set_attn_implementation("sdpa")
    want = model(tokens, labels=classes)
    want.loss.backward()
    assert relative(got.unshard(logits), want.logits) < 1e-10
    assert abs(got.loss(logits).item() - F.cross_entropy(want.logits.flatten(0, 1), classes.flatten()).item()) < 1e-10
    for name, grad in gradients(model).items():
        assert relative(grads[name], grad) < 1e-6, name  # the model's own loss is computed in float32


@pytest.mark.parametrize("given", ["labels", "targets", "input_ids"])
def test_the_model_s_own_loss_takes_the_targets_of_the_batch(llama, batch, given):
    """A Trainer hands on labels=, whatever they are by then; the loss that transformers computes is in float32."""
    got = split(llama, rl.SimulatedWorld(3), *batch)
    handed = {"labels": batch[1], "targets": got.targets, "input_ids": got["input_ids"]}[given]
    out = llama(**got, labels=handed)
    llama.set_attn_implementation("sdpa")
    want = llama(batch[0], labels=batch[1]).loss
    llama.set_attn_implementation("ringlearn")
    assert abs(out.loss.item() - want.item()) < 1e-6 and abs(got.loss(out.logits).item() - want.item()) < 1e-6
    with pytest.raises(ValueError, match=r"pass the whole labels to split\(..., labels=\)"):
        llama(**split(llama, rl.SimulatedWorld(3), batch[0]), labels=batch[1])


@pytest.mark.parametrize("count", [np.int64(40), torch.tensor(40), torch.tensor([40]), 40])
def test_a_count_of_any_kind_of_integer(llama, batch, count):
    got = split(llama, rl.SimulatedWorld(2), *batch, count=count)
    assert got.count == 40 and type(got.count) is int


@pytest.mark.parametrize(
    "count", [0, -1, 3, 40.0, torch.tensor(40.0), True, float("nan"), "40", torch.tensor([40, 40])]
)
def test_a_count_that_makes_no_sense(llama, batch, count):
    with pytest.raises(ValueError, match="expected count, the number of targets in all batches of the step"):
        split(llama, rl.SimulatedWorld(2), *batch, count=count)


def test_a_batch_without_targets_counts_none(llama, batch):
    got = split(llama, rl.SimulatedWorld(2), batch[0], torch.full_like(batch[0], -100), count=0)
    loss = got.loss(llama(**got).logits)
    loss.backward()
    assert loss.item() == 0.0 and got.count == 0


# Training loops


def test_a_batch_moves_as_a_whole_and_item_by_item(llama, batch):
    got = split(llama, rl.SimulatedWorld(3), *batch)
    want = llama(**got).logits
    for moved in (got.to("cpu"), got.to(torch.device("cpu"), non_blocking=True), copy.copy(got), got.copy(),
                  {name: x.to("cpu") for name, x in got.items()}, dict(got)):  # fmt: skip
        assert torch.equal(llama(**moved).logits, want)
    anew = type(got)({name: x.to("cpu") for name, x in got.items()})  # as the Trainer of transformers does
    assert torch.equal(anew.loss(llama(**anew).logits), got.loss(want)) and torch.equal(
        anew.unshard(want), got.unshard(want)
    )
    with pytest.raises(ValueError, match="Batch: expected the items of a batch that split"):
        type(got)({"input_ids": batch[0]})
    on_meta = got.to("meta")
    assert on_meta["input_ids"].device.type == on_meta.targets.device.type == "meta" and type(on_meta) is type(got)
    assert got["input_ids"].device.type == "cpu" and on_meta.count == got.count


def test_a_batch_cannot_be_pickled_and_says_what_to_do(llama, batch):
    got = split(llama, rl.SimulatedWorld(3), *batch)
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled; .*call split.* in the training loop"):
            attempt(got)


def test_gradients_of_a_simulated_world_are_there_already(llama, batch):
    llama.zero_grad()
    got = split(llama, rl.SimulatedWorld(3), *batch)
    got.loss(llama(**got).logits).backward()
    grads = gradients(llama)
    rl.nn.sum_gradients(llama.parameters())
    want = one_device(llama, *batch)[2]
    for name, grad in grads.items():
        assert relative(grad, want[name]) < 1e-10


def test_a_compiled_model_is_the_same_without_a_warning(batch, caplog, recwarn):
    model = make_model("Mistral", sliding_window=7, dtype=torch.float32)
    got = split(model, rl.SimulatedWorld(2), *batch)
    want = model(**got).logits
    with caplog.at_level(logging.WARNING):
        logits = torch.compile(model, backend="eager")(**got).logits
        got.loss(logits).backward()
    assert torch.equal(logits, want)
    assert not [r for r in caplog.records if "_dynamo" in r.name] and not [
        w for w in recwarn if "ynamo" in str(w.message)
    ]


# What is refused


@pytest.mark.parametrize("call, words", [
    (lambda m, w, x: split(m, w, x[:0]), "a batch of at least one row"),
    (lambda m, w, x: split(m, w, x.tolist()), "input_ids to be an int64 tensor"),
    (lambda m, w, x: split(m, w, x[0]), r"input_ids to be an int64 tensor \(B, S\), got \(20,\)"),
    (lambda m, w, x: split(m, w, x == 3), "input_ids to be an int64 tensor"),
    (lambda m, w, x: split(m, w, x - VOCABULARY), "input_ids below 61"),
    (lambda m, w, x: split(m, w, x + VOCABULARY), "input_ids below 61"),
    (lambda m, w, x: split(m, w, x, x.double()), "labels to be an int64 tensor"),
    (lambda m, w, x: split(m, w, x, x.where(x > 9, -1)), "use -100 instead"),
    (lambda m, w, x: split(m, w, x, layout="zigzag"), "expected a layout such as rl.zigzag"),
    (lambda m, w, x: split(m, w, x, strategy=rl.dilated_attention), "required argument: 'segment_lengths'; supply"),
    (lambda m, w, x: split(m, w, x, strategy="ring"), "strategy= to be called as strategy"),
    (lambda m, w, x: split(m, w, x).loss(m(**split(m, w, x), logits_to_keep=1).logits),
     r"loss: expected logits \(2, 20, 'vocabulary'\) of all tokens"),
    (lambda m, w, x: split(m, w, x, cu_seq_lens_q=torch.tensor([0, 20])), "cu_seq_lens_q.*position_ids"),
    (lambda m, w, x: split(m, w, x, seq_idx=x), "got seq_idx.*position_ids that restart"),
    (lambda m, w, x: split(m, w, x, token_type_ids=x), "got token_type_ids, which a ring cannot use; omit it"),
    (lambda m, w, x: split(m, w, x, shift_labels=x), "pass labels=, which split shifts itself"),
    (lambda m, w, x: split(w, m, x), "expected a SimulatedWorld or a DistributedWorld, got LlamaForCausalLM"),
    (lambda m, w, x: split(torch.nn.DataParallel(m), w, x), "DataParallel distributes the rows of a batch itself"),
    (lambda m, w, x: split(m, w, x).unshard(torch.randn(2, 19, 61)), r"unshard: expected a tensor \(2, 20, '...'\)"),
    (lambda m, w, x: split(m, w, x).loss(m(**split(m, w, x))), "got CausalLMOutputWithPast"),
])  # fmt: skip
def test_input_that_makes_no_sense(llama, batch, call, words):
    with pytest.raises(ValueError, match=words):
        call(llama, rl.SimulatedWorld(2), batch[0])


def test_integers_of_other_widths(llama, batch):
    want = split(llama, rl.SimulatedWorld(2), *batch)
    for kind in (torch.int32, torch.int16):
        got = split(llama, rl.SimulatedWorld(2), *(x.to(kind) for x in batch))
        assert torch.equal(got["input_ids"], want["input_ids"]) and torch.equal(got.targets, want.targets)
        assert got["input_ids"].dtype == got.targets.dtype == torch.int64


def test_borders_of_documents_that_kernels_for_packed_sequences_want(llama, batch):
    """TRL's collator without padding, and that of transformers, give them beside position_ids, or alone."""
    tokens, positions = batch[0][:1], torch.cat([torch.arange(5), torch.arange(15)]).unsqueeze(0)
    borders = torch.tensor([0, 5, 20], dtype=torch.int32)
    more = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 15, "max_length_k": 15}
    want = split(llama, rl.SimulatedWorld(3), tokens, tokens, position_ids=positions)
    for given in (more, more | {"position_ids": positions}, {"cu_seq_lens_q": None, "position_ids": positions}):
        got = split(llama, rl.SimulatedWorld(3), tokens, tokens, **given)
        assert torch.equal(llama(**got).logits, llama(**want).logits) and torch.equal(got.targets, want.targets)
    wrong = [
        (more | {"position_ids": torch.arange(20).unsqueeze(0)}, "got borders at .0, 5, 20. and .* restart at .0."),
        (more | {"cu_seq_lens_q": borders[:2]}, "from 0 to its length, got"),
        (more | {"cu_seq_lens_k": borders * 2}, "and cu_seq_lens_k alike"),
        (more | {"cu_seq_lens_q": [0, 5, 20]}, "expected cu_seq_lens_q"),
    ]
    for given, words in wrong:
        with pytest.raises(ValueError, match=f"split: .*{words}"):
            split(llama, rl.SimulatedWorld(3), tokens, tokens, **given)
    with pytest.raises(ValueError, match="documents in one row"):
        split(llama, rl.SimulatedWorld(3), *batch, **more)


def test_unsigned_integers_and_tensors_without_values(llama, batch):
    tokens, labels = batch
    want = split(llama, rl.SimulatedWorld(2), tokens, tokens)
    got = split(llama, rl.SimulatedWorld(2), tokens.to(torch.uint16), tokens.to(torch.uint16))
    assert torch.equal(got["input_ids"], want["input_ids"]) and torch.equal(got.targets, want.targets)
    for name in ("input_ids", "labels", "attention_mask", "position_ids"):
        given = {"input_ids": tokens, name: tokens.to("meta")}
        with pytest.raises(ValueError, match=f"split: expected {name} with values, got a tensor on the meta device"):
            split(llama, rl.SimulatedWorld(2), **given)


def test_learnt_positions_end():
    model, (tokens, labels) = (
        make_model("GPT2", model="GPT2LMHeadModel", n_embd=32, n_layer=1, n_head=4, n_positions=20),
        make_batch(21),
    )
    with pytest.raises(ValueError, match="transformer.wpe has learnt 20 positions, got tokens up to position 20"):
        split(model, rl.SimulatedWorld(2), tokens, labels)
    split(model, rl.SimulatedWorld(2), tokens[:, :20], labels[:, :20])
    padding = torch.ones(2, 20).tril(5)
    with pytest.raises(ValueError, match="padding on the left moves them; pass position_ids"):
        split(model, rl.SimulatedWorld(2), tokens[:, :20], labels[:, :20], padding.flip(1))


def test_models_that_compute_with_their_mask_are_refused_by_name(batch):
    model = make_model("Doge", head_dim=8)
    with pytest.raises(ValueError, match="the model of DogeConfig computes with its attention mask"):
        model(**split(model, rl.SimulatedWorld(2), batch[0]))


def test_dilated_attention_with_its_arguments(llama, batch):
    """One segment that keeps every token is attention as it is."""
    whole = partial(rl.dilated_attention, segment_lengths=[S], dilation_rates=[1])
    got = split(llama, rl.SimulatedWorld(2), *batch, strategy=whole)
    assert relative(got.unshard(llama(**got).logits), one_device(llama, *batch)[0]) < 1e-10
