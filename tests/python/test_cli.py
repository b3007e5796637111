"""The command ``tensorizer``."""

import json
import os
import re
import threading
from pathlib import Path

import pytest
import tensorizer
import torch
from conftest import assert_same
from tensorizer import DecryptionParams, TensorSerializer
from tensorizer_cli.main import main

TENSORS = {
    "big": torch.randn(300, 1000),
    "half": torch.randn(4, 5).to(torch.bfloat16),
    "meta": torch.zeros(3, 2, device="meta"),
    "empty": torch.empty(0, 7),
    "scalar": torch.tensor(5),
}
KEY = bytes(range(32))


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "f.tensors")
    tensorizer.save(TENSORS, path, allow_meta=True)
    return path


def run(*arguments):
    return main([str(argument) for argument in arguments])


def test_ls(path, capsys):
    assert run("ls", path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "dtype", "shape", "bytes", "type"]
    assert lines[1].split() == ["big", "float32", "[300,", "1000]", "1,200,000", "state_dict"]
    assert lines[-1] == "5 tensors, 1.2 MB, data version 4"


def test_cp_keeps_everything(tmp_path, path, capsys):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    original = str(tmp_path / "m.tensors")
    with TensorSerializer(original) as serializer:
        serializer.write_module(module)
    copied, again = str(tmp_path / "copy.tensors"), str(tmp_path / "again.tensors")
    for source in (original, path):
        assert run("cp", source, copied) == 0
        assert run("cp", copied, again) == 0
        assert Path(again).read_bytes() == Path(copied).read_bytes()
        assert run("diff", source, copied) == 0
        assert "the same" in capsys.readouterr().out
    # That of a serializer has room in its index for more tensors.
    assert os.path.getsize(copied) == os.path.getsize(path)
    assert run("cp", original, copied) == 0
    assert os.path.getsize(copied) < os.path.getsize(original) - 200_000
    assert run("cp", "--alignment", 1, path, copied) == 0
    assert os.path.getsize(copied) < os.path.getsize(path)
    assert run("diff", path, copied) == 0


def test_diff(tmp_path, path, capsys):
    other = str(tmp_path / "g.tensors")
    changed = TENSORS["big"].clone()
    changed[7, 7] = 0
    tensors = {
        "big": changed,
        "half": TENSORS["half"].float(),
        "meta": torch.zeros(3, 2),
        "x": changed,
    }
    tensorizer.save(tensors, other)
    assert run("diff", path, other) == 1
    out = capsys.readouterr().out
    assert re.search(r"big: [34] of 1,200,000 bytes differ", out)
    assert "half: bfloat16 [4, 5] and float32 [4, 5]" in out
    assert f"meta: only {other} has data" in out
    assert f"only in {path}: scalar" in out
    assert f"only in {other}: x" in out
    assert out.endswith("6 differences\n")
    # Lines are in the order of the file; tensors of the other one only come last.
    places = [line.removeprefix("only in ").split(":")[0] for line in out.splitlines()[:-1]]
    assert places == ["big", "half", "meta", path, path, other]


