"""Settings of torch's compilers, which read them when they are imported."""

import os
from pathlib import Path

import build_cache
import tensorizer

PACKAGE = Path(tensorizer.__file__).parent
#: Sources that the generated code of the operators depends on.
SOURCES = [
    build_cache.ROOT / "csrc",
    PACKAGE / "torch_hooks",
    PACKAGE / "lib",
    *PACKAGE.glob("*.so"),
]

# torch keeps machine code on the disk, which it finds by its exact source. Graphs are lowered anew
# in each test, so that none of an earlier build can hide a defect.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
    build_cache.build_once("inductor", SOURCES, lambda folder: None)
)
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT"] = "0"
# Compile in this process: a pool of others would be left behind.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# The test for the vector instructions of the machine takes long.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
# The wrapper around the kernels of a compiled package need not be fast.
os.environ["AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"] = "O0"
