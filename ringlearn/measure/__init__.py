"""``python -m ringlearn.measure``: what ring attention costs on this machine (``ringlearn.bench.multi_gpu``)."""

from ..bench.multi_gpu import multi_gpu

__all__ = ["multi_gpu"]
