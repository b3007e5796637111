"""Files of the clouds' servers, and credentials for them: ``gs://``, ``az://``, ``abfss://``."""

import base64
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorizer
import torch
from conftest import assert_same
from emulators import Azurite, Doorman, Front, Google, Tokens, Tunnel
from processes import COMMAND, run_python
from servers import free_port, make_certificates, need
from tensorizer import TensorDeserializer
from tensorizer.stream_io import open_stream

ops = torch.ops.tensorizer

SEED = torch.Generator().manual_seed(5)  # random bytes may by chance have the name of a secret
TENSORS = {"big": torch.randn(6, 500, 1000, generator=SEED), "small": torch.arange(10)}


@pytest.fixture(autouse=True)
def settings(no_settings_of_the_machine, monkeypatch):
    monkeypatch.setenv("TENSORIZER_ATTEMPTS", "2")
    monkeypatch.setenv("TENSORIZER_TOTAL_SECONDS", "30")


@pytest.fixture(scope="module")
def google():
    server = Google()
    yield server
    server.stop()


@pytest.fixture
def use(monkeypatch):
    """Set variables."""

    def set_all(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_all


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "f.tensors"
    tensorizer.save(TENSORS, path)
    return path.read_bytes()


@pytest.fixture(params=["gs", "az"])
def cloud(request, google, azurite, use):
    """A server of each cloud, as that of this environment, and addresses there."""
    server = google if request.param == "gs" else azurite
    use(**server.settings())
    server.address = f"{request.param}://bucket"
    return server


def check(found, wanted=TENSORS):
    assert list(found) == list(wanted)
    for name in wanted:
        assert_same(found[name].detach(), wanted[name])


class Payer(Front):
    """Hands on requests that name the project that pays for them."""

    def __init__(self, server):
        self.projects = []
        super().__init__(server)

    def answer(self, handler):
        self.projects.append(handler.headers.get("x-goog-user-project"))
        if self.projects[-1]:
            return super().answer(handler)
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        body = b"<Error><Code>UserProjectMissing</Code><Message>No project.</Message></Error>"
        handler.send_response(400)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return None


class TestReading:
    def test_every_reader_opens_cloud_addresses(self, cloud, data, tmp_path):
        cloud.put("a/f.tensors", data)
        address = f"{cloud.address}/a/f.tensors"
        check(tensorizer.load(address, verify_hash=True))
        check(ops.load(address))
        with TensorDeserializer(address, "cpu") as reader:
            check(dict(reader.items()))
        with open_stream(address) as stream:
            assert stream.read() == data
        with open_stream(address, begin=8, end=20) as stream:
            assert stream.read() == data[8:20]
        rows = tensorizer.load(address, slices={"big": (slice(2, 4),)})["big"]
        assert_same(rows, TENSORS["big"][2:4])
        done = run_python(COMMAND, "cp", address, tmp_path / "copy")
        assert done.returncode == 0, done.stderr
        check(tensorizer.load(tmp_path / "copy"))

    @pytest.mark.parametrize("name", ["a b/ü %20 +&=;'.tensors", "100%.tensors", "a//b.tensors"])
    def test_odd_names(self, cloud, data, name):
        cloud.put(name, data)
        check(tensorizer.load(f"{cloud.address}/{name}"))

    def test_folders(self, cloud, tmp_path):
        tensorizer.save(TENSORS, tmp_path / "model.safetensors", max_shard_size=1000)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert len(names) == 3
        for name in names:
            cloud.put(f"folder/{name}", (tmp_path / name).read_bytes())
        for end in ("folder", "folder/", "folder/model.safetensors.index.json"):
            found = tensorizer.load(f"{cloud.address}/{end}")
            check(dict(sorted(found.items())))

    def test_a_missing_object_raises_file_not_found(self, cloud):
        for name in ("nothing.tensors", "no/folder/"):
            with pytest.raises(FileNotFoundError, match=name):
                tensorizer.load(f"{cloud.address}/{name}")

    def test_a_file_that_changes_in_the_middle(self, cloud, data):
        cloud.put("changing.tensors", data)
        address = f"{cloud.address}/changing.tensors"
        with TensorDeserializer(address, "cpu", lazy_load=True) as reader:
            assert_same(reader["small"].detach(), TENSORS["small"])
            cloud.put("changing.tensors", data[:-1] + bytes([data[-1] ^ 1]))
            with pytest.raises(OSError, match="changed since it was opened"):
                reader["big"]

    def test_cached_objects_are_revalidated_without_storing_secrets(
        self, cloud, data, tmp_path, use
    ):
        """The second load asks for nothing but whether the file is the same; no secret is kept."""
        cloud.put("kept.tensors", data)
        address = f"{cloud.address}/kept.tensors"
        with Front(cloud) as relay:
            place = f"{relay.url}/{Azurite.account}"
            use(STORAGE_EMULATOR_HOST=relay.host, AZURE_STORAGE_ENDPOINT=place)
            check(tensorizer.load(address, cache_dir=tmp_path))
            assert relay.sent >= len(data)
            before, relay.sent = len(relay.requests), 0
            check(tensorizer.load(address, cache_dir=tmp_path))
            assert len(relay.requests) == before + 1
            assert relay.sent < len(data) / 10
        kept = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in kept) >= len(data)
        for path in kept:
            for secret in (Azurite.key, "sig="):
                assert secret not in path.name
                assert secret.encode() not in path.read_bytes()


