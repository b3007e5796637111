"""Encrypted files, both ways and against the old package."""

import copy
import pickle

import pytest
import secret_words
import tensorizer
import torch
from conftest import MANIFEST, assert_same, bits, golden_bytes
from processes import run_python
from scripted import FaultServer
from tensorizer import (
    CryptographyError,
    DecryptionParams,
    EncryptionParams,
    TensorDeserializer,
    TensorSerializer,
)
from tensorizer.serialization import HashMismatchError

pytestmark = pytest.mark.device

KEY = bytes(range(32))
MIN = {"opslimit": EncryptionParams.OpsLimit.MIN, "memlimit": EncryptionParams.MemLimit.MIN}
TENSORS = {
    "big": torch.randn(3, 1000, 1000),
    "exact": torch.arange(2 << 20, dtype=torch.uint8),
    **{f"small.{i}": torch.full((i % 7 + 1, 3), float(i)) for i in range(60)},
    "turned": torch.randn(700, 900).T,
    "half": torch.randn(40, 30).to(torch.bfloat16),
    "scalar": torch.tensor(5),
}
#: The old package cannot write these, but reads them.
EMPTY = {"none": torch.empty(0), "none2": torch.empty(2, 0), "meta": torch.zeros(3, device="meta")}


def check(loaded, tensors=TENSORS):
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        wanted = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor
        assert_same(loaded[name].detach(), wanted)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save(TENSORS, path, encryption=EncryptionParams(KEY))
    return path


@pytest.mark.parametrize("manifest", [False, True])
@pytest.mark.parametrize("verify", [False, True, "crc32"])
def test_every_way_of_loading(tmp_path, manifest, verify):
    path = tmp_path / "f.tensors"
    everything = TENSORS | EMPTY
    before = {name: None if t.is_meta else bits(t) for name, t in everything.items()}
    params = EncryptionParams(KEY, manifest=manifest)
    tensorizer.save(everything, path, encryption=params, allow_meta=True)
    for name, tensor in everything.items():
        assert tensor.is_meta or bits(tensor) == before[name], "the caller's memory was touched"
    params = DecryptionParams.from_key(KEY, require_manifest=manifest)
    for readers in (None, 1, 3):
        loaded = TensorDeserializer(
            path, "cpu", encryption=params, num_readers=readers, verify_hash=verify
        )
        check(dict(loaded.items()), everything)
    lazy = TensorDeserializer(path, "cpu", lazy_load=True, encryption=params, verify_hash=verify)
    for name in ("scalar", "big", "small.3"):
        assert_same(lazy[name].detach(), TENSORS[name])
    lazy.close()
    check(tensorizer.load(path, "cpu", encryption=params, verify_hash=verify), everything)


def test_into_a_module(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.BatchNorm1d(1000))
    with TensorSerializer(tmp_path / "m", encryption=EncryptionParams(KEY)) as serializer:
        serializer.write_module(module)
    again = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.BatchNorm1d(1000))
    params = DecryptionParams.from_key(KEY)
    loaded = TensorDeserializer(tmp_path / "m", "cpu", lazy_load=True, encryption=params)
    assert loaded.load_into_module(again) == 7
    for name, tensor in module.state_dict().items():
        assert_same(again.state_dict()[name], tensor)
    loaded = TensorDeserializer(tmp_path / "m", "cpu", encryption=params)
    assert loaded.verify_module(module)[0]


def test_strings(tmp_path):
    path = tmp_path / "f.tensors"
    params = EncryptionParams.from_string("pässword-hu5hw0rd", **MIN)
    tensorizer.save(TENSORS, path, encryption=params)
    check(
        tensorizer.load(path, "cpu", encryption=DecryptionParams.from_string("pässword-hu5hw0rd"))
    )
    check(tensorizer.load(path, "cpu", encryption=DecryptionParams.from_key(params.key)))
    again = EncryptionParams.from_string("pässword-hu5hw0rd", **MIN, salt=params.salt)
    assert again.key == params.key
    assert again == params
    assert EncryptionParams.from_string("pässword-hu5hw0rd", **MIN) != params  # another salt
    with pytest.raises(CryptographyError, match="Tensor decryption failed"):
        tensorizer.load(path, "cpu", encryption=DecryptionParams.from_string("password-hu5hw0rd"))
    latin = DecryptionParams.from_string("pässword-hu5hw0rd", encoding="latin-1")
    with pytest.raises(CryptographyError, match="Tensor decryption failed"):
        tensorizer.load(path, "cpu", encryption=latin)


