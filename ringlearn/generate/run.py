"""Read a prompt, generate, and say how long it took."""

from __future__ import annotations

import argparse
import codecs
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import text
from ..attention.decoding import Ownership
from ..layouts import LAYOUTS
from ..nn import Config, Transformer
from ..nn.hugging_face import prefill, register
from ..train import checkpoint
from ..worlds import DistributedWorld, SimulatedWorld
from ..worlds.distributed.join import backend_for_this_host, join
from ..worlds.world import World
from .options import TOKENS

SMALL = Config(width=256, layers=4, heads=8, kv_heads=2)  # the model with random weights
_OWN = ("prompt_file", "load", "model")  # options whose paths may differ from host to host


@dataclass(frozen=True)
class Writer:
    """A model, and how text becomes tokens and tokens text.

    generate: (tokens (1, S), called with each new token on rank 0) -> (1, S + new).
    """

    name: str
    model: torch.nn.Module
    encode: Callable[[str | bytes], Tensor]
    decoder: Callable[[], Any]
    generate: Callable[[Tensor, Callable[[Tensor], None]], Tensor]


def run(options: argparse.Namespace) -> Tensor:
    """Generate as the options say; returns all tokens, (1, S + new). Every rank calls it.

    Raises ValueError, OSError or ImportError on every rank if the prompt or the model is not what was expected.
    """
    world = world_of(options)
    first, writer, tokens, problem = 0 in world.ranks, None, None, None
    try:
        writer = (_transformers if options.model else _own)(options, world)
        tokens = _prompt(options, writer)
    except (ValueError, OSError, ImportError) as error:
        problem = error
    world.agree("ringlearn.generate", {}, {}, problem)
    S, P, most = tokens.shape[1], world.size, tokens.shape[1] + options.new_tokens

    def say(words: str) -> None:
        if first:
            print(words, flush=True)

    parameters = sum(p.numel() for p in writer.model.parameters())
    ranks = "1 rank" if P == 1 else f"{P} {'simulated ' if len(world.ranks) > 1 else ''}ranks"
    say(f"{writer.name}, {parameters:,} parameters, {options.dtype}; {ranks}, {options.layout} ({world.device})")
    kept = Ownership(P, options.interleave).count(0, most)
    say(f"a prompt of {S:,} tokens; including new ones, a rank keeps {kept:,} of {most:,} at most")
    torch.manual_seed(options.seed)
    decoder, times = writer.decoder(), []  # times: of each token

    def write(token: Tensor) -> None:
        if first:
            number = int(token)  # the device has computed it
            times.append(time.perf_counter())
            decoder.put(number)

    begun = time.perf_counter()
    out = writer.generate(tokens, write)
    if first:
        decoder.end()
        waited, rest = times[0] - begun, times[-1] - times[0]
        rate = f", then {(len(times) - 1) / rest:,.1f} tokens/s" if len(times) > 1 else ""
        say(f"first token after {waited:.2f} s ({S / waited:,.0f} tokens of the prompt a second){rate}")
    return out


def world_of(options: argparse.Namespace) -> World:
    """The ranks that the options ask for; all processes of a torchrun call this together."""
    if "RANK" not in os.environ:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return SimulatedWorld(options.simulate or 1, device=device, count_memory=False)
    if not dist.is_initialized():
        join(backend_for_this_host() if options.backend == "auto" else options.backend)
    world = DistributedWorld(timeout=options.timeout)
    said = {f"--{name.replace('_', '-')}": str(value) for name, value in vars(options).items() if name not in _OWN}
    world.agree("the command line", said)
    return world


class _Bytes:
    """Tokens that are bytes of UTF-8 text; what is no text, or would move the cursor, is shown as a dot."""

    def __init__(self):
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def put(self, token: int) -> None:
        letters = self.utf8.decode(bytes([token]))
        print(
            "".join(c if c.isprintable() and c != "\ufffd" or c == "\n" else "·" for c in letters), end="", flush=True
        )

    def end(self) -> None:
        print(flush=True)


# Models


