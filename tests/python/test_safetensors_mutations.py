"""Thousands of files that are a little wrong, read by the library of safetensors and by us."""

import copy
import json
import random
import re

import pytest
import tensorizer
from conftest import assert_same
from packing import FILES, filled, info, pack, pack_tensors
from safetensors import SafetensorError
from safetensors.torch import load_file
from tensorizer import FormatError

#: Files of each test, and the seeds of its mutations.
COUNT = 800
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]
#: Small files, so that changes hit something.
BASES = [
    pack_tensors(
        {"a": filled("F32", [2, 3]), "b": filled("U8", [5]), "c.d": filled("BF16", [2])},
        {"format": "pt", "x": "y"},
    ),
    pack_tensors({"": filled("I64", []), "e": filled("BOOL", [0, 4]), "f": filled("C64", [1])}),
    pack_tensors({"four": filled("F4", [3, 4]), "eight": filled("F8_E4M3", [7])}, length=200),
    FILES["header in another order"],
    FILES["unknown fields"],
    FILES["escapes"],
]
#: Values that replace others in a header.
VALUES = [0, 1, -1, 2, 4, 8, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 1.0, 0.5,
          None, True, "", "a", "U8", "F64", "F4", "BF16", [], [0], [0, 0], [0, 4], [1, 2, 3],
          [[1]], {}, {"a": "b"}, {"__metadata__": {}}, info(), info("F32", [1])]  # fmt: skip
PIECES = [b'"', b"{", b"}", b"[", b"]", b",", b":", b" ", b"\0", b"\xff", b"\\u0000", b"0", b"9",
          b"-", b".", b"e", b"null", b'"a":', b"U8", b"\xc3", b"\n", b"\t ", b"1",
          b"4"]  # fmt: skip
#: Members that may stand anywhere in an object.
MEMBERS = [
    b'"n":1,',
    b'"n":[{}],',
    b'"n":"\xff",',
    b'"n":1e999,',
    b'"n":"\\ud800",',
    b'"n":-0.0e-9,',
    b'"n":' + b"[" * 130 + b"]" * 130 + b",",
    b'"n":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},',
    b'"":null,',
    b'"__metadata__":{},',
    b'"__metadata__":null,',
    b'"dtype":"U8",',
    b'"shape":[0],',
]

#: Files that only we refuse: a part of the message, and the reason. See also STRICTER in
#: test_safetensors_hostile.py.
ONLY_OURS = {
    "comes twice": "a key of the metadata twice",
    "at most 64 dimensions": "torch has no more",
    "is too large": "torch cannot compute the strides of empty tensors of such shapes",
    "invalid type: map, expected a string": "dtypes as objects",
    "no format that tensorizer reads": "white space before the header",
}


def mutate_bytes(rng, data):
    """Change bytes anywhere, the length of the header included."""
    begin = 8 + int.from_bytes(data[:8], "little")
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data))
        match rng.randrange(9):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                del data[at : at + rng.randint(1, 8)]
            case 3:
                data[at:at] = rng.choice(PIECES)
            case 4:
                data[at:at] = data[at : at + rng.randint(1, 60)]
            case 5:
                data[8 if rng.random() < 0.5 else 0] = rng.randrange(256)
            case _ if begin < len(data):
                # Changes the lowest bit: any bits are a number, but a boolean has only this one.
                data[rng.randrange(begin, len(data))] ^= 1
        data = data or bytearray(b"x")
    return bytes(data)


def mutate_header_text(rng, data):
    """Change bytes of the header, whose length stays right."""
    length = int.from_bytes(data[:8], "little")
    text = bytearray(data[8 : 8 + length])
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(text) + 1)
        kind = rng.random()
        if kind < 0.4:
            text[at : at + rng.randint(0, 3)] = rng.choice(PIECES)
        elif kind < 0.8:
            begins = [number + 1 for number, byte in enumerate(text) if byte in b"{,"] or [0]
            at = rng.choice(begins)
            text[at:at] = rng.choice(MEMBERS)
        else:
            end = min(len(text), at + rng.randint(1, 50))
            text[at:at] = text[at:end]
    return pack(bytes(text), data[8 + length :])