def test_wrong_uses(tmp_path, path):
    plain = tmp_path / "plain.tensors"
    tensorizer.save({"a": torch.ones(3)}, plain)
    with pytest.raises(CryptographyError, match="not requested"):
        TensorDeserializer(path, "cpu")
    with pytest.raises(CryptographyError, match="is not encrypted"):
        TensorDeserializer(plain, "cpu", encryption=DecryptionParams.from_key(KEY))
    with pytest.raises(CryptographyError, match="Tensor decryption failed"):
        TensorDeserializer(path, "cpu", encryption=DecryptionParams.from_key(bytes(32)))
    with pytest.raises(CryptographyError, match="with a key and not with a passphrase"):
        TensorDeserializer(path, "cpu", encryption=DecryptionParams.from_string("x-hu5hw0rd"))
    with pytest.raises(CryptographyError, match="no manifest"):
        TensorDeserializer(
            path, "cpu", encryption=DecryptionParams.from_key(KEY, require_manifest=True)
        )
    with pytest.raises(ValueError, match="without a key"):
        TensorDeserializer(path, "cpu", encryption=DecryptionParams())
    with pytest.raises(TypeError, match="DecryptionParams"):
        TensorDeserializer(path, "cpu", encryption=KEY)
    with pytest.raises(TypeError, match="EncryptionParams"):
        TensorSerializer(tmp_path / "x", encryption=KEY)
    with pytest.raises(ValueError, match="'crc32'"):
        TensorDeserializer(path, "cpu", verify_hash="sha1")


def test_arguments_of_params():
    for wrong, error in (("k" * 32, TypeError), (b"short", ValueError), (None, TypeError)):
        with pytest.raises(error, match="key"):
            EncryptionParams(wrong)
        with pytest.raises(error, match="key"):
            DecryptionParams.from_key(wrong)
    for given in (KEY.hex().encode(), bytearray(KEY.hex().upper().encode() + b"\n")):
        assert EncryptionParams(given) == EncryptionParams(KEY)
        assert DecryptionParams.from_key(given) == DecryptionParams(given) == DecryptionParams(KEY)
    for wrong, error in (("", ValueError), (b"", ValueError), (5, TypeError)):
        with pytest.raises(error, match="source"):
            EncryptionParams.from_string(wrong)
        with pytest.raises(error, match="source"):
            DecryptionParams.from_string(wrong)
    ops, mem = EncryptionParams.OpsLimit, EncryptionParams.MemLimit
    assert [int(x) for x in ops] == [1, 2, 3, 4]
    assert [int(x) for x in mem] == [8192, 1 << 26, 1 << 28, 1 << 30]
    for arguments in ({"opslimit": mem.MIN}, {"memlimit": ops.MIN}, {"opslimit": "1"}):
        with pytest.raises(TypeError, match="limit"):
            EncryptionParams.from_string("x-hu5hw0rd", **arguments)
    for arguments in ({"opslimit": 0}, {"opslimit": 1 << 32}, {"memlimit": 8191}):
        with pytest.raises(ValueError, match="limit"):
            EncryptionParams.from_string("x-hu5hw0rd", **arguments)
    for salt, error in ((b"x", ValueError), (5, TypeError)):
        with pytest.raises(error, match="salt"):
            EncryptionParams.from_string("x-hu5hw0rd", **MIN, salt=salt)
    assert EncryptionParams.from_string("x-hu5hw0rd", **MIN, salt="s" * 16).salt == b"s" * 16
    random = EncryptionParams.random()
    assert len(random.key) == 32
    assert random != EncryptionParams.random()
    assert random == EncryptionParams(random.key)
    with pytest.raises(ValueError, match="no salt"):
        _ = random.salt
    assert EncryptionParams(bytearray(KEY)).key == KEY
    assert EncryptionParams(memoryview(KEY)).key == KEY


@pytest.mark.host
def test_keys_are_not_shown():
    for params in (
        EncryptionParams(secret_words.key("SECRET")),
        DecryptionParams.from_key(secret_words.key("SECRET")),
        DecryptionParams.from_string("SECRET-hu5hw0rd"),
    ):
        assert "SECRET" not in repr(params) + str(params)


def read_with(params, path):
    with TensorDeserializer(path, "cpu", encryption=params) as file:
        assert torch.equal(file["a"], torch.ones(3))


