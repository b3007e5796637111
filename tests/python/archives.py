"""Archives of torch.save, in whose records and pickles any value can be set."""

import collections
import io
import pickle
import struct

import tensorizer
import torch

#: Errors that reading a file may raise, whatever is in it.
REFUSALS = (ValueError, OSError, NotImplementedError, MemoryError, pickle.UnpicklingError)


class Storage:
    """Stands for a storage in a pickle, with any record, type and count."""

    def __init__(self, key="0", count=6, kind=torch.FloatStorage, pid=None):
        self.pid = pid or ("storage", kind, key, "cpu", count)


class Call:
    """A function that a pickle has called."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def tensor(storage=None, offset=0, shape=(2, 3), stride=(3, 1)):
    storage = storage or Storage()
    rest = (False, collections.OrderedDict())
    return Call(torch._utils._rebuild_tensor_v2, storage, offset, shape, stride, *rest)


def pickled(tree):
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return obj.pid if isinstance(obj, Storage) else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump(tree)
    return buffer.getvalue()


DATA = torch.arange(6.0).numpy().tobytes()


def records(tree=None, **more):
    """Return the records of a checkpoint with one storage of six floats."""
    tree = {"a": tensor()} if tree is None else tree
    found = {"data.pkl": pickled(tree), "byteorder": b"little", "data/0": DATA, "version": b"3\n"}
    return found | {name.replace("__", "/"): data for name, data in more.items()}


class Zip:
    """An archive whose fields can be set to anything, record by record.

    ``local`` and ``central`` have for a name the fields that are to be others.
    """

    def __init__(self, content, *, folder="x/", local=None, central=None, end=None, end64=None):
        self.local, self.central = local or {}, central or {}
        out = bytearray()
        directory = bytearray()
        for name, data in content if isinstance(content, list) else content.items():
            at = len(out)
            out += self.header(folder + name, data, at)
            out += data
            if data:
                out += struct.pack("<IIII", 0x08074B50, 0, len(data), len(data))
            directory += self.entry(folder + name, data, at)
        count = len(content)
        self.start = len(out)
        out += directory
        end64 = {"length": 44, "disk": 0, "here": count, "count": count} | (end64 or {})
        end64 = {"size": len(directory), "start": self.start, "at": len(out), "disks": 1} | end64
        out += struct.pack(
            "<IQHHIIQQQQ", 0x06064B50, end64["length"], 45, 45, end64["disk"], 0, end64["here"],
            end64["count"], end64["size"], end64["start"],
        )  # fmt: skip
        out += struct.pack("<IIQI", 0x07064B50, 0, end64["at"], end64["disks"])
        end = {"disk": 0, "here": count, "count": count, "comment": b""} | (end or {})
        end = {"size": len(directory), "start": self.start, "junk": b""} | end
        out += struct.pack(
            "<IHHHHIIH", 0x06054B50, end["disk"], 0, end["here"], end["count"], end["size"],
            end["start"], len(end["comment"]),
        )  # fmt: skip
        self.bytes = bytes(out) + end["comment"] + end["junk"]

    def header(self, name, data, at):
        field = {"sign": 0x04034B50, "flags": 0x808, "method": 0, "size": 0, "packed": 0}
        field |= {"name": name.encode(), "extra": b"FB" + b"\0\0"} | self.local.get(name, {})
        padding = -(at + 30 + len(field["name"]) + len(field["extra"])) % 64
        field["extra"] += b"Z" * padding if len(field["extra"]) == 4 else b""
        return struct.pack(
            "<IHHHHHIIIHH", field["sign"], 0, field["flags"], field["method"], 0, 0, 0,
            field["packed"], field["size"], len(field["name"]), len(field["extra"]),
        ) + field["name"] + field["extra"]  # fmt: skip

    def entry(self, name, data, at):
        field = {"sign": 0x02014B50, "flags": 0x808, "method": 0, "size": len(data), "at": at}
        field |= {"packed": len(data), "disk": 0, "name": name.encode(), "extra": b""}
        field |= self.central.get(name, {})
        return struct.pack(
            "<IHHHHHHIIIHHHHHII", field["sign"], 0, 0, field["flags"], field["method"], 0, 0, 0,
            field["packed"], field["size"], len(field["name"]), len(field["extra"]), 0,
            field["disk"], 0, 0, field["at"],
        ) + field["name"] + field["extra"]  # fmt: skip


def load(data):
    return tensorizer.load(io.BytesIO(data))
