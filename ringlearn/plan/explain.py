"""Where each number of a plan comes from: a sentence for every component, with its formula and source."""

from __future__ import annotations

BYTES: dict[str, str] = {
    "weights": "parameters of the fullest rank ((layers / pp + embedding) / tp) x its bytes, / dp cp with FSDP 3",
    "gradients": "as the weights; sharded from FSDP 2 on. Counted where the fullest moment has them",
    "optimizer": "AdamW's two moments in float32, and master weights if the framework has them; sharded from FSDP 1 on",
    "gathered weights": "the bf16 copy that computes: two layers at a time, or a whole stage in a pipeline",
    "gathered gradients": "of what computes, before they are reduced; of a whole stage in a pipeline, in float32",
    "activations": "local tokens x layers / pp x bytes that the backward needs x micro-batches in flight (memory.py)",
    "checkpoints": "2 bytes x local tokens x width x layers / pp: inputs of layers, where the backward begins anew",
    "one layer's backward": "tensors at its fullest moment, one by one, and rows that tp gathers (memory.py)",
    "buffers of the strategy": "messages, gathered rows, partial results: ringlearn.costs, as in a simulated world",
    "logits and loss": "tokens x vocabulary / tp x 14 bytes (bf16, float32, log-probabilities, gradient), or a block",
    "reserve": "CUDA, NCCL and libraries, and what the allocator cannot use: two fitted constants",
}
SECONDS: dict[str, str] = {
    "matrix products": "6 x tokens x parameters of layers and output, / (peak x the fitted part that products reach)",
    "attention": "14 x pairs x heads x head dim, / (peak x what the kernel reaches in docs/measurements)",
    "elementwise": "bytes that norms, RoPE, additions and activations read and write, / memory bandwidth",
    "recomputation": "products and attention that the backward computes once more",
    "offloading": "inputs of layers over PCIe and back, less what hides behind computing",
    "strategy": "bytes of ringlearn.costs over the link, less the attention they hide behind",
    "tensor parallel": "a gather and a scatter of whole rows for each half of a layer, forward, backward and again",
    "experts": "two all-to-alls of the tokens' rows a layer",
    "FSDP": "gathers of weights and scatters of gradients, less what hides behind computing",
    "pipeline": "the bubble: (pp - 1) / (stages x micro-batches) of the rest (Narayanan et al. 2021)",
    "optimizer": "28 bytes a parameter over memory bandwidth, the GPU's or the host's",
    "host": "what Python needs to start the kernels, beyond what the GPU computes meanwhile",
    "weights": "bytes of weights over 0.89 of memory bandwidth (docs/measurements)",
    "cache": "bytes of keys and values over 0.89 of memory bandwidth",
    "kernels": "ten kernels a layer, 4 us between two (arXiv 2411.01783, table 8)",
}
# Serving has no backward, so these differ from training.
PREFILL: dict[str, str] = {
    "matrix products": "2 x tokens x parameters of layers, / (tp x cp x peak x the fitted part that products reach)",
    "attention": "4 x pairs x heads x head dim x layers, / (tp x cp x peak x what the kernel's forward reaches)",
    "tensor parallel": "four gathers or scatters of this rank's rows in each layer, over the link",
    "strategy": "keys and values over the link to the next rank, less the attention they hide behind",
}
DECODE: dict[str, str] = {
    "tensor parallel": "two sums over the ranks in each layer, of one row for each sequence",
    "strategy": "in each layer queries go round the ring, and partial results go home, with nothing to hide behind",
}
