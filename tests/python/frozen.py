"""Imported last by the server that forks interpreters.

Forks share the pages that they do not write to; the garbage collector would write to all of them.
"""

import gc

import torch  # noqa: F401

gc.collect()
gc.freeze()
