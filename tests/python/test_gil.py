"""Operators whose caller has the GIL, as code has that is compiled ahead of time."""

import tensorizer
import torch
from conftest import run_python
from scripted import FaultServer

CODE = """
import sys, torch, tensorizer
url, package = sys.argv[1:]
ops = torch.ops.tensorizer
class Module(torch.nn.Module):
    def forward(self, x):
        a, b = ops.load.list(url, ["a", "b"], num_readers=4)
        return a.sum() + b.sum() + x
program = torch.export.export(Module(), (torch.ones(1),))
torch._inductor.aoti_compile_and_package(program, package_path=package)
"""

# A process of its own, which has no connections yet.
RUN = """
import sys, torch, tensorizer
run = torch._inductor.aoti_load_package(sys.argv[2])
print(run(torch.ones(1)).item())
"""


def test_a_compiled_package_loads_from_a_server(tmp_path):
    tensors = {"a": torch.ones(8_000_000), "b": torch.ones(8_000_000)}
    tensorizer.save(tensors, tmp_path / "f")
    with FaultServer((tmp_path / "f").read_bytes()) as server:
        package = tmp_path / "model.pt2"
        made = run_python(CODE, server.url, package, timeout=250)
        assert made.returncode == 0, made.stderr
        # Threads of ours ask for the GIL, to look into the environment, while the caller has it.
        done = run_python(RUN, server.url, package, timeout=150)
    assert (done.returncode, done.stdout) == (0, "16000001.0\n"), done.stderr
