"""Loading by a group of ranks to CUDA devices."""

import os

import pytest
import torch
from ranks import groups, start as ranks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("REQUIRE_CUDA") != "1",
    reason="no CUDA device",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same tensors in every format."""
    folder = tmp_path_factory.mktemp("group")
    groups.write(folder)
    return folder


def test_over_gloo(folder):
    """By way of the hosts; the ranks may share a device."""
    ranks.run("devices.load", 2, folder, "gloo")


@pytest.mark.skipif(
    "cuda" not in os.environ.get("LD_PRELOAD", ""), reason="the emulated CUDA counts bytes"
)
def test_each_bus_carries_what_its_rank_wants(folder):
    """Over gloo, a rank reads its share of the file; the others' come by way of the host."""
    for wanted, read, sent in ranks.run("devices.over_the_bus", 3, folder, "gloo"):
        assert read == pytest.approx(wanted / 3, rel=0.01)
        assert sent <= 1.01 * wanted


@pytest.mark.skipif(
    "cuda" in os.environ.get("LD_PRELOAD", ""), reason="the emulated CUDA has no kernels of NCCL"
)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a device for each rank")
def test_over_nccl(folder):
    """Each bus carries the share of its rank, and nothing else."""
    world = min(torch.cuda.device_count(), 4)
    ranks.run("devices.load", world, folder, "nccl")
    for wanted, read, _ in ranks.run("devices.over_the_bus", world, folder, "nccl"):
        assert read == pytest.approx(wanted / world, rel=0.01)
