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
        "build it again with `pip install --force-reinstall --no-deps --no-cache-dir tensorizer`."
    )

from ._C import DEFAULT_S3_ENDPOINT, Reader, Source, Writer, __version__, cpu_count  # noqa: E402

__all__ = ["DEFAULT_S3_ENDPOINT", "Reader", "Source", "Writer", "__version__", "cpu_count"]
