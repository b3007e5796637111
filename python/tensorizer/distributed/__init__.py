"""Checkpoints of ``torch.distributed.checkpoint`` in ``.tensors`` files.

``dcp.save(state, storage_writer=Writer(uri))`` and ``dcp.load(state, storage_reader=Reader(uri))``.
"""

from .reader import Reader, load_state
from .writer import Writer

__all__ = ["Reader", "Writer", "load_state"]

Reader.__module__ = Writer.__module__ = load_state.__module__ = __name__
