"""Bytes of servers are cached, and the next load of the same file finds them."""

import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
import tensorizer
import torch
from conftest import OWN_MOUNTS, ROOT, assert_same
from processes import COMMAND, run_python, start_python
from tensorizer import TensorDeserializer, _native, load
from tensorizer._C import forget_environment
from tensorizer.file import open_file

MB = 1 << 20
#: The first request, which every opening makes.
FIRST = MB + 64
#: Bytes of a tensor: more than what is read over between two that are wanted.
EACH = 3 * MB // 2


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(3)
    return {f"t{number}": torch.rand(EACH // 4 + number) for number in range(12)}


@pytest.fixture
def served(nginx, tensors, request):
    """A file of this test alone, its name and its size."""
    name = f"{abs(hash(request.node.name))}.tensors"
    with tensorizer.TensorSerializer(nginx.root / name) as file:  # with room in the index
        file.write_state_dict(tensors)
    return name, (nginx.root / name).stat().st_size


@pytest.fixture
def folder(tmp_path, monkeypatch):
    yield tmp_path / "cache"
    monkeypatch.undo()
    forget_environment()


def set_variable(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    forget_environment()


def assert_all(found, tensors):
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same(found[name].detach(), tensor)


def is_synced(entry):
    """Tell whether a file of the cache is complete, and on the disk: its last number is 1."""
    with entry.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        return file.read() == (1).to_bytes(8, "little")


def parts(folder):
    """Return the files that are incomplete, or being synced."""
    return sorted(path for path in folder.glob("*.cached") if not is_synced(path))


def entries(folder):
    """Return all files, once all that are complete are synced."""
    deadline = time.monotonic() + 30
    while parts(folder):
        assert time.monotonic() < deadline, "a part stays"
        time.sleep(0.01)
    return sorted(folder.glob("*.cached"))


def past_cache(uri):
    """Return the reason in a report that a call has read past the cache."""
    return f"read past the cache, which keeps whole files: the call wants less than half of {uri}"


def test_the_second_load_is_from_the_cache(nginx, served, folder, tensors):
    name, size = served
    uri = f"{nginx.http}/{name}"
    assert_all(load(uri, cache_dir=folder), tensors)
    first = nginx.sent(name)
    assert size <= first <= size + FIRST + MB // 8
    (entry,) = entries(folder)
    assert (uri, size, size) == _native.cache_entries(str(folder))[0][:3]
    for _ in range(2):
        assert_all(load(uri, cache_dir=folder, verify_hash=True), tensors)
    with TensorDeserializer(uri, "cpu", cache_dir=folder, mmap=True) as file:
        assert_all(file, tensors)
        assert str(entry) in Path("/proc/self/maps").read_text()
    assert nginx.sent(name) <= first + 3 * FIRST
    assert_all(dict(tensorizer.iterate(uri, cache_dir=folder)), tensors)
    assert_all(load(uri), tensors)
    # The last bytes are for the cache alone.
    assert nginx.sent(name) >= first + size - 64
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def statuses(nginx, name):
    """Return the status of each answer about a file, and the bytes of its body."""
    lines = [line.split('"') for line in nginx.requests()]
    return [tuple(map(int, line[2].split()[:2])) for line in lines if f"/{name}" in line[1]]


def test_an_unchanged_file_costs_an_answer_without_a_body(nginx, served, folder, tensors):
    name, _ = served
    uri = f"{nginx.http}/{name}"
    load(uri, cache_dir=folder)
    before = len(statuses(nginx, name))
    for _ in range(2):
        assert_all(load(uri, cache_dir=folder, verify_hash=True), tensors)
    assert statuses(nginx, name)[before:] == [(304, 0)] * 2
    # Without a cache no request has a condition.
    load(uri, names=["t3"])
    assert 304 not in [status for status, _ in statuses(nginx, name)[before + 2 :]]


def test_a_new_version_is_sent_with_the_condition(nginx, served, folder, tensors):
    name, _ = served
    uri = f"{nginx.http}/{name}"
    load(uri, cache_dir=folder)
    others = {name: tensor + 1 for name, tensor in tensors.items()}
    time.sleep(1)  # nginx makes its tags of seconds and sizes
    tensorizer.save(others, nginx.root / name)
    before = len(statuses(nginx, name))
    assert_all(load(uri, cache_dir=folder, verify_hash=True), others)
    assert 304 not in [status for status, _ in statuses(nginx, name)[before:]]
    assert_all(load(uri, cache_dir=folder, verify_hash=True), others)
    assert statuses(nginx, name)[-1] == (304, 0)


def test_objects_of_clouds_are_revalidated(bucket, folder, tensors, tmp_path, request):
    scheme = request.node.callspec.params["bucket"]
    tensorizer.save(tensors, tmp_path / "f")
    bucket.put("cached.tensors", (tmp_path / "f").read_bytes())
    for _ in range(3):
        uri = f"{scheme}://bucket/cached.tensors"
        loaded = load(uri, cache_dir=folder, verify_hash=True)
        assert_all(loaded, tensors)
    assert len(entries(folder)) == 1


def test_by_the_environment_and_by_operators(nginx, served, folder, tensors):
    name, size = served
    program = """
import sys, torch, tensorizer
uri = sys.argv[1]
if sys.argv[2] == "operator":
    found = torch.ops.tensorizer.load(uri)
else:
    found = tensorizer.load(tensorizer.stream_io.open_stream(uri))
print(len(found), sum(float(tensor.sum()) for tensor in found.values()))
"""
    expected = f"12 {sum(float(tensor.sum()) for tensor in tensors.values())}\n"
    for way in ("operator", "stream", "operator"):
        done = run_python(
            program,
            f"{nginx.http}/{name}",
            way,
            env={**os.environ, "TENSORIZER_CACHE": str(folder)},
        )
        assert done.stdout == expected, done.stderr
    assert nginx.sent(name) <= size + 3 * FIRST


#: Calls that want less than half of the file.
SMALL = {
    "names": lambda uri, folder: load(uri, names=["t3", "t9"], cache_dir=folder),
    "slices": lambda uri, folder: load(
        uri, cache_dir=folder, slices={f"t{number}": (0, 0, 1000) for number in range(12)}
    ),
    "iterate": lambda uri, folder: dict(
        tensorizer.iterate(uri, names=["t3", "t9"], cache_dir=folder)
    ),
}


@pytest.mark.parametrize("way", SMALL)
def test_a_call_that_wants_less_than_half_reads_past_the_cache(nginx, served, folder, tensors, way):
    name, size = served
    uri = f"{nginx.http}/{name}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = SMALL[way](uri, folder)
    assert tensorizer.stats()["fallbacks"] == [past_cache(uri)]
    assert not entries(folder)
    assert nginx.sent(name) < size / 2
    # If the file is there, such a call reads it from there.
    load(uri, cache_dir=folder)
    before = nginx.sent(name)
    for key, tensor in SMALL[way](uri, folder).items():
        assert_same(tensor, found[key])
    assert tensorizer.stats()["fallbacks"] == []
    assert nginx.sent(name) == before


def test_a_call_that_wants_most_of_a_file_leaves_a_part_for_the_next(
    nginx, served, folder, tensors
):
    name, size = served
    uri, first = f"{nginx.http}/{name}", [f"t{number}" for number in range(7)]
    assert_all(load(uri, names=first, cache_dir=folder), {n: tensors[n] for n in first})
    assert tensorizer.stats()["fallbacks"] == []
    (part,) = parts(folder)
    sent = nginx.sent(name)
    # A small call reads from the part what is there.
    assert_all(load(uri, names=["t3"], cache_dir=folder), {"t3": tensors["t3"]})
    assert nginx.sent(name) == sent
    assert_all(load(uri, names=["t9"], cache_dir=folder), {"t9": tensors["t9"]})
    assert tensorizer.stats()["fallbacks"] == [past_cache(uri)]
    assert parts(folder) == [part]
    before = nginx.sent(name)
    assert_all(load(uri, cache_dir=folder, verify_hash=True), tensors)
    assert nginx.sent(name) - before <= size - 7 * EACH
    assert len(entries(folder)) == 1
    before = nginx.sent(name)
    assert_all(load(uri, cache_dir=folder, verify_hash=True), tensors)
    assert nginx.sent(name) == before


def test_a_changed_file_is_downloaded_again(nginx, served, folder, tensors):
    name, _ = served
    uri = f"{nginx.http}/{name}"
    load(uri, cache_dir=folder)
    others = {name: tensor + 1 for name, tensor in tensors.items()}
    time.sleep(1)  # nginx makes its tags of seconds and sizes
    tensorizer.save(others, nginx.root / name)
    assert_all(load(uri, cache_dir=folder), others)
    # The old version is removed: no request can be for it any more.
    (entry,) = entries(folder)
    assert entry.read_bytes().startswith((nginx.root / name).read_bytes())


def test_signatures_are_no_part_of_a_name(nginx, served, folder, tensors):
    name, size = served
    for number in range(3):
        for query in (
            f"X-Amz-Signature=secret-hu5hw0rd{number}&X-Amz-Expires={number}",
            f"Signature=secret-hu5hw0rd{number}&Expires={number}&AWSAccessKeyId=secret-hu5hw0rd",
            f"sv=1&sig=secret-hu5hw0rd{number}&se={number}",
        ):
            assert_all(load(f"{nginx.http}/{name}?{query}", cache_dir=folder), tensors)
    assert len(entries(folder)) == 1
    assert b"secret" not in entries(folder)[0].read_bytes()[size:]
    for number in range(2):
        load(f"{nginx.http}/{name}?versionId={number}", cache_dir=folder)
    assert len(entries(folder)) == 3
    # An unknown query may be a secret, or name another file: such a file is not cached.
    for query in ("token=secret-hu5hw0rd", "Signature=secret-hu5hw0rd", "sv=1", "sig=1&se=2"):
        load(f"{nginx.http}/{name}?{query}", cache_dir=folder)
    assert len(entries(folder)) == 3


def test_s3(moto, tensors, folder, tmp_path, monkeypatch):
    for name, value in moto.settings().items():
        monkeypatch.setenv(name, value)
    tensorizer.save(tensors, tmp_path / "f.safetensors", max_shard_size="8MB")
    for path in tmp_path.iterdir():
        if path.is_file():
            moto.client().upload_file(str(path), "bucket", f"cached/{path.name}")
    uri = "s3://bucket/cached/f.safetensors.index.json"
    for _ in range(2):
        assert_all(load(uri, cache_dir=folder), tensors)
    assert len(entries(folder)) == 3
    for path in tmp_path.iterdir():
        if path.is_file():
            moto.client().put_object(Bucket="bucket", Key=f"cached/{path.name}", Body=b"x")
    with pytest.raises((OSError, ValueError)):
        load(uri, cache_dir=folder)


SHARING = """
import sys, torch, tensorizer
print("ready", flush=True)
sys.stdin.readline()
found = tensorizer.load(sys.argv[1], cache_dir=sys.argv[2])
print(len(found), sum(float(tensor.double().sum()) for tensor in found.values()))
"""


def sums(tensors):
    return f"{len(tensors)} {sum(float(tensor.double().sum()) for tensor in tensors.values())}\n"


def start(uri, folder, count):
    """Start processes that load once they are told to."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [start_python(SHARING, uri, folder, **pipes) for _ in range(count)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    return processes


def go(process):
    process.stdin.write("\n")
    process.stdin.flush()


def test_four_processes_share_one_download(nginx, served, folder, tensors):
    name, size = served
    processes = start(f"{nginx.http}/slow/{name}", folder, 4)
    for process in processes:
        go(process)
    for process in processes:
        assert process.communicate(timeout=60)[0] == sums(tensors)
    assert size <= nginx.sent(f"slow/{name}") <= size + 4 * FIRST
    assert [row[1:3] for row in _native.cache_entries(str(folder))] == [(size, size)]


def test_another_process_continues_for_one_that_is_killed(nginx, served, folder, tensors):
    name, size = served
    uri = f"{nginx.http}/slow/{name}"
    first, second = start(uri, folder, 2)
    go(first)
    while not folder.exists() or not parts(folder):
        time.sleep(0.01)
    go(second)
    time.sleep(0.3)
    assert parts(folder), "the first one was too fast"
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert second.communicate(timeout=60)[0] == sums(tensors)
    assert nginx.sent(f"slow/{name}") <= 2 * size
    assert [row[1:3] for row in _native.cache_entries(str(folder))] == [(size, size)]
    before = nginx.sent(f"slow/{name}")
    assert_all(load(uri, cache_dir=folder, verify_hash=True), tensors)
    assert nginx.sent(f"slow/{name}") == before


def test_a_process_that_is_killed_leaves_what_is_right(nginx, served, folder, tensors):
    name, _ = served
    uri = f"{nginx.http}/slow/{name}"
    for delay in (0.1, 0.3, 0.6):
        (process,) = start(uri, folder, 1)
        go(process)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert_all(load(uri, cache_dir=folder, verify_hash=True), tensors)
    before = nginx.sent(f"slow/{name}")
    assert_all(load(uri, cache_dir=folder, verify_hash=True), tensors)
    assert nginx.sent(f"slow/{name}") - before <= FIRST


def test_a_process_that_stands_still_blocks_no_load(nginx, served, folder, tensors, monkeypatch):
    name, size = served
    uri = f"{nginx.http}/slow/{name}"
    (process,) = start(uri, folder, 1)
    go(process)
    # In the middle of the data it is the one that fetches; before and after, it need not be.
    while not any(row[2] > size // 8 for row in _native.cache_entries(str(folder))):
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)
    try:
        set_variable(monkeypatch, "TENSORIZER_STALL_SECONDS", "0.3")
        assert_all(load(uri, cache_dir=folder, verify_hash=True), tensors)
        (why,) = tensorizer.stats()["fallbacks"]
        assert why.startswith(f"the cache in {folder} does not keep all of {uri}: the process ")
    finally:
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=60)


def test_a_full_disk_ends_no_load(nginx, served, tensors, tmp_path):
    name, _ = served
    program = """
import resource, sys, tensorizer
resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, 5 << 20))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import warnings
with warnings.catch_warnings(record=True) as warned:
    found = tensorizer.load(sys.argv[1], cache_dir=sys.argv[2], verify_hash=True)
print(len(found), [str(warning.message) for warning in warned] == tensorizer.stats()["fallbacks"])
print(*tensorizer.stats()["fallbacks"])
"""
    done = run_python(program, f"{nginx.http}/{name}", tmp_path / "cache")
    found, why = done.stdout.splitlines()
    assert found == "12 True", done.stderr
    assert why.startswith(f"the cache in {tmp_path / 'cache'} does not keep all of {nginx.http}")
    assert "File too large" in why
    assert_all(load(f"{nginx.http}/{name}", cache_dir=tmp_path / "cache"), tensors)


def test_damaged_entries_are_made_anew(nginx, served, folder, tensors):
    name, size = served
    uri = f"{nginx.http}/{name}"
    for damage in ("truncated", "empty", "other"):
        load(uri, cache_dir=folder)
        (entry,) = entries(folder)
        if damage == "truncated":
            os.truncate(entry, size)
        elif damage == "empty":
            os.truncate(entry, 0)
        else:
            with entry.open("r+b") as file:
                file.seek(-16384, os.SEEK_END)
                file.write(b"{} ")
        assert_all(load(uri, cache_dir=folder, verify_hash=True), tensors)


def test_a_part_of_an_earlier_boot_is_not_used(nginx, served, folder, tensors):
    """A crash of the machine may have lost bytes of a part, but none of a complete file."""
    name, _ = served
    uri, first = f"{nginx.http}/{name}", [f"t{number}" for number in range(7)]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().encode()

    def age(path):
        text = path.read_bytes()
        assert text.count(boot) == 1
        path.write_bytes(text.replace(boot, boot[::-1]))

    load(uri, names=first, cache_dir=folder)
    (part,) = parts(folder)
    age(part)
    before = nginx.sent(name)
    assert_all(load(uri, names=first, cache_dir=folder), {name: tensors[name] for name in first})
    assert nginx.sent(name) - before >= 7 * EACH
    load(uri, cache_dir=folder)
    (entry,) = entries(folder)
    age(entry)
    before = nginx.sent(name)
    assert_all(load(uri, cache_dir=folder), tensors)
    assert nginx.sent(name) == before


def test_the_least_recently_used_goes(nginx, folder, monkeypatch):
    set_variable(monkeypatch, "TENSORIZER_CACHE_GB", "1")
    monkeypatch.setenv("TENSORIZER_CACHE", str(folder))

    def use(number, size=300 * MB):
        """Read the first bytes of a file, whose entry counts with all that it will have."""
        (nginx.root / f"big{number}").touch()
        os.truncate(nginx.root / f"big{number}", size)
        with tensorizer.stream_io.open_stream(f"{nginx.http}/big{number}") as stream:
            assert stream.read(1000) == bytes(1000)

    for number in (0, 1, 2, 0, 3):
        use(number)
        time.sleep(0.02)
    left = [Path(row[0]).name for row in _native.cache_entries(str(folder))]
    assert left == ["big2", "big0", "big3"]
    use(4, size=1100 * MB)
    assert left == [Path(row[0]).name for row in _native.cache_entries(str(folder))]


def test_the_cache_leaves_a_twentieth_of_the_disk_free(nginx, served, tensors, folder, monkeypatch):
    set_variable(monkeypatch, "TENSORIZER_CACHE_GB", "0")
    name, size = served
    assert_all(load(f"{nginx.http}/{name}", cache_dir=folder), tensors)
    disk = os.statvfs(folder)
    left = (disk.f_bavail - disk.f_blocks // 20) * disk.f_frsize
    if abs(left) > 1 << 30:  # What others write meanwhile is of no account.
        assert bool(entries(folder)) == (left > size)


def test_a_folder_that_others_may_use_is_refused(nginx, served, tmp_path):
    name, _ = served
    tmp_path.joinpath("open").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match=r"no other user may access \(chmod 700\)"):
        load(f"{nginx.http}/{name}", cache_dir=tmp_path / "open")


def test_an_unusable_folder_of_the_environment_is_warned_of_once(
    nginx, served, tensors, folder, monkeypatch
):
    name, _ = served
    uri = f"{nginx.http}/{name}"
    (folder.parent / "file").write_bytes(b"")
    for path in (folder.parent / "file/sub", folder.parent / "open"):
        if path.name == "open":
            path.mkdir(mode=0o755)
        set_variable(monkeypatch, "TENSORIZER_CACHE", str(path))
        said = re.escape(f"the cache in {path} cannot be used: ")
        with pytest.warns(UserWarning, match=said) as warned:
            for _ in range(2):
                assert_all(load(uri), tensors)
                (line,) = tensorizer.stats()["fallbacks"]
                assert re.match(said, line)
            assert_all(dict(tensorizer.iterate(uri)), tensors)
            assert tensorizer.stats()["fallbacks"] == [line]
            torch.ops.tensorizer.load(uri)
            assert tensorizer.stats()["fallbacks"] == [line]
        assert len(warned) == 1
        with pytest.raises(OSError, match="using the cache in"):
            load(uri, cache_dir=path)


def test_a_complete_copy_of_a_folder_that_others_may_use(nginx, served, tensors, folder):
    name, size = served
    uri = f"{nginx.http}/{name}"
    load(uri, cache_dir=folder)
    sent = nginx.sent(name)
    folder.chmod(0o755)
    assert_all(load(uri, cache_dir=folder, verify_hash=True), tensors)
    assert nginx.sent(name) - sent < MB
    (entry,) = entries(folder)
    for path, mode in ((folder, 0o777), (entry, 0o666)):
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode)
        with pytest.raises(PermissionError, match="no other user may access"):
            load(uri, cache_dir=folder)
        path.chmod(before)
    # Damage is read from the server, as the copy cannot be replaced.
    with open(entry, "r+b") as file:
        file.seek(size // 2)
        file.write(bytes(100))
    assert_all(load(uri, cache_dir=folder, verify_hash=True), tensors)


#: Loads two files as a user for whom the folder of the cache is read-only.
READ_ONLY = """
folder, user, *addresses = sys.argv[1:]
mount("--bind", folder, folder)
mount("-o", "remount,ro,bind", folder)
import os, tensorizer
os.setgroups([])
os.setresgid(*[int(user)] * 3)
os.setresuid(*[int(user)] * 3)
for address in addresses:
    try:
        found = tensorizer.load(address, "cpu", cache_dir=folder, mmap=True)
        print(len(found), tensorizer.stats()["fallbacks"])
    except OSError as error:
        print(error)
"""


@pytest.mark.parametrize("user", [0, 4242])
def test_a_read_only_folder(nginx, served, user):
    name, _ = served
    # pytest closes its own temporary folders to other users.
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "cache"
        load(f"{nginx.http}/{name}", cache_dir=folder)
        if user:
            os.chmod(top, 0o755)
            folder.chmod(0o755)
            entries(folder)[0].chmod(0o644)
        shutil.copy(nginx.root / name, nginx.root / f"other-{name}")
        sent = nginx.sent(name)
        addresses = [f"{nginx.http}/{name}", f"{nginx.http}/other-{name}"]
        done = run_python(OWN_MOUNTS + READ_ONLY, folder, user, *addresses, cwd="/")
    if "unshare: not permitted" in done.stderr:
        pytest.skip("only root can mount")
    assert done.returncode == 0, done.stderr
    kept, other = done.stdout.splitlines()
    assert kept == "12 []"
    assert nginx.sent(name) - sent < FIRST + MB // 8
    # A file that is not there is read past a read-only folder; one of another user is a mistake.
    if user:
        assert "using the cache in" in other and "pass a folder of your own" in other
    else:
        assert other.startswith("12 ['the cache in ") and "Read-only" in other


def test_files_of_servers_without_ranges_or_etags_are_not_cached(nginx, served, tensors, folder):
    """Servers without ranges or tags."""
    name, _ = served
    for way in ("whole", "tagless"):
        assert_all(load(f"{nginx.http}/{way}/{name}", cache_dir=folder), tensors)
        assert not folder.exists() or not entries(folder)


def test_the_command(nginx, served, folder):
    name, size = served
    shown = tensorizer.utils.convert_bytes(size)
    uri = f"{nginx.http}/{name}"

    def command(*arguments):
        done = run_python(COMMAND, "cache", *arguments, "--folder", folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert command("ls") == "0 files, 0 bytes\n"
    load(uri, cache_dir=folder)
    listed = command("ls")
    assert f"100% of {shown:<9}  {uri}\n1 file, {shown}\n" in listed
    with TensorDeserializer(uri, "cpu", lazy_load=True, cache_dir=folder):
        assert command("clear") == "removed 0 files, 0 bytes\n"
        assert len(entries(folder)) == 1
    assert command("clear") == f"removed 1 file, {shown}\n"
    assert not entries(folder)


def test_threads_share_a_download(nginx, served, folder, tensors):
    name, size = served
    found = []

    def work():
        found.append(load(f"{nginx.http}/{name}", cache_dir=folder))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for one in found:
        assert_all(one, tensors)
    assert nginx.sent(name) <= size + 3 * FIRST + 2 * MB


def test_the_example_of_the_document(nginx, served, folder):
    name, size = served
    text = (ROOT / "docs/how-to/cache.md").read_text()
    (code,) = re.findall(r'```python title="with a cache"\n(.+?)```', text, re.DOTALL)
    for said, meant in {
        "https://models.example.org/model.safetensors": f"{nginx.http}/{name}",
        "/var/tmp/tensorizer": str(folder),
    }.items():
        assert said in code
        code = code.replace(said, meant)
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert nginx.sent(name) <= size + 2 * FIRST + MB // 8


WARNED = """
import sys, warnings, tensorizer
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    for address in sys.argv[1:]:
        tensorizer.load(address, "cpu")
print("|".join(str(one.message) for one in found))
"""


def test_a_server_without_an_etag_is_warned_of_once(nginx, tmp_path):
    tensorizer.save({"a": torch.ones(3)}, nginx.root / "said.tensors")
    known, tagless = (f"{nginx.http}/{folder}said.tensors" for folder in ("", "tagless/"))
    env = os.environ | {"TENSORIZER_CACHE": str(tmp_path / "cache")}
    done = run_python(WARNED, known, tagless, tagless, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        f"{tagless} is not cached: its server sends no strong ETag, without which a changed "
        "file cannot be told from a cached one"
    )
    assert run_python(WARNED, tagless).stdout.strip() == ""


def test_loads_in_batches_are_one_call(nginx, served, folder, monkeypatch):
    name, size = served
    monkeypatch.setattr(open_file, "_BATCH_BYTES", size // 8)
    for _ in range(2):
        load(f"{nginx.http}/{name}", cache_dir=folder, dtype="bfloat16")
        assert tensorizer.stats()["fallbacks"] == []
    assert size <= nginx.sent(name) < 1.2 * size


def test_streams_that_are_read_from_the_front_are_kept(nginx, served, folder, monkeypatch):
    name, size = served
    monkeypatch.setenv("TENSORIZER_CACHE", str(folder))
    uri = f"{nginx.http}/{name}"
    with tensorizer.stream_io.open_stream(uri) as stream:
        stream.seek(size // 2)
        stream.read(10)
    assert not entries(folder)
    before = nginx.sent(name)
    assert before < size
    for _ in range(2):
        with tensorizer.stream_io.open_stream(uri) as stream:
            assert stream.read(1000) + stream.read() == (nginx.root / name).read_bytes()
    assert nginx.sent(name) - before < 1.5 * size