@pytest.mark.parametrize(
    "address",
    ["gs://bucket", "gs:///key", "gs://a@bucket/key", "gs://bucket/a/../key", "az://container",
     "az://container/blob?sig=hidden-hu5hw0rd", "abfss://container@host.example.org/blob",
     "abfss://container@account/blob", "gs://bucket/.\t./other/key", "az://container/a\nb"],
)  # fmt: skip
def test_malformed_cloud_addresses_are_refused(address, use):
    use(AZURE_STORAGE_ACCOUNT_NAME="account")
    for load in (tensorizer.load, open_stream):
        with pytest.raises(ValueError, match="expected (gs|az)://") as raised:
            load(address)
        assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    "server", ["http://user:hidden-hu5hw0rd@host", "https://host?sig=hidden-hu5hw0rd", "ftp://h"]
)
def test_invalid_endpoint_addresses_are_refused(server, use):
    use(AZURE_STORAGE_ENDPOINT=server, AZURE_STORAGE_ACCOUNT_NAME="a", GOOGLE_BASE_URL=server)
    for address in ("gs://bucket/name", "az://container/name"):
        with pytest.raises(ValueError, match="expected the https:// or http:// address") as raised:
            tensorizer.load(address)
        assert "hidden" not in str(raised.value)


class TestGoogle:
    @pytest.fixture
    def saved(self, google, data):
        google.put("f.tensors", data)
        return "gs://bucket/f.tensors"

    def test_google_bearer_token_is_sent_as_given(self, google, saved, use):
        with Doorman(google) as door:
            use(GOOGLE_BASE_URL=door.url, GOOGLE_BEARER_TOKEN="given-hu5hw0rd")
            check(tensorizer.load(saved))
            assert set(door.shown) == {"Bearer given-hu5hw0rd"}

    def test_the_machines_own_account(self, google, saved, use):
        """It is asked once, and its answer serves until shortly before it expires."""
        with Doorman(google) as door, Tokens() as tokens:
            use(GOOGLE_BASE_URL=door.url, GCE_METADATA_HOST=tokens.host)
            for _ in range(3):
                check(tensorizer.load(saved))
            assert tokens.given == 1
            assert "/service-accounts/default/token" in tokens.asked[0]
            assert set(door.shown) == {"Bearer hu5hw0rd-1"}

    def test_a_token_that_expires_in_the_middle(self, google, saved, use):
        """After the first request only the next token is good."""

        def good(token, number):
            return token == ("hu5hw0rd-1" if number == 1 else "hu5hw0rd-2")

        with Doorman(google, good) as door, Tokens() as tokens:
            use(GOOGLE_BASE_URL=door.url, GCE_METADATA_HOST=tokens.host)
            with TensorDeserializer(saved, "cpu", lazy_load=True) as reader:
                for name, tensor in TENSORS.items():
                    assert_same(reader[name].detach(), tensor)
            assert tokens.given == 2
            assert set(door.shown[2:]) <= {"Bearer hu5hw0rd-1", "Bearer hu5hw0rd-2"}
            assert door.shown[-1] == "Bearer hu5hw0rd-2"

    def test_short_lived_tokens(self, google, saved, use, monkeypatch):
        """Each is good for a second only, by the clock of the server."""
        since = {}

        def good(token, _number):
            return time.monotonic() - since.setdefault(token, time.monotonic()) < 1

        with Doorman(google, good) as door, Tokens(lifetime=1) as tokens:
            use(GOOGLE_BASE_URL=door.url, GCE_METADATA_HOST=tokens.host)
            with open_stream(saved, buffer_size=1) as stream:
                for position in range(8_000_000, 8_000_004):
                    stream.seek(position)
                    assert len(stream.read(1)) == 1
                    time.sleep(0.7)
            assert tokens.given > 1

    def test_a_rejected_token_is_renewed_once(self, google, saved, use):
        with Doorman(google, lambda *_: False) as door, Tokens() as tokens:
            use(GOOGLE_BASE_URL=door.url, GCE_METADATA_HOST=tokens.host)
            with pytest.raises(PermissionError, match="401 Unauthorized") as raised:
                tensorizer.load(saved)
            assert "hu5hw0rd-" not in str(raised.value)
            # Once more with a new one, which is not good either.
            assert (len(door.shown), tokens.given) == (2, 2)

    def test_errors_of_the_metadata_server_are_reported(self, google, saved, use):
        for tokens in (Tokens(status=403), Tokens(status=503)):
            with tokens:
                use(GOOGLE_BASE_URL=google.url, GCE_METADATA_HOST=tokens.host)
                use(GCE_METADATA_IP=tokens.host)
                with pytest.raises(OSError, match=f"answered {tokens.status}.*The client is not"):
                    tensorizer.load(saved)

    def test_a_service_account(self, google, saved, use, tmp_path):
        """It signs its own tokens."""
        make_certificates(tmp_path)
        openssl, key = need("openssl"), tmp_path / "server.key"
        said = {"type": "service_account", "private_key": key.read_text(), "private_key_id": "id",
                "client_email": "me@example.org"}  # fmt: skip
        path = tmp_path / "account.json"
        path.write_text(json.dumps(said))
        for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"):
            with Doorman(google) as door, pytest.MonkeyPatch.context() as patch:
                use(GOOGLE_BASE_URL=door.url)
                patch.setenv(name, str(path))
                check(tensorizer.load(saved))
                token = door.shown[0].removeprefix("Bearer ")
        parts = [base64.urlsafe_b64decode(part + "==") for part in token.split(".")]
        claims = json.loads(parts[1])
        assert claims["iss"] == "me@example.org"
        assert claims["exp"] > time.time() + 3000
        (tmp_path / "signature").write_bytes(parts[2])
        (tmp_path / "text").write_text(token.rpartition(".")[0])
        subprocess.run(
            [openssl, "pkey", "-in", key, "-pubout", "-out", tmp_path / "public"], check=True
        )
        verify = [
            openssl,
            "dgst",
            "-sha256",
            "-verify",
            "public",
            "-signature",
            "signature",
            "text",
        ]
        subprocess.run(verify, cwd=tmp_path, check=True, capture_output=True)

    @pytest.mark.parametrize("place", ["variable", "home", "folder"])
    def test_credentials_of_a_gcloud_login_are_used(self, google, saved, use, tmp_path, place):
        """Google's own server is asked, here behind a proxy."""
        make_certificates(tmp_path, "accounts.google.com")
        said = {"type": "authorized_user", "client_id": "id", "client_secret": "secret-hu5hw0rd",
                "refresh_token": "refresh-hu5hw0rd"}  # fmt: skip
        folder = tmp_path / ".config/gcloud"
        folder.mkdir(parents=True)
        path = folder / "application_default_credentials.json"
        path.write_text(json.dumps(said))
        if place == "variable":
            use(GOOGLE_APPLICATION_CREDENTIALS=path.rename(tmp_path / "elsewhere"))
        if place == "folder":
            use(CLOUDSDK_CONFIG=folder, HOME="/nowhere")
        with Doorman(google) as door, Tokens(tls=tmp_path) as tokens, Tunnel(tokens.port) as tunnel:
            use(GOOGLE_BASE_URL=door.url, NO_PROXY="127.0.0.1")
            use(HTTPS_PROXY=f"http://{tunnel.host}", SSL_CERT_FILE=tmp_path / "ca.pem")
            check(tensorizer.load(saved))
            assert tunnel.asked == ["accounts.google.com:443"]
            assert tokens.fields[0]["refresh_token"] == "refresh-hu5hw0rd"
            assert set(door.shown) == {"Bearer hu5hw0rd-1"}

    @pytest.mark.parametrize("text", [None, "no json", '"secret"', '{"type": "secret"}'])
    def test_invalid_credentials_files_are_refused(self, saved, use, tmp_path, text):
        path = tmp_path / "secret.json"
        if text is not None:
            path.write_text(text)
        use(GOOGLE_APPLICATION_CREDENTIALS=path, GOOGLE_BASE_URL="http://127.0.0.1:9")
        with pytest.raises(OSError, match="finding credentials: ") as raised:
            tensorizer.load(saved)
        assert "secret" not in str(raised.value).replace("secret.json", "")

    @pytest.mark.parametrize("kind", ["impersonated_service_account", "external_account"])
    def test_credentials_of_other_types_are_named(self, google, saved, use, tmp_path, kind):
        """The error says what helps, and that helps although the file stays."""
        path = tmp_path / "file.json"
        path.write_text(json.dumps({"type": kind, "source_credentials": "hu5hw0rd"}))
        use(GOOGLE_APPLICATION_CREDENTIALS=path, GOOGLE_BASE_URL=google.url)
        with pytest.raises(OSError, match=f"`{kind}`.*GOOGLE_BEARER_TOKEN") as raised:
            tensorizer.load(saved)
        assert "hu5hw0rd" not in str(raised.value)
        use(GOOGLE_BEARER_TOKEN="given-hu5hw0rd")
        check(tensorizer.load(saved))

    def test_the_requester_pays(self, google, saved, use, tmp_path):
        """The project is that of the variable, or else of the file."""
        with Payer(google) as payer, Tokens() as tokens:
            use(GOOGLE_BASE_URL=payer.url, GCE_METADATA_HOST=tokens.host)
            with pytest.raises(OSError, match="UserProjectMissing.*set GOOGLE_CLOUD_QUOTA_PROJECT"):
                tensorizer.load(saved)
            use(GOOGLE_CLOUD_QUOTA_PROJECT="of-variable")
            check(tensorizer.load(saved))
            make_certificates(tmp_path)
            said = {"type": "service_account", "private_key": (tmp_path / "server.key").read_text(),
                    "private_key_id": "id", "client_email": "me@example.org",
                    "quota_project_id": "of-file"}  # fmt: skip
            (tmp_path / "account.json").write_text(json.dumps(said))
            use(GOOGLE_APPLICATION_CREDENTIALS=tmp_path / "account.json")
            check(tensorizer.load(saved))
            use(GOOGLE_CLOUD_QUOTA_PROJECT="")
            check(tensorizer.load(saved))
        assert list(dict.fromkeys(payer.projects)) == [None, "of-variable", "of-file"]

    def test_lack_of_gcs_credentials_is_detected_quickly_and_cached(self, google, saved, use):
        """No metadata server is waited for long, and the lack of credentials is cached."""
        use(GOOGLE_BASE_URL=google.url)
        begun = time.monotonic()
        check(tensorizer.load(saved))
        assert time.monotonic() - begun < 20
        begun = time.monotonic()
        check(tensorizer.load(saved))
        assert time.monotonic() - begun < 1.5

    def test_only_the_configured_metadata_server_is_used(self, google, saved, use):
        """No other is asked, whatever becomes of it, nor by what its variable is changed to."""
        with Tokens(status=503) as tokens, Doorman(google) as door, Tokens() as other:
            use(GOOGLE_BASE_URL=door.url, GCE_METADATA_HOST=tokens.host)
            # A request to any other metadata server would go through this proxy.
            use(HTTP_PROXY=f"http://{other.host}", NO_PROXY="127.0.0.1")
            with pytest.raises(OSError, match="`127.0.0.1` answered 503"):
                tensorizer.load(saved)
            assert (other.given, door.shown) == (0, [])

    def test_a_folder_without_credentials(self, google, saved, use, tmp_path):
        """Credentials of the usual folder are not used instead."""
        folder = tmp_path / ".config/gcloud"
        folder.mkdir(parents=True)
        (folder / "application_default_credentials.json").write_text("{}")
        use(CLOUDSDK_CONFIG=tmp_path, GOOGLE_BASE_URL=google.url)
        with pytest.raises(
            ValueError, match="the folder of CLOUDSDK_CONFIG has no application_def"
        ):
            tensorizer.load(saved)

    def test_unrelated_environment_variables_are_ignored(self, google, saved, use):
        """``SERVICE_ACCOUNT`` is not Google's."""
        with Doorman(google) as door:
            use(
                GOOGLE_BASE_URL=door.url,
                GOOGLE_BEARER_TOKEN="given-hu5hw0rd",
                SERVICE_ACCOUNT="builder",
            )
            check(tensorizer.load(saved))

    @pytest.mark.parametrize(
        "bad",
        [{"GCE_METADATA_HOST": "a b"}, {"GCE_METADATA_HOST": ""}, {"GCE_METADATA_IP": "a/b"},
         {"GOOGLE_BEARER_TOKEN": "hu5hw0rd\nden"}, {"GOOGLE_BASE_URL": "127.0.0.1:9"}],
    )  # fmt: skip
    def test_variables_that_are_not_well_formed(self, use, bad):
        use(**{"GOOGLE_BASE_URL": "http://127.0.0.1:9"} | bad)
        with pytest.raises(ValueError, match="expected ") as raised:
            tensorizer.load("gs://bucket/f.tensors")
        assert "hu5hw0rd" not in str(raised.value)

    def test_the_metadata_server_of_a_machine(self, tmp_path, data):
        """In a network of its own: see ``machine.py``."""
        unshare = [need("unshare"), "--map-root-user", "--net"]
        if subprocess.run([*unshare, "true"], capture_output=True).returncode:
            pytest.skip("the kernel lets nobody here make networks")
        (tmp_path / "f.tensors").write_bytes(data)
        script = Path(__file__).parent / "machine.py"
        run = subprocess.run([*unshare, sys.executable, script, tmp_path / "f.tensors"],
                             capture_output=True, text=True, timeout=100)  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == ["retried", "renewed", "kept", "refused", "nobody"]

    def test_gcs_settings_without_credentials_send_unsigned_requests(self, google, saved, use):
        with Doorman(google) as door:
            for variable in ({"GOOGLE_SKIP_SIGNATURE": "true"}, {"NO_GCE_CHECK": "true"}):
                use(GOOGLE_BASE_URL=door.url, **variable)
                with pytest.raises(PermissionError, match="no credentials were found: set GOOGLE"):
                    tensorizer.load(saved)
            assert set(door.shown) == {""}


