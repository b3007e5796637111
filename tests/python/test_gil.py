"""Operators whose caller has the GIL, as code has that is compiled ahead of time."""

import tensorizer
import torch
from processes import run_python
from scripted import FaultServer

#: Calls an operator by torch's functions for compiled code. The process has no connections yet.
CODE = """
import ctypes, sys, torch, tensorizer
call = ctypes.PyDLL(torch._C.__file__)  # unlike CDLL it keeps the GIL
def made(make, *arguments):
    handle = ctypes.c_void_p()
    assert make(*arguments, ctypes.byref(handle)) == 0
    return handle.value
def string(text):
    return made(call.torch_new_string_handle, text.encode(), ctypes.c_size_t(len(text)))
names = made(call.torch_new_list_reserve_size, ctypes.c_size_t(2))
for name in "ab":
    assert call.torch_list_push_back(ctypes.c_void_p(names), ctypes.c_uint64(string(name))) == 0
stack = (ctypes.c_uint64 * 6)(string(sys.argv[1]), names)
version = ctypes.c_uint64(2 << 56 | 10 << 48)
assert ctypes.pythonapi.PyGILState_Check()
assert call.torch_call_dispatcher(b"tensorizer::load", b"list", stack, version) == 0
size = ctypes.c_size_t()
assert call.torch_list_size(ctypes.c_void_p(stack[0]), ctypes.byref(size)) == 0
print(size.value)
"""


def test_a_caller_that_has_the_gil_loads_from_a_server(tmp_path):
    tensorizer.save({"a": torch.ones(4_000_000), "b": torch.ones(4_000_000)}, tmp_path / "f")
    with FaultServer((tmp_path / "f").read_bytes()) as server:
        # Threads of ours ask for the GIL, to look into the environment, while the caller has it.
        done = run_python(CODE, server.url)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