def _own(options: argparse.Namespace, world: World) -> Writer:
    """A transformer of ringlearn.nn over bytes: with random weights, or as ringlearn.train has saved it."""
    torch.manual_seed(options.seed)
    config, name = SMALL, "a small model with random weights"
    if options.load:
        saved = checkpoint.progress(options.load)
        run = (saved or {}).get("run", {})
        if run.get("task") != "text":
            raise ValueError(
                f"--load {options.load}: expected a folder in which ringlearn.train --task text --save has left a "
                f"checkpoint, got {'one of another task' if saved else 'none there'}"
            )
        config = Config(**run["model"] | {"checkpoint": False})
        name = f"the model of {options.load}, step {saved['step']:,}"
    model = Transformer(config).to(world.device, getattr(torch, options.dtype))
    if options.load:
        checkpoint.load_model(options.load, model)

    def generate(tokens: Tensor, write: Callable[[Tensor], None]) -> Tensor:
        how = {"temperature": options.temperature, "layout": LAYOUTS[options.layout], "interleave": options.interleave}
        return model.generate(tokens, options.new_tokens, world, on_token=write, **how)

    return Writer(name, model, _bytes, _Bytes, generate)


def _transformers(options: argparse.Namespace, world: World) -> Writer:
    """A model of transformers. Without a tokenizer beside it, bytes are its tokens."""
    register()
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation=register()
    )
    model = model.to(world.device).eval()
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    words = model.get_input_embeddings().num_embeddings
    if tokenizer is None and words < 256:
        raise ValueError(f"--model {options.model}: expected a tokenizer, or a model of bytes, got {words} words")

    def encode(prompt: str | bytes) -> Tensor:
        letters = prompt.decode(errors="replace") if isinstance(prompt, bytes) else prompt
        return tokenizer(letters, return_tensors="pt")["input_ids"]

    def generate(tokens: Tensor, write: Callable[[Tensor], None]) -> Tensor:
        how = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
        prompt = prefill(
            *(model, world, tokens),
            new_tokens=options.new_tokens,
            streamer=_Streamer(write),
            layout=LAYOUTS[options.layout],
            interleave=options.interleave,
        )
        pad = model.generation_config.pad_token_id
        return model.generate(
            **prompt, **how, max_new_tokens=options.new_tokens, pad_token_id=0 if pad is None else pad
        )

    if tokenizer is None:
        return Writer(f"{options.model}, which has no tokenizer, over bytes", model, _bytes, _Bytes, generate)

    class Words(TextStreamer):
        """Tokens of the model's tokenizer."""

        def put(self, token: int) -> None:
            super().put(torch.tensor([token]))

    return Writer(options.model, model, encode, lambda: Words(tokenizer, skip_special_tokens=True), generate)


class _Streamer:
    """What ``generate`` of transformers calls with the prompt first, and then with each token."""

    def __init__(self, write: Callable[[Tensor], None]):
        self.write, self.begun = write, False

    def put(self, tokens: Tensor) -> None:
        if self.begun:
            self.write(tokens)
        self.begun = True

    def end(self) -> None: ...


# The prompt


def _bytes(prompt: str | bytes) -> Tensor:
    data = prompt.encode() if isinstance(prompt, str) else prompt
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()[None]


def _prompt(options: argparse.Namespace, writer: Writer) -> Tensor:
    """Tokens (1, S)."""
    if options.prompt is not None:
        return writer.encode(options.prompt)
    if options.prompt_file is not None:
        words = Path(options.prompt_file).read_text()
        if not words:
            raise ValueError(f"--prompt-file {options.prompt_file}: expected a text, but the file is empty")
        return writer.encode(words)
    wanted = options.tokens or TOKENS
    tokens = writer.encode(text.standard_library_bytes()[: 8 * wanted])[:, :wanted]  # few tokens are longer than that
    if tokens.shape[1] < wanted:
        raise ValueError(f"--tokens: expected at most {tokens.shape[1]:,}, all there are in the text, got {wanted:,}")
    return tokens