def places(node):
    """Yield every container of a JSON value, with a key of it."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in list(pairs):
        yield node, key
        if isinstance(value, (dict, list)):
            yield from places(value)


def mutate_json(rng, data):
    """Change what the header says; sometimes the data with it, or keys twice."""
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        node, key = rng.choice(list(places(header)) or [(header, "a")])
        match rng.randrange(6):
            case 0:
                node[key] = copy.deepcopy(rng.choice(VALUES))
            case 1 if isinstance(node[key], int):
                node[key] = max(0, node[key] + rng.choice((-1, 1, -8, 8)))
            case 2:
                del node[key]
            case 3 if isinstance(node, dict):
                node[rng.choice(["", "z", "__metadata__", "a"])] = copy.deepcopy(node[key])
            case 4 if isinstance(node, dict):
                items = list(node.items())
                rng.shuffle(items)
                node.clear()
                node.update(items)
            case _:
                rest = rest[: rng.randrange(len(rest) + 1)] + bytes(rng.choice((0, 0, 1, 8)))
        if not header:
            break
    text = json.dumps(header, separators=rng.choice([(",", ":"), (", ", ": ")]))
    if rng.random() < 0.1:
        # Two members under one key.
        text = re.sub(
            r'"(b|e|x|shape|eight)"', rng.choice(['"a"', '"dtype"', '"format"', '""']), text
        )
    return pack(text.encode(), rest)


def ours(path):
    try:
        return tensorizer.load(path, "cpu")
    except FormatError as error:
        return str(error)
    except NotImplementedError as error:
        # A type of safetensors that torch has not.
        assert "torch has no dtype for F6" in str(error)
        return str(error)


def theirs(path):
    try:
        return load_file(path)
    except (SafetensorError, TypeError, RuntimeError, OverflowError) as error:
        # The latter are torch's about shapes that it cannot have.
        return str(error)


def duplicates(data):
    """Tell whether a header has a key twice."""
    found = []

    def pairs(items):
        found.extend([key for key, _ in items].count(key) > 1 for key, _ in items)
        return dict(items)

    length = int.from_bytes(data[:8], "little")
    json.loads(data[8 : 8 + length], object_pairs_hook=pairs)
    return any(found)


def compare(path, data):
    """Return how it went; raise where the two disagree without a reason."""
    path.write_bytes(data)
    mine, other = ours(path), theirs(path)
    if isinstance(mine, str):
        assert "defect" not in mine
        assert "hostile.safetensors" in mine or "torch has no dtype" in mine
        if isinstance(other, str):
            return "refused"
        assert duplicates(data) or any(said in mine for said in ONLY_OURS), (mine, data)
        return "stricter"
    assert not isinstance(other, str), (other, data)
    assert set(mine) == set(other), data
    for name, tensor in other.items():
        assert_same(mine[name], tensor)
    return "read"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mutate", [mutate_bytes, mutate_header_text, mutate_json])
def test_the_library_agrees(mutate, seed, tmp_path):
    rng = random.Random(seed)
    outcomes = {"read": 0, "refused": 0, "stricter": 0}
    disagreements = []
    for number in range(COUNT):
        data = mutate(rng, BASES[number % len(BASES)])
        try:
            outcomes[compare(tmp_path / "hostile.safetensors", data)] += 1
        except AssertionError as error:
            disagreements.append(str(error).splitlines()[0])
    assert not disagreements, f"{len(disagreements)} of {COUNT}"
    assert outcomes["read"] > COUNT / 20, outcomes
    assert outcomes["refused"] > COUNT / 4, outcomes


def test_the_files_themselves_are_read(tmp_path):
    for data in BASES:
        assert compare(tmp_path / "hostile.safetensors", data) == "read"
