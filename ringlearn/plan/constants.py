"""Six constants that no data sheet states: fitted on ten published rows, named in docs/published/fitted.json.

``python tools/published_plans.py --fit`` computes them again, and a test checks that this file has the result.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """The fractions of the data sheets' rates that real runs reach, and their fixed overheads.

    products_bf16, products_fp8: fraction of the peak that matrix products reach.  links: fraction of the bandwidth
    between nodes that messages reach.  host_per_layer: seconds to launch a layer's kernels from Python, forward and
    backward.  device_overhead: bytes of a GPU that PyTorch's allocator does not see.  reserved: bytes that it reserves,
    divided by the bytes of the tensors.
    """

    products_bf16: float
    products_fp8: float
    links: float
    host_per_layer: float
    device_overhead: float
    reserved: float


FITTED = Constants(
    products_bf16=0.5718,
    products_fp8=0.4807,
    links=0.4911,
    host_per_layer=0.0153,
    device_overhead=4196000000.0,
    reserved=1.052,
)
