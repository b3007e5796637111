"""Replacements of ``torch.save`` and ``torch.load`` inside blocks, which use our files."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import _weights_only_unpickler as restricted

from .._errors import PairMismatchError
from .._native import check_target, local_path
from .._patching import Patch
from ..checkpoints import block_options, pairs
from ..checkpoints.pairs import LoadFunc, SaveFunc
from ..checkpoints.pickling import loading_module, unpickler_class
from ..checkpoints.storage_file import FileIdentity, is_path, without_link
from ..streams.addresses import is_address

_Function: TypeAlias = Callable[..., Any]
_SAVE = inspect.signature(torch.serialization.save)
_LOAD = inspect.signature(torch.serialization.load)

#: The name by which torch.load refers to the module of its restricted unpickler.
_UNPICKLER_MODULE = "_weights_only_unpickler"
#: The values of an environment variable that torch takes for "yes".
_YES = ("1", "y", "yes", "true")


class _SavingBlock:
    """One block of :func:`tensorizer_saving`."""

    def __init__(self, file_obj: Any, save_func: SaveFunc | None, options: dict[str, Any]) -> None:
        self.file_obj, self.save_func, self.options = file_obj, save_func, options
        #: The file of ``torch.save`` to which each storage file belongs. Objects are kept alive, so
        #: that their ids are not reused.
        self._written: dict[object, object] = {}
        self._kept_objects: list[Any] = []

    def __call__(self, original: _Function, call: inspect.BoundArguments) -> Any:
        target = call.arguments["f"]
        if not is_path(target) and not hasattr(target, "write"):
            raise AttributeError(
                "expected 'f' to be a path or a file object with a 'write' attribute, "
                f"found {type(target).__name__}"
            )
        if is_path(target):
            path = os.fsdecode(target)
            if local_path(path) != path:
                raise ValueError(
                    f"torch.save writes to paths, and {path} is an address: give a path, or for "
                    "s3://, gs:// and az:// an open file: with open_stream(address, 'wb') as file: "
                    "torch.save(object, file)"
                )
            check_target(path)
        skipped = torch.serialization._serialization_tls.skip_data
        of = without_link(target) if self.file_obj is None else target
        file = None if skipped else pairs.storage_file_for(self.file_obj, of)
        if file is None:
            return original(*call.args, **call.kwargs)
        self._refuse_overwriting(file, target)

        def torch_save(pickled: Any, pickle_module: Any) -> None:
            call.arguments.update(f=pickled, pickle_module=pickle_module)
            original(*call.args, **call.kwargs)

        return pairs.save_pair(target, file, self.save_func, self.options, torch_save)

    def _refuse_overwriting(self, file: Any, target: Any) -> None:
        """Refuse to overwrite the storages of another object that this block has saved."""
        storage_key, pickle_key = self._key(file), self._key(target)
        if storage_key == pickle_key:
            raise ValueError(f"{file!r} cannot hold both a pickle and its storages")
        if self._written.setdefault(storage_key, pickle_key) != pickle_key:
            raise ValueError(
                f"the storages of {target!r} would overwrite those of another object, which this "
                f"block has saved to {file!r}: pass no file_obj, or a function that returns "
                "another file for each, such as lambda f: f'{f}.tensors'"
            )

    def _key(self, file: Any) -> object:
        if is_path(file):
            if is_address(file):
                return file
            path = local_path(file) if isinstance(file, str) else None
            return os.path.realpath(path or os.fsdecode(file))
        self._kept_objects.append(file)
        return id(file), file.tell() if hasattr(file, "tell") else None


def _load(
    storages_of: _Function, any_code: bool, original: _Function, call: inspect.BoundArguments
) -> Any:
    """Call ``torch.load`` such that it takes the storages from their own file."""
    arguments = call.arguments
    mmap = arguments.get("mmap")
    if mmap is None:
        import torch.utils.serialization.config

        mmap = torch.utils.serialization.config.load.mmap
    # A module that was given is Python's own pickle; without it, torch chooses as usual.
    arguments.pop("pickle_module", None)
    if any_code:
        arguments["weights_only"] = False
    only_weights = _weights_only(arguments.get("weights_only"))
    if only_weights:
        # Explicit, so that torch cannot decide otherwise than ``_weights_only``.
        arguments["weights_only"] = True
    target, location = arguments["f"], arguments.get("map_location")
    outer = _restricted.get()
    attempts = 1
    while True:
        pickle_identity = FileIdentity(target)
        storages = storages_of(target, location, mmap)
        if only_weights:
            _restricted.set(unpickler_class(restricted.Unpickler, storages))
        else:
            arguments["pickle_module"] = loading_module(storages)
        try:
            return original(*call.args, **call.kwargs)
        except (FileNotFoundError, PairMismatchError):
            # Both files were replaced between opening one and the other.
            if attempts == pairs.MAX_ATTEMPTS or not pickle_identity.was_replaced():
                raise
            attempts += 1
        finally:
            _restricted.set(outer)
            storages.forget()


def _weights_only(given: bool | None) -> bool:
    """Tell how torch interprets ``weights_only`` if it is given no pickle module.

    Releases of torch differ in whether upper case counts in the environment variables. Here it
    counts only where that is safer.
    """
    if os.getenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in _YES:
        return True
    if given is not None:
        return given
    if os.getenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") in _YES:
        return False
    return bool(torch.serialization._default_to_weights_only(None))


#: The replacement of a call of torch in the innermost block, which gets its function and arguments.
_saving: ContextVar[_Function | None] = ContextVar("_saving", default=None)
_loading: ContextVar[_Function | None] = ContextVar("_loading", default=None)
_restricted: ContextVar[type | None] = ContextVar("_restricted", default=None)


def _outside_blocks(func: _Function) -> _Function:
    """Return a function that runs outside of all blocks, so that it may use torch itself."""

    def call(*args: Any) -> Any:
        context = contextvars.copy_context()
        for block in (_saving, _loading, _restricted):
            context.run(block.set, None)
        return context.run(func, *args)

    return call


class _RestrictedUnpicklerModule:
    """A stand-in for torch's module of the unpickler for ``weights_only=True``."""

    def __getattr__(self, name: str) -> Any:
        own = _restricted.get() if name == "Unpickler" else None
        return own or getattr(restricted, name)


