"""Malformed files of safetensors: those that its library refuses are refused."""

import io
import json
import struct

import pytest
import tensorizer
import torch
from packing import FILES, feeding, info, pack
from processes import run_python
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from scripted import FaultServer
from tensorizer import FormatError, TensorDeserializer, TruncatedError

ops = torch.ops.tensorizer

GOOD = pack({"a": info()}, b"1234")
#: Longer than any header that is read.
TOO_LONG = 100_000_001


def header(text, data=b"1234"):
    return pack(text.encode() if isinstance(text, str) else text, data)


def one(data=b"1234", **fields):
    """Return a file with a tensor `a`, some of whose fields are other JSON, or left out."""
    written = {"dtype": '"U8"', "shape": "[4]", "data_offsets": "[0,4]"} | fields
    pairs = (f'"{name}":{text}' for name, text in written.items() if text is not None)
    return header('{"a":{' + ",".join(pairs) + "}}", data)


def tensor(text):
    """Return a file with a tensor `a` that is described by other JSON."""
    return header('{"a":' + text + "}")


def with_length(length, rest=GOOD[8:]):
    return struct.pack("<Q", length) + rest


def two(first, second, data):
    return pack({"a": info("U8", [first[1] - first[0]], *first),
                 "b": info("U8", [second[1] - second[0]], *second)}, data)  # fmt: skip


