"""Checks of the options of blocks where they are given, and not at the first save or load."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from ..file import file_writer, hints
from ..file.arguments import parsed_device
from ..file.options import ReadOptions, check_reading
from ..file.progress import ProgressReporter
from ..file.reader import TensorDeserializer
from ..file.writer import TensorSerializer
from ..streams.open import check_writable


def check_saving(file_obj: Any, options: Mapping[str, Any], *, for_function: bool) -> None:
    """Refuse the arguments of a saving block that no save could use.

    Args:
        file_obj: The file of the storages.
        options: Options of :class:`TensorSerializer`, or of the caller's own function.
        for_function: True for such a function, which checks its options itself.

    Raises:
        TypeError, ValueError: See :class:`TensorSerializer`.

    """
    if isinstance(file_obj, str):
        check_writable(file_obj)
    if for_function:
        return
    if "progress" in options:
        raise TypeError("tensorizer_saving() has no progress=, as torch.save decides what is saved")
    _check_names("tensorizer_saving", options, TensorSerializer)
    file_writer.check_options(
        **{name: value for name, value in options.items() if name != "compress_tensors"}
    )


def check_loading(options: Mapping[str, Any]) -> None:
    """Refuse the arguments of a loading block that no load could use.

    Raises:
        TypeError, ValueError: See :class:`TensorDeserializer`; or ``dtype``, ``filter_func`` or
            ``names`` is given.

    """
    for name in ("dtype", "filter_func", "names"):
        if options.get(name) is not None:
            raise ValueError(
                f"{name} cannot be applied to storages, which are bytes without names: change what "
                "torch.load returns"
            )
    _check_names("tensorizer_loading", options, TensorDeserializer)
    checked = options.keys() & ReadOptions.__annotations__.keys()
    check_reading(**{name: options[name] for name in checked})
    if options.get("device") is not None:
        parsed_device(options["device"])
    ProgressReporter(options.get("progress", False))


def _check_names(block: str, options: Mapping[str, Any], of: type) -> None:
    known = inspect.signature(of).parameters.keys() - {"file_obj"}
    for name in options:
        if name not in known:
            raise TypeError(
                f"{block}() got an unexpected keyword argument {name!r}, which {of.__name__} does "
                f"not have{hints.of_option(name, known)}"
            )


def check_decoration(block: str, file_obj: Any, caller: FrameType) -> None:
    """Refuse a block as a decorator without brackets, which would take the function for a file.

    Such a function was just made by ``caller``, and has no name there yet.

    Raises:
        TypeError: It is used so.

    """
    name = getattr(file_obj, "__name__", None)
    made_here = any(getattr(one, "co_name", None) == name for one in caller.f_code.co_consts)
    if name is None or name == "<lambda>" or not made_here:
        return
    if caller.f_locals.get(name, caller.f_globals.get(name)) is not file_obj:
        raise TypeError(
            f"@{block} without brackets: write @{block}() above the function {name!r}, or pass "
            "file_obj, the file of the storages, in the brackets"
        )


def check_decorated(block: str, function: Any) -> None:
    """Refuse to decorate what a block would not surround.

    Raises:
        TypeError: It is no function, or one whose code runs after its call has returned.

    """
    if not callable(function) or isinstance(function, torch.nn.Module):
        raise TypeError(
            f"{block} decorates functions, not {type(function).__name__}: write @{block}() with "
            "brackets above the function that saves or loads"
        )
    later = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_later(function) for is_later in later):
        raise TypeError(
            f"{block} cannot decorate {function.__name__!r}, whose code runs after the call: use "
            f"`with {block}():` inside of it"
        )
