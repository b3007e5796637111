"""Uses an installed wheel: use.py CMAKE PROGRAM_FOLDER MINOR NAME, in an empty folder."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

# What needs no compiler: there is none.
path, os.environ["PATH"] = os.environ["PATH"], ""
assert shutil.which("c++") is None

import tensorizer  # noqa: E402
import torch  # noqa: E402

cmake, program, minor, name = sys.argv[1:]
package = Path(tensorizer.__file__).parent
assert package.is_relative_to(sys.prefix), f"{package} is not that of this environment"
assert importlib.metadata.version(name).endswith(f"+torch{minor}")
needed = importlib.metadata.requires(name)
assert f"torch=={minor}.*" in needed, needed

tensors = {"weight": torch.randn(40, 30), "bias": torch.arange(5)}
tensorizer.save(tensors, "f.tensors")
for loaded in (
    tensorizer.load("f.tensors", verify_hash=True),
    torch.ops.tensorizer.load("f.tensors"),
    dict(tensorizer.TensorDeserializer("f.tensors")),
):
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)

module, other = torch.nn.Linear(30, 40), torch.nn.Linear(30, 40)
serializer = tensorizer.TensorSerializer("module.tensors")
serializer.write_module(module)
serializer.close()
assert tensorizer.TensorDeserializer("module.tensors").load_into_module(other) == 2
assert torch.equal(module.weight, other.weight)

for arguments, expected in ((["ls", "f.tensors"], "weight"), (["completion", "bash"], "complete ")):
    shown = subprocess.run(
        [Path(sys.executable).with_name("tensorizer"), *arguments],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert expected in shown.stdout

os.environ["PATH"] = path
prefixes = f"{tensorizer.cmake_prefix_path};{torch.utils.cmake_prefix_path}"
for command in (
    [cmake, "-S", program, "-B", "build", f"-DCMAKE_PREFIX_PATH={prefixes}"],
    [cmake, "--build", "build"],
    ["build/program", "f.tensors", "from_cpp.tensors"],
):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
assert torch.equal(tensorizer.load("from_cpp.tensors")["weight"], tensors["weight"])
print(f"tensorizer {importlib.metadata.version(name)} works with torch {torch.__version__}")
