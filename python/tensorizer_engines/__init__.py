"""The parts that the plugins for serving engines share: files, options, and weights one by one.

Importing this imports neither torch, an engine nor tensorizer.
"""

import logging

#: The value of the engines' ``--load-format``.
LOAD_FORMAT = "tensorizer_stream"


def warn_of_another_shape(engine: str, error: Exception) -> None:
    """Say that an engine has no place for the load format, or one of another shape than is known.

    It is said by the engine's own logger, so that it is shown as the engine's messages are.
    """
    logging.getLogger(f"{engine.lower()}.tensorizer").warning(
        "tensorizer: load format %s is not registered, as this %s differs: %s: %s",
        LOAD_FORMAT,
        engine,
        type(error).__name__,
        " ".join(str(error).split()),
    )
