"""The native module, after checking that it fits the torch of this process."""

import torch

try:
    from ._build import TORCH_MINOR
except ImportError as missing:
    raise ImportError(
        "tensorizer was not built: run `pip install .` in its source folder, from where the "
        "package itself cannot be imported before."
    ) from missing

_found = ".".join(torch.__version__.split(".")[:2])
if _found != TORCH_MINOR:
    raise ImportError(
        f"tensorizer was built against torch {TORCH_MINOR}, and this is torch {torch.__version__}: "
        f"install its wheel for this torch, tensorizer-*+torch{_found}-*.whl, or build it again "
        "with `pip install --force-reinstall --no-deps .` in its source folder."
    )

from ._C import (  # noqa: E402
    DEFAULT_S3_READ_ENDPOINT,
    DEFAULT_S3_WRITE_ENDPOINT,
    MAX_DEPTH,
    Decryption,
    Encryption,
    Handle,
    PathSink,
    Reader,
    Sink,
    Source,
    Writer,
    __version__,
    cpu_count,
    local_path,
    release_pinned,
    set_pinned_limit,
    snapshot,
    staged,
    stats,
)

__all__ = [
    "DEFAULT_S3_READ_ENDPOINT",
    "DEFAULT_S3_WRITE_ENDPOINT",
    "MAX_DEPTH",
    "Decryption",
    "Encryption",
    "Handle",
    "PathSink",
    "Reader",
    "Sink",
    "Source",
    "Writer",
    "__version__",
    "cpu_count",
    "local_path",
    "release_pinned",
    "set_pinned_limit",
    "snapshot",
    "staged",
    "stats",
]
