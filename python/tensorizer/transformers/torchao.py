"""Metadata of models that torchao has quantized: how the parts of tensors belong together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from .._patching import Patch
from ..file.open_file import OpenFile
from .libraries import library
from .remote_code import entry

#: The metadata of the model that is being built.
_metadata: ContextVar[dict[str, str] | None] = ContextVar("_metadata", default=None)


class _QuantizerPatch(Patch):
    """Gives transformers' quantizer the metadata that it reads from files, as it gets no files."""

    def apply(self) -> None:
        cls = library("transformers.quantizers.quantizer_torchao").TorchAoHfQuantizer
        original = cls._process_model_before_weight_loading

        @functools.wraps(original)
        def process(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = _metadata.get()
            if found is not None:
                self.metadata = found
            return original(self, *args, **kwargs)

        self.replace(cls, "_process_model_before_weight_loading", process)


_patch = _QuantizerPatch()


@contextlib.contextmanager
def metadata_of(file: OpenFile, config: Any, headers: Mapping[str, str] | None) -> Iterator[None]:
    """Let transformers build a model of torchao from an open file in this block."""
    quantization = getattr(config, "quantization_config", None)
    method = entry(quantization, "quant_method")
    if str(getattr(method, "value", method)) != "torchao" or file.reader.format != "safetensors":
        yield
        return
    found, files = dict(file.reader.metadata or ()), file.reader.files()
    if files != [file.reader.uri]:
        # Each shard has those of all tensors, and their index has none.
        with OpenFile(files[0], headers=headers) as first:
            found = dict(first.reader.metadata or ())
    before = _metadata.set(found)
    try:
        with _patch:
            yield
    finally:
        _metadata.reset(before)
