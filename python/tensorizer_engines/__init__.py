"""Parts that the plugins for serving engines share: files, options, and weights one by one.

Importing this imports neither torch, an engine nor tensorizer.
"""

import logging

#: The value of the engines' ``--load-format``.
LOAD_FORMAT = "tensorizer_stream"


def warn_of_unsupported_engine(engine: str, error: Exception) -> None:
    """Warn that an engine does not support the load format, or has an unknown interface for it.

    The warning is logged by the engine's own logger, so that it is shown like the engine's
    messages.
    """
    logging.getLogger(f"{engine.lower()}.tensorizer").warning(
        "tensorizer: load format %s is not registered, as this %s differs: %s: %s",
        LOAD_FORMAT,
        engine,
        type(error).__name__,
        " ".join(str(error).split()),
    )