def test_verify(path, capsys):
    assert run("verify", path) == 0
    assert "5 of 5" in capsys.readouterr().out
    with open(path, "r+b") as file:
        file.seek(-100_000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-100_000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    assert run("verify", path) == 1
    out = capsys.readouterr().out
    assert "'big' failed" in out
    assert "4 of 5" in out


def test_encryption(tmp_path, path, capsys, monkeypatch):
    (tmp_path / "key").write_bytes(KEY)
    monkeypatch.setenv("HEX_KEY", KEY.hex())
    monkeypatch.setenv("WORDS", "some words-hu5hw0rd")
    sealed, again, plain = (str(tmp_path / name) for name in ("sealed", "again", "plain"))
    assert run("encrypt", "--key-file", tmp_path / "key", "--manifest", path, sealed) == 0
    assert run("ls", sealed) == 0
    assert "encrypted" in capsys.readouterr().out
    params = DecryptionParams.from_key(KEY, require_manifest=True)
    assert_same(tensorizer.load(sealed, "cpu", encryption=params)["big"], TENSORS["big"])
    assert run("verify", "--key-env", "HEX_KEY", "--require-manifest", sealed) == 0
    assert run("rekey", "--key-env", "HEX_KEY", "--new-passphrase-env", "WORDS", sealed, again) == 0
    assert run("decrypt", "--passphrase-env", "WORDS", again, plain) == 0
    assert run("diff", path, plain) == 0
    with open(path, "rb") as one, open(plain, "rb") as other:
        assert one.read() == other.read()
    capsys.readouterr()
    for wrong, text in (
        (("decrypt", "--key-env", "HEX_KEY", again, plain), "decryption failed"),
        (("decrypt", "--require-manifest", "--passphrase-env", "WORDS", again, plain), "manifest"),
        (("decrypt", again, plain), "missing"),
        (("encrypt", path, sealed), "missing"),
        (("cp", again, plain), "decryption was not requested"),
        (("encrypt", "--key-env", "NOTHING", path, sealed), "NOTHING is not set"),
        (("encrypt", "--key-env", "WORDS", path, sealed), "32 bytes or 64"),
        (("encrypt", "--key-env", "WORDS", "--prompt", path, sealed), "only one of"),
    ):
        assert run(*wrong) == 2, wrong
        error = capsys.readouterr().err
        assert text in error
        assert "some words-hu5hw0rd" not in error
    # Commands that failed left the target as it was.
    assert run("diff", path, plain) == 0


def test_keys_that_do_not_fit(tmp_path, path, capsys):
    """A file that cannot be decrypted is an error, and no difference of tensors."""
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "other").write_bytes(bytes(32))
    sealed, manifest = str(tmp_path / "sealed"), str(tmp_path / "manifest")
    many, single = str(tmp_path / "many"), str(tmp_path / "single")
    tensorizer.save({"one": torch.ones(9)}, single)
    tensorizer.save({str(i): torch.full((9,), i) for i in range(100)}, many)
    assert run("encrypt", "-q", "--key-file", tmp_path / "key", path, sealed) == 0
    assert run("encrypt", "-q", "--key-file", tmp_path / "key", "--manifest", path, manifest) == 0
    assert run("encrypt", "-q", "--key-file", tmp_path / "key", many, many) == 0
    assert run("encrypt", "-q", "--key-file", tmp_path / "key", single, single) == 0
    assert capsys.readouterr() == ("", "")
    wrong = ("--key-file", tmp_path / "other")
    for arguments, text in (
        ((sealed,), "is encrypted, and decryption was not requested"),
        ((*wrong, sealed), "the key does not fit"),
        ((*wrong, many), "none of 15 tensors could be decrypted"),
        ((*wrong, single), "its tensor could not be decrypted"),
        ((*wrong, manifest), "wrong key"),
        ((*wrong, path), "is not encrypted"),
        (("--require-manifest", path), "--require-manifest needs one of"),
        (("--require-manifest", "--key-file", tmp_path / "key", sealed), "manifest"),
    ):
        assert run("verify", *arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1
        assert text in err


def test_damage_of_what_is_encrypted(tmp_path, path, capsys):
    """Even of the smallest tensors, which a key is tried on."""
    (tmp_path / "key").write_bytes(KEY)
    sealed = tmp_path / "sealed"
    assert run("encrypt", "-q", "--key-file", tmp_path / "key", path, sealed) == 0
    assert run("ls", "--json", sealed) == 0
    rows = json.loads(capsys.readouterr().out)["tensors"]
    data = bytearray(sealed.read_bytes())
    for row in rows:
        if row["name"] in ("scalar", "half"):
            data[row["offset"]] ^= 1
    sealed.write_bytes(data)
    assert run("verify", "--key-file", tmp_path / "key", sealed) == 1
    half, scalar, meta, last = capsys.readouterr().out.splitlines()
    assert meta == "meta has no data: a load gives zeros"
    assert "`half`" in half
    assert "`scalar`" in scalar
    assert last == "3 of 5 tensors are as they were written"


@pytest.mark.parametrize("where", ["file", "pipe"])
def test_verify_counts_the_intact_tensors(tmp_path, where, capsys):
    path = tmp_path / "f.tensors"
    tensors = {name: torch.arange(5000.0) + i for i, name in enumerate(("a", "b"))}

    def verify():
        if where == "file":
            return run("verify", path)
        fifo = tmp_path / "fifo"
        fifo.unlink(missing_ok=True)
        os.mkfifo(fifo)
        feeder = threading.Thread(target=lambda: fifo.write_bytes(path.read_bytes()))
        feeder.start()
        status = run("verify", fifo)
        feeder.join()
        return status

    tensorizer.save(tensors, path)
    data = bytearray(path.read_bytes())
    data[data.index(tensors["a"].numpy().tobytes()) + 9] ^= 1
    path.write_bytes(data)
    assert verify() == 1
    damage, last = capsys.readouterr().out.splitlines()
    assert "'a' failed" in damage
    assert last == "1 of 2 tensors is as it was written"
    tensorizer.save({"a": tensors["a"]}, path)
    assert verify() == 0
    assert capsys.readouterr().out == "1 of 1 tensor is as it was written\n"


@pytest.mark.parametrize("option", ["--key-file", "--passphrase-file"])
def test_a_file_with_a_key_is_not_read_beyond_4096_bytes(tmp_path, path, capsys, option):
    """A device or the wrong file would fill the memory."""
    target = tmp_path / "sealed"
    assert run("encrypt", option, "/dev/zero", path, target) != 0
    assert f"{option} /dev/zero: expected a file of at most 4096 bytes" in capsys.readouterr().err
    assert not target.exists()
    (tmp_path / "words").write_bytes(b"w" * 4096)
    assert (run("encrypt", option, tmp_path / "words", path, target) == 0) == (
        option == "--passphrase-file"
    )


def test_diff_with_a_key_for_each_side(tmp_path, path, capsys):
    for name, key in (("one", KEY), ("two", bytes(32))):
        (tmp_path / f"{name}.key").write_bytes(key)
        assert run("encrypt", "--key-file", tmp_path / f"{name}.key", path, tmp_path / name) == 0
    one, two = tmp_path / "one", tmp_path / "two"
    capsys.readouterr()
    first, second = ("--key-file", f"{one}.key"), ("--other-key-file", f"{two}.key")
    for arguments in (
        (*first, *second, one, two),
        (*first, one, one),
        # A file and its plain copy.
        (*first, one, path),
        (*first, path, one),
        (*second, path, two),
    ):
        assert run("diff", *arguments) == 0
        assert capsys.readouterr() == ("the tensors are the same\n", "")
    for arguments, text in (
        ((*first, one, two), "wrong key"),
        ((*second, one, two), "one is encrypted"),
        ((one, path), "--key-file"),
        ((path, two), "--other-key-file"),
        ((*first, path, path), "neither"),
        ((*second, two, path), "is not encrypted"),
        ((*first, "--require-manifest", one, path), "manifest"),
        ((*first, "--require-manifest", path, one), "is not encrypted"),
    ):
        assert run("diff", *arguments) == 2, arguments
        out, err = capsys.readouterr()
        assert out == ""
        assert text in err


def test_readers(tmp_path, capsys):
    path = tmp_path / "f.tensors"
    tensorizer.save({str(i): torch.full((1 << 18,), float(i)) for i in range(8)}, path)
    for arguments in (("diff", path, path), ("verify", path), ("cp", path, tmp_path / "copy")):
        for readers in (1, 2):
            assert run(*arguments, "--num-readers", readers) == 0
            if arguments[0] != "cp":
                assert tensorizer.stats()["threads"] == readers


def test_one_difference(tmp_path, path, capsys):
    other = tmp_path / "g.tensors"
    tensorizer.save(TENSORS | {"scalar": torch.tensor(6)}, other, allow_meta=True)
    assert run("diff", path, other) == 1
    assert capsys.readouterr().out == "scalar: 1 of 8 bytes differs\n1 difference\n"
    assert run("diff", "--quiet", path, other) == 1
    assert capsys.readouterr().out == "scalar: 1 of 8 bytes differs\n"


def test_copies_report_size_and_rate_on_stderr_unless_quiet(tmp_path, path, capsys):
    target = tmp_path / "copy"
    (tmp_path / "key").write_bytes(KEY)
    key = ("--key-file", tmp_path / "key")
    rate = r"1\.2 MB in \d+\.\d\d s, [\d.]+ .B/s, to "
    for name, said, options, source, to in (
        ("cp", "copied", (), path, target),
        ("encrypt", "encrypted", key, path, tmp_path / "sealed"),
        ("decrypt", "decrypted", key, tmp_path / "sealed", target),
    ):
        assert run(name, *options, source, to) == 0
        out, err = capsys.readouterr()
        assert out == ""
        meta = f"meta has no data, as in {source}\n"
        assert re.fullmatch(f"{said}: 5 tensors, {rate}{re.escape(str(to))}\n{meta}", err)
    tensorizer.save({"one": torch.ones(1, dtype=torch.uint8)}, path)
    assert run("cp", path, target) == 0
    assert capsys.readouterr().err.startswith("copied: 1 tensor, 1 byte in ")
    assert run("cp", "--quiet", path, target) == 0
    assert capsys.readouterr() == ("", "")
