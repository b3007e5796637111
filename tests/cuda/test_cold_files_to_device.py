"""Files that are not in the page cache, loaded to a device."""

import os
import sys

import pytest
import tensorizer
import torch

sys.path.append(os.path.join(os.path.dirname(__file__), "../python"))
from test_cold_files import (  # noqa: F401  # fixtures
    AROUND,
    MIB,
    OPENING,
    cut,
    folder,
    loaded,
    path,
    same,
    tensors,
)


def test_rows_to_a_device_cost_no_more_than_their_bytes(path, tensors):
    wanted = ["rows", "columns", "flat"]
    found, reading, read = loaded(path, "cuda", names=wanted, slices=cut(0, wanted))
    expected = {
        name: tensors[name].narrow(0, start, stop - start)
        for name, (_, start, stop) in cut(0, wanted).items()
    }
    same(found, expected)
    total = sum(tensor.nbytes for tensor in expected.values())
    assert reading in AROUND
    assert read <= 1.02 * total + OPENING
    assert tensorizer.stats()["bytes"] == total


@pytest.mark.parametrize("iterates", [False, True])
def test_columns_to_a_device_are_gathered_from_direct_reads(path, tensors, iterates):
    wanted = ["rows", "columns"]
    slices = cut(1, wanted)
    expected = {
        name: tensors[name].narrow(1, start, stop - start)
        for name, (_, start, stop) in slices.items()
    }
    call = tensorizer.iterate if iterates else tensorizer.load
    found, reading, read = loaded(path, "cuda", call, names=wanted, slices=slices)
    same(found, expected)
    assert reading in AROUND
    assert read <= 1.02 * sum(tensors[name].nbytes for name in wanted) + OPENING
    if not iterates:
        assert tensorizer.stats()["bytes"] == sum(tensor.nbytes for tensor in expected.values())


def test_gathered_slices_keep_to_a_limit_of_memory(path, tensors):
    found, _, _ = loaded(
        path, "cuda", names=["rows"], slices=cut(1, ["rows"]), memory_limit=24 * MIB
    )
    assert torch.equal(found["rows"].cpu(), tensors["rows"][:, 355:710])
