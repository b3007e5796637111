"""Models without initial weights."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import torch

from .._patching import Patch

T = TypeVar("T")

_active: contextvars.ContextVar[bool] = contextvars.ContextVar("no_init_or_tensor", default=False)


class _TorchPatch(Patch):
    """Wrappers of torch's functions, which act only in tasks that are inside a block."""

    def apply(self) -> None:
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

        self.replace(torch, "empty", empty_on_meta)
        for layer in (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm):
            self.replace(layer, "reset_parameters", skipped(layer.reset_parameters))


_patch = _TorchPatch()


@contextlib.contextmanager
def _no_init() -> Iterator[None]:
    with _patch:
        token = _active.set(True)
        try:
            yield
        finally:
            # Raises if the block ends in another context than it began in.
            _active.reset(token)


@overload
def no_init_or_tensor(loading_code: None = None) -> contextlib.AbstractContextManager[None]: ...
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
        TypeError: ``loading_code`` is neither None nor callable, or it is a module.

    """
    if loading_code is None:
        return _no_init()
    if isinstance(loading_code, torch.nn.Module):
        # It can be called, with the arguments of its forward pass.
        raise TypeError(
            f"no_init_or_tensor takes a function that builds the module, such as lambda: "
            f"{type(loading_code).__name__}(...), not a module that was built before"
        )
    if not callable(loading_code):
        raise TypeError(f"loading_code must be callable or None, not {loading_code!r}")
    with _no_init():
        return loading_code()
