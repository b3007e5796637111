"""Checkpoints of ``torch.distributed.checkpoint`` in ``.tensors`` files.

``dcp.save(state, storage_writer=Writer(uri))`` and ``dcp.load(state, storage_reader=Reader(uri))``.
"""

from .reader import Reader
from .writer import Writer

__all__ = ["Reader", "Writer"]

Reader.__module__ = Writer.__module__ = __name__
