"""Targets of copies, keys that the command makes, and its completion in shells."""

import json
import os
import shutil
import stat
import subprocess
import sys

import pytest
import tensorizer
import torch
from processes import COMMAND, run_python, start_python
from tensorizer_cli import local
from tensorizer_cli.arguments import COMMANDS
from tensorizer_cli.main import main

TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}


@pytest.fixture
def file(tmp_path):
    tensorizer.save(TENSORS, tmp_path / "m.tensors", metadata={"step": "7"})
    return tmp_path / "m.tensors"


def same(found):
    return found.keys() == TENSORS.keys() and all(
        torch.equal(found[name], one) for name, one in TENSORS.items()
    )


def run(*arguments):
    return main([str(argument) for argument in arguments])


# Folders


@pytest.mark.parametrize(
    ("name", "copied"),
    [
        ("m.tensors", "m.tensors"),
        ("m.safetensors", "m.safetensors"),
        ("m.pt", "m.tensors"),
        ("model.safetensors.index.json", "model.safetensors"),
    ],
)
def test_a_folder_gets_the_name_of_the_file(tmp_path, name, copied):
    if name.endswith(".pt"):
        torch.save(TENSORS, tmp_path / name)
    elif name.endswith(".json"):
        tensorizer.save(TENSORS, tmp_path / "model.safetensors", max_shard_size=48)
    else:
        tensorizer.save(TENSORS, tmp_path / name)
    (tmp_path / "there").mkdir()
    for folder in (tmp_path / "there", f"{tmp_path}/new/"):
        assert run("cp", tmp_path / name, folder) == 0
        assert same(tensorizer.load(f"{folder}/{copied}", "cpu"))


def test_a_prefix_of_a_bucket_gets_the_name_of_the_file(file, s3):
    assert run("cp", file, "s3://bucket/of-the-command/") == 0
    assert same(tensorizer.load("s3://bucket/of-the-command/m.tensors", "cpu"))


def test_a_file_is_not_copied_onto_itself_by_its_folder(file, capsys):
    assert run("cp", file, file.parent) == 2
    assert "is the file itself" in capsys.readouterr().err


def test_an_encrypted_copy_in_a_folder_is_no_safetensors_file(tmp_path):
    tensorizer.save(TENSORS, tmp_path / "m.safetensors")
    assert run("keygen", tmp_path / "key") == 0
    folder = f"{tmp_path}/sealed/"
    assert run("encrypt", "--key-file", tmp_path / "key", tmp_path / "m.safetensors", folder) == 0
    assert os.listdir(folder) == ["m.safetensors.tensors"]


def test_copying_stdin_into_a_folder_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("cp", "-", f"{tmp_path}/") == 2
    assert "/dev/stdin has no name for a file in it" in capsys.readouterr().err


def test_a_target_that_is_empty_is_refused(file, capsys):
    assert run("cp", file, "") == 2
    assert "expected a path or an address to copy to" in capsys.readouterr().err
    assert not os.path.exists("/m.tensors")


def test_an_address_is_copied_to_a_folder_again(file, nginx, tmp_path):
    shutil.copy(file, nginx.root / "again.tensors")
    (tmp_path / "there").mkdir()
    for _ in range(2):
        assert run("cp", f"{nginx.http}/again.tensors?query=1", tmp_path / "there") == 0
    assert same(tensorizer.load(tmp_path / "there/again.tensors", "cpu"))


def test_local_names_are_kept_as_they_are(tmp_path):
    for name in ("a?b.tensors", "with space.tensors"):
        tensorizer.save(TENSORS, tmp_path / name)
        assert run("cp", (tmp_path / name).as_uri(), f"{tmp_path}/there/") == 0
        assert same(tensorizer.load(tmp_path / "there" / name, "cpu"))
    assert run("cp", tmp_path / "a?b.tensors", (tmp_path / "there").as_uri()) == 0


# Streams


def command(*arguments, code="", **options):
    return run_python(code + COMMAND, *arguments, text=False, **options)


def test_a_dash_is_the_standard_input(file):
    data = file.read_bytes()
    listed = json.loads(command("ls", "--json", "-", input=data).stdout)
    assert {one["name"] for one in listed["tensors"]} == set(TENSORS)
    assert b"2 of 2 tensors" in command("verify", "-", input=data).stdout
    target = file.with_name("copy.tensors")
    assert command("cp", "-", target, input=data).returncode == 0
    assert same(tensorizer.load(target, "cpu"))


def test_a_dash_is_the_standard_output(file):
    done = command("cp", file, "-")
    assert done.returncode == 0, done.stderr
    copy = file.with_name("copy.tensors")
    copy.write_bytes(done.stdout)
    assert run("diff", file, copy) == 0
    assert b"to the standard output" in done.stderr
    for option in ("--json", "--verify"):
        refused = command("cp", option, file, "-")
        assert refused.returncode == 2 and b"exclude each other" in refused.stderr


def test_a_full_standard_output_is_an_error(file):
    with open("/dev/full", "wb") as full:
        done = command("cp", file, "-", stdout=full)
    assert done.returncode == 2
    assert b"standard output: No space left on device" in done.stderr


def test_bytes_that_no_reader_takes_are_an_error(file):
    # More than a pipe takes without a reader.
    tensorizer.save({"a": torch.ones(5 << 20)}, file)
    end, pipe = os.pipe()
    with start_python(COMMAND, "cp", file, "-", stdout=pipe, stderr=subprocess.PIPE) as process:
        os.close(pipe)
        assert os.read(end, 5) == file.read_bytes()[:5]
        os.close(end)
        assert b"standard output: " in process.stderr.read()
    assert process.returncode == 2