class TestAzure:
    @pytest.fixture
    def saved(self, azurite, data):
        azurite.put("f.tensors", data)
        azurite.put("f.tensors", data, "open")
        return "az://bucket/f.tensors"

    def test_names_of_accounts(self, azurite, saved, use, monkeypatch):
        use(**azurite.settings())
        files = f"abfss://bucket@{azurite.account}.dfs.core.windows.net/f.tensors"
        check(tensorizer.load(files))
        check(tensorizer.load(f"az://bucket@{azurite.account}.blob.core.windows.net/f.tensors"))
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
        with pytest.raises(ValueError, match="not the name of its account"):
            tensorizer.load(files)
        text = "no storage account given: set AZURE_STORAGE_ACCOUNT_NAME"
        with pytest.raises(ValueError, match=text):
            tensorizer.load(saved)

    def test_the_emulator(self, azurite, saved, use):
        use(AZURE_STORAGE_USE_EMULATOR="true", AZURITE_BLOB_STORAGE_URL=azurite.url)
        use(AZURE_STORAGE_ACCOUNT_NAME=azurite.account, AZURE_STORAGE_ACCOUNT_KEY=azurite.key)
        check(tensorizer.load(saved))

    def test_connection_strings(self, azurite, saved, use):
        use(
            AZURE_STORAGE_CONNECTION_STRING=f"AccountName={azurite.account};AccountKey={azurite.key};"
            f"BlobEndpoint={azurite.url}/{azurite.account};"
        )
        check(tensorizer.load(saved))

    @pytest.mark.parametrize(
        "string",
        ["AccountName=account;SharedAccessSignature=hidden-hu5hw0rd;BlobEndpoint={server}/account",
         "BlobEndpoint=https://account.blob.core.windows.net;SharedAccessSignature=hidden-hu5hw0rd",
         "AccountName=account;AccountKey=aGlkZGVu;DefaultEndpointsProtocol=http"],
    )  # fmt: skip
    def test_connection_strings_of_another_account(self, use, string):
        """Neither their servers nor their signatures are used for the account that was named."""
        with Tokens() as server, Tokens(status=403) as tokens:
            url = f"http://{server.host}"
            use(AZURE_STORAGE_CONNECTION_STRING=string.format(server=url))
            use(IDENTITY_ENDPOINT=f"http://{tokens.host}/id", HTTPS_PROXY=url, HTTP_PROXY=url)
            use(NO_PROXY="127.0.0.1")
            with pytest.raises(PermissionError, match="finding credentials"):
                tensorizer.load("abfss://c@other.dfs.core.windows.net/f.tensors")
            use(AZURE_STORAGE_ACCOUNT_NAME="other")
            with pytest.raises(PermissionError, match="finding credentials"):
                tensorizer.load("az://c/f.tensors")
            # The same name in another cloud is another account.
            if "{server}" not in string:
                with pytest.raises(PermissionError, match="finding credentials"):
                    tensorizer.load("abfss://c@account.dfs.core.usgovcloudapi.net/f.tensors")
            assert server.asked == []

    @pytest.mark.parametrize(
        ("string", "what"),
        [("UseDevelopmentStorage=true", "AZURE_STORAGE_USE_EMULATOR=true"),
         ("BlobEndpoint=http://127.0.0.1:9/x;SharedAccessSignature=hidden-hu5hw0rd",
          "no account name"),
         ("AccountName=x;Unknown=hidden-hu5hw0rd", "unknown key"),
         ("hidden-hu5hw0rd", "without `=`")],
    )  # fmt: skip
    def test_invalid_connection_strings_are_refused(self, use, string, what):
        use(AZURE_STORAGE_CONNECTION_STRING=string)
        for address in ("az://c/b", "abfss://c@other.dfs.core.windows.net/b"):
            with pytest.raises(ValueError, match=what) as raised:
                tensorizer.load(address)
            assert "hidden" not in str(raised.value)

    def test_other_clouds_of_connection_strings(self, use):
        """The end of their hosts is that of the account's server."""
        string = "AccountName=x;AccountKey=aGlkZGVu;EndpointSuffix=core.usgovcloudapi.net"
        with Tokens() as plain, Tunnel(plain.port) as tunnel:
            use(AZURE_STORAGE_CONNECTION_STRING=string, HTTPS_PROXY=f"http://{tunnel.host}")
            with pytest.raises(OSError):
                tensorizer.load("az://c/b")
            assert set(tunnel.asked) == {"x.blob.core.usgovcloudapi.net:443"}

    @pytest.mark.parametrize("name", ["AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_ENDPOINT"])
    def test_azure_settings_without_an_account_name_are_refused(self, use, name):
        use(**{name: "http://127.0.0.1:9/mine?sig=hidden-hu5hw0rd"})
        with pytest.raises(ValueError, match="not the name of its account") as raised:
            tensorizer.load("abfss://c@other.dfs.core.windows.net/b")
        assert "hidden" not in str(raised.value)

    @pytest.mark.parametrize(
        "bad",
        [{"AZURE_STORAGE_TOKEN": "hu5hw0rd\nden"}, {"IDENTITY_ENDPOINT": "host:1/x"},
         {"IDENTITY_HEADER": "hu5hw0rd\nden"}, {"AZURE_TENANT_ID": "a b"},
         {"AZURE_AUTHORITY_HOST": "a b"}, {"AZURE_STORAGE_ENDPOINT": "127.0.0.1:9"},
         {"AZURE_STORAGE_SAS_TOKEN": "sig=" + "hidden-hu5hw0rd" * 1000}],
        ids=lambda bad: next(iter(bad)),
    )  # fmt: skip
    def test_variables_that_are_not_well_formed(self, use, bad):
        use(**{"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:9"})
        use(**bad)
        with pytest.raises(ValueError) as raised:
            tensorizer.load("az://c/b")
        assert "hu5hw0rd" not in str(raised.value)

    def test_the_command_line_of_azure_is_not_asked(self, azurite, saved, use):
        use(AZURE_STORAGE_ACCOUNT_NAME=azurite.account, AZURE_USE_AZURE_CLI="true")
        use(AZURE_STORAGE_ENDPOINT=f"{azurite.url}/{azurite.account}")
        with pytest.raises(ValueError, match="set AZURE_STORAGE_TOKEN to what `az account get-acc"):
            tensorizer.load(saved)
        use(AZURE_STORAGE_ACCOUNT_KEY=azurite.key)
        check(tensorizer.load(saved))

    def test_a_wrong_azure_account_key_raises_permission_error(self, azurite, saved, use):
        key = base64.b64encode(b"another").decode()
        use(**azurite.settings() | {"AZURE_STORAGE_ACCOUNT_KEY": key})
        with pytest.raises(PermissionError, match="403 Forbidden") as raised:
            tensorizer.load(saved)
        assert key not in str(raised.value)

    @pytest.mark.parametrize("key", ["no base64!", "c2hvcnQ"])
    def test_an_invalid_azure_account_key_is_refused_and_not_shown(self, azurite, saved, use, key):
        use(**azurite.settings() | {"AZURE_STORAGE_ACCOUNT_KEY": key})
        with pytest.raises(OSError, match="finding credentials") as raised:
            tensorizer.load(saved)
        assert key not in str(raised.value)

    def signed(self, azurite, use, hours):
        given = azurite.settings()
        del given["AZURE_STORAGE_ACCOUNT_KEY"]
        use(**given, AZURE_STORAGE_SAS_TOKEN=azurite.shared_access(hours))

    def test_a_shared_access_signature(self, azurite, saved, use):
        self.signed(azurite, use, 1)
        check(tensorizer.load(saved))

    def test_an_expired_shared_access_signature_is_refused(self, azurite, saved, use):
        self.signed(azurite, use, -1)
        with pytest.raises(PermissionError, match="403 Forbidden") as raised:
            tensorizer.load(saved)
        assert "sig=" not in str(raised.value)

    def test_azure_skip_signature_sends_unsigned_requests(self, azurite, saved, use):
        use(AZURE_STORAGE_ACCOUNT_NAME=azurite.account)
        use(AZURE_STORAGE_ENDPOINT=f"{azurite.url}/{azurite.account}", AZURE_SKIP_SIGNATURE="true")
        check(tensorizer.load("az://open/f.tensors"))
        with pytest.raises(OSError, match="no credentials were found: set AZURE"):
            tensorizer.load(saved)

    def test_lack_of_azure_credentials_is_detected_quickly_and_cached(self, azurite, saved, use):
        use(AZURE_STORAGE_ACCOUNT_NAME=azurite.account)
        use(AZURE_STORAGE_ENDPOINT=f"{azurite.url}/{azurite.account}")
        begun = time.monotonic()
        check(tensorizer.load("az://open/f.tensors"))
        assert time.monotonic() - begun < 20
        begun = time.monotonic()
        check(tensorizer.load("az://open/f.tensors"))
        assert time.monotonic() - begun < 1.5

    def test_keys_of_another_account(self, use):
        """They are not shown to the account that an address names."""
        port = free_port()
        use(AZURE_STORAGE_ACCOUNT_NAME="mine", AZURE_STORAGE_ACCOUNT_KEY="aHU1aHcwcmQ=")
        use(AZURE_STORAGE_ENDPOINT="http://127.0.0.1:9/mine", AZURE_SKIP_SIGNATURE="false")
        use(HTTPS_PROXY=f"http://127.0.0.1:{port}", IDENTITY_ENDPOINT=f"http://127.0.0.1:{port}/id")
        with pytest.raises(OSError, match="finding credentials"):
            tensorizer.load("abfss://c@other.dfs.core.windows.net/f.tensors")