#: Opens a file with pickled parameters.
OPENING = """
import pickle, sys
import tensorizer, torch
with open(sys.argv[1], "rb") as file:
    params = pickle.load(file)
assert torch.equal(tensorizer.load(sys.argv[2], "cpu", encryption=params)["a"], torch.ones(3))
print(type(params).__module__)
"""


@pytest.mark.parametrize("kind", ["key", "string"])
def test_params_are_copied_and_go_to_other_processes(tmp_path, kind):
    if kind == "key":
        params = EncryptionParams(KEY, manifest=True)
        opening = DecryptionParams.from_key(KEY, require_manifest=True)
    else:
        params = EncryptionParams.from_string(
            "x-hu5hw0rd", opslimit=1, memlimit=1 << 20, manifest=True
        )
        opening = DecryptionParams.from_string("x-hu5hw0rd", require_manifest=True, max_opslimit=1)
    path = tmp_path / "f.tensors"
    for same in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert same == params
        # The passphrase opens it: how the key was derived went along.
        tensorizer.save({"a": torch.ones(3)}, path, encryption=same)
        read_with(copy.deepcopy(opening), path)
    assert copy.deepcopy(opening) == opening == pickle.loads(pickle.dumps(opening))
    assert opening != DecryptionParams.from_string("another-hu5hw0rd")
    unlimited = EncryptionParams.from_string(
        "x-hu5hw0rd", opslimit=2, memlimit=1 << 20, manifest=True
    )
    tensorizer.save({"a": torch.ones(3)}, tmp_path / "g", encryption=unlimited)
    if kind == "string":
        with pytest.raises(CryptographyError, match="is allowed"):
            read_with(pickle.loads(pickle.dumps(opening)), tmp_path / "g")
    (tmp_path / "params").write_bytes(pickle.dumps(opening))
    done = run_python(OPENING, tmp_path / "params", path)
    assert done.stdout.split() == ["tensorizer"], done.stderr


def test_limits_of_a_file(tmp_path):
    path = tmp_path / "f.tensors"
    params = EncryptionParams.from_string("x-hu5hw0rd", opslimit=2, memlimit=1 << 20)
    tensorizer.save({"a": torch.ones(3)}, path, encryption=params)
    for limits in ({"max_opslimit": 1}, {"max_memlimit": 1 << 19}):
        with pytest.raises(CryptographyError, match="is allowed"):
            tensorizer.load(
                path, "cpu", encryption=DecryptionParams.from_string("x-hu5hw0rd", **limits)
            )
    tensorizer.load(
        path, "cpu", encryption=DecryptionParams.from_string("x-hu5hw0rd", max_opslimit=2)
    )


def test_damage(path):
    data = bytearray(path.read_bytes())
    data[-200_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CryptographyError, match="Tensor decryption failed"):
        tensorizer.load(path, "cpu", encryption=DecryptionParams.from_key(KEY))


def test_a_wrong_key_is_found_before_everything_is_downloaded(path):
    data = path.read_bytes()
    with FaultServer(data) as server:
        with pytest.raises(CryptographyError, match="Tensor decryption failed"):
            tensorizer.load(server.url, "cpu", encryption=DecryptionParams.from_key(bytes(32)))
        assert server.sent < len(data) / 4
        check(tensorizer.load(server.url, "cpu", encryption=DecryptionParams.from_key(KEY)))
    with FaultServer(data, ranges=False) as server:
        check(tensorizer.load(server.url, "cpu", encryption=DecryptionParams.from_key(KEY)))