#: By the defect: the file, and a part of the message.
MALFORMED = {
    "empty": (b"", "an empty file"),
    "a byte": (b"\x08", "no format that tensorizer reads"),
    "half a length": (GOOD[:4], "no format that tensorizer reads"),
    "a length alone": (GOOD[:8], "no format that tensorizer reads"),
    "length 0": (with_length(0), "expected a safetensors header|at least|EOF|no format"),
    "length 1": (with_length(1), "safetensors header"),
    "length one less": (with_length(len(GOOD) - 13), "safetensors header"),
    "length one more": (with_length(len(GOOD) - 11), "safetensors header: trailing characters"),
    "length of the file": (with_length(len(GOOD)), "truncated: the safetensors header needs bytes"),
    "length beyond the file": (with_length(5_000), "truncated: the safetensors header needs bytes"),
    "length beyond 100 MB": (
        with_length(TOO_LONG), "at most 100000000 bytes, found one of 100000001"),
    "length 2^39": (with_length(1 << 39), "at most 100000000 bytes, found one of 549755813888"),
    "length 2^40": (with_length(1 << 40), "no format that tensorizer reads"),
    "length 2^63": (with_length(1 << 63), "no format that tensorizer reads"),
    "length 2^64-1": (with_length((1 << 64) - 1), "no format that tensorizer reads"),
    "not UTF-8": (header(b'{"\xff":' + json.dumps(info()).encode() + b"}"), "UTF-8|unicode"),
    "not UTF-8 in what is ignored": (one(x='"X"')
                                     .replace(b'"X"', b'"\xc3"'), "UTF-8|unicode"),
    "surrogates": (header('{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'), "header"),
    "surrogates in what is ignored": (
        one(x='"\\ud800"'), "header"),
    "no JSON": (header(b"{this is no JSON}"), "safetensors header: key must be a string"),
    "JSON cut off": (header('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'), "header: EOF"),
    "a comma too many": (header('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},}'), "comma"),
    "a list": (header("[]"), "no format that tensorizer reads"),
    "a string": (header('"a"'), "no format that tensorizer reads"),
    "null": (header("null"), "no format that tensorizer reads"),
    "a byte order mark": (header(b"\xef\xbb\xbf" + GOOD[8:-4]), "no format that tensorizer reads"),
    "garbage after the header": (header(GOOD[8:-4] + b"}"), "header: trailing characters"),
    "zeros after the header": (header(GOOD[8:-4] + b"\0\0\0"), "header: trailing characters"),
    "another object": (header(GOOD[8:-4] + b"{}"), "header: trailing characters"),
    "comments": (header('{/*x*/"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'), "header: "),
    "NaN": (one(x='NaN'), "header: expected value"),
    "a number that is too large": (
        one(x='1e999'), "out of range"),
    "a hole": (
        two((0, 2), (3, 4), b"1234"), "`b`: expected its data from byte 2.*found 3 to 4.*hole"),
    "a hole at the beginning": (pack({"a": info("U8", [3], 1, 4)}, b"1234"), "from byte 0.*1 to 4"),
    "an overlap": (
        two((0, 3), (2, 4), b"1234"), "`b`: expected its data from byte 3.*found 2 to 4"),
    "the same data": (two((0, 4), (0, 4), b"1234"), "expected its data from byte 4.*found 0 to 4"),
    "offsets that are reversed": (pack({"a": info("U8", [4], 4, 0)}, b"1234"), "found 4 to 0"),
    "reversed, of nothing": (
        pack({"a": info("U8", [0], 4, 0), "b": info()}, b"1234"), "tensor `[ab]`"),
    "offsets beyond the file": (pack({"a": info("U8", [9], 0, 9)}, b"1234"),
                                "end.* at byte|truncated"),
    "offsets far beyond the file": (pack({"a": info("U8", [2**62], 0, 2**62)}, b"1234"),
                                    "end.* at byte|truncated|data at byte"),
    "offsets of 2^64-1": (pack({"a": info("U8", [2**64 - 1], 0, 2**64 - 1)}, b"1234"), "too large"),
    "offsets that wrap round": (two((0, 4), (4, 2**64 - 1), b"1234"), "tensor `b`.*too large"),
    "bytes after the data": (GOOD + b"5", "expected the file to end.* at byte .*found"),
    "bytes after no data": (pack({}, b"5"), "expected the file to end.* at byte .*found"),
    "a polyglot": (GOOD + b"PK\x05\x06" + bytes(18), "expected the file to end"),
    "no data": (GOOD[:-4], "end.* at byte|truncated"),
    "more bytes than elements": (pack({"a": info("U8", [3])}, b"1234"),
                                 r"`a`: expected 3 bytes of data for shape \[3\].*found 4"),
    "fewer bytes than elements": (
        pack({"a": info("I16", [3])}, b"1234"), "expected 6 bytes.*found 4"),
    "bytes of an empty tensor": (
        pack({"a": info("U8", [0])}, b"1234"), "expected 0 bytes.*found 4"),
    "a scalar without data": (pack({"a": info("U8", [], 0, 0)}), "expected 1 bytes.*found 0"),
    "a shape that overflows": (pack({"a": info("U8", [2**32, 2**32], 0, 0)}), "too large"),
    "a size that overflows": (pack({"a": info("I64", [2**61], 0, 0)}), "too large"),
    "an overflow before a zero": (pack({"a": info("U8", [2**33, 2**33, 0], 0, 0)}), "too large"),
    "a negative dimension": (one(shape='[-4]'), "integer `-4`"),
    "a dimension of -0": (one(b"", shape='[-0]', data_offsets='[0,0]'), "header: "),
    "a dimension of 4.0": (one(shape='[4.0]'), "point `4.0`"),
    "a dimension of 4e0": (one(shape='[4e0]'), "header: "),
    "a dimension of 2^64": (one(shape='[18446744073709551616]'),
                            "header: invalid type"),
    "a dimension of text": (one(shape='["4"]'), "header: "),
    "a shape of a number": (one(shape='4'), "dimensions"),
    "a shape of null": (one(shape='null'), "dimensions"),
    "a negative offset": (one(data_offsets='[-1,3]'), "header: "),
    "a fraction of an offset": (one(data_offsets='[0.5,4]'), "header: "),
    "one offset": (one(data_offsets='[4]'), "header: invalid length"),
    "three offsets": (one(data_offsets='[0,4,4]'), "header: "),
    "an unknown dtype": (one(dtype='"F128"'), "F128"),
    "a dtype in other letters": (one(dtype='"u8"'), "u8"),
    "a dtype of ours": (one(dtype='"torch.uint8"'), "torch.uint8"),
    "an empty dtype": (one(dtype='""'), "dtype"),
    "a dtype of a number": (one(dtype='8'), "header: "),
    "half a byte of F4": (one(b"1", dtype='"F4"', shape='[]', data_offsets='[0,1]'), "F4"),
    "half a byte of F4 more": (one(b"12", dtype='"F4"', shape='[3]', data_offsets='[0,2]'), "F4"),
    "an odd row of F4": (one(b"123", dtype='"F4"', shape='[2,3]', data_offsets='[0,3]'), "F4"),
    "an odd row of no F4": (one(b"", dtype='"F4"', shape='[0,3]', data_offsets='[0,0]'), "F4"),
    "half a byte of F6": (one(b"1", dtype='"F6_E2M3"', shape='[1]', data_offsets='[0,1]'), "F6"),
    "no dtype": (one(dtype=None), "missing field `dtype`"),
    "no shape": (one(shape=None), "missing field `shape`"),
    "no offsets": (one(data_offsets=None), "missing field `data_offsets`"),
    "a tensor of null": (tensor("null"), "header: invalid type: null"),
    "a tensor of text": (tensor('"U8"'), "header: invalid type: string"),
    "a tensor of nothing": (tensor("{}"), "missing field"),
    "a tensor twice": (header('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
                              '"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}'), "`?a`?"),
    "a dtype twice": (one(dtype='"U8","dtype":"U8"'), "duplicate"),
    "a shape twice": (one(shape='[4],"shape":[4]'), "duplicate"),
    "offsets twice": (one(shape='[4],"data_offsets":[0,4]'),
                      "duplicate"),
    "metadata twice": (header('{"__metadata__":{},"__metadata__":{}}', b""), "duplicate field"),
    "metadata of null twice": (
        header('{"__metadata__":null,"__metadata__":null}', b""), "duplicate"),
    "metadata of numbers": (pack({"__metadata__": {"a": 1}}), "header: invalid type"),
    "metadata of null in it": (pack({"__metadata__": {"a": None}}), "header: invalid type"),
    "metadata of objects": (pack({"__metadata__": {"a": {}}}), "header: invalid type"),
    "metadata of a list": (pack({"__metadata__": [["a", "b"]]}), "expected an object of strings"),
    "metadata of text": (pack({"__metadata__": "a"}), "expected an object of strings"),
    "metadata of a tensor": (pack({"__metadata__": info()}, b"1234"), "header: invalid type"),
    "deep lists": (header('{"a":' + "[" * 10_000 + "]" * 10_000 + "}"), "header: "),
    "deep lists that do not end": (header('{"a":' + "[" * 10_000), "header: "),
    "deep objects": (header('{"a":' * 10_000 + "1" + "}" * 10_000), "header: "),
    "deep metadata": (header('{"__metadata__":' + '{"a":' * 10_000 + "}" * 10_001), "header: "),
    "depth in what is ignored": (one(x="[" * 10_000 + "]" * 10_000), "recursion limit"),
    "a long dtype": (one(dtype='"' + "F" * 5_000 + '"'), "dtype"),
    "a long string": (tensor('"' + "F" * 5_000 + '"'), "header: invalid type: string"),
    "a long field": (one(dtype=None, **{"F" * 5_000: '"U8"'}), "missing field `dtype`"),
}  # fmt: skip