def test_no_standard_output_is_an_error(file):
    done = command("cp", file, "-", code="import os, sys\nos.close(1)\nsys.stdout = None\n")
    assert done.returncode == 2
    assert b"standard output: " in done.stderr


# Damage


@pytest.mark.parametrize("target", ["copy.tensors", "copy.safetensors"])
@pytest.mark.parametrize("options", [[], ["--verify"]])
def test_a_damaged_file_is_not_copied_with_new_hashes(file, capsys, target, options):
    data = bytearray(file.read_bytes())
    data[data.index(TENSORS["a"].numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    copy = file.with_name(target)
    copy.write_text("what was there")
    assert run("cp", *options, file, copy) == 2
    assert "Tensor 'a' failed CRC32 verification" in capsys.readouterr().err
    assert copy.read_text() == "what was there"


# Shards


def test_a_copy_in_shards_is_verified(file, capsys):
    target = file.with_name("m.safetensors")
    assert run("cp", file, target, "--max-shard-size", "48", "--verify") == 0
    assert "verified:" in capsys.readouterr().err
    assert len([*file.parent.glob("m-*-of-00002.safetensors")]) == 2
    assert same(tensorizer.load(f"{target}.index.json", "cpu"))
    assert run("cp", file, file.with_name("x.tensors"), "--max-shard-size", "5GB") == 2
    assert "is for targets that end with .safetensors" in capsys.readouterr().err
    assert run("cp", file, file.with_name("y.safetensors"), "--max-shard-size", "5 apples") == 2
    assert "expected bytes as in" in capsys.readouterr().err


# Keys


def test_a_key_is_made_once_and_fits(file, capsys):
    key, sealed = file.with_name("key.bin"), file.with_name("sealed.tensors")
    assert run("keygen", key) == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    first = key.read_bytes()
    assert len(first) == 32
    assert run("keygen", key) == 2
    assert "File exists" in capsys.readouterr().err
    assert key.read_bytes() == first
    assert run("encrypt", "--drop-metadata", "--key-file", key, file, sealed) == 0
    assert run("verify", "--key-file", key, sealed) == 0


def test_half_a_key_is_not_left_behind(tmp_path, monkeypatch, capsys):
    def fail(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        assert run("keygen", tmp_path / "key") == 2
    assert "No space left" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_key_is_printed_for_the_environment(monkeypatch, file, capsys):
    assert run("keygen", "-") == 0
    printed = capsys.readouterr().out.strip()
    assert len(bytes.fromhex(printed)) == 32
    monkeypatch.setenv("KEY_OF_TEST", printed)
    sealed = file.with_name("sealed.tensors")
    assert run("encrypt", "--drop-metadata", "--key-env", "KEY_OF_TEST", file, sealed) == 0


# Shells


def shell(name):
    found = shutil.which(name)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is required in CI")
        pytest.skip(f"{name} is not installed")
    return found


def completed(tmp_path, name, *words):
    """Return what a shell offers for the last of some words of a command line."""
    assert run("completion", name) == 0
    script = tmp_path / f"script.{name}"
    if name == "fish":
        line = f"source {script}; complete -C 'tensorizer {' '.join(words)}'"
    else:
        given = " ".join(f"'{word}'" for word in ("tensorizer", *words))
        line = (
            f"source {script}; COMP_WORDS=({given}); COMP_CWORD={len(words)}; _shtab_tensorizer; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
    return script, [shell(name), "-c", line]


def offered(tmp_path, capsys, name, *words):
    script, line = completed(tmp_path, name, *words)
    script.write_text(capsys.readouterr().out)
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stderr == ""
    return {row.split("\t")[0] for row in done.stdout.splitlines() if row}


# Not every machine has fish.
@pytest.mark.parametrize("name", ["bash", pytest.param("fish", marks=pytest.mark.long)])
def test_commands_and_options_are_completed(tmp_path, capsys, name):
    assert offered(tmp_path, capsys, name, "") >= {"ls", "cp", "keygen", "completion"}
    assert offered(tmp_path, capsys, name, "ve") == {"verify"}
    found = offered(tmp_path, capsys, name, "cp", "--m")
    assert found == {"--max-shard-size", "--memory-limit"}
    (tmp_path / "model.tensors").touch()
    assert "model.tensors" in offered(tmp_path, capsys, name, "verify", "mod")


# Not every machine has zsh.
@pytest.mark.long
def test_zsh_takes_its_script(tmp_path, capsys):
    assert run("completion", "zsh") == 0
    (tmp_path / "_tensorizer").write_text(capsys.readouterr().out)
    line = (
        f"fpath=({tmp_path} $fpath); autoload -U compinit && compinit -D -u; "
        "echo $_comps[tensorizer]"
    )
    done = subprocess.run(
        [shell("zsh"), "-f", "-c", line], capture_output=True, text=True, timeout=60
    )
    assert (done.stderr, done.stdout.strip()) == ("", "_tensorizer")


def test_scripts_of_a_build_are_printed(tmp_path, capsys, monkeypatch):
    (tmp_path / "bash").write_text("# the script")
    monkeypatch.setattr(local, "_SCRIPTS", tmp_path)
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert run("completion", "bash") == 0
    assert capsys.readouterr().out == "# the script\n"
    assert run("completion", "zsh") == 2
    assert "pip install shtab" in capsys.readouterr().err


def test_each_command_has_examples(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            run(name, "--help")
        assert "examples:\n  " in capsys.readouterr().out, name
