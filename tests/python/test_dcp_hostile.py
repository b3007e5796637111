"""Checkpoints whose checkpoint.json, or whose files, are not what they should be."""

import copy
import hashlib
import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_planners import fails
from tensorizer import FormatError
from tensorizer.distributed import Reader, Writer
from tensorizer.distributed.chunks import check_coverage
from tensorizer.distributed.layout import sealed
from tensorizer.distributed.whole_tensors import WholeTensors
from torch.distributed.checkpoint import metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, dtype=torch.int64), "step": 5}


@pytest.fixture
def folder(tmp_path):
    dcp.save(STATE, storage_writer=Writer(tmp_path / "c"))
    return tmp_path / "c"


def read(folder):
    return json.loads((folder / "checkpoint.json").read_bytes())


def write(folder, content):
    content = {name: value for name, value in content.items() if name != "sha256"}
    (folder / "checkpoint.json").write_bytes(sealed(content))


def load(folder):
    target = {"a": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.int64), "step": 0}
    dcp.load(target, storage_reader=Reader(folder))
    return target


def refused(folder, match=".", error=(FormatError, OSError)):
    """Check that neither of both takes it, and that the error says where."""
    with fails(error, f"(?s)(?=.*{match})(?=.*{folder})"):
        load(folder)
    with pytest.raises(error, match=match), WholeTensors(folder) as whole:
        for _ in whole.load(whole.names):
            pass


def test_truncated(folder):
    data = (folder / "checkpoint.json").read_bytes()
    for length in (*range(0, len(data), 7), len(data) - 1):
        (folder / "checkpoint.json").write_bytes(data[:length])
        refused(folder, "is not a checkpoint, or is damaged: ValueError.*SHA-256 does not match")


def test_a_flipped_bit_of_the_metadata_is_refused(folder):
    data = (folder / "checkpoint.json").read_bytes()
    for at in range(0, len(data), 5):
        changed = bytearray(data)
        changed[at] ^= 1
        (folder / "checkpoint.json").write_bytes(changed)
        refused(folder, "SHA-256 does not match")


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"null", b"1", b"{", b"\xff\xfe", b'{"a": "\xff"}', b"[" * 100_000,
        b'{"a":' * 100_000, b'{"version": ' + b"9" * 10_000 + b"}", b"NaN", b"\0" * 1000,
    ],
)  # fmt: skip
def test_foreign_json_is_refused(folder, text):
    (folder / "checkpoint.json").write_bytes(text)
    refused(folder)
    # With a hash that fits
    body = text.removesuffix(b"}")
    digest = hashlib.sha256(body + b"}").hexdigest().encode()
    (folder / "checkpoint.json").write_bytes(body + b',"sha256":"' + digest + b'"}')
    refused(folder)