def test_crc32_finds_damage(tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save(TENSORS, path)
    check(tensorizer.load(path, "cpu", verify_hash="crc32"))
    data = bytearray(path.read_bytes())
    at = data.index(TENSORS["big"].numpy().tobytes()[:64])
    for where in (at + 10_000_000, data.index(TENSORS["small.5"].numpy().tobytes())):
        wrong = bytearray(data)
        wrong[where] ^= 1
        path.write_bytes(wrong)
        with pytest.raises(HashMismatchError, match="CRC32"):
            tensorizer.load(path, "cpu", verify_hash="crc32")


@pytest.mark.host
def test_golden_files():
    """Encrypted files that old releases wrote, or could read, load with each key and passphrase."""
    files = [
        f
        for f in MANIFEST["files"]
        if f["category"] in ("valid", "handmade") and ("key_hex" in f or "passphrase" in f)
    ]
    assert len(files) >= 20
    for file in files:
        ways = []
        if "key_hex" in file:
            ways.append(DecryptionParams.from_key(bytes.fromhex(file["key_hex"])))
        if "passphrase" in file:
            ways.append(DecryptionParams.from_string(file["passphrase"]))
        if "passphrase_hex" in file:
            ways.append(DecryptionParams.from_string(bytes.fromhex(file["passphrase_hex"])))
        import io

        for way in ways:
            source = io.BytesIO(golden_bytes(file))
            loaded = TensorDeserializer(
                source, "cpu", lazy_load=True, encryption=way, verify_hash=True
            )
            short = "1024" in file.get("how", "")  # pieces that no release writes
            refused = []
            for name in loaded:
                try:
                    if name not in file.get("lazy_only", []):
                        loaded[name]
                except CryptographyError as error:
                    assert "in pieces of 1024 bytes: expected one piece" in str(error)
                    refused.append(name)
            assert bool(refused) == short
            loaded.close()


@pytest.mark.host
@pytest.mark.parametrize(
    ("opslimit", "memlimit"),
    [
        # Both at once would take many times longer, and test no more.
        pytest.param(
            EncryptionParams.OpsLimit.SENSITIVE, EncryptionParams.MemLimit.MIN, id="passes"
        ),
        # Fills a gigabyte.
        pytest.param(
            EncryptionParams.OpsLimit.MIN,
            EncryptionParams.MemLimit.SENSITIVE,
            id="memory",
            marks=pytest.mark.long,
        ),
    ],
)
def test_sensitive(tmp_path, opslimit, memlimit):
    """With all the passes, and with all the memory, of the strongest preset."""
    params = EncryptionParams.from_string("x-hu5hw0rd", opslimit, memlimit)
    tensorizer.save({"a": torch.ones(3)}, tmp_path / "f", encryption=params)
    loaded = tensorizer.load(
        tmp_path / "f", "cpu", encryption=DecryptionParams.from_string("x-hu5hw0rd")
    )
    assert_same(loaded["a"], torch.ones(3))


READ = """
from tensorizer import DecryptionParams
p = DecryptionParams.from_key(args[1]) if isinstance(args[1], bytes) else \
    DecryptionParams.from_string(args[1])
d = tensorizer.TensorDeserializer(args[0], device="cpu", encryption=p, verify_hash=True)
views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
return {n: d[n].detach().reshape(-1).view(views[d[n].element_size()]).numpy().tobytes()
        for n in d.keys()}
"""


@pytest.mark.host
@pytest.mark.parametrize("manifest", [False, True])
@pytest.mark.parametrize("secret", [KEY, "words-hu5hw0rd"], ids=["key", "string"])
def test_the_old_package_reads_it(tmp_path, old, secret, manifest):
    path = tmp_path / "f.tensors"
    if isinstance(secret, bytes):
        params = EncryptionParams(secret, manifest=manifest)
    else:
        params = EncryptionParams.from_string(secret, **MIN, manifest=manifest)
    tensorizer.save(TENSORS | EMPTY, path, encryption=params, allow_meta=True)
    read = old(READ, str(path), secret)
    for name, tensor in TENSORS.items():
        assert read[name] == bits(tensor)
    assert read["none2"] == b""


@pytest.mark.host
def test_the_old_package_wrote_it(tmp_path, old):
    path = tmp_path / "f.tensors"
    for secret in (KEY, "words-hu5hw0rd"):
        old(
            """
from tensorizer import EncryptionParams
e = EncryptionParams
p = e(args[1]) if isinstance(args[1], bytes) else \
    e.from_string(args[1], opslimit=e.OpsLimit.MIN, memlimit=e.MemLimit.MIN)
s = tensorizer.TensorSerializer(args[0], encryption=p)
s.write_state_dict({k: torch.from_numpy(v) for k, v in args[2].items()})
s.close()
""",
            str(path),
            secret,
            {k: t.clone().numpy() for k, t in TENSORS.items() if t.dtype != torch.bfloat16},
        )
        make = (
            DecryptionParams.from_key
            if isinstance(secret, bytes)
            else (DecryptionParams.from_string)
        )
        loaded = tensorizer.load(path, "cpu", encryption=make(secret), verify_hash=True)
        for name, tensor in loaded.items():
            assert_same(tensor, TENSORS[name].contiguous())


@pytest.mark.host
def test_memory_while_encrypting(tmp_path):
    code = (
        "import sys, tensorizer, torch\n"
        "def peak(): return next(int(l.split()[1]) for l in open('/proc/self/status')"
        " if l.startswith('VmHWM')) << 10\n"
        # Each is larger than what saving may take.
        "t = {str(i): torch.ones(20_000_000) for i in range(2)}\n"
        "e = tensorizer.EncryptionParams.random()\nbefore = peak()\n"
        "tensorizer.save(t, sys.argv[1], encryption=e)\nprint(peak() - before)\n"
    )
    done = run_python(code, tmp_path / "f")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 << 20


ops = torch.ops.tensorizer
KEY_TENSOR = torch.tensor(list(KEY), dtype=torch.uint8)


@pytest.fixture
def saved(tmp_path):
    path = str(tmp_path / "op.tensors")
    ops.save(path, {"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(5)}, key=KEY_TENSOR)
    return path


@pytest.mark.host
def test_operators(saved):
    loaded = tensorizer.load(saved, "cpu", encryption=DecryptionParams.from_key(KEY))
    assert_same(loaded["b"], torch.arange(5))
    assert_same(ops.load(saved, key=KEY_TENSOR)["b"], torch.arange(5))
    assert_same(ops.load(saved, ["b"], key=KEY_TENSOR, verify=True)[0], torch.arange(5))
    out = [torch.zeros(5, dtype=torch.int64)]
    ops.load(saved, ["b"], out, key=KEY_TENSOR)
    assert_same(out[0], torch.arange(5))
    out[0].zero_()
    ops.load(saved, "b", out[0], key=KEY_TENSOR)
    assert_same(out[0], torch.arange(5))
    ops.save(saved, ["c"], [torch.ones(2)], key=KEY_TENSOR)
    assert ops.names(saved) == ["c"]
    with pytest.raises(RuntimeError, match="Tensor is encrypted"):
        ops.load(saved)
    with pytest.raises(RuntimeError, match="Tensor decryption failed"):
        ops.load(saved, key=torch.zeros(32, dtype=torch.uint8))
    for wrong in (torch.zeros(31, dtype=torch.uint8), torch.zeros(32)):
        with pytest.raises((RuntimeError, ValueError), match="uint8 tensor of 32 elements"):
            ops.load(saved, key=wrong)


@pytest.mark.host
def test_torchscript(saved):
    @torch.jit.script
    def both(path: str, key: torch.Tensor):
        out = torch.zeros(5, dtype=torch.int64)
        torch.ops.tensorizer.load_(path, ["b"], [out], key=key)
        return torch.ops.tensorizer.load(path, key=key)["a"], out

    a, b = both(saved, KEY_TENSOR)
    assert_same(a, torch.arange(12.0).reshape(3, 4))
    assert_same(b, torch.arange(5))
    assert "3.14" not in str(both.graph)


@pytest.mark.host
def test_compile_and_export(saved, tmp_path):
    copied = str(tmp_path / "copy.tensors")

    def both(key, out):
        ops.load(saved, ["b"], [out], key=key)
        ops.save(copied, ["x"], [out], key=key)
        return ops.load(saved, key=key)["a"]

    torch._dynamo.reset()
    for compiled in (torch.compile(both, fullgraph=True), None):
        run = compiled
        out = torch.zeros(5, dtype=torch.int64)
        if run is None:
            module = torch.nn.Module()
            module.forward = both
            program = torch.export.export(module, (KEY_TENSOR.clone(), out.clone()))
            # The key is an argument: the program holds none.
            assert not program.constants
            assert not program.state_dict
            run = program.module()
        assert_same(run(KEY_TENSOR, out), torch.arange(12.0).reshape(3, 4))
        assert_same(out, torch.arange(5))
        again = ops.load(copied, key=KEY_TENSOR)
        assert_same(again["x"], torch.arange(5))
        with pytest.raises(RuntimeError, match="Tensor decryption failed"):
            run(torch.zeros(32, dtype=torch.uint8), out)


def test_a_manifest_of_a_file_without_data_needs_the_key_itself(tmp_path):
    params = EncryptionParams.from_string("words-hu5hw0rd", manifest=True)
    tensorizer.save({"a": torch.empty(0)}, tmp_path / "f", encryption=params)
    by_words = DecryptionParams.from_string("words-hu5hw0rd", require_manifest=True)
    with pytest.raises(CryptographyError, match="no tensor has data; give the key itself"):
        tensorizer.load(tmp_path / "f", encryption=by_words)
    by_key = DecryptionParams.from_key(params.key, require_manifest=True)
    assert list(tensorizer.load(tmp_path / "f", encryption=by_key)) == ["a"]
