"""Files behind addresses, as Python file objects.

:func:`open_stream` opens local paths and ``http://``, ``https://``, ``s3://``, ``gs://``,
``az://``, ``abfss://``, ``hf://``, ``redis://`` and ``rediss://`` addresses. A stream that is
handed to :class:`tensorizer.TensorDeserializer` or :class:`tensorizer.TensorSerializer` is not read
or written through Python: tensors travel by parallel requests, straight into and out of their
memory.
"""

from shutil import which as _which

from .streams.atomic import logger as logger
from .streams.certificates import CAInfo
from .streams.credentials import (
    _infer_credentials as _infer_credentials,
    _ParsedCredentials as _ParsedCredentials,
)
from .streams.open import (
    default_s3_read_endpoint as default_s3_read_endpoint,
    default_s3_write_endpoint as default_s3_write_endpoint,
    open_stream,
    s3_download as s3_download,
    s3_upload as s3_upload,
)
from .streams.servers import CURLStreamFile, RedisStreamFile

__all__ = ["CAInfo", "CURLStreamFile", "RedisStreamFile", "open_stream"]

#: Where ``curl`` is, or None. Nothing here runs it.
curl_path = _which("curl")