#: Path in the JSON, the value that is put there, and a part of the error.
CHANGES = [
    (["format"], "safetensors", "expected format"),
    (["version"], 3, "expected format"),
    (["version"], True, "expected format"),
    (["version"], 2, "KeyError.*orders"),
    (["version"], None, "."),
    (["dcp_version"], 5, "expected a version"),
    (["files"], "abc", "expected a list"),
    (["files"], {"a": 1}, "expected a list"),
    (["files", 0], 7, "."),
    (["files", 0], "../c.tensors", "expected the name of a file in the folder"),
    (["files", 0], "/etc/passwd", "expected the name of a file in the folder"),
    (["files", 0], "/etc/x.tensors", "expected the name of a file in the folder"),
    (["files", 0], "sub/x.tensors", "expected the name of a file in the folder"),
    (["files", 0], "x\\y.tensors", "expected the name of a file in the folder"),
    (["files", 0], ".tensors", "expected the name of a file in the folder"),
    (["files", 0], "http:x.tensors", "expected the name of a file in the folder"),
    (["files", 0], "x.tensors\n", "expected the name of a file in the folder"),
    (["files", 0], "\x00.tensors", "expected the name of a file in the folder"),
    (["files", 0], "missing.tensors", "missing.tensors"),
    (["items"], [], "."),
    (["items"], None, "."),
    (["items", "a"], None, "."),
    (["items", "a"], "object", "."),
    (["items", "a"], {"object": [0]}, "."),
    (["items", "a", "dtype"], "float64", "float32"),
    (["items", "a", "dtype"], "int32", "int32"),
    (["items", "a", "dtype"], "load", "no dtype"),
    (["items", "a", "dtype"], 3, "."),
    (["items", "a", "dtype"], ["float32"], "."),
    (["items", "a", "size"], [3, 5], "have 12 elements together"),
    (["items", "a", "size"], [12], "."),
    (["items", "a", "size"], [-3, -4], "expected lengths"),
    (["items", "a", "size"], [3.0, 4.0], "expected lengths"),
    (["items", "a", "size"], [True, 12], "expected lengths"),
    (["items", "a", "size"], [1 << 63, 1], "expected lengths"),
    (["items", "a", "size"], [1 << 62, 1 << 62], "elements together"),
    (["items", "a", "size"], "34", "expected lengths"),
    (["items", "a", "chunks"], [], "have 0 elements together"),
    (["items", "a", "chunks"], 5, "."),
    (["items", "a", "chunks", 0], [], "."),
    (["items", "a", "chunks", 0, 0], [1, 0], "lies outside of it"),
    (["items", "a", "chunks", 0, 0], [-1, 0], "expected lengths"),
    (["items", "a", "chunks", 0, 0], [0], "."),
    (["items", "a", "chunks", 0, 0], [10**400, 0], "expected lengths"),
    (["items", "a", "chunks", 0, 1], [2, 4], "have 8 elements together"),
    (["items", "a", "chunks", 0, 2], 1, "expected one of 1 files"),
    (["items", "a", "chunks", 0, 2], -1, "expected one of 1 files"),
    (["items", "a", "chunks", 0, 2], True, "expected one of 1 files"),
    (["items", "a", "chunks", 0, 2], 10**30, "expected one of 1 files"),
    (["items", "a", "chunks", 0, 3], 7, "and a name"),
    (["items", "a", "chunks", 0, 3], "b", "is int64 of shape"),
    (["items", "a", "chunks", 0, 3], "none", "expected tensor 'none'"),
    (["items", "a", "chunks", 0, 3], "\ud800", "surrogates"),
    (["items", "a", "chunks", 0, 3], "\x1e[0]", "expected tensor"),
    (["planner"], 5, "."),
    (["planner"], {}, "."),
    (["planner", "paths"], [], "."),
    (["planner", "paths", "a"], [-1], "expected str keys and list indices"),
    (["planner", "paths", "a"], [1 << 40], "expected str keys and list indices"),
    (["planner", "paths", "a"], [None], "expected str keys and list indices"),
    (["planner", "paths", "a"], 3, "."),
    (["planner"], {"pickle": "?"}, "."),
    (["planner"], {"pickle": 3}, "."),
]  # fmt: skip


@pytest.mark.parametrize(("where", "value", "match"), CHANGES)
def test_changed_metadata_are_refused(folder, where, value, match):
    content = read(folder)
    *outer, last = where
    part = content
    for step in outer:
        part = part[step]
    part[last] = value
    write(folder, content)
    refused(folder, match)


def test_names_that_are_missing(folder):
    content = read(folder)
    del content["sha256"]
    for name in content:
        write(folder, {other: value for other, value in content.items() if other != name})
        refused(folder, "KeyError")


def test_overlapping_or_misshapen_chunks_are_refused(folder):
    content = read(folder)
    (chunk,) = content["items"]["a"]["chunks"]
    for chunks, match in (
        ([chunk, chunk], "two chunks of 'a' begin at the same place"),
        ([[[0, 0], [2, 4], 0, "a"], [[2, 0], [1, 4], 0, "a"]], r"of shape \[3, 4\], and the ch"),
    ):
        changed = copy.deepcopy(content)
        changed["items"]["a"]["chunks"] = chunks
        write(folder, changed)
        refused(folder, match)


#: Offsets and sizes of chunks of 3 times 4; whether they are all of it.
TILINGS = [
    ([(0, 0, 1, 4), (1, 0, 2, 4)], True),
    ([(0, 0, 3, 1), (0, 1, 3, 3)], True),
    # Chunks around one in the middle: no cut goes through the whole tensor.
    ([(0, 0, 1, 3), (0, 3, 2, 1), (1, 0, 2, 1), (2, 1, 1, 3), (1, 1, 1, 2)], True),
    # Columns that are cut in different places; one has a chunk without elements.
    ([(0, 0, 1, 2), (1, 0, 2, 2), (0, 2, 2, 2), (2, 2, 1, 2), (1, 2, 0, 2)], True),
    # The right number of elements, but some of them twice.
    ([(0, 0, 2, 4), (1, 0, 1, 4)], False),
    ([(0, 0, 2, 3), (0, 1, 2, 3)], False),
    ([(0, 0, 1, 3), (0, 3, 2, 1), (1, 0, 2, 1), (2, 1, 1, 3), (0, 1, 1, 2)], False),
    ([(0, 0, 3, 2), (0, 1, 2, 3)], False),
]


