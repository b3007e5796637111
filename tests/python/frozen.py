"""Imported last by the server that forks interpreters.

Forks share the pages that they do not write to; the garbage collector would write to all of them.
"""

import gc
import weakref

import torch


def _is_of_torch(registered):
    return isinstance(registered, torch.library.Library) and registered.ns != "tensorizer"


#: What removes the operators that torch registered from its dispatcher when an interpreter ends.
OPERATORS_OF_TORCH = [
    finalizer for finalizer in weakref.finalize._registry if _is_of_torch(finalizer.peek()[0])
]

gc.collect()
gc.freeze()
