"""The bytes of `.tensors` files, read without the library: where fields are, whether hashes fit."""

import hashlib
import struct
import zlib
from dataclasses import dataclass, field

PROLOGUE = 73


@dataclass
class Field:
    """A number or a string in a file."""

    at: int
    size: int


@dataclass
class Body:
    """A tensor: what the index says of it, and where its header and data lie."""

    name: bytes = b""
    long: bool = False
    dims: int = 0
    header_at: int = 0
    data_at: int = 0
    data_len: int = 0
    #: Offsets of the fields of the index that have its positions.
    places: list[int] = field(default_factory=list)


class Reading:
    """Steps through bytes, and keeps where fields were."""

    def __init__(self, data, at):
        self.data, self.at, self.fields = data, at, []

    def take(self, size):
        if self.at + size > len(self.data):
            raise ValueError("too short")
        self.fields.append(Field(self.at, size))
        self.at += size
        return bytes(self.data[self.at - size : self.at])

    def int(self, size):
        return int.from_bytes(self.take(size), "little")

    def dtype_and_shape(self, long):
        self.take(self.int(1))
        dims = self.int(1)
        for _ in range(dims):
            self.int(8 if long else 4)
        return dims


def read_index(data):
    """Return the tensors in the order of the index, its fields, and where its entries end."""
    reading = Reading(data, 0)
    for size in (5, 4, 8, 24, 8, 8, 8, 8):
        reading.take(size)
    count, tagged = struct.unpack_from("<Q", data, 57)[0], data[9] & 2
    bodies = []
    for _ in range(count):
        body = Body(long=bool(tagged and reading.int(4) == 5))
        body.name = reading.take(reading.int(2))
        reading.int(1)
        body.dims = reading.dtype_and_shape(body.long)
        body.places = [reading.at, reading.at + 8]
        body.header_at, body.data_at, body.data_len = (reading.int(8) for _ in range(3))
        bodies.append(body)
    return bodies, reading.fields, reading.at


def is_encrypted(data):
    version = struct.unpack_from("<I", data, 5)[0]
    return version == 3 or (version > 3 and data[9] & 1 == 1)


@dataclass
class Header:
    """The places in a file of a header's fields, hash values and block of encryption."""

    fields: list[Field]
    hashes: list[tuple[int, int, int]]
    block: tuple[int, int] | None


def read_header(data, body, encrypted):
    """Read a header; raise ValueError where it is none."""
    reading = Reading(data, body.header_at)
    reading.int(8), reading.int(2), reading.int(1)
    reading.take(reading.int(2))
    reading.dtype_and_shape(body.long)
    reading.int(2)
    hashes = []
    for _ in range(reading.int(1)):
        kind, size = reading.int(1), reading.int(1)
        hashes.append((kind, reading.at, size))
        reading.take(size)
    block = None
    if encrypted:
        start = reading.at
        end = reading.int(8) + reading.at
        while reading.at + 8 <= end:
            reading.take(min(8, end - reading.at))
        reading.take(end - reading.at)
        block = (start, end)
    fields = [*reading.fields, Field(body.data_at - 8, 8), Field(body.data_at, body.data_len)]
    return Header(fields, hashes, block)


def digests(data, body, header, plain):
    """Return what the hashes of a tensor must be: by kind and place."""
    covered = bytearray(data[body.header_at : body.data_at])
    for _, at, size in header.hashes:
        covered[at - body.header_at : at - body.header_at + size] = bytes(size)
    if header.block:
        start, end = (at - body.header_at for at in header.block)
        del covered[start:end]
    covered += plain
    for kind, at, size in header.hashes:
        crc = zlib.crc32(covered).to_bytes(4, "little")
        yield at, size, crc if kind == 0 else hashlib.sha256(covered).digest()


def hashes_fit(data, body, plain):
    """Tell whether a tensor has hashes, and all of them are those of its header and these data."""
    header = read_header(data, body, is_encrypted(data))
    found = [(data[at : at + size], right) for at, size, right in
             digests(data, body, header, plain)]  # fmt: skip
    return bool(found) and all(bytes(one) == other for one, other in found)


def all_fields(data):
    """Return the fields of prologue, index, headers and data of a sound file."""
    bodies, fields, _ = read_index(data)
    for body in bodies:
        fields = fields + read_header(data, body, is_encrypted(data)).fields
    return [one for one in fields if one.size]


def rehash(data, plain=None):
    """Give headers the hashes that fit what they say now, as far as they can be read."""
    try:
        bodies, _, _ = read_index(data)
        for number, body in enumerate(bodies):
            if body.data_at + body.data_len > len(data) or body.data_at < body.header_at:
                continue
            header = read_header(data, body, is_encrypted(data))
            own = data[body.data_at : body.data_at + body.data_len]
            known = plain[number] if plain else own
            for at, size, right in digests(data, body, header, known):
                if len(right) == size and at + size <= len(data):
                    data[at : at + size] = right
    except (ValueError, struct.error, IndexError):
        pass
    return data


def tightened(data):
    """Return a sound file without the unused space of its index, which is most of a small one."""
    bodies, _, used = read_index(data)
    old_end = PROLOGUE + struct.unpack_from("<Q", data, 65)[0]
    if used >= old_end:
        return data
    result = bytearray(data[:used] + data[old_end:])
    struct.pack_into("<Q", result, 65, used - PROLOGUE)
    for body in bodies:
        for place, old in zip(body.places, (body.header_at, body.data_at), strict=True):
            struct.pack_into("<Q", result, place, old - (old_end - used))
    return bytes(result)