@pytest.mark.parametrize(("boxes", "whole"), TILINGS)
def test_chunks_that_overlap(tmp_path, boxes, whole):
    tensor = torch.arange(12.0).reshape(3, 4)
    chunks, parts = [], {}
    for number, (row, column, rows, columns) in enumerate(boxes):
        parts[str(number)] = tensor[row : row + rows, column : column + columns].clone()
        chunks.append([[row, column], [rows, columns], 0, str(number)])
    folder = tmp_path / "c"
    dcp.save(parts, storage_writer=Writer(folder))
    content = read(folder)
    content["items"] = {"a": {"dtype": "float32", "size": [3, 4], "chunks": chunks}}
    content["planner"] = None
    write(folder, content)
    if not whole:
        refused(folder, "chunks of 'a' overlap")
        return
    target = {"a": torch.zeros(3, 4)}
    dcp.load(target, storage_reader=Reader(folder))
    assert torch.equal(target["a"], tensor)


def test_chunks_of_which_there_are_many():
    # Cut in both dimensions, and in a spiral, in which nothing can be cut away.
    grid = [(row, column, 1, 1) for row in range(300) for column in range(200)]
    _check(grid, (300, 200))
    spiral, low, high = [], 0, 4000
    while high - low > 2:
        side = high - low - 1
        spiral += [(low, low, 1, side), (low, high - 1, side, 1)]
        spiral += [(high - 1, low + 1, 1, side), (low + 1, low, side, 1)]
        low, high = low + 1, high - 1
    spiral.append((low, low, high - low, high - low))
    with pytest.raises(ValueError, match="are too many to rule that out"):
        _check(spiral, (4000, 4000))


def _check(boxes, size):
    chunks = [
        metadata.ChunkStorageMetadata(torch.Size(box[:2]), torch.Size(box[2:])) for box in boxes
    ]
    properties = metadata.TensorProperties(dtype=torch.float32)
    check_coverage("a", metadata.TensorStorageMetadata(properties, torch.Size(size), chunks))


def test_an_object_stored_as_a_tensor_is_refused(folder):
    content = read(folder)
    for name, match in (("a", "float32 of shape"), ("b", "int64 of shape"), ("no", "expected ten")):
        content["items"]["step"]["object"][1] = name
        write(folder, content)
        with fails(FormatError, match):
            load(folder)


def test_damaged_planner_data_are_refused(folder):
    content = read(folder)
    for data in ("", "AAAA", "gAJLAS4="):
        content["planner"] = {"pickle": data}
        write(folder, content)
        with fails((FormatError, pickle.UnpicklingError), str(folder)):
            load(folder)


def test_files_of_another_checkpoint(folder, tmp_path):
    (own,) = folder.glob("*.tensors")
    other = {"a": torch.zeros(3, 5), "b": torch.ones(2), "step": 5}
    dcp.save(other, storage_writer=Writer(tmp_path / "d"))
    (path,) = (tmp_path / "d").glob("*.tensors")
    shutil.copy(path, own)
    refused(folder, r"tensor '[ab]' of .* and the checkpoint says")
    own.write_bytes(own.read_bytes()[:-100])
    refused(folder)
    own.write_bytes(b"")
    refused(folder)
    own.unlink()
    refused(folder, error=(FileNotFoundError,))
    own.mkdir()
    refused(folder, error=(OSError, FormatError))


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "c").write_bytes(b"x")
    with fails(OSError, str(tmp_path / "c")):
        load(tmp_path / "c")
    with fails(OSError, str(tmp_path / "c")):
        dcp.save(STATE, storage_writer=Writer(tmp_path / "c"))


def test_a_damaged_checkpoint_can_be_replaced(folder):
    (folder / "checkpoint.json").write_bytes(b"x")
    before = set(folder.glob("rank-*"))
    dcp.save(STATE, storage_writer=Writer(folder))
    assert torch.equal(load(folder)["a"], STATE["a"])
    # The old files stay: a damaged checkpoint.json does not tell that they belong to it.
    assert before < set(folder.iterdir())


def test_a_fifo_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "checkpoint.json")
    with pytest.raises(FormatError, match="expected a regular file, found one of mode"):
        _ = Reader(tmp_path).read_metadata().state_dict_metadata


@pytest.mark.parametrize("address", ["s3://", "gs://", "az:///"])
def test_an_address_without_a_folder_is_refused(address):
    with pytest.raises(ValueError, match="expected the address of a folder"):
        Writer(address)
