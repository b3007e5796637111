"""The environment is read at the first use of a variable, and not while a thread changes it."""

import os

import pytest
import tensorizer
import torch
from processes import run_python
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


def test_an_unknown_variable_is_one_warning(tmp_path):
    tensorizer.save({"a": torch.ones(3)}, tmp_path / "f")
    code = """
import sys, tensorizer
del sys.modules["tensorizer._native"]
import tensorizer._native
for _ in range(2): tensorizer.load(sys.argv[1])
"""
    env = {
        **os.environ,
        "TENSORIZER_NUM_READER": "4",
        "TENSORIZER_PORT_80_TCP": "tcp://10.0.0.1:80",
    }
    expected = "TENSORIZER_NUM_READER (the nearest known name is TENSORIZER_NUM_READERS)"
    done = run_python(code, tmp_path / "f", env=env)
    assert (done.returncode, done.stderr.count(expected)) == (0, 1), done.stderr
    assert "TENSORIZER_PORT_80_TCP" not in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ATTEMPTS", "0", "a whole number of at least 1"),
        ("ATTEMPTS", "-1", "a whole number of at least 1"),
        ("STALL_SECONDS", "0", "a number of seconds from 0.01 to 2678400"),
        ("TOTAL_SECONDS", "1e9", "a number of seconds from 0.01 to 2678400"),
        ("NUM_READERS", "many", "a whole number"),
    ],
)
def test_values_out_of_range_are_refused(name, value, expected, tmp_path, monkeypatch):
    tensorizer.save({"a": torch.ones(3)}, tmp_path / "f")
    monkeypatch.setenv(f"TENSORIZER_{name}", value)
    with FaultServer((tmp_path / "f").read_bytes()) as server:
        address = str(tmp_path / "f") if name == "NUM_READERS" else server.url
        with pytest.raises(ValueError, match=f"TENSORIZER_{name} must be {expected}"):
            tensorizer.load(address, "cpu")
        with pytest.raises(RuntimeError, match=f"TENSORIZER_{name} must be {expected}"):
            torch.ops.tensorizer.load(address)