#: Files that the library reads and we refuse: a part of the message, and the reason.
STRICTER = {
    "white space before the header": (
        header(b" " + GOOD[8:-4]), "no format that tensorizer reads",
        "the format has a header begin with a brace, by which it is told from other files"),
    "a tensor twice, the same": (
        header('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
               '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'), "tensor `a`",
        "the format forbids duplicate keys; parsers disagree which of them counts"),
    "an empty tensor twice": (
        header('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
               '"a":{"dtype":"F64","shape":[0],"data_offsets":[0,0]}}', b""), "`?a`?",
        "the format forbids duplicate keys"),
    "a key of the metadata twice": (
        header('{"__metadata__":{"a":"b","a":"c"}}', b""), "`a` comes twice",
        "the format forbids duplicate keys"),
    "65 dimensions": (
        pack({"a": info("U8", [1] * 65, 0, 1)}, b"1"), "at most 64 dimensions",
        "torch and numpy compute with 64 at most"),
    "an overflow after a zero": (
        pack({"a": info("U8", [0, 2**33, 2**33], 0, 0)}), "too large",
        "torch cannot compute the strides"),
    "a dtype as an object": (
        one(dtype='{"U8":null}'), "header: invalid type: map",
        "the format has dtypes as strings"),
    "a name of 65,536 bytes": (
        pack({"ab" * 32_768: info()}, b"1234"), "at most 65535 bytes, found 65536",
        "a .tensors file could not hold it"),
}  # fmt: skip


