"""vLLM's load format ``tensorizer_stream``: the entry point that registers it.

Importing this imports neither torch, vLLM nor tensorizer.
"""

import functools

from tensorizer_engines import LOAD_FORMAT, warn_of_unsupported_engine


@functools.cache
def register() -> None:
    """Register the load format; vLLM calls this in each of its processes.

    If this vLLM does not support it, or has an unknown interface for it, a warning is logged and
    nothing is registered: vLLM goes on with its own formats.
    """
    try:
        from vllm.model_executor.model_loader import register_model_loader

        from .loader import VllmStreamLoader

        register_model_loader(LOAD_FORMAT)(VllmStreamLoader)
    except Exception as error:
        warn_of_unsupported_engine("vLLM", error)
