"""The options in ``--model-loader-extra-config``."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensorizer import DecryptionParams
from tensorizer._types import VerifyHash
from tensorizer.file.arguments import named_device
from tensorizer.file.encryption import key_of
from tensorizer.file.options import ReadOptions, check_reading
from tensorizer.stream_io import open_stream

if TYPE_CHECKING:
    from tensorizer.group.members import FreeGroup
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class LoaderOptions:
    """The options of a load.

    Attributes:
        uri: The location of the weights, if not the model: a file, folder, index or address.
        buffer_bytes: The most bytes of tensors that are held for the model.
        num_readers: Threads that read at once; None for as many as help.
        verify_hash: Compare every tensor with the hashes in the file: a bool, or ``"crc32"``.
        device: The device of the tensors; None for the model's.
        encryption_keyfile: A file or address with the key: 32 bytes, or 64 hexadecimal digits.
        cache_dir: A folder that caches data from servers; None for ``TENSORIZER_CACHE``.
        memory_limit: The most bytes in flight; None for ``TENSORIZER_MEMORY_LIMIT_MB``.
        distributed: True if ranks read the weights once and give them to each other, False if each
            reads all. ``"auto"``: True, except for local files that are loaded to the CPU, and for
            servers if the first rank has a cache, which the processes of a machine fill together.
        stale_if_error: Use a complete copy of the cache if its server fails.
        max_bytes_per_second: The most bytes per second that a rank receives from servers.
        headers: Header fields of the requests to the servers of the files.
        timeout: The seconds that the load of a file may take.

    """

    uri: str | None = None
    buffer_bytes: int = 1 << 30
    num_readers: int | None = None
    verify_hash: VerifyHash = False
    device: str | None = None
    encryption_keyfile: str | None = None
    cache_dir: str | None = None
    memory_limit: int | None = None
    distributed: bool | Literal["auto"] = "auto"
    stale_if_error: bool = False
    max_bytes_per_second: int | None = None
    headers: dict[str, str] | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name in ("uri", "device", "encryption_keyfile", "cache_dir"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name} must be a string that is not empty, not {value!r}")
        if type(self.buffer_bytes) is not int or self.buffer_bytes < 1:
            raise ValueError(f"buffer_bytes must be a positive int, not {self.buffer_bytes!r}")
        check_reading(**self.reading())
        if self.device is not None:
            named_device(self.device)
        if self.distributed != "auto" and not isinstance(self.distributed, bool):
            raise ValueError(f'distributed must be true, false or "auto", not {self.distributed!r}')

    @classmethod
    def of(cls, given: Any) -> LoaderOptions:
        """Return the options from the configuration of a loader.

        Raises:
            ValueError: It is not a dictionary, has unknown keys, or values that do not fit.
            TypeError: ``num_readers`` is not an int.
            RuntimeError: ``device`` is not a device of this machine.

        """
        if given is not None and not isinstance(given, dict):
            raise ValueError(
                f"model_loader_extra_config must be a dictionary, not {type(given).__name__}"
            )
        known = [field.name for field in fields(cls)]
        unknown = sorted(str(key) for key in given or {} if key not in known)
        if unknown:
            raise ValueError(
                f"model_loader_extra_config has {', '.join(unknown)}, which tensorizer does not "
                f"know: expected any of {', '.join(known)}"
            )
        return cls(**(given or {}))

    def reading(self) -> dict[str, Any]:
        """Return the options of reading, without the key."""
        shared = ReadOptions.__annotations__.keys() & vars(self).keys()
        return {name: getattr(self, name) for name in shared}

    def decryption(self) -> DecryptionParams | None:
        """Read the key, if the weights are encrypted.

        Raises:
            OSError: The file cannot be read.
            ValueError: It has neither 32 bytes nor 64 hexadecimal digits.

        """
        if self.encryption_keyfile is None:
            return None
        with open_stream(self.encryption_keyfile, timeout=self.timeout) as stream:
            key = key_of(stream.read(), f"encryption_keyfile {stream.name}")
        return DecryptionParams.from_key(key)

    def group_for(self, group: ProcessGroup | None, device: torch.device) -> FreeGroup | None:
        """Return the group whose ranks load together to a device; None if each loads by itself.

        Args:
            group: The ranks that load the same model; nothing else uses their group meanwhile.
            device: The device of the weights.

        """
        if group is None or group.size() == 1 or self.distributed is False:
            return None
        from tensorizer.group.members import FreeGroup

        has_cache = bool(self.cache_dir or os.environ.get("TENSORIZER_CACHE"))
        return FreeGroup(
            group,
            shares_local_files=self.distributed is True or device.type != "cpu",
            prefers_cache=self.distributed == "auto" and has_cache,
        )

    def device_for(self, model: torch.nn.Module) -> torch.device:
        """Return the device for the tensors of a model: CUDA if the model is there, else the CPU.

        Weights that are quantized during the load are on the meta device until then.
        """
        if self.device is not None:
            return torch.device(self.device)
        real = (at.device for at in model.parameters() if at.device.type != "meta")
        found = next(real, torch.device("cpu"))
        return found if found.type == "cuda" else torch.device("cpu")
