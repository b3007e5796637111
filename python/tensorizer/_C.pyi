from collections.abc import Sequence
from typing import Any, final

__all__ = [
    "DEFAULT_S3_READ_ENDPOINT",
    "DEFAULT_S3_WRITE_ENDPOINT",
    "TORCH_VERSION",
    "Decryption",
    "Encryption",
    "PathSink",
    "Reader",
    "Sink",
    "Source",
    "Writer",
    "__version__",
    "cpu_count",
]

DEFAULT_S3_READ_ENDPOINT: str
DEFAULT_S3_WRITE_ENDPOINT: str
TORCH_VERSION: str
__version__: str
cpu_count: int

_Name = str | tuple[str | int, ...]

@final
class Encryption:
    @staticmethod
    def from_key(bytes: bytes, manifest: bool) -> Encryption: ...
    @staticmethod
    def random(manifest: bool) -> Encryption: ...
    @staticmethod
    def derive(
        source: bytes, opslimit: int, memlimit: int, salt: bytes | None, manifest: bool
    ) -> Encryption: ...
    @property
    def key(self) -> bytes: ...
    @property
    def salt(self) -> bytes | None: ...
    @property
    def manifest(self) -> bool: ...
    def same(self, other: Encryption) -> bool: ...

@final
class Decryption:
    def __new__(
        cls,
        *,
        key: bytes | None,
        source: bytes | None,
        require_manifest: bool,
        max_opslimit: int | None,
        max_memlimit: int | None,
    ) -> Decryption: ...

@final
class Reader:
    @staticmethod
    def from_path(path: str) -> Reader: ...
    @staticmethod
    def from_fd(descriptor: int, uri: str, base: int) -> Reader: ...
    @staticmethod
    def from_object(object: Any, uri: str, base: int, len: int | None) -> Reader: ...
    @staticmethod
    def from_source(source: Source, base: int) -> Reader: ...
    def headers(self) -> list[tuple[str, str]]: ...
    def decrypt(self, decryption: Decryption) -> None: ...
    def close(self) -> None: ...
    @property
    def uri(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def encrypted(self) -> bool: ...
    @property
    def tensor_bytes_field(self) -> int: ...
    @property
    def parallel(self) -> bool: ...
    @property
    def seekable(self) -> bool: ...
    def __len__(self) -> int: ...
    def names(self) -> list[_Name]: ...
    def stored_names(self) -> list[str]: ...
    def memory_lens(self) -> list[int]: ...
    def data_lens(self) -> list[int]: ...
    def offsets(self) -> list[tuple[int, int]]: ...
    def head_of(self, numbers: Sequence[int]) -> bytes: ...
    def raw(self, offset: int, len: int) -> bytes: ...
    def kinds(self) -> list[int]: ...
    def describe(self, number: int) -> tuple[str, list[int], bool]: ...
    def load(
        self, numbers: Sequence[int], *, verify: str, readers: int | None, map: bool | None
    ) -> tuple[int, list[int]]: ...
    def matches(self, ticket: int, numbers: Sequence[int]) -> list[bool]: ...

@final
class Source:
    @staticmethod
    def http(
        uri: str,
        headers: Sequence[tuple[str, str]],
        *,
        ca_file: str | None = None,
        ca_folder: str | None = None,
        trust_all: bool = False,
    ) -> Source: ...
    @staticmethod
    def s3(
        uri: str,
        *,
        access_key: str | None,
        secret_key: str | None,
        endpoint: str | None,
        config_path: str | None,
        force_http: bool | None,
        region: str | None,
        ca_file: str | None = None,
        ca_folder: str | None = None,
        trust_all: bool = False,
    ) -> Source: ...
    @staticmethod
    def redis(
        uri: str,
        *,
        ca_file: str | None = None,
        ca_folder: str | None = None,
        trust_all: bool = False,
    ) -> Source: ...
    def read(self, offset: int, len: int) -> bytes: ...
    def close(self) -> None: ...
    @property
    def uri(self) -> str: ...
    @property
    def size(self) -> int | None: ...
    def headers(self) -> list[tuple[str, str]]: ...

@final
class PathSink:
    def __new__(cls, path: str) -> PathSink: ...
    def open(self) -> int: ...
    def publish(self, len: int) -> None: ...
    def abandon(self) -> None: ...

@final
class Sink:
    @staticmethod
    def s3(
        uri: str,
        *,
        access_key: str | None,
        secret_key: str | None,
        endpoint: str | None,
        config_path: str | None,
        force_http: bool | None,
        region: str | None,
        ca_file: str | None = None,
        ca_folder: str | None = None,
        trust_all: bool = False,
    ) -> Sink: ...
    def write(self, offset: int, data: bytes) -> None: ...
    def publish(self, len: int) -> None: ...
    def abandon(self) -> None: ...
    @property
    def uri(self) -> str: ...

@final
class Writer:
    @staticmethod
    def to_path(
        path: str, alignment: int, threads: int | None, encryption: Encryption | None
    ) -> Writer: ...
    @staticmethod
    def to_fd(
        descriptor: int,
        uri: str,
        base: int,
        alignment: int,
        threads: int | None,
        encryption: Encryption | None,
    ) -> Writer: ...
    @staticmethod
    def to_sink(
        sink: Sink, base: int, alignment: int, threads: int | None, encryption: Encryption | None
    ) -> Writer: ...
    @staticmethod
    def to_object(
        object: Any,
        uri: str,
        base: int,
        alignment: int,
        threads: int | None,
        encryption: Encryption | None,
    ) -> Writer: ...
    @property
    def total_tensor_bytes(self) -> int: ...
    @property
    def end(self) -> int: ...
    def write(
        self,
        ticket: int,
        names: Sequence[_Name],
        kinds: Sequence[int],
        modules: Sequence[int],
    ) -> None: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...
