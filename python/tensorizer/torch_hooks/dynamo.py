"""Makes Dynamo, the tracer of ``torch.compile``, trace the operators that do not fit a graph.

A graph cannot have a dict or strings as results. So ``names(uri)`` is traced as a constant, and
``load(uri)`` as "the names that the file has now, then ``load.list`` of these". ``load.list`` is
traced as ``load.checked`` with the dtypes and shapes that the file has now, so that they are in the
keys of torch's caches. ``load_``, whose schema does not state that it changes its arguments, is
traced as ``load.into``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_Handlers = dict[Callable[..., Any], Callable[..., Any]]


def _make_handlers(function: type) -> _Handlers:
    """Return a handler for each operator; one that returns None leaves the call to Dynamo."""
    from torch._dynamo.exc import UserError, UserErrorType
    from torch._dynamo.variables import ConstantVariable, ConstDictVariable, ListVariable

    ops = torch.ops.tensorizer

    def ask(op: Callable[..., list[str]], *args: Any) -> Any:
        try:
            found = op(*(arg.as_python_constant() for arg in args))
        except RuntimeError as error:
            # Dynamo shows this error as it is; it would report others as defects of its own.
            raise UserError(UserErrorType.INVALID_INPUT, str(error)) from error
        return ListVariable([ConstantVariable.create(text) for text in found])

    def load_list(_: Any, tx: Any, uri: Any, names: Any, **options: Any) -> Any:
        if not (uri.is_python_constant() and names.is_python_constant()):
            return None
        expected = ask(ops._describe, uri, names)
        return function(ops.load.checked).call_function(tx, [uri, names, expected], options)

    def load_dict(_: Any, tx: Any, uri: Any, **options: Any) -> Any:
        if not uri.is_python_constant():
            return None
        names = ask(ops.names, uri)
        tensors = load_list(_, tx, uri, names, **options).unpack_var_sequence(tx)
        return ConstDictVariable(dict(zip(names.items, tensors, strict=True)))

    def load(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        given = len(args) + sum(name in kwargs for name in ("uri", "names"))
        if given == 1:
            return load_dict(_, tx, *args, **kwargs)
        is_list = given == 2 and not {"name", "out", "expected"} & kwargs.keys()
        return load_list(_, tx, *args, **kwargs) if is_list else None

    def names(_: Any, tx: Any, uri: Any) -> Any:
        return ask(ops.names, uri) if uri.is_python_constant() else None

    def load_(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return function(ops.load.into).call_function(tx, list(args), kwargs)

    return {
        ops.load: load,
        ops.load.default: load_dict,
        ops.load.list: load_list,
        ops.names: names,
        ops.names.default: names,
        ops.load_: load_,
        ops.load_.default: load_,
    }


def break_graphs(trace_rules: ModuleType) -> None:
    """Make Dynamo leave calls of this package's Python code to Python, as those of ``torch.save``.

    This is ``torch.compiler.disable`` for all of it, without the import of Dynamo, which takes
    longer than that of torch. ``trace_rules`` is ``torch._dynamo.trace_rules``.
    """
    for package in _PACKAGES:
        trace_rules.add(package)


#: The packages of this distribution that programs call.
_PACKAGES = ("tensorizer", "tensorizer_engines", "tensorizer_sglang", "tensorizer_vllm")


def extend_dynamo(variables: ModuleType) -> None:
    """Extend the table of functions that Dynamo knows. It is private, and built on first use.

    ``variables`` is ``torch._dynamo.variables.torch``.
    """
    function = variables.TorchInGraphFunctionVariable
    original = function._get_handlers

    @functools.cache
    def get_handlers() -> _Handlers:
        handlers: _Handlers = original()
        try:
            handlers.update(_make_handlers(function))
        except Exception as error:
            warnings.warn(
                f"torch.compile of torch {torch.__version__} does not support torch.ops.tensorizer."
                f"load(uri) without names ({type(error).__name__}: {error}); load(uri, names) is "
                "not affected",
                stacklevel=2,
            )
        return handlers

    function._get_handlers = staticmethod(get_handlers)
