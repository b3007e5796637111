"""The environment is read at the first use of a variable, and not while a thread changes it."""

import pytest
import tensorizer
import torch
from conftest import run_python
from scripted import FaultServer

#: torch and the SDK of S3 look for these once in the life of a process.
ONCE = {"ATEN_CPU_CAPABILITY", "THP_MEM_ALLOC_ENABLE", "LOG_SENSITIVE_BODIES"}

CODE = """
import os, sys, threading, tensorizer, torch
from tensorizer.stream_io import open_stream
path, http, s3 = sys.argv[1:]
os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = "key", "secret-hu5hw0rd"
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
# What is set now counts, although the process began without it.
os.environ["AWS_ENDPOINT_URL_S3"] = "http://" + s3
tensorizer.load(path)
torch.ops.tensorizer.load(path)
tensorizer.load(http)
os.environ["HF_ENDPOINT"] = "https://127.0.0.1:1"
for address in (http.replace("http", "redis") + "/x", "https://127.0.0.1:1/f", "hf://org/repo"):
    try:
        tensorizer.load(address)
    except OSError:
        pass
tensorizer.save({"a": torch.ones(3)}, "s3://bucket/environment")
print(tensorizer.load("s3://bucket/environment")["a"].sum().item())
"""


@pytest.fixture
def watched(with_faults, tmp_path):
    """Return an environment in which looks into it that may race are noted, and where."""
    noted = tmp_path / "noted"
    env = with_faults(NOTES=noted)
    return {name: value for name, value in env.items() if not name.startswith("AWS_")}, noted


def test_environment_variables_are_read_only_under_the_gil(watched, tmp_path, moto):
    env, noted = watched
    tensorizer.save({"a": torch.ones(3)}, tmp_path / "f")
    with FaultServer((tmp_path / "f").read_bytes()) as server:
        addresses = tmp_path / "f", server.url, moto.host
        done = run_python(CODE, *addresses, env=env, finalize=True)
    assert (done.returncode, done.stdout) == (0, "3.0\n"), done.stderr
    seen = noted.read_text().splitlines() if noted.exists() else []
    assert sorted(set(seen) - ONCE) == []


def test_variables_are_read_once(tmp_path):
    code = """
import os, sys, tensorizer, torch
path = sys.argv[1]
os.environ["TENSORIZER_STALL_SECONDS"] = "7"
try: tensorizer.load("http://127.0.0.1:1/f")
except OSError: pass
os.environ["TENSORIZER_STALL_SECONDS"] = "nothing"
try: tensorizer.load("http://127.0.0.1:1/f")
except OSError: print("as before")
"""
    assert run_python(code, tmp_path).stdout == "as before\n"
