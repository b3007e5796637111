"""vLLM's load format ``tensorizer_stream``: the entry point that registers it.

Importing this imports neither torch, vLLM nor tensorizer.
"""

import functools
import logging

#: What ``--load-format`` takes.
LOAD_FORMAT = "tensorizer_stream"


@functools.cache
def register() -> None:
    """Register the load format; vLLM calls this in each of its processes.

    Where this vLLM has no place for it, or one of another shape than is known, a warning says so
    and nothing is registered: vLLM goes on with its own formats.
    """
    try:
        from vllm.model_executor.model_loader import register_model_loader

        from .loader import StreamLoader

        register_model_loader(LOAD_FORMAT)(StreamLoader)
    except Exception as error:
        # Of vLLM's own logger, so that it is shown as vLLM's messages are.
        logging.getLogger("vllm.tensorizer").warning(
            "tensorizer: load format %s is not registered, as this vLLM differs: %s: %s",
            LOAD_FORMAT,
            type(error).__name__,
            " ".join(str(error).split()),
        )
