"""Opens files at addresses as Python file objects.

:func:`open_stream` opens local paths and ``http://``, ``https://``, ``s3://``, ``gs://``,
``az://``, ``abfss://``, ``hf://``, ``redis://`` and ``rediss://`` addresses. If a stream is passed
to :class:`tensorizer.TensorDeserializer` or :class:`tensorizer.TensorSerializer`, the native code
transfers the tensors with parallel requests, straight into and out of their memory.
"""

from shutil import which as _which

from ._native import DEFAULT_S3_READ_ENDPOINT, DEFAULT_S3_WRITE_ENDPOINT
from .streams.atomic import logger as logger
from .streams.certificates import CAInfo
from .streams.credentials import (
    _infer_credentials as _infer_credentials,
    _ParsedCredentials as _ParsedCredentials,
)
from .streams.open import open_stream, s3_download as s3_download, s3_upload as s3_upload
from .streams.servers import CURLStreamFile, RedisStreamFile

__all__ = ["CAInfo", "CURLStreamFile", "RedisStreamFile", "open_stream"]

#: The default server for reading with keys that are passed as arguments, without a sign of AWS. A
#: program can assign it to set the server of all its reads, unless a setting of higher precedence
#: names one: see docs/reference/addresses/s3.md.
default_s3_read_endpoint = DEFAULT_S3_READ_ENDPOINT
#: The default server for writing, with the same rules.
default_s3_write_endpoint = DEFAULT_S3_WRITE_ENDPOINT
#: The path of ``curl``, or None. This package does not run it.
curl_path = _which("curl")