def write(tmp_path, data):
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(data)
    return path


def refused(call, said, path):
    with pytest.raises(FormatError, match=said) as info:
        call()
    text = str(info.value)
    assert str(path) in text
    assert len(text) < 1000
    assert "defect" not in text
    assert text.isprintable()


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case, tmp_path):
    data, said = MALFORMED[case]
    path = write(tmp_path, data)
    with pytest.raises(SafetensorError):
        load_file(path)
    refused(lambda: tensorizer.load(path, "cpu"), said, path)
    refused(lambda: TensorDeserializer(path, "cpu", lazy_load=True), said, path)
    with pytest.raises(FormatError, match=said):
        tensorizer.load(io.BytesIO(data), "cpu")
    with pytest.raises(RuntimeError, match=said):
        ops.names(str(path))


@pytest.mark.parametrize("case", STRICTER)
def test_stricter(case, tmp_path):
    data, said, _reason = STRICTER[case]
    path = write(tmp_path, data)
    with safe_open(path, "pt"):
        pass
    refused(lambda: tensorizer.load(path, "cpu"), said, path)


#: Defects that show only if the size of the file is known.
NEED_A_SIZE = ("bytes after the data", "bytes after no data", "a polyglot",
               "offsets far beyond the file")  # fmt: skip


@pytest.mark.parametrize("case", [case for case in MALFORMED if case not in NEED_A_SIZE])
def test_malformed_in_a_pipe(case):
    data, _ = MALFORMED[case]
    with feeding(data) as number:
        with pytest.raises(FormatError) as info:
            tensorizer.load(number, "cpu")
    assert "descriptor" in str(info.value)


def test_the_longest_names(tmp_path):
    name = "ab" * 32_767
    path = write(tmp_path, pack({name: info()}, b"1234"))
    assert list(tensorizer.load(path, "cpu")) == [name]


# Files that end too early


def cuts(data):
    begin = 8 + int.from_bytes(data[:8], "little")
    return sorted({*range(9, 100), *range(9, begin, 97), begin - 1, begin, begin + 1,
                   *range(begin, len(data), 131), len(data) - 1})  # fmt: skip


def test_every_truncation(tmp_path):
    data = FILES["dtypes"]
    for cut in cuts(data):
        path = write(tmp_path, data[:cut])
        for source in (path, io.BytesIO(data[:cut])):
            with pytest.raises(TruncatedError) as info:
                tensorizer.load(source, "cpu")
            assert isinstance(info.value, OSError), cut
        with pytest.raises(TruncatedError):
            TensorDeserializer(path, "cpu", lazy_load=True, mmap=True)


def test_truncations_of_pipes():
    data = FILES["dtypes"]
    for cut in cuts(data)[::5]:
        with feeding(data[:cut]) as number:
            with pytest.raises(TruncatedError):
                tensorizer.load(number, "cpu")


@pytest.mark.parametrize("ranges", [True, False])
def test_truncations_of_servers(ranges, no_settings_of_the_machine):
    data = FILES["dtypes"]
    for cut in cuts(data)[::20]:
        with FaultServer(data[:cut], ranges=ranges) as server:
            with pytest.raises(TruncatedError):
                tensorizer.load(server.url, "cpu")


