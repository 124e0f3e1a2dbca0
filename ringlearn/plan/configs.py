"""A plan as command lines and options of ringlearn, torchtitan, Megatron-LM and accelerate."""

from __future__ import annotations

from dataclasses import replace

from .hardware import GPU, GiB
from .memory import memory
from .models import Model
from .search import Candidate

_MEGATRON = {"ring": "p2p", "all-gather": "all_gather", "ulysses": "a2a", "hybrid": "a2a+p2p", "double-ring": "p2p"}


def configs(m: Model, gpu: GPU, c: Candidate) -> dict[str, str]:
    """By program: torchrun's line, and the options of each framework that can do this; else why it cannot."""
    s = c.setup
    found = {"torchrun": _torchrun(gpu, s.gpus), "ringlearn.train": _ringlearn(m, c)}
    return (
        found
        | {"your model": _yours(c)}
        | {"torchtitan": _torchtitan(c), "Megatron-LM": _megatron(m, gpu, c), "accelerate": _accelerate(c)}
    )


def _yours(c: Candidate) -> str:
    s = c.setup
    if s.tp > 1 or s.pp > 1 or s.ep > 1:
        return "not this one: ringlearn splits the sequence; tensors, layers or experts are for the model to split"
    if s.cp == 1:
        return "as it is: every GPU has whole sequences, and no ring is needed"
    two = s.inner > 1  # these strategies know which ranks share a node
    shape, axes = ((s.dp, s.cp // s.inner, s.inner), ("dp", "node", "cp")) if two else ((s.dp, s.cp), ("dp", "cp"))
    mine = "'node', 'cp'" if two else "'cp'"
    return (
        f"mesh = init_device_mesh('cuda', {shape}, mesh_dim_names={axes}); world = rl.DistributedWorld(mesh[{mine}]); "
        f"batch = split(model, world, ..., strategy=rl.{s.strategy.replace('-', '_')}_attention, "
        f"layout=rl.{s.layout})  (docs/your_model.md)"
    )


def _torchrun(gpu: GPU, gpus: int) -> str:
    if gpus <= gpu.node:
        return f"torchrun --standalone --nproc-per-node {gpus} PROGRAM"
    nodes, each = -(-gpus // gpu.node), gpu.node
    return f"torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint HOST:29500 PROGRAM"


def _ringlearn(m: Model, c: Candidate) -> str:
    s = c.setup
    if s.tp > 1 or s.pp > 1 or s.ep > 1:
        return "not this one: ringlearn.train splits data and sequences, not layers or matrices"
    words = [f"-m ringlearn.train --width {m.width} --layers {m.layers} --heads {m.heads} {m.kv_heads}"]
    words.append(f"--tokens {c.tokens} --batch {s.dp * s.sequences} --accumulate {s.microbatches} --dtype bfloat16")
    words.append(f"--dp {s.dp} --strategy {s.strategy} --layout {s.layout}")
    words += ["--fsdp"] * (s.fsdp == 3) + ["--checkpoint-layers"] * (s.recompute in ("full", "offload"))
    words += [f"--inner {s.inner}"] * (s.inner > 1)
    return " ".join(words) + "  (a model of these sizes, of its own kind)"


def _torchtitan(c: Candidate) -> str:
    s = c.setup
    shard = s.dp if s.fsdp == 3 else 1
    mode = {"none": "none", "selective": "selective"}.get(s.recompute, "full")
    words = [
        f"--training.seq_len {c.tokens} --training.local_batch_size {s.sequences * s.microbatches}",
        f"--parallelism.data_parallel_shard_degree {shard}",
        f"--parallelism.data_parallel_replicate_degree {s.dp // shard}",
        f"--parallelism.tensor_parallel_degree {s.tp} --parallelism.context_parallel_degree {s.cp}",
        f"--parallelism.pipeline_parallel_degree {s.pp} --activation_checkpoint.mode {mode} --training.compile",
    ]
    if s.cp > 1:
        rotate = "alltoall" if "ring" in s.strategy else "allgather"
        words.append(f"--parallelism.context_parallel_rotate_method {rotate}")
    words += [f"--parallelism.expert_parallel_degree {s.ep}"] * (s.ep > 1)
    words += ["--model.converters float8"] * (s.precision != "bf16")
    note = "  (it has neither Ulysses nor two rings)" if s.strategy in ("ulysses", "hybrid", "double-ring") else ""
    return " ".join(words) + note


def _megatron(m: Model, gpu: GPU, c: Candidate) -> str:
    s = replace(c.setup, framework="megatron", fsdp=min(c.setup.fsdp, 2), tiled_loss=False, tiled_mlp=False)
    needed = sum(memory(m, s, c.tokens).values())
    if needed > gpu.memory or s.recompute == "offload":
        s = replace(s, recompute="full")
        needed = sum(memory(m, s, c.tokens).values())
    if needed > gpu.memory:
        has = f"{needed / GiB:,.0f} GiB of a GPU, which has {gpu.memory / GiB:.0f}"
        return f"not this one: Megatron-LM keeps whole weights and logits, and would need {has}"
    words = [
        f"--seq-length {c.tokens} --micro-batch-size {s.sequences} --global-batch-size {c.sequences}",
        f"--tensor-model-parallel-size {s.tp} --pipeline-model-parallel-size {s.pp} --context-parallel-size {s.cp}",
    ]
    words += [f"--cp-comm-type {_MEGATRON[s.strategy]}"] * (s.cp > 1) + ["--sequence-parallel"] * (s.tp > 1)
    words += ["--use-distributed-optimizer"] * (s.fsdp > 0) + [f"--expert-model-parallel-size {s.ep}"] * (s.ep > 1)
    words += [f"--hierarchical-context-parallel-sizes {s.inner} {s.cp // s.inner}"] * (s.strategy == "hybrid")
    if s.recompute == "full":
        words.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    words += ["--fp8-format hybrid"] * (s.precision != "bf16")
    other = s.recompute != c.setup.recompute != "offload"
    return " ".join(words) + "  (layers recomputed, because it keeps whole weights and logits)" * other


def _accelerate(c: Candidate) -> str:
    s = c.setup
    if s.pp > 1 or s.ep > 1:
        return "not this one: accelerate splits neither layers nor experts"
    sizes = f"dp_shard_size={s.dp}, tp_size={s.tp}"
    if s.strategy == "ulysses" and s.cp > 1:
        sizes += f", sp_size={s.cp}, sp_backend='deepspeed'"
    else:
        sizes += f", cp_size={s.cp}"
    again = s.recompute in ("full", "offload")
    return (
        f"ParallelismConfig({sizes}); FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing={again})"
    )
