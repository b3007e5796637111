"""The reader of files, :class:`TensorDeserializer`."""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import os
import warnings
from collections.abc import Iterable, Iterator, KeysView, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from .._types import FilterFuncType, Name, TensorType, VerifyHash
from ..modules import held_elsewhere, state, vllm_files
from ..modules.wrappers import Submodules
from ..tensors import fake_mode
from ..tensors.arrays import opaque_array
from ..tensors.handles import lend, refuse_short
from ..tensors.usage import convert_bytes
from . import hints, unchanged
from .arguments import checked_verification, named_device, names_of, resolve_device
from .dtensors import load_sharded, sharded_slots
from .loaded_tensors import LoadedTensors
from .name_tree import LEFT_OUT, converted, list_or_dict_with_gaps, nested, path_of, plain
from .open_file import OpenFile
from .options import LoadOptions, takes
from .progress import ProgressReporter, ProgressType
from .slices import TensorSlice

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Unpack

#: The types of tensors, by their numbers.
_KINDS = {int(kind): kind for kind in TensorType}


class TensorDeserializer(collections.abc.Mapping[Any, torch.nn.Parameter]):
    """The tensors of a file, as a read-only mapping and as a loader of modules.

    The file is a ``.tensors`` file, a safetensors file, an index of shards
    (``*.safetensors.index.json``), a folder that holds one of these, or an archive of
    ``torch.save``. Its content tells the format. Only ``.tensors`` files have hashes and
    encryption.

    Args:
        file_obj: A path, ``os.PathLike``, ``http(s)://``, ``s3://``, ``gs://``, ``az://`` or
            ``hf://`` address, file descriptor (which stays the caller's), or binary file object
            (which is closed with this object; streams of :mod:`tensorizer.stream_io` are read by
            the native code). A pipe and a server without range requests are read in one pass, but
            not archives of ``torch.save``. An index has to be opened by its path or address.
        device: The device of the tensors. None: CUDA if there is any, else the CPU. CUDA without a
            number is the device that is current when tensors are loaded.
        filter_func: Called once with each tensor's name; a tensor is left out if it returns
            something false. The names of nested structures are tuples.
        dtype: Cast floating-point tensors to this dtype (and complex ones, if it is complex); a
            name such as ``"float16"`` is accepted too. Integers, booleans, and floating-point
            numbers of 8 bits or fewer, which have their scales elsewhere, keep their dtypes.
        names: Only these tensors; a string is one name. A name that the file lacks is a
            ``KeyError``.
        lazy_load: Read tensors on first access, in any order. Otherwise all of them are
            read at once and the file is closed. A pipe is read up to the tensor, and those before
            it are kept.
        plaid_mode: Ignored.
        plaid_mode_buffers: Ignored.
        progress: Called as ``progress(done, total)`` with the bytes of tensor data that are loaded,
            and with the number of bytes of the chosen tensors, on the thread that loads, which
            waits for it. An exception from it ends the load. True shows a bar on a
            terminal or in a notebook.
        options: How the file is read: see :class:`LoadOptions`.

    Raises:
        OSError: The file cannot be opened or read.
        FormatError: It is not a valid file of any of these formats (a ``ValueError``).
        TruncatedError: It ends too early (a ``FormatError`` and an ``OSError``).
        InvalidVersionError: Its version is not supported (a ``ValueError``).
        CryptographyError: It is encrypted and ``encryption`` is None, or the other way round; the
            key is wrong, or the data were changed.
        HashMismatchError: ``verify_hash`` found other bytes than were written, or no hashes.
            ``DamagedFileError``, a subclass, is for files of a hub.
        NotImplementedError: A tensor has a dtype that torch lacks, or is more than plain bytes.
        pickle.UnpicklingError: torch's restricted unpickler refuses an archive of ``torch.save``.
        MemoryError: The tensors do not fit into memory; on CUDA a ``torch.OutOfMemoryError`` too.
        DeviceError: A device refused or was lost (a ``RuntimeError``).
        ValueError: More than one reader for a source that can only have one; ``memory_limit`` is
            less than the minimum, which the message states.

    """

    @takes(LoadOptions)
    def __init__(
        self,
        file_obj: str | bytes | os.PathLike[Any] | int | BinaryIO | Any,
        device: torch.device | str | None = None,
        filter_func: FilterFuncType | None = None,
        dtype: torch.dtype | str | None = None,
        *,
        names: Iterable[Name] | None = None,
        lazy_load: bool = False,
        plaid_mode: bool | None = None,
        plaid_mode_buffers: int | None = None,
        progress: ProgressType = False,
        **options: Unpack[LoadOptions],
    ) -> None:
        self._reporter = reporter = ProgressReporter(progress)
        self._names = names_of(names)
        self._is_part = filter_func is not None or names is not None
        self._file = OpenFile(
            file_obj,
            dtype=dtype,
            progress=reporter if progress else None,
            wanted=self._names,
            lazily=lazy_load and not self._is_part and not options.get("verify_hash"),
            closes_stream=True,
            **options,
        )
        self._keys: dict[Any, int | list[int]] | None = None
        self._cursor = 0
        self._filter = filter_func
        try:
            named = self._named_device = named_device(device)
            #: None for CUDA without a number, which means the current device at each call.
            self._fixed_device = None if named.type == "cuda" and named.index is None else named
            self._loaded = LoadedTensors(
                self._file, self._selection if self._file.is_whole else None
            )
            if self._file.is_whole:
                reporter.total = self.total_tensor_bytes
            if not lazy_load:
                with reporter:
                    self._load(self._selection)
                self._file.close()
        except BaseException:
            # Not by close(): a subclass may have overridden it, and is not set up yet.
            self._file.close()
            raise

    @property
    def _device(self) -> torch.device:
        """The device for tensors that are loaded now: the current CUDA device may change."""
        return self._fixed_device or resolve_device(self._named_device)

    def _verification(self, verify_hash: VerifyHash | None) -> str:
        if verify_hash is None:
            return self._file.verify
        verify = checked_verification(verify_hash)
        # Refuses a format without hashes, even if all tensors are loaded already.
        self._file.read([], torch.device("cpu"), verify)
        return verify

    @functools.cached_property
    def _selection(self) -> Sequence[int]:
        chosen: Sequence[int] = range(len(self._file.reader))
        if self._names is not None:
            chosen = sorted(set(self._file.find_all(self._names).values()))
        wants = self._filter
        if wants is None:
            return chosen
        return [number for number in chosen if wants(self._file.reader.name(number))]

    @functools.cached_property
    def total_tensor_bytes(self) -> int:
        """Bytes of data of the tensors chosen, in the file."""
        return self._file.reader.data_len(self._selection)

    @property
    def _top(self) -> dict[Any, int | list[int]]:
        """The keys at the top, each with its tensor's number, or the numbers of those below."""
        # Without a lock, which a forked child could inherit locked: two threads make the same dict.
        if self._keys is None:
            self._keys = self._file.reader.top_level(self._selection)
        return self._keys

    # The file

    def close(self) -> None:
        """Close the file. Loaded tensors stay valid. Closing again has no effect."""
        file: OpenFile | None = getattr(self, "_file", None)
        if file is not None:
            file.close()
            self._reporter.close()

    def __repr__(self) -> str:
        if "_loaded" not in vars(self):
            return f"<{type(self).__name__} that is not open>"
        if not self._file.is_whole:
            return f"<{type(self).__name__} of {self._file.uri!r}, for {self._named_device}>"
        count, size = len(self._selection), convert_bytes(self.total_tensor_bytes)
        tensors = f"{count} {'tensor' if count == 1 else 'tensors'}, {size}"
        return f"<{type(self).__name__} of {self._file.uri!r}: {tensors}, for {self._named_device}>"

    def __enter__(self) -> TensorDeserializer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def total_file_bytes(self) -> int:
        """The number of bytes of tensor data that the file states."""
        return self._file.reader.tensor_bytes_field

    @property
    def total_bytes_read(self) -> int:
        """Bytes of tensor data read so far."""
        return self._file.bytes_read

    @property
    def cache_status(self) -> str | None:
        """The header ``x-cache-status`` of the server's response; None if there is none."""
        return next(
            (v for k, v in self._file.reader.headers() if k.lower() == "x-cache-status"), None
        )

    #: Kept for callers of the old package; always 0 there too.
    read_bytes = 0
    total_compressed_tensor_bytes = 0

    # Loading

    def _load(self, numbers: Sequence[int], verify: str | None = None) -> None:
        """Load those of the tensors that are not loaded yet."""
        self._loaded.load(numbers, self._device, verify)

    # Mapping

    def __getitem__(self, name: str | int) -> torch.nn.Parameter:
        """Return a tensor as a ``Parameter``, or a subtree as a read-only mapping of them.

        Annotated as a ``Parameter``, which is the common case; :meth:`tree` returns subtrees as
        ``Any``.
        """
        found = self._find(name)
        if found is None:
            raise self._missing(name)
        return found

    def _missing(self, name: Any) -> KeyError:
        """Return the error of a tensor that is not in the file, or was not chosen."""
        if isinstance(name, (str, tuple)):
            # Names that no file can hold are a ``ValueError``.
            with contextlib.suppress(KeyError, ValueError):
                number = self._file.find(name)
                if self._is_part:
                    return KeyError(
                        f"Tensor {name!r} of {self._file.uri} was left out by names or filter_func"
                    )
                steps = "".join(f"[{step!r}]" for step in path_of(self._file.reader.name(number)))
                return KeyError(
                    f"Tensor {name!r} of {self._file.uri} is nested: expected {steps}, key by key"
                )
        return self._file.missing(name)

    def get(self, name: Any, default: Any = None) -> Any:
        """Return a tensor or a subtree, or the default if there is none."""
        found = self._find(name)
        return default if found is None else found

    def _find(self, name: str | int) -> torch.nn.Parameter | None:
        if not self._file.is_whole and isinstance(name, str):
            early = self._loaded.load_from_shard(name, self._device)
            if early is not None:
                return early
        try:
            node = self._top[name]
        except (KeyError, TypeError):
            return None
        if isinstance(node, int):
            return self._loaded.load_one(node, self._device)
        self._load(node)
        below = ((path_of(self._file.reader.name(n))[1:], self._loaded[n]) for n in node)
        subtree: Any = converted(nested(below), MappingProxyType)
        return subtree  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._top)

    def __len__(self) -> int:
        return len(self._top)

    def __contains__(self, name: object) -> bool:
        return name in self._top

    def keys(self) -> KeysView[Any]:
        """Return the top-level keys, in the order of the file. Nothing is loaded."""
        return self._top.keys()

    def tree(
        self,
        prefix: Iterable[str | int] | None = None,
        *,
        default: Any = None,
        filter_func: FilterFuncType | None = None,
    ) -> Any:
        """Return the tensors below a prefix as nested dicts and lists, or one tensor.

        Args:
            prefix: The path of the subtree; None for everything.
            default: The result if nothing matches.
            filter_func: Leaves out tensors by name; lists are closed up, without gaps.

        Raises:
            TypeError: ``prefix`` is a string or not iterable.

        """
        if isinstance(prefix, (str, bytes)) or (
            prefix is not None and not isinstance(prefix, collections.abc.Iterable)
        ):
            raise TypeError(f"prefix must be an iterable of keys and indices, not {prefix!r}")
        above = () if prefix is None else tuple(prefix)
        below: list[tuple[tuple[str | int, ...], int]] = []
        wanted: list[int] = []
        # The tensors whose names begin so, and perhaps others.
        node = self._top.get(above[0], ()) if above else self._selection
        for number in [node] if isinstance(node, int) else node:
            name = self._file.reader.name(number)
            path = path_of(name)
            if path[: len(above)] == above:
                below.append((path[len(above) :], number))
                if filter_func is None or filter_func(name):
                    wanted.append(number)
        if not wanted:
            return default
        self._load(wanted)
        if below == [((), wanted[0])]:
            return self._loaded[wanted[0]]
        chosen = set(wanted)
        found = ((path, self._loaded[n] if n in chosen else LEFT_OUT) for path, n in below)
        saved_as_dicts = self._file.reader.format == "torch"
        return converted(nested(found), list_or_dict_with_gaps if saved_as_dicts else plain)

    # Reading one after another

    def _next(
        self, filter_func: FilterFuncType | None, num_tensors: int
    ) -> Iterator[tuple[int, Name, TensorType]]:
        if num_tensors < -1:
            raise ValueError(f"num_tensors must be -1 or more, not {num_tensors}")
        given, kinds = 0, self._file.reader.kinds()
        while self._cursor < len(self._selection) and given != num_tensors:
            number = self._selection[self._cursor]
            self._cursor += 1
            name = self._file.reader.name(number)
            if filter_func is None or filter_func(name):
                given += 1
                yield number, name, TensorType(kinds[number])

    def read_tensors(
        self,
        filter_func: FilterFuncType | None = None,
        num_tensors: int = -1,
        verify_hash: VerifyHash | None = None,
    ) -> Iterator[tuple[int, TensorType, Name, torch.nn.Parameter]]:
        """Yield ``(module index, type, name, tensor)`` in the order of the file.

        A second call continues after the last tensor that this method or :meth:`read_numpy_arrays`
        has yielded.

        Args:
            filter_func: Called with each name; skips a tensor if it returns something false.
            num_tensors: The most to yield; -1 for all.
            verify_hash: Overrides the constructor's. Tensors that are loaded already are hashed.

        """
        verify = self._verification(verify_hash)
        for number, name, kind in self._next(filter_func, num_tensors):
            self._loaded.check_hashes([number], verify)
            self._load([number], verify)
            yield self._loaded.modules[number], kind, name, self._loaded[number]

    def read_numpy_arrays(
        self,
        filter_func: FilterFuncType | None = None,
        num_tensors: int = -1,
        allow_raw_data: bool = False,
        verify_hash: VerifyHash | None = None,
    ) -> Iterator[tuple[int, TensorType, Name, npt.NDArray[Any], bool, str | None]]:
        """Yield ``(module index, type, name, array, opaque, torch dtype)`` for each tensor.

        Continues like :meth:`read_tensors`. The dtypes that numpy lacks are opaque: the array
        then holds integers of the same width, and the last item names the dtype, such as
        ``"torch.bfloat16"``. ``dtype=`` is ignored.

        Raises:
            RuntimeError: The device is not the CPU.
            ValueError: A tensor is opaque, and ``allow_raw_data`` is false.

        """
        if self._device.type != "cpu":
            raise RuntimeError(f"numpy arrays are on the CPU, and this device is {self._device}")
        verify = self._verification(verify_hash)
        for number, name, kind in self._next(filter_func, num_tensors):
            dtype, _, opaque = self._file.reader.describe(number)
            if opaque and not allow_raw_data:
                raise ValueError(
                    f"{name!r} has the dtype torch.{dtype}, which numpy lacks: "
                    "allow_raw_data=True yields its bytes"
                )
            if self._file.dtype is None and not self._file.reader.seekable:
                # It cannot be read again.
                self._load([number], verify)
            with fake_mode.suspended():
                if self._file.dtype is None and number in self._loaded:
                    self._loaded.check_hashes([number], verify)
                    tensor = self._loaded[number].detach()
                else:
                    read = self._file.read([number], self._device, verify)
                    (tensor,), (self._loaded.modules[number],) = read
                tensor = tensor.resolve_conj().resolve_neg()
                array = opaque_array(tensor) if opaque else tensor.numpy()
            torch_dtype = f"torch.{dtype}" if opaque else None
            yield self._loaded.modules[number], kind, name, array, opaque, torch_dtype

    def slice(self, name: Name) -> TensorSlice:
        """Return a tensor whose parts can be loaded: ``file.slice("weight")[:100]``.

        The deserializer must be lazy, so that its file is open. Loaded parts are plain tensors, not
        parameters, and the deserializer keeps no reference to them.

        Raises:
            KeyError: There is no such tensor.

        """
        number = self._file.find(name)
        if number not in self._selection:
            raise self._missing(name)
        return TensorSlice(self._file, number, lambda: self._device, self._file.verify)

    # Modules

    def load_into_module(
        self,
        m: torch.nn.Module,
        filter_func: FilterFuncType | None = None,
        verify_hash: VerifyHash | None = None,
        *,
        strict: bool = False,
        only_changed: bool = False,
    ) -> int:
        """Load the tensors that :meth:`TensorSerializer.write_module` wrote into a module.

        In a saved ``state_dict()``, and in a file of another format, tensors are found by their
        names. Names with and without the attributes of ``DistributedDataParallel``, compiled
        modules and other wrappers (``module.fc.weight``, ``_orig_mod.fc.weight``) match, whatever
        wraps ``m`` or its submodules. Scripted modules are filled in place.

        The module's parameters and buffers stay the same objects, with their class, their
        attributes and ``requires_grad``, so that optimizers and tied modules still refer to them.
        Those on the ``meta`` device are replaced by objects of the same class with the same
        attributes. If a tensor has the deserializer's device and the dtype of the file (or
        ``dtype=``), its memory is filled. With ``lazy_load=True`` it is filled directly: if that
        fails half-way, it holds some of the new bytes. Otherwise, and with ``mmap=True``, the
        tensor gets the loaded memory. Strides that are not row-major, such as those of
        ``channels_last``, stay.

        A tensor gets the dtype of the file, or ``dtype``; a warning names those that had another.
        In a file that vLLM wrote from a model of its own, tensors are not cast to ``dtype`` if the
        module has them in the file's dtype.

        Tied tensors stay tied if the file holds equal bytes for them, or only one of them. Tensors
        of the module that the file lacks stay unchanged, with a warning unless a filter was given.
        So do buffers on the ``meta`` device, also if they are not persistent.
        Tensors that only the file has are registered under the submodules that they name, with a
        warning (as buffers, if the file does not state their type). The file is closed.

        A ``DTensor`` (FSDP2, tensor parallel) gets only its local part, on its own device or that
        of its mesh; with ``lazy_load=True`` only these bytes are read. It keeps its memory and its
        dtype, regardless of the file and of ``dtype``. A ``DTensor`` on the ``meta`` device is
        replaced by one of the same placement. Parameters that FSDP2 has gathered for a forward pass
        are resharded first, as ``load_state_dict`` does.

        Args:
            m: A module of the structure that was saved, possibly without data
                (:func:`tensorizer.utils.no_init_or_tensor`).
            filter_func: Leaves out tensors by name.
            verify_hash: Overrides the constructor's. Tensors that are loaded already are hashed.
            strict: Raise if file and module do not have the same tensors, apart from buffers
                that are not persistent and not on the ``meta`` device.
            only_changed: Load only tensors whose SHA-256 in this file is not that of the file
                which was loaded into ``m`` before by this method. With ``lazy_load=True`` only
                their bytes are read. Tensors that were replaced since, or changed in place, are
                loaded too. Torch does not count changes through ``.data``, and by fused
                optimizers: load everything into a module that is trained. Without hashes in both
                files all are loaded, and ``tensorizer.stats()["fallbacks"]`` says so.

        Returns:
            The number of tensors loaded.

        Raises:
            KeyError: The module lacks a submodule of the file, or has another attribute where the
                file has a tensor, or is scripted and lacks a tensor of the file.
            RuntimeError: A tensor of the module has another shape than in the file; with
                ``strict``, also if a tensor is only in the module or only in the file. Or FSDP's
                first version or accelerate holds the weights elsewhere; the message has the call
                to make. Nothing has been changed.
            ValueError: A name has no dot, so that no module owns it; or hashes are to be compared
                of tensors that were cast when they were loaded.
            NotImplementedError: The file holds a nested structure; or the module holds a tensor
                that consists of other tensors, or a ``DTensor`` whose placement is neither
                ``Shard`` nor ``Replicate``.

        """
        if not isinstance(m, torch.nn.Module):
            is_class = isinstance(m, type)
            raise TypeError(
                "load_into_module fills a torch.nn.Module, not "
                + (f"the class {m.__name__}" if is_class else type(m).__name__)
                + ("" if is_class else ": tensorizer.load(uri) returns a dict of tensors")
            )
        held_elsewhere.put_in_place(m, to_load=True)
        verify = self._verification(verify_hash)
        reader, kinds = self._file.reader, self._file.reader.kinds()
        chosen, names = self._chosen_for(filter_func, kinds)
        submodules = Submodules(m, [state.with_dot(str(name)) for name in names])
        try:
            slots = [
                state.TensorSlot.find(submodules, name, _KINDS[kinds[number]])
                for name, number in zip(names, chosen, strict=True)
            ]
        except KeyError as error:
            raise KeyError(f"{error.args[0]}{hints.of_prefixes(names, m)}") from None
        tensors = [slot.current() for slot in slots]
        found = list(zip(slots, tensors, strict=True))
        everything = None
        if strict and len(chosen) < len(reader):
            every = map(reader.name, range(len(reader)))
            everything = [submodules.tensor(state.with_dot(str(name))) for name in every]
        elif strict or (filter_func is None and not self._is_part):
            everything = tensors
        dtypes = self._loaded.dtypes_for_slots(chosen, tensors)
        shapes: Sequence[Sequence[int]] = [shape for _, shape in reader.describe_all(chosen)]
        removed: list[state.TensorSlot] = []
        if self._loaded.is_vllms:
            shapes = vllm_files.accepted_shapes(shapes, tensors, dtypes)
            removed = vllm_files.removed_parameters(m, found) if everything is tensors else []
            everything = everything and [*everything, *(slot.current() for slot in removed)]
        state.check(m, found, [str(name) for name in names], shapes, everything, strict=strict)
        fake_mode.refuse_mixture(tensors)
        refuse_short(zip(names, tensors, strict=True))
        self._loaded.check_hashes(chosen, verify)
        state.warn_of_dtypes(m, found, [str(name) for name in names], dtypes)
        rows = list(zip(slots, tensors, chosen, strict=True))
        if only_changed:
            named = list(zip(names, chosen, tensors, dtypes, strict=True))
            same = unchanged.find_unchanged(m, reader, named, self._device)
            rows = [row for row in rows if row[2] not in same]
        unchanged.forget(m, names)
        self._fill(m, rows, verify)
        for slot in removed:
            setattr(slot.module, slot.attribute, None)
        if not fake_mode.is_active():
            unchanged.remember(m, reader, names, chosen, [slot.current() for slot in slots])
        held_elsewhere.take_over(m)
        self.close()
        return len(rows)

    def _fill(self, m: torch.nn.Module, rows: list[state.Row], verify: str) -> None:
        """Load tensors into their slots; rows have the tensors that are there, and the numbers."""
        sharded = sharded_slots(rows)
        cut = {number for _, number in sharded}
        rows = [row for row in rows if row[2] not in cut] if cut else rows
        here = self._loaded.fill(rows, self._device, verify)
        rest = [row for row in rows if row[2] not in here]
        self._load([number for _, _, number in rest], verify)
        loaded: list[tuple[state.TensorSlot, torch.Tensor]] = []
        for slot, there, number in rest:
            tensor = self._loaded.for_slot(number, there)
            if there is not None and self._loaded.has_other_strides(number, there):
                there.data = tensor.detach()
            else:
                loaded.append((slot, tensor))
        loaded += load_sharded(self._loaded, sharded, verify) if sharded else []
        state.assign(m, loaded, fill=not self._file.maps)

    def _chosen_for(
        self, filter_func: FilterFuncType | None, kinds: Sequence[int]
    ) -> tuple[list[int], list[Name]]:
        """Return the numbers and names of the tensors for a module.

        The ``_extra_state`` of modules in a state dict is no tensor of theirs.
        """
        chosen, names = list[int](), list[Name]()
        every = self._file.reader.names(list(self._selection))
        for number, name in zip(self._selection, every, strict=True):
            if filter_func is not None and not filter_func(name):
                continue
            is_extra = isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"
            if is_extra and _KINDS[kinds[number]] is TensorType.STATE_DICT:
                warnings.warn(f"{name} is not loaded: pass it to set_extra_state()", stacklevel=3)
            else:
                chosen.append(number)
                names.append(name)
        return chosen, names

    def to_redis(self, redis_client: Any, key_prefix: str, force: bool = False) -> None:
        """Copy the chosen tensors to a Redis server.

        They are read back from ``redis://host/<key_prefix>``. Values beyond 512 MiB are split.

        Args:
            redis_client: A client such as ``redis.Redis``.
            key_prefix: The prefix of all keys, before a colon.
            force: Also store tensors that the server has already.

        Raises:
            ValueError: The file was closed, as it is after a load that is not lazy, and cannot be
                opened again: it was neither a path nor an address, or it has changed, or its server
                has no strong ``ETag`` by which that would be seen.
            NotImplementedError: The file is not a ``.tensors`` file.
            TypeError: ``redis_client`` is not a client of Redis.

        """
        from .to_redis import copy_to_redis  # few need it

        limit = self._file.memory_limit
        with self._file.reopened() as reader:
            copy_to_redis(
                reader, self._selection, redis_client, key_prefix, force=force, limit=limit
            )

    def verify_module(self, m: torch.nn.Module) -> tuple[bool, list[tuple[str, bool]]]:
        """Compare the tensors of a module with the hashes in the file.

        Returns:
            True if all match, and ``(name, matches)`` for every tensor of the file and every
            tensor that only the module has, by the names of :meth:`TensorSerializer.write_module`.
            Names are matched as by :meth:`load_into_module`.

        Raises:
            RuntimeError: The file was closed before the tensors' headers were read; or FSDP's first
                version or accelerate holds the weights of the module elsewhere.
            HashMismatchError: The file holds no hash of a tensor.

        """
        held_elsewhere.put_in_place(m, to_load=False)
        kinds = self._file.reader.kinds()
        chosen = {
            n: state.with_dot(name) if kinds[n] == TensorType.STATE_DICT else name
            for n, name in ((n, str(self._file.reader.name(n))) for n in self._selection)
        }
        own, others = state.tensors_for(m, chosen)
        matches = self._file.reader.matches(lend(list(own.values())), list(own))
        verdict = dict(zip(own, matches, strict=True))
        results = [(name, verdict.get(n, False)) for n, name in chosen.items()]
        results += [(name, False) for name in others]
        return all(ok for _, ok in results), results
