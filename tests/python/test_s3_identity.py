"""Credentials for S3: profiles, roles by a token in a file, and single sign-on."""

import contextlib
import hashlib
import json
import time

import pytest
import tensorizer
import torch
from scripted import Relay, Scripted
from tensorizer.stream_io import open_stream

TENSORS = {"big": torch.randn(5, 1000, 1000), "small": torch.arange(10)}
START = "https://example.awsapps.com/start"
ROLE = "arn:aws:iam::123456789012:role/reader"


@pytest.fixture(autouse=True)
def settings(s3, monkeypatch, tmp_path):
    """No keys in the environment; an own home."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    (tmp_path / ".aws/sso/cache").mkdir(parents=True)


@pytest.fixture
def address(moto, tmp_path):
    tensorizer.save(TENSORS, tmp_path / "f.tensors")
    moto.client().upload_file(str(tmp_path / "f.tensors"), "bucket", "identity.tensors")
    return "s3://bucket/identity.tensors"


@pytest.fixture
def relay(moto, monkeypatch):
    with Relay(moto.host) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{relay.host}")
        yield relay


def check(loaded):
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def load_and_save(address):
    check(tensorizer.load(address, verify_hash=True))
    tensorizer.save(TENSORS, address + ".copy")
    check(tensorizer.load(address + ".copy", verify_hash=True))


class Identities(Scripted):
    """Gives credentials of roles for tokens: STS, and the two servers of single sign-on."""

    def __init__(self, lasts=3600):
        self.lasts, self.given, self.asked = lasts, 0, []
        super().__init__()
        self.url = f"http://127.0.0.1:{self.port}"

    def answer(self, handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0))).decode()
        status = 200
        with self.lock:
            self.asked.append((handler.path, dict(handler.headers), body))
            self.given += 1
            if "AssumeRoleWithWebIdentity" in body:
                said = self.of_sts()
            elif handler.path.startswith("/token"):
                said = {
                    "accessToken": "renewed-hu5hw0rd",
                    "expiresIn": 3600,
                    "refreshToken": "next-hu5hw0rd",
                }
            elif handler.headers.get("x-amz-sso_bearer_token") in (
                "good-hu5hw0rd",
                "renewed-hu5hw0rd",
            ):
                end = int((time.time() + self.lasts) * 1000)
                said = {"roleCredentials": {"accessKeyId": f"sso-{self.given}",
                        "secretAccessKey": "s-hu5hw0rd", "sessionToken": "t-hu5hw0rd",
                        "expiration": end}}  # fmt: skip
            else:
                status, said = 401, {"message": "Session token not found or invalid"}
        data = said.encode() if isinstance(said, str) else json.dumps(said).encode()
        handler.send_response(status)
        if status == 401:
            handler.send_header("x-amzn-ErrorType", "UnauthorizedException")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def of_sts(self):
        end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.lasts))
        space = "https://sts.amazonaws.com/doc/2011-06-15/"
        return (
            f'<AssumeRoleWithWebIdentityResponse xmlns="{space}">'
            f"<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>web-{self.given}"
            "</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>"
            f"<Expiration>{end}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>"
            "</AssumeRoleWithWebIdentityResponse>"
        )


@pytest.fixture
def identities(monkeypatch):
    with Identities() as server:
        for service in ("STS", "SSO", "SSO_OIDC"):
            monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", server.url)
        yield server


def test_profiles(address, relay, monkeypatch, tmp_path):
    """The keys of the profile that is named, and of no other."""
    (tmp_path / ".aws/credentials").write_text(
        "".join(
            f"[{name}]\naws_access_key_id = of-{name}\naws_secret_access_key = s\n"
            for name in ("default", "one", "two")
        )
    )
    load_and_save(address)
    for name in ("one", "two"):
        monkeypatch.setenv("AWS_PROFILE", name)
        load_and_save(address)
    used = list(dict.fromkeys(relay.signers))
    assert used == ["of-default", "of-one", "of-two"]


@pytest.mark.parametrize("place", ["environment", "profile"])
def test_a_role_by_a_token_in_a_file(address, relay, identities, monkeypatch, tmp_path, place):  # noqa: PLR0917
    (tmp_path / "token").write_text("secret.token")
    if place == "environment":
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
        monkeypatch.setenv("AWS_ROLE_SESSION_NAME", "session")
    else:
        monkeypatch.setenv("AWS_PROFILE", "pod")
        (tmp_path / ".aws/config").write_text(
            f"[profile pod]\nrole_arn = {ROLE}\nweb_identity_token_file = {tmp_path}/token\n"
        )
    load_and_save(address)
    assert set(relay.signers) == {"web-1"}
    ((_, _, body),) = identities.asked
    assert "WebIdentityToken=secret.token" in body
    assert "reader" in body


def test_a_role_of_moto(address, relay, moto, monkeypatch, tmp_path):
    """The same by a server that others wrote."""
    (tmp_path / "token").write_text("token")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://{moto.host}")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    load_and_save(address)
    (signer,) = set(relay.signers)
    assert signer.startswith("ASIA")


def test_the_token_is_read_again_when_the_role_expires(
    address, relay, monkeypatch, tmp_path
):  # as a cluster replaces it
    (tmp_path / "token").write_text("old")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    # Whatever it gives is about to expire: each request asks again.
    with Identities(lasts=-1) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server.url)
        check(tensorizer.load(address))
        (tmp_path / "token").write_text("new")
        tensorizer.save(TENSORS, address + ".copy")
        bodies = [body for _, _, body in server.asked]
    assert "WebIdentityToken=old" in bodies[0]
    assert "WebIdentityToken=new" in bodies[-1]
    assert len(set(relay.signers)) == len(relay.signers) > 3


def test_a_token_that_is_refused(address, relay, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "nothing"))
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    with pytest.raises(PermissionError, match="finding credentials"):
        tensorizer.load(address)
    with pytest.raises(PermissionError, match="finding credentials"):
        tensorizer.save(TENSORS, address + ".copy")
    assert relay.requests == []


def sign_on(tmp_path, token, ends="2100-01-01T00:00:00Z", session=True):
    """Write what `aws sso login` leaves behind, and a profile that uses it."""
    said = {"accessToken": token, "expiresAt": ends, "region": "us-east-1", "startUrl": START}
    said |= {"clientId": "client", "clientSecret": "secret-hu5hw0rd",
             "refreshToken": "refresh-hu5hw0rd",
             "registrationExpiresAt": "2100-01-01T00:00:00Z"}  # fmt: skip
    name = hashlib.sha1(b"mine" if session else START.encode()).hexdigest()
    (tmp_path / f".aws/sso/cache/{name}.json").write_text(json.dumps(said))
    role = "sso_account_id = 123456789012\nsso_role_name = reader\n"
    of_start = f"sso_start_url = {START}\nsso_region = us-east-1\n"
    config = f"[profile sso]\n{role}" + ("sso_session = mine\n" if session else of_start)
    if session:
        config += f"[sso-session mine]\n{of_start}sso_registration_scopes = sso:account:access\n"
    (tmp_path / ".aws/config").write_text(config)


@pytest.mark.parametrize("session", [True, False], ids=["session", "older"])
def test_single_sign_on(address, relay, identities, monkeypatch, tmp_path, session):  # noqa: PLR0917
    sign_on(tmp_path, "good-hu5hw0rd", session=session)
    monkeypatch.setenv("AWS_PROFILE", "sso")
    load_and_save(address)
    assert set(relay.signers) == {"sso-1"}
    ((path, _, _),) = identities.asked
    assert "role_name=reader" in path
    assert "account_id=123456789012" in path


def test_a_session_is_renewed(address, relay, identities, monkeypatch, tmp_path):
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 30))
    sign_on(tmp_path, "old-hu5hw0rd", soon)
    monkeypatch.setenv("AWS_PROFILE", "sso")
    load_and_save(address)
    assert set(relay.signers) == {"sso-2"}
    assert [path.split("?")[0] for path, _, _ in identities.asked] == [
        "/token",
        "/federation/credentials",
    ]


@pytest.mark.parametrize("token", ["wrong-hu5hw0rd", None])
def test_a_session_that_is_over(address, relay, identities, monkeypatch, tmp_path, token):  # noqa: PLR0917
    """The error says so, and no request is sent without credentials."""
    monkeypatch.setenv("AWS_PROFILE", "sso")
    sign_on(tmp_path, token or "x", session=False)
    if token is None:
        sign_on(tmp_path, "x", "2020-01-01T00:00:00Z", session=False)
    with pytest.raises(PermissionError, match="finding credentials") as raised:
        tensorizer.load(address)
    assert "secret" not in str(raised.value)
    with pytest.raises(PermissionError, match="finding credentials"):
        tensorizer.save(TENSORS, address + ".copy")
    assert relay.requests == []


ARN = "arn:aws:iam::123456789012:user/alice"


def log_in(tmp_path, key, ends="2100-01-01T00:00:00Z"):
    """Write what `aws login` leaves behind, and a profile that uses it."""
    said = {"accessToken": {"accessKeyId": key, "secretAccessKey": "s-hu5hw0rd",
                            "sessionToken": "t-hu5hw0rd", "accountId": "123456789012",
                            "expiresAt": ends},
            "refreshToken": "refresh-hu5hw0rd", "dpopKey": "key-hu5hw0rd"}  # fmt: skip
    folder = tmp_path / ".aws/login/cache"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{hashlib.sha256(ARN.encode()).hexdigest()}.json"
    file.write_text(json.dumps(said))
    (tmp_path / ".aws/config").write_text(
        f"[profile console]\nlogin_session = {ARN}\n"
        f"[profile role]\nrole_arn = {ROLE}\nsource_profile = console\n"
    )
    return file


def test_a_session_of_aws_login(address, relay, monkeypatch, tmp_path):
    file = log_in(tmp_path, "login")
    monkeypatch.setenv("AWS_PROFILE", "console")
    load_and_save(address)
    assert set(relay.signers) == {"login"}
    monkeypatch.setenv("AWS_LOGIN_CACHE_DIRECTORY", str(tmp_path))
    file.rename(tmp_path / file.name)
    load_and_save(address)
    # Keys of the environment take precedence, as in AWS's clients.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "variable")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s-hu5hw0rd")
    load_and_save(address)
    assert set(relay.signers) == {"login", "variable"}


def test_a_session_of_aws_login_is_read_again_when_it_expires(
    address, relay, monkeypatch, tmp_path
):
    monkeypatch.setenv("AWS_PROFILE", "console")
    # On a busy machine a session may expire before the object is open.
    for seconds in (2, 5, 20):
        ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
        log_in(tmp_path, "old", ends)
        with contextlib.suppress(PermissionError):
            stream = open_stream(address, buffer_size=1)
            break
    else:
        pytest.fail("each session had expired before the object was open")
    with stream:
        # As the AWS CLI renews it.
        log_in(tmp_path, "new")
        for position in range(10_000_000, 10_000_300):
            stream.seek(position)
            stream.read(1)
            if relay.signers[-1] == "new":
                break
            time.sleep(0.1)
    assert set(relay.signers) == {"old", "new"}


@pytest.mark.parametrize("case", ["expired", "missing", "malformed", "role"])
def test_a_session_of_aws_login_that_cannot_be_used(address, relay, monkeypatch, tmp_path, case):
    """The error says what helps, in words of a user."""
    file = log_in(
        tmp_path, "x", "2020-01-01T00:00:00Z" if case == "expired" else "2100-01-01T00:00:00Z"
    )
    if case == "missing":
        file.unlink()
    if case == "malformed":
        file.write_text('{"accessToken": "hu5hw0rd"')
    monkeypatch.setenv("AWS_PROFILE", "role" if case == "role" else "console")
    with pytest.raises(PermissionError, match="aws configure export-credentials") as raised:
        tensorizer.load(address)
    assert "hu5hw0rd" not in str(raised.value)
    assert "feature" not in str(raised.value)
    assert relay.requests == []