def bearer(number, lifetime=3600):
    """Return a token as Azurite reads them."""
    now = int(time.time())
    said = {"aud": "https://storage.azure.com", "iss": "https://sts.windows.net/tenant/",
            "iat": now - 60, "nbf": now - 60, "exp": now + lifetime, "number": number}  # fmt: skip
    parts = [json.dumps(part).encode() for part in ({"alg": "none", "typ": "JWT"}, said)]
    parts = [base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts]
    return ".".join([*parts, "c2lnbmF0dXJl"])


@pytest.fixture(scope="session")
def server():
    """A server of Azure that is asked over TLS."""
    with Azurite.of_run(tls=True) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(server.folder / "ca.pem"))
        server.make_containers()
        patch.undo()
        yield server


class TestTokensOfAzure:
    @pytest.fixture(autouse=True)
    def saved(self, server, data, use):
        use(SSL_CERT_FILE=server.folder / "ca.pem", AZURE_STORAGE_ACCOUNT_NAME=server.account)
        use(AZURE_STORAGE_ENDPOINT=f"{server.url}/{server.account}")
        server.put("f.tensors", data)

    def load(self):
        check(tensorizer.load("az://bucket/f.tensors"))

    def test_a_client_with_a_secret(self, use):
        with Tokens(make=bearer) as tokens:
            use(AZURE_AUTHORITY_HOST=f"http://{tokens.host}", AZURE_TENANT_ID="tenant")
            use(AZURE_CLIENT_ID="client", AZURE_CLIENT_SECRET="secret-hu5hw0rd")
            for _ in range(3):
                self.load()
            assert tokens.asked == ["/tenant/oauth2/v2.0/token"]
            assert tokens.fields[0]["client_secret"] == "secret-hu5hw0rd"

    def test_a_rejected_client_secret_raises_permission_error(self, use):
        with Tokens(status=401) as tokens:
            use(AZURE_AUTHORITY_HOST=f"http://{tokens.host}", AZURE_TENANT_ID="tenant")
            use(AZURE_CLIENT_ID="client", AZURE_CLIENT_SECRET="hidden-hu5hw0rd")
            with pytest.raises(
                PermissionError, match="invalid_client: The client is not"
            ) as raised:
                self.load()
            assert "hidden" not in str(raised.value)
            assert tokens.given == 1

    def test_the_identity_of_a_workload(self, use, tmp_path):
        (tmp_path / "token").write_text("of the cluster")
        with Tokens(make=bearer) as tokens:
            use(AZURE_AUTHORITY_HOST=f"http://{tokens.host}", AZURE_TENANT_ID="tenant")
            use(AZURE_CLIENT_ID="client", AZURE_FEDERATED_TOKEN_FILE=tmp_path / "token")
            self.load()
            assert tokens.fields[0]["client_assertion"] == "of the cluster"

    def test_the_identity_of_a_machine(self, use):
        with Tokens(make=bearer) as tokens:
            use(IDENTITY_ENDPOINT=f"http://{tokens.host}/identity")
            self.load()
            assert tokens.asked[0].startswith("/identity?")

    def test_a_token_that_no_header_can_hold(self, use):
        with Tokens(make=lambda _: "to\nken") as tokens:
            use(IDENTITY_ENDPOINT=f"http://{tokens.host}/identity")
            with pytest.raises(OSError, match="the access token has characters"):
                self.load()

    def test_a_token_with_an_absurd_expiry_is_refused(self, use):
        with Tokens(make=bearer, lifetime=10**15) as tokens:
            use(IDENTITY_ENDPOINT=f"http://{tokens.host}/identity")
            with pytest.raises(OSError, match="expiry is too far in the future"):
                self.load()

    def test_tokens_that_have_expired(self, use):
        """The server says so, and the next one is good."""
        with Tokens(make=lambda number: bearer(number, 3600 if number > 1 else -30)) as tokens:
            use(IDENTITY_ENDPOINT=f"http://{tokens.host}/identity")
            self.load()
            assert tokens.given == 2
