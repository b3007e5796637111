"""A bucket of each cloud that is written to, on an emulator."""

from emulators import GoogleXml, ask


class Google:
    """A bucket behind the XML API."""

    scheme, refusal = "gs", "401 Unauthorized"

    def __init__(self, moto):
        self.moto, self.door = moto, GoogleXml(moto)
        self.host = self.door.host

    def settings(self, host=None):
        return self.settings_of(host or self.host)

    @staticmethod
    def settings_of(host):
        return {"GOOGLE_BASE_URL": f"http://{host}", "GOOGLE_BEARER_TOKEN": "secret-hu5hw0rd"}

    def read(self, name):
        return self.moto.client().get_object(Bucket="bucket", Key=name)["Body"].read()

    def put(self, name, data):
        self.moto.client().put_object(Bucket="bucket", Key=name, Body=data)

    def left(self, name):
        """Return the uploads that are under way."""
        found = self.moto.client().list_multipart_uploads(Bucket="bucket").get("Uploads", [])
        return [one for one in found if one["Key"] == name]

    def drop(self, name):
        """Drop the uploads that are under way; there must be one."""
        (one,) = self.left(name)
        client = self.moto.client()
        client.abort_multipart_upload(Bucket="bucket", Key=name, UploadId=one["UploadId"])

    @staticmethod
    def stage(method, path):
        if method in ("PUT", "POST"):
            begin = "begin" if "uploads" in path.partition("?")[2] else "complete"
            return begin if method == "POST" else "part" if "partNumber" in path else "put"
        return "abort" if method == "DELETE" else None

    def stop(self):
        self.door.__exit__()


class Azure:
    """A container."""

    scheme, refusal = "az", "403 .*(AuthenticationFailed|AuthorizationFailure)"

    def __init__(self, server):
        self.server, self.host = server, server.host

    def settings(self, host=None):
        return self.server.settings() | {
            "AZURE_STORAGE_ENDPOINT": f"http://{host or self.host}/{self.server.account}"
        }

    def read(self, name):
        place = f"{self.server.url}/{self.server.account}/bucket/{name}"
        return ask("GET", f"{place}?{self.server.shared_access()}", None)

    def put(self, name, data):
        self.server.put(name, data)

    def left(self, name):
        """Azure has no call that drops blocks."""
        return []

    @staticmethod
    def stage(method, path):
        if method == "PUT":
            kinds = {"comp=blocklist": "complete", "comp=block": "part"}
            return next((kind for mark, kind in kinds.items() if mark in path), "put")
        return None

    def stop(self):
        pass
