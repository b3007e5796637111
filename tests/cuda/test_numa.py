"""Staging memory and readers on the NUMA node of their device, with a substitute for /sys."""

import json
import os
from pathlib import Path

import emulated
import pytest

#: A load of some seconds at most, of which the bus takes the most; meanwhile threads are looked at.
PROGRAM = """
import ctypes, json, os, sys, threading, time, tensorizer

def preferred():
    "Return the nodes that large mappings of this process prefer, by get_mempolicy."
    number = {"x86_64": 239, "aarch64": 236}[os.uname().machine]
    nodes = set()
    for line in open("/proc/self/maps"):
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
        found = ctypes.CDLL(None).syscall(number, ctypes.byref(mode), mask, ctypes.c_ulong(1024),
                                          ctypes.c_ulong(first), ctypes.c_ulong(2))
        if found == 0 and mode.value == 1:
            nodes.update(node for node in range(64) if mask[0] >> node & 1)
    return sorted(nodes)

def cpus():
    "Return the CPUs on which readers may run."
    found = set()
    for task in os.listdir("/proc/self/task"):
        try:
            status = dict(line.split(":\\t") for line in open(f"/proc/self/task/{task}/status"))
        except (OSError, ValueError):
            continue
        if status["Name"].strip() == "tensorizer":
            found.add(status["Cpus_allowed_list"].strip())
    return found

def load():
    where = (lambda name: f"cuda:{int(name) % 2}") if DEVICES == 2 else "cuda:0"
    tensorizer.load(sys.argv[1], where, num_readers=READERS)

tensorizer.save({str(n): torch.zeros(4_000_000, dtype=torch.uint8) for n in range(10)}, sys.argv[1])
assert preferred() == []
loading = threading.Thread(target=load)
loading.start()
seen = set()
while loading.is_alive():
    seen |= cpus()
    time.sleep(0.001)
torch.cuda.synchronize()
print(json.dumps([sorted(seen), preferred()]))
"""


@pytest.fixture
def sys_folder(tmp_path):
    """Two devices, each on a node with one of this machine's first two CPUs."""

    def write(nodes, cpus):
        for device, node in enumerate(nodes):
            folder = tmp_path / "sys/bus/pci/devices" / f"0000:{device + 1:02x}:00.0"
            folder.mkdir(parents=True)
            (folder / "numa_node").write_text(f"{node}\n")
        for node, of_node in cpus.items():
            folder = tmp_path / f"sys/devices/system/node/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{of_node}\n")
        return tmp_path / "sys"

    return write


def run(tmp_path, folder, devices, readers, **env):
    env = {"FAKE_CUDA_SYS": str(folder), "FAKE_CUDA_BUS_MBPS": "100"} | env
    env["TENSORIZER_IN_FLIGHT_MB"], env["TENSORIZER_PINNED_MB"] = "8", "16"
    code = f"DEVICES, READERS = {devices}, {readers}\n{PROGRAM}"
    done = emulated.run(code, tmp_path / "f.tensors", **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def all_cpus():
    """Return the CPUs on which this process may run, as the kernel writes them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list"))


needs_cpus = pytest.mark.skipif(
    not {0, 1} <= os.sched_getaffinity(0), reason="this process may not run on the CPUs 0 and 1"
)
needs_nodes = pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA"
)


@needs_cpus
@needs_nodes
def test_memory_and_readers_are_on_the_node_of_the_device(tmp_path, sys_folder):
    folder = sys_folder([0], {0: "1"})
    cpus, nodes = run(tmp_path, folder, 1, 2)
    # The node has one CPU, and so one reader stays there. Threads begin where all may run.
    assert set(cpus) == {"1", all_cpus()}
    assert nodes == [0]


@needs_cpus
@needs_nodes
def test_readers_are_shared_out_among_the_nodes_of_several_devices(tmp_path, sys_folder):
    folder = sys_folder([0, 1], {0: "0", 1: "1"})
    cpus, nodes = run(tmp_path, folder, 2, 2)
    assert set(cpus) - {all_cpus()} == {"0", "1"}
    # This machine may have no second node.
    assert nodes in ([0], [0, 1])


@needs_nodes
@pytest.mark.parametrize("how", ["unknown", "off", "none"])
def test_threads_stay_unbound_where_no_numa_node_is_known(tmp_path, sys_folder, how):
    folder = (
        tmp_path / "nothing"
        if how == "none"
        else sys_folder([-1 if how == "unknown" else 0], {0: "1"})
    )
    cpus, nodes = run(tmp_path, folder, 1, 2, TENSORIZER_NUMA="0" if how == "off" else "1")
    assert cpus == [all_cpus()] and nodes == []
