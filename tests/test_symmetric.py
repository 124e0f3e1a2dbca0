"""The protocol of the copy-engine transport, on a model of streams: every order in which GPUs may do things is allowed.

Real GPUs have few of these orders, and a wrong protocol may work there for a long time. Here each rank has three
streams, queues of operations; a scheduler takes the head of any queue that can go on, at random. A write to a flag is
seen by others at the latest before the next write of the same stream (so much do the driver's writes promise), or any
time before.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ringlearn.launch.pool import Pool
from ringlearn.worlds.distributed import symmetric

PROGRAMS = Path(__file__).with_name("programs.py")


class Moment:
    done = False


class Event:
    """What waits for it, waits for the moment at which it was last recorded."""

    def record(self, stream):
        self.moment = Moment()
        stream.queue.append(("record", self.moment))

    def wait(self, stream):
        stream.queue.append(("event", self.moment))


class Stream:
    def __init__(self, gpu):
        self.cuda_stream, self.queue, self.unseen = self, deque(), deque()
        gpu.streams.append(self)


class Gpu:
    """All GPUs of a host: memory by address, and streams."""

    def __init__(self, seed):
        self.random, self.streams, self.memory, self.flags = random.Random(seed), [], {}, {}

    # What symmetric._Driver offers
    def batch(self, *operations):
        return operations

    def submit(self, stream, batch):
        stream.queue.extend(batch)

    def copy(self, to, source, nbytes, stream):
        stream.queue.append(("copy", to, source))

    def run(self):
        """Until nothing is left. Raises if no stream can go on."""
        while any(s.queue for s in self.streams):
            able = [s for s in self.streams if s.unseen or s.queue and self.able(s.queue[0])]
            assert able, "deadlock: " + "; ".join(str(s.queue[0]) for s in self.streams if s.queue)
            stream = self.random.choice(able)
            if stream.unseen and (self.random.random() < 0.3 or not (stream.queue and self.able(stream.queue[0]))):
                flag, value = stream.unseen.popleft()
                self.flags[flag] = value
                continue
            self.step(stream, *stream.queue.popleft())

    def able(self, operation):
        kind, *what = operation
        if kind == "wait":
            return self.flags.get(what[0], 0) == what[1]
        return kind != "event" or what[0].done

    def step(self, stream, kind, *what):
        if kind == "write":
            while stream.unseen:
                flag, value = stream.unseen.popleft()
                self.flags[flag] = value
            stream.unseen.append(what)
        elif kind == "copy":
            to, source = what
            self.memory[to] = self.memory[source]
        elif kind == "record":
            what[0].done = True


class Message:
    """A tensor, as far as the wire looks at one."""

    def __init__(self, address):
        self.address, self.nbytes = address, 8

    def contiguous(self):
        return self

    def untyped_storage(self):
        return self

    def data_ptr(self):
        return self.address

    def is_contiguous(self):
        return True


def ring(seed, size, monkeypatch):
    """Wires of all ranks over one model of GPUs, each with a main stream."""
    gpu = Gpu(seed)
    cuda = SimpleNamespace(
        Stream=lambda device: Stream(gpu),
        Event=Event,
        is_current_stream_capturing=lambda: False,
    )
    monkeypatch.setattr(symmetric, "torch", SimpleNamespace(cuda=cuda, Tensor=torch.Tensor))
    monkeypatch.setattr(symmetric, "current_stream", lambda device: mains[device])
    monkeypatch.setattr(symmetric, "_Driver", lambda: gpu)
    mains = [Stream(gpu) for _ in range(size)]
    wires = [symmetric.SymmetricWire(None, rank, size, rank) for rank in range(size)]
    for wire in wires:
        wire.capacity = 1000
        wire._slots = [10_000_000 * (r + 1) for r in range(size)]
        wire._flags = [-1000 * (r + 1) for r in range(size)]
        wire._handle = object()
        for slot in range(wire.slots):
            gpu.flags[wire._flag(wire.rank, slot, "free")] = 1
        wire._prepare()
    return gpu, wires


class Rank:
    """Posts and takes messages that say who sent them as which, and checks what arrives."""

    addresses = itertools.count(1)

    def __init__(self, gpu, wire):
        self.gpu, self.wire, self.numbers, self.expected = gpu, wire, {False: 0, True: 0}, []

    def rotate(self, back, left_out=frozenset()):
        """left_out: the ranks that send nothing, of which those that would receive it know."""
        number = self.numbers[back] = self.numbers[back] + 1
        source, works = (self.wire.rank + (1 if back else -1)) % self.wire.size, []
        if self.wire.rank not in left_out:
            sent = Message(next(self.addresses))
            self.gpu.memory[sent.address] = (self.wire.rank, back, number)
            works.append(self.wire.send([sent], back))
        if source not in left_out:
            buffer = Message(next(self.addresses))
            works.append(self.wire.receive(buffer, back, together=bool(works)))
            self.expected.append((buffer.address, (source, back, number)))
        return works

    def check(self):
        for address, message in self.expected:
            assert self.gpu.memory[address] == message


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(40))
def test_every_message_arrives_whatever_the_order_of_things(seed, size, monkeypatch):
    """Forwards and backwards of attention in a row: the messages of ring.py, in its order."""
    gpu, wires = ring(seed, size, monkeypatch)
    ranks = [Rank(gpu, wire) for wire in wires]

    def wait(works):
        for work in works:
            work.wait()

    for rank in ranks:
        for _ in range(3):
            for _ in range(size - 1):
                wait(rank.rotate(back=False))
            rank.wire.join()
            travelling = None
            for step in range(size):
                arriving = rank.rotate(back=True) if step < size - 2 else []
                if travelling:
                    wait(travelling)
                travelling = rank.rotate(back=True) if step < size - 1 else None
                wait(arriving)
            rank.wire.join()
    gpu.run()
    for rank in ranks:
        rank.check()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(60))
def test_many_messages_at_once_awaited_in_any_order(seed, size, monkeypatch):
    gpu, wires = ring(seed, size, monkeypatch)
    choose = random.Random(seed)
    ranks = [Rank(gpu, wire) for wire in wires]
    way = [choose.random() < 0.5 for _ in range(6)]  # the same messages on all ranks
    for rank in ranks:
        for _ in range(2):
            handles = [rank.rotate(back) for back in way]
            choose.shuffle(handles)  # each rank awaits them as it likes
            for works in handles:
                for work in works:
                    work.wait()
            rank.wire.join()
    gpu.run()
    for rank in ranks:
        rank.check()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(30))
def test_messages_that_nobody_needs_are_left_out_by_both_sides(seed, size, monkeypatch):
    gpu, wires = ring(seed, size, monkeypatch)
    choose = random.Random(seed)
    ranks = [Rank(gpu, wire) for wire in wires]
    hops = [(choose.random() < 0.5, {r for r in range(size) if choose.random() < 0.5}) for _ in range(8)]
    for rank in ranks:
        before = []
        for back, left_out in hops:
            works = rank.rotate(back, left_out)
            for work in before:  # one hop later, as in a ring
                work.wait()
            before = works
        rank.wire.join()
    gpu.run()
    for rank in ranks:
        rank.check()


def test_what_fits_is_decided_by_the_size_of_a_message_alone():
    wire = object.__new__(symmetric.SymmetricWire)
    wire.capacity = 100
    assert [wire.fits(n) for n in (0, 1, 100, 101)] == [False, True, True, False]


def test_one_copy_takes_what_lies_in_order_in_one_storage_and_nothing_of_the_next():
    memory = np.zeros(24, dtype=np.float32)  # two storages that touch, as two allocations of a GPU may
    one, other = torch.from_numpy(memory[:16]), torch.from_numpy(memory[16:])
    a, b, c = one[:8], one[8:], other
    assert symmetric._pieces([a, b, c]) == [(a.data_ptr(), 64), (c.data_ptr(), 32)]
    assert symmetric._pieces([b, a]) == [(b.data_ptr(), 32), (a.data_ptr(), 32)]
    assert symmetric._pieces([]) == []


def test_why_there_is_none():
    assert "this world is on cpu" in symmetric.unavailable(torch.device("cpu"), 2)
    assert symmetric.unavailable(torch.device("cuda", 0), 1) == "a single rank has no neighbour"


def test_on_cpus_the_transport_is_gloo_and_says_why_it_cannot_be_another():
    with Pool(2, backend="gloo") as pool:
        for name, reserved, symmetrical, unknown in pool.run(f"{PROGRAMS}:transports"):
            assert name == "gloo" and reserved == 0
            assert "cannot be used: rank 0: it moves data between GPUs" in symmetrical
            assert "got 'carrier pigeon'" in unknown