class _TorchPatch(Patch):
    """The replacement of torch's functions."""

    def apply(self) -> None:
        self.replace(torch, "save", _in_place_of(torch.save, _SAVE, _saving))
        self.replace(torch, "load", _in_place_of(torch.load, _LOAD, _loading))
        self.replace(torch.serialization, _UNPICKLER_MODULE, _RestrictedUnpicklerModule())


_patch = _TorchPatch()


def _in_place_of(
    original: _Function, signature: inspect.Signature, variable: ContextVar[Any]
) -> _Function:
    """Return a function that calls the block in ``variable``, or else the original."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        block = variable.get()
        # A distributed checkpoint puts many objects into one file of its own format.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        is_left_alone = variable is _saving and caller.startswith("torch.distributed.checkpoint")
        if block is None or is_left_alone:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        module = bound.arguments.get("pickle_module")
        if module is not None and module is not pickle:
            raise ValueError(
                f"pickle_module={getattr(module, '__name__', module)!r}: "
                f"{variable.name.strip('_')} by tensorizer needs Python's own pickle. Call torch "
                "outside of the block, or without pickle_module"
            )
        return block(original, bound)

    # Also for callers that ignore ``__wrapped__``.
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


class _Block(contextlib.ContextDecorator):
    """A block, or the decorator of a function that runs in one.

    Args:
        name: The public name of the block.
        variable: The variable that has the innermost block.
        make: A function that makes the settings of one block.

    """

    def __init__(self, name: str, variable: ContextVar[Any], make: Callable[[], Any]) -> None:
        self._name, self._variable, self._make = name, variable, make
        self._outer: list[Any] = []

    def _recreate_cm(self) -> _Block:
        return _Block(self._name, self._variable, self._make)

    def __call__(self, *function: Any, **kwargs: Any) -> Any:
        only = function[0] if len(function) == 1 and not kwargs else None
        block_options.check_decorated(self._name, only)
        return super().__call__(function[0])

    def __enter__(self) -> None:
        made = self._make()
        _patch.__enter__()
        self._outer.append(self._variable.get())
        self._variable.set(made)

    def __exit__(self, *_: object) -> None:
        self._variable.set(self._outer.pop())
        _patch.__exit__()


def tensorizer_saving(
    file_obj: Any = None, *, save_func: SaveFunc | None = None, **serializer_kwargs: Any
) -> _Block:
    """Make ``torch.save`` write storages to a ``.tensors`` file, in a block or a function.

    Torch's own file still holds all other data, including the dtypes, shapes and strides of the
    tensors. If both files are paths, neither is visible before both are complete; if saving fails,
    the old files stay. Two saves of the same files run one after the other. Each file states the
    identity of the pair.

    Only ``torch.save`` in the thread or task that runs the block is affected, not functions that
    were imported by name before. ``torch.distributed.checkpoint`` is not affected. In nested
    blocks, the innermost one applies.

    Args:
        file_obj: The file of the storages: a path, address or file object that
            :class:`TensorSerializer` opens, for one object; or a function that is called with the
            file of each ``torch.save`` and returns one of these, or None for torch's own format.
            None: the name of torch's file with ``.tensors`` appended. Buffers in memory, which
            have no name, are saved in torch's own format.
        save_func: Called instead of :class:`TensorSerializer`, with the file, a list of ``uint8``
            tensors that are the storages, and a dict of the other arguments.
        serializer_kwargs: Further arguments of :class:`TensorSerializer`, such as ``encryption``.

    Raises:
        TypeError, ValueError: An argument is not one of :class:`TensorSerializer`, or has a value
            that it refuses; or the block is used as a decorator without brackets, or of a
            coroutine or generator.
        OSError, TypeError, ValueError: By ``torch.save``; see :class:`TensorSerializer`. A
            ``TypeError`` is also raised for a file without a name. A ``ValueError`` is also raised
            for a ``pickle_module``, and if the storages of two objects would get the same file.
        RuntimeError: By ``torch.save`` in a signal handler that has interrupted a save of the same
            files, because it would wait forever.

    """
    name = "tensorizer_saving"
    block_options.check_decoration(name, file_obj, sys._getframe(1))
    block_options.check_saving(file_obj, serializer_kwargs, for_function=save_func is not None)
    func = save_func and _outside_blocks(save_func)
    return _Block(name, _saving, lambda: _SavingBlock(file_obj, func, serializer_kwargs))


def tensorizer_loading(
    file_obj: Any = None,
    *,
    load_func: LoadFunc | None = None,
    suppress_weights_only: bool = False,
    **deserializer_kwargs: Any,
) -> _Block:
    """Make ``torch.load`` read storages from a ``.tensors`` file, in a block or a function.

    Files in torch's own format load as usual. ``map_location`` is respected. Without it, storages
    go to ``device`` if that is given, otherwise to the devices that they were saved from. Files of
    the old package do not state these devices; their storages go to the current CUDA device if
    there is one. ``weights_only`` is respected, and True by default, as in torch. ``mmap=True``
    maps the storages' file too, if it is local.

    Args:
        file_obj: As for :func:`tensorizer_saving`.
        load_func: Called instead of :class:`TensorDeserializer`, with the file and a dict of the
            other arguments; returns the storages as ``uint8`` tensors.
        suppress_weights_only: Load with ``weights_only=False`` regardless of the argument of
            ``torch.load``, which lets a file run any code. It exists for programs of the old
            package; in new ones, pass ``weights_only=False`` to ``torch.load``.
        deserializer_kwargs: Further arguments of :class:`TensorDeserializer`, such as ``device`` or
            ``encryption``.

    Raises:
        FileNotFoundError: By ``torch.load``: the storages' file is missing.
        PairMismatchError: By ``torch.load``: the storages' file belongs to another object. It is
            not raised if a save was killed between the two files, or is between them now: then the
            right file is read under its hidden name, with a ``RuntimeWarning``.
        OSError, ValueError, CryptographyError: By ``torch.load``: see :class:`TensorDeserializer`.
        TypeError, ValueError: At once, as for :func:`tensorizer_saving`. A ``ValueError`` is also
            raised if ``dtype`` or ``filter_func`` is given: storages are bytes without a dtype, and
            all of them are needed.

    """
    name = "tensorizer_loading"
    block_options.check_decoration(name, file_obj, sys._getframe(1))
    if load_func is None:
        block_options.check_loading(deserializer_kwargs)
    if suppress_weights_only:
        warnings.warn(
            "suppress_weights_only lets files run any code while they are loaded: rather pass "
            "weights_only=False to torch.load, for files that you trust",
            stacklevel=2,
        )
    func = load_func and _outside_blocks(load_func)
    storages_of = functools.partial(pairs.StorageFileLoader, file_obj, func, deserializer_kwargs)
    load = functools.partial(_load, storages_of, suppress_weights_only)
    return _Block(name, _loading, lambda: load)