def test_a_file_that_becomes_shorter(tmp_path):
    path = write(tmp_path, FILES["dtypes"])
    with TensorDeserializer(path, "cpu", lazy_load=True) as file:
        with path.open("r+b") as other:
            other.truncate(path.stat().st_size - 5)
        with pytest.raises(TruncatedError, match="hostile.safetensors"):
            file["F8_E8M0.scalar"]


# Bombs


BOMB = """
import ctypes, sys, tensorizer
def measured(what):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(what)) << 10
for source in sys.argv[1:] or [0]:
    ctypes.CDLL(None).malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")
    before = measured("VmRSS")
    try:
        outcome = len(tensorizer.load(source, "cpu"))
    except tensorizer.FormatError as error:
        outcome = "refused" if len(str(error)) < 1000 else "refused at length"
    print(outcome, measured("VmHWM") - before, sep=",")
"""

#: A header of some megabytes, what becomes of it, and how often its bytes it may take in memory:
#: twice while it is read, and what was understood of it.
BOMBS = {
    "lists": (lambda: b'{"a":' + b"[" * 8_000_000, "refused", 3),
    "objects": (lambda: b'{"a":' * 2_000_000, "refused", 3),
    "a name": (lambda: b'{"' + b"a" * 8_000_000 + b'":' + GOOD[13:-4], "refused", 4),
    "escapes in a name": (lambda: b'{"' + b"\\n" * 4_000_000 + b'":' + GOOD[13:-4], "refused", 5),
    "a string": (lambda: b'{"a":"' + b"a" * 8_000_000 + b'"}', "refused", 3),
    "dimensions": (
        lambda: b'{"a":{"shape":[' + b"1," * 4_000_000 + b'1],"dtype":"U8","data_offsets":[0,1]}}',
        "refused", 3),
    "a dtype": (
        lambda: b'{"a":{"dtype":"' + b"\\n" * 4_000_000 + b'","shape":[],"data_offsets":[0,1]}}',
        "refused", 5),
    "metadata": (
        lambda: b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(500_000)) + b"}}",
        "0", 30),
    "empty objects": (
        lambda: b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":['
        + b"{}," * 2_500_000 + b"{}]}}", "1", 3),
    "tensors": (
        lambda: b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i
                                 for i in range(150_000)) + b"}", "150000", 20),
    "the same tensor": (
        lambda: b"{" + b",".join([b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'] * 150_000)
        + b"}", "refused", 12),
    "white space": (lambda: b"{" + b" " * 8_000_000 + b"}", "0", 3),
}  # fmt: skip


def test_bombs_take_bounded_memory(tmp_path):
    sizes = {}
    for name, (make, _, _) in BOMBS.items():
        (tmp_path / name).write_bytes(pack(make()))
        sizes[name] = (tmp_path / name).stat().st_size
    done = run_python(BOMB, *(tmp_path / name for name in BOMBS), timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {}
    for name, line in zip(BOMBS, done.stdout.splitlines(), strict=True):
        outcome, growth = line.split(",")
        _, expected, most = BOMBS[name]
        if outcome != expected or int(growth) > most * sizes[name] + (8 << 20):
            found[name] = (outcome, int(growth) / sizes[name])
    assert not found


def test_a_length_that_is_not_there_takes_no_memory():
    """A pipe or a server may claim any length."""
    with feeding(with_length(99_000_000)) as number:
        done = run_python(BOMB, timeout=60, stdin=number)
    assert done.returncode == 0, done.stderr[-2000:]
    outcome, growth = done.stdout.split(",")
    assert outcome == "refused"
    assert int(growth) < 16 << 20


def test_a_sparse_file_with_a_header_that_is_too_long(tmp_path):
    path = tmp_path / "hostile.safetensors"
    with path.open("wb") as file:
        file.write(with_length(TOO_LONG))
        file.truncate(1 << 40)
    refused(lambda: tensorizer.load(path, "cpu"), "at most 100000000 bytes", path)
