"""``torch.save`` and ``torch.load`` on the native core, for code that cannot be changed.

Inside a block of :func:`tensorizer_saving`, ``torch.save`` writes the storages of an object to a
``.tensors`` file next to its own file. Inside a block of :func:`tensorizer_loading`, ``torch.load``
reads them from that file.
"""

from ._errors import PairMismatchError
from .checkpoints.save_lock import logger as logger
from .torch_hooks.save_and_load import tensorizer_loading, tensorizer_saving

__all__ = ["PairMismatchError", "tensorizer_loading", "tensorizer_saving"]
