"""Files of servers that are opened without a request, from what another opening has learnt."""

import functools
import os
import pickle
import shutil

import pytest
import redis
import tensorizer
import torch
from conftest import assert_same
from emulators import Doorman, Google
from native import open_reader
from packing import filled, pack, pack_tensors
from safetensors.torch import load_file
from scripted import Relay
from servers import Nginx, Redis
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer._C import Reader, open as native_open
from tensorizer.tensors.handles import take
from test_shards import INDEX, TENSORS, write_shards

#: First bytes of a file that tell its format.
LEAST = 73
#: Fields of an answer that are passed on with its head.
TOLD = {"accept-ranges", "content-length", "content-range", "content-type", "etag", "last-modified"}
#: Bytes of a file that the first request asks for.
FIRST_REQUEST = 1 << 20
MANY = {f"model.layers.{i}.self_attn.weight": filled("U8", (i % 5,), i) for i in range(20_000)}
FILES = ["f.tensors", "many.tensors", "many.safetensors", "empty.safetensors"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "many.safetensors").write_bytes(pack_tensors(MANY))
    (folder / "empty.safetensors").write_bytes(pack({}))
    tensorizer.save(TENSORS, folder / "f.tensors")
    tensorizer.save(load_file(folder / "many.safetensors"), folder / "many.tensors")
    torch.save(TENSORS, folder / "f.bin")
    write_shards(folder / "model")
    return folder


@pytest.fixture(scope="module")
def nginx(root, tmp_path_factory):
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    shutil.copytree(root, server.root, dirs_exist_ok=True)
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def settings(no_settings_of_the_machine, monkeypatch):
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "4")


def hand_on(heads):
    """Return what another process would get."""
    return pickle.loads(pickle.dumps(heads))


def load(reader):
    numbers = list(range(len(reader)))
    handle, _ = reader.load(numbers, devices=[-1])
    return dict(zip(reader.names(numbers), take(handle), strict=True))


def check(loaded, expected=TENSORS):
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert_same(loaded[name].detach(), tensor)


def check_the_same(address, requests, expected=TENSORS):
    """Open an address twice, load what was opened without a request, and return the heads."""
    first = open_reader(address)
    heads = hand_on(first.heads())
    before = requests()
    second = open_reader(address, heads)
    assert requests() == before
    assert (second.uri, second.format, second.files()) == (first.uri, first.format, first.files())
    assert second.offsets() == first.offsets()
    assert second.metadata == first.metadata
    assert second.headers() == [field for head in heads[-len(first.files()) :] for field in head[4]]
    assert second.heads() == []
    assert requests() == before
    check(load(second), expected)
    return heads


# Without a request


@pytest.mark.parametrize("name", FILES)
def test_a_cached_header_opens_a_file_without_a_request(nginx, root, name):
    address = f"{nginx.http}/{name}"
    expected = tensorizer.load(root / name, "cpu")
    [head] = check_the_same(address, nginx.requests, expected)
    uri, size, etag, modified, headers, first = head
    data = (root / name).read_bytes()
    assert (uri, size) == (address, len(data))
    assert (etag, modified) == (dict(headers)["etag"], dict(headers)["last-modified"])
    begin = min((at for at, _ in open_reader(str(root / name)).offsets()), default=len(data))
    assert first == data[: len(first)]
    assert len(first) <= max(begin, LEAST)
    assert (len(first) > FIRST_REQUEST) == name.startswith("many")


@pytest.mark.parametrize("name", FILES)
def test_an_index_is_fetched_once(nginx, root, name):
    before = nginx.sent(name)
    reader = open_reader(f"{nginx.http}/{name}")
    [head] = reader.heads()
    size = (root / name).stat().st_size
    assert nginx.sent(name) - before == max(len(head[-1]), min(FIRST_REQUEST, size))
    second = open_reader(f"{nginx.http}/{name}", [head])
    assert nginx.sent(name) - before == max(len(head[-1]), min(FIRST_REQUEST, size))
    assert len(second) == len(reader)


@pytest.mark.parametrize("place", [INDEX, "", "/"])
def test_shards(nginx, place):
    address = f"{nginx.http}/model" + (place and f"/{place.strip('/')}")
    heads = check_the_same(address, nginx.requests)
    assert [uri.rpartition("/")[2] for uri, *_ in heads[:2]] == [
        INDEX,
        "model-00001-of-00004.safetensors",
    ]
    assert len(heads) == 5
    assert all(uri.startswith(f"{nginx.http}/model/") for uri, *_ in heads)


