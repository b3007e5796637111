"""Models without initial weights."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import torch

from .._locks import ForkSafeLock

T = TypeVar("T")

_active: contextvars.ContextVar[bool] = contextvars.ContextVar("no_init_or_tensor", default=False)
_lock = ForkSafeLock()
_depth = 0
_undo: list[tuple[Any, str, Any]] = []


def _patch() -> None:
    """Replace functions of torch by wrappers, which act only in tasks that are inside a block."""
    empty = torch.empty

    def empty_on_meta(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _active.get():
            kwargs["device"] = "meta"
        result: torch.Tensor = empty(*args, **kwargs)
        return result

    def skipped(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def reset_parameters(self: Any) -> None:
            if not _active.get():
                original(self)

        return reset_parameters

    _replace(torch, "empty", empty_on_meta)
    for layer in (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm):
        _replace(layer, "reset_parameters", skipped(layer.reset_parameters))


def _replace(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


@contextlib.contextmanager
def _no_init() -> Iterator[None]:
    global _depth  # noqa: PLW0603
    with _lock.current():
        if _depth == 0:
            _patch()
        _depth += 1
    token = _active.set(True)
    try:
        yield
    finally:
        try:
            # Raises if the block ends in another context than it began in.
            _active.reset(token)
        finally:
            with _lock.current():
                _depth -= 1
                if _depth == 0:
                    while _undo:
                        owner, name, value = _undo.pop()
                        setattr(owner, name, value)


@overload
def no_init_or_tensor(
    loading_code: None = None,
) -> contextlib.AbstractContextManager[None]: ...
@overload
def no_init_or_tensor(loading_code: Callable[[], T]) -> T: ...
def no_init_or_tensor(loading_code: Callable[[], T] | None = None) -> Any:
    """Build modules whose weights take no memory; load their weights afterwards.

    Inside, ``torch.empty`` makes tensors on the ``meta`` device, even if another device is given,
    and ``Linear``, ``Embedding`` and ``LayerNorm`` do not initialise their parameters. Only the
    calling task or thread is affected.

    Args:
        loading_code: Run this inside and return its result. None returns a context manager.

    Raises:
        TypeError: ``loading_code`` is neither None nor callable.

    """
    if loading_code is None:
        return _no_init()
    if not callable(loading_code):
        raise TypeError(f"loading_code must be callable or None, not {loading_code!r}")
    with _no_init():
        return loading_code()
