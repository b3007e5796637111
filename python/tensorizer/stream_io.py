"""Files behind addresses, as Python file objects.

:func:`open_stream` opens local paths and ``http://``, ``https://``, ``s3://``, ``redis://`` and
``rediss://`` addresses. A stream that is handed to :class:`tensorizer.TensorDeserializer` or
:class:`tensorizer.TensorSerializer` is not read or written through Python: tensors travel by
parallel requests, straight into and out of their memory.
"""

from .streams.certificates import CAInfo
from .streams.open import (
    default_s3_read_endpoint,
    default_s3_write_endpoint,
    open_stream,
    s3_download,
    s3_upload,
)
from .streams.servers import CURLStreamFile, RedisStreamFile

__all__ = ["CAInfo", "CURLStreamFile", "RedisStreamFile", "open_stream"]

# Reachable, as before, but not part of ``import *``.
__extra__ = (default_s3_read_endpoint, default_s3_write_endpoint, s3_download, s3_upload)