def test_only_ranges_of_data_are_read(nginx, root):
    reader = open_reader(f"{nginx.http}/many.safetensors")
    second = open_reader(f"{nginx.http}/many.safetensors", reader.heads())
    before = len(nginx.requests())
    load(second)
    answers = [line.split('"')[2].split() for line in nginx.requests()[before:]]
    assert {status for status, _ in answers} == {"206"}
    size = sum(second.data_lens())
    assert (
        sum(int(sent) for _, sent in answers) == size < (root / "many.safetensors").stat().st_size
    )


@pytest.fixture(scope="module")
def objects(moto, root):
    """Objects of the files, in the bucket of S3."""
    client = moto.client()
    for path in [root / "f.tensors", *(root / "model").iterdir()]:
        client.upload_file(str(path), "bucket", str(path.relative_to(root)))


@pytest.fixture
def bucket(s3, objects, monkeypatch):
    with Relay(s3.host) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")
        yield relay


@pytest.mark.parametrize("place", ["f.tensors", f"model/{INDEX}", "model", "model/"])
def test_objects_of_s3(bucket, place):
    heads = check_the_same(f"s3://bucket/{place}", lambda: len(bucket.requests))
    expected = f"model/{INDEX}" if "model" in place else place
    assert heads[0][0] == f"s3://bucket/{expected}"
    assert all(uri.startswith("s3://bucket/") for uri, *_ in heads)
    for secret in (b"secret", b"Signature", b"Credential"):
        assert secret not in pickle.dumps(heads)


@pytest.mark.parametrize("place", ["f.tensors", "model/"])
def test_objects_of_google(root, monkeypatch, place):
    server = Google()
    try:
        for path in root.rglob("*"):
            if path.is_file():
                server.put(str(path.relative_to(root)), path.read_bytes())
        with Doorman(server) as door:
            monkeypatch.setenv("GOOGLE_BASE_URL", door.url)
            monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "secret-hu5hw0rd")
            heads = check_the_same(f"gs://bucket/{place}", lambda: len(door.requests))
        assert heads[0][0].startswith("gs://bucket/")
        assert b"secret" not in pickle.dumps(heads)
    finally:
        server.stop()


def test_the_keys_of_s3cfg(bucket, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    keys = "access_key = from-the-file\nsecret_key = secret-hu5hw0rd"
    text = f"[default]\n{keys}\nhost_base = {bucket.host}\nuse_https = False\n"
    (tmp_path / ".s3cfg").write_text(text)
    check_the_same("s3://bucket/f.tensors", lambda: len(bucket.requests))
    assert set(bucket.signers) == {"from-the-file"}


def test_archives_of_torch(nginx, root):
    """The directory of an archive is at its end, and is requested again."""
    address = f"{nginx.http}/f.bin"
    expected = Reader(native_open(address, {"model": True}))
    reader = open_reader(address)
    [head] = hand_on(reader.heads())
    assert head[-1] == (root / "f.bin").read_bytes()[:LEAST]
    numbers = list(range(len(expected)))
    for opened in (reader, open_reader(address, [head])):
        assert opened.format == expected.format == "torch"
        assert opened.names(numbers) == expected.names(numbers)
        assert opened.offsets() == expected.offsets()
        assert opened.read(numbers) == expected.read(numbers)


# Secrets


@pytest.mark.parametrize(
    "place", ["f.tensors", "f.tensors?token=hidden-hu5hw0rd", "model/", "model"]
)
def test_secrets_of_addresses(nginx, place):
    address = f"http://user:word-hu5hw0rd@127.0.0.1:{nginx.port}/auth/{place}"
    heads = check_the_same(address, nginx.requests)
    assert heads[0][0].startswith(f"{nginx.http}/auth/{place.partition('?')[0]}")
    assert heads[0][0].endswith("?...") == ("?" in place)
    for secret in (b"user", b"word", b"hidden"):
        assert secret not in pickle.dumps(heads)


def test_secrets_of_answers(nginx):
    """Fields are left out even if no list of secrets would have them."""
    reader = open_reader(f"{nginx.http}/session/f.tensors")
    fields = dict(reader.headers())
    assert fields["set-cookie"] == "session=hidden-hu5hw0rd"
    assert fields["x-of-some-vendor"] == "hidden-hu5hw0rd"
    [head] = reader.heads()
    assert set(dict(head[4])) == TOLD & set(fields)
    assert b"hidden" not in pickle.dumps(head)


def test_secrets_of_places_that_a_server_names(nginx, root):
    address = f"{nginx.http}/signed/f.tensors"
    reader = open_reader(address)
    assert "signature=hidden-hu5hw0rd" in nginx.requests()[-1]
    heads = hand_on(reader.heads())
    assert heads[0][0] == address
    assert b"hidden" not in pickle.dumps(heads)
    check(load(open_reader(address, heads)))


# Files that have changed


@pytest.mark.parametrize("by_tag", [True, False])
@pytest.mark.parametrize("new", [{"other": torch.arange(900)}, {"tiny": torch.ones(1)}], ids=list)
def test_a_file_that_was_replaced(nginx, tmp_path, by_tag, new):
    """The other file may have any length, and the head a tag, or a date alone."""
    path = nginx.root / "replaced.tensors"
    tensorizer.save({"first": torch.ones(500_000)}, path)
    address = f"{nginx.http}/replaced.tensors"
    [(uri, size, etag, modified, headers, first)] = open_reader(address).heads()
    head = (uri, size, etag if by_tag else None, modified, headers, first)
    tensorizer.save(new, tmp_path / "new")
    os.utime(tmp_path / "new", (1, 1))
    shutil.move(tmp_path / "new", path)
    [(_, new_size, new_etag, *_)] = open_reader(address).heads()
    before = nginx.requests()
    reader = open_reader(address, [head])
    assert nginx.requests() == before
    with pytest.raises(OSError) as caught:
        load(reader)
    facts = [("ETag", etag, new_etag)] * by_tag
    facts.append(("Last-Modified", modified, "Thu, 01 Jan 1970 00:00:01 GMT"))
    facts.append(("size", f"{size} bytes", f"{new_size} bytes"))
    # A connection that was closed meanwhile is tried twice, which is told behind it.
    assert str(caught.value).startswith(
        f"reading `{address}`: the file changed since it was opened: "
        + ("" if by_tag else f"it had no ETag, has {new_etag}; ")
        + "; ".join(f"its {fact} was {was}, is {now}" for fact, was, now in facts)
    )
    path.unlink()
    with pytest.raises(FileNotFoundError, match="404"):
        load(reader)


def test_a_shard_that_was_replaced(nginx, root):
    shutil.copytree(root / "model", nginx.root / "changing")
    address = f"{nginx.http}/changing/"
    heads = open_reader(address).heads()
    shard = nginx.root / "changing/model-00003-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes() + b" ")
    with pytest.raises(OSError, match=r"00003-of-00004.*the file changed since it was opened"):
        load(open_reader(address, heads))


# Heads that are passed in


@pytest.mark.parametrize("known", [0, 1, 8, 72, LEAST, 100, 5000])
def test_less_than_the_whole_index(nginx, known):
    address = f"{nginx.http}/model/{INDEX}"
    heads = open_reader(address).heads()
    heads = [(*head[:5], head[5][:known]) for head in heads]
    check(load(open_reader(address, heads)))
    # A shard is asked for, and the others are not.
    whole = open_reader(address).heads()
    check(load(open_reader(address, whole[:3] + whole[4:])))


def test_heads_of_other_files(nginx):
    heads = open_reader(f"{nginx.http}/many.tensors").heads()
    check(load(open_reader(f"{nginx.http}/f.tensors", heads)))


def test_impossible_cached_headers_are_refused(nginx):
    address = f"{nginx.http}/f.tensors"
    [head] = open_reader(address).heads()
    uri, size, etag, modified, headers, first = head
    opened = functools.partial(open_reader, address)
    with pytest.raises(ValueError, match=rf"at most the {len(first) - 1} bytes .*{len(first)}$"):
        opened([(uri, len(first) - 1, etag, modified, headers, first)])
    with pytest.raises(tensorizer.TruncatedError):
        opened([(uri, len(first) + 1, etag, modified, headers, first)])
    with pytest.raises(tensorizer.FormatError, match="an empty file"):
        opened([(uri, 0, etag, modified, headers, b"")])
    with pytest.raises(tensorizer.FormatError):
        opened([(uri, size, etag, modified, headers, b"\xff" * len(first))])
    for odd in ((2**64 - 1, etag), (size, 'W/"x"'), (size, '"two\r\nlines"'), (size, '"ü"')):
        with pytest.raises(OSError, match=r"f\.tensors"):
            load(opened([(uri, *odd, modified, headers, first)]))
    # Replicas of a file have their own dates.
    load(opened([(uri, size, etag, "then", headers, first)]))
    for wrong in (head[:5], [*head], (*head[:5], "text"), (uri, "1", *head[2:]), None):
        with pytest.raises((TypeError, ValueError), match="heads"):
            opened([wrong])
    with pytest.raises(OverflowError):
        opened([(uri, -1, *head[2:])])


@pytest.mark.parametrize("tag", [True, False])
@pytest.mark.parametrize("date", [True, False])
def test_cached_headers_without_validators_are_requested_again(nginx, tag, date):
    """The address as it is shown may be that of several files."""
    address = f"{nginx.http}/f.tensors"
    [(uri, size, etag, modified, headers, first)] = open_reader(address).heads()
    head = (uri, size, etag if tag else None, modified if date else None, headers, first)
    before = len(nginx.requests())
    reader = open_reader(address, [head])
    assert len(nginx.requests()) - before == (0 if tag or date else 1)
    check(load(reader))


# Sources without heads


def test_local_files_have_no_cached_headers(nginx, root, tmp_path):
    for address in (
        str(root / "f.tensors"),
        (root / "model").as_uri(),
        f"{nginx.http}/whole/f.tensors",
    ):
        reader = open_reader(address)
        assert reader.heads() == []
        check(load(open_reader(address, reader.heads())))
    reader = open_reader(f"{nginx.http}/f.tensors")
    heads = reader.heads()
    assert reader.sliced([(reader.find("large"), [(1, 3), (0, 1000)])]).heads() == heads
    assert open_reader(f"{nginx.http}/f.tensors", heads).heads() == []
    with (tmp_path / "framed").open("wb+") as file:
        file.write(b"before")
        with TensorSerializer(file) as serializer:
            serializer.write_state_dict(TENSORS)
    shutil.copy(tmp_path / "framed", nginx.root)
    source = native_open(f"{nginx.http}/framed")
    assert Reader(source, 6, keep_heads=True).heads() == []
    source.close()


def test_redis(root, tmp_path):
    server = Redis(tmp_path)
    try:
        with (
            redis.Redis(port=server.port) as client,
            TensorDeserializer(root / "f.tensors", "cpu", lazy_load=True) as deserializer,
        ):
            deserializer.to_redis(client, "model")
        reader = open_reader(f"{server.address}/model")
        assert reader.heads() == []
        check(load(open_reader(f"{server.address}/model", [])))
    finally:
        server.stop()


# The same as other ways to open


def outcome(function):
    try:
        reader = function()
    except Exception as error:
        return type(error)
    return reader.uri, reader.names(list(range(len(reader))))


ODD = [
    "{http}/nothing",
    "{http}/nothing/",
    "{http}/nothing.tensors",
    "{http}/f.tensors/",
    "{http}/f.tensors?a=/",
    "{http}/model?a",
    "{http}/model//",
    "{http}/token/f.tensors",
    "{http}/token/",
    "{http}/moved/f.tensors",
    "{http}/moved/model/",
    "{http}/loop/f",
    "{http}",
    "HTTP://127.0.0.1:{port}/f.tensors",
    "HTTP://127.0.0.1:{port}/model",
    "{https}/f.tensors",
    "http://",
    "http://127.0.0.1:1/f",
    "s3://bucket",
    "s3://bucket/",
    "s3://bucket/model",
    "s3://bucket/nothing/",
    "S3://bucket/f.tensors",
    "redis://127.0.0.1:1/key/",
    "gs://bucket",
    "az://container/f?a",
    "gcs://bucket/f",
]


@pytest.mark.parametrize("address", ODD)
def test_the_same_as_by_streams(nginx, bucket, address, monkeypatch):
    if ":1/" in address:  # Refused, which is tried again for a time.
        monkeypatch.setenv("TENSORIZER_TOTAL_SECONDS", "1")
    address = address.format(http=nginx.http, https=nginx.https, port=nginx.port)

    def by_stream():
        return Reader(native_open(address, {"model": True}))

    expected = outcome(by_stream)
    assert outcome(lambda: open_reader(address)) == expected
    if isinstance(expected, tuple):
        heads = open_reader(address).heads()
        before = nginx.requests(), len(bucket.requests)
        assert outcome(lambda: open_reader(address, heads)) == expected
        assert (nginx.requests(), len(bucket.requests)) == before
