"""Placeholders for objects of classes that torch's restricted unpickler does not allow."""

from __future__ import annotations

import io
import pickletools
from typing import Any

import torch
from torch import _weights_only_unpickler as restricted


class Placeholder:
    """A class or a function that a pickle names, or what it would have made. Neither runs anything.

    The unpickler makes one for each name, and objects from that. It only does so with classes that
    are allowed, with which it compares: a placeholder is equal to its class.

    Attributes:
        name: The name in the pickle, with its module.
        content: The arguments, states and items of an object; None for what the name refers to.

    """

    __slots__ = ("content", "name")
    name: str
    content: list[Any] | None

    def __new__(cls, *arguments: Any) -> Placeholder:
        """Make the placeholder of a name; if ``cls`` is one, that of an object of it."""
        made = object.__new__(Placeholder)
        if isinstance(cls, Placeholder):
            made.name, made.content = cls.name, [arguments]
        else:
            (made.name,), made.content = arguments, None
            if type(made.name) is not str:
                raise TypeError("expected a name")
        return made

    def __call__(self, *arguments: Any) -> Placeholder:
        """Return the placeholder of the result of a call."""
        return Placeholder.__new__(self, *arguments)  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return other is self or other is Placeholder

    __hash__ = object.__hash__

    def __setstate__(self, state: Any) -> None:
        if self.content is not None:
            self.content.append(state)

    def __repr__(self) -> str:
        return f"<{self.name}>"


#: Kinds of tensors that only ``torch.load`` can rebuild, by the function that a pickle names.
SPECIAL_TENSORS = {
    "_rebuild_qtensor": "a quantized tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_njt": "a nested tensor",
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_wrapper_subclass": "a tensor of a subclass",
    "_rebuild_device_tensor_from_numpy": "a tensor of a device that torch saves as an array",
    "_rebuild_device_tensor_from_cpu_tensor": "a tensor of a device that torch saves as another",
}
#: The opcodes that put items into an object: its kind, and how many items are on the stack above
#: it; 0 for all above a mark.
_PUT_ITEMS = {"a": (list, 1), "e": (list, 0), "s": (dict, 2), "u": (dict, 0)}
#: The opcodes that call a function or make an object.
_CALLS = "R\x81"


class Unpickler(restricted.Unpickler):
    """The restricted unpickler, with placeholders for objects of classes that are not allowed.

    Args:
        data: The pickle.
        options: Those of the restricted unpickler.

    Raises:
        ValueError: The pickle is damaged.

    """

    def __init__(self, data: bytes, **options: Any) -> None:
        # Its name is our own: no other pickle can mean something else by it.
        torch.serialization.add_safe_globals([Placeholder])
        data = _with_placeholders(data)
        self._file = io.BytesIO(data)
        super().__init__(self._file, **options)
        self.read = self._read
        opcodes = ((opcode.code, position) for opcode, _, position in pickletools.genops(data))
        self._special = {at: code for code, at in opcodes if code in _PUT_ITEMS or code in _CALLS}
        self._has_container = False

    def _read(self, count: int) -> bytes:
        """Read; before an opcode, let a placeholder take part in what the opcode does."""
        if self._has_container:
            items, self._has_container = self.stack.pop(), False
            self.stack[-1].__setstate__(items)
        code = self._special.get(self._file.tell())
        if code in _PUT_ITEMS:
            self._take_items(*_PUT_ITEMS[code])
        elif code is not None:
            self._replace_function()
        return self._file.read(count)

    def _take_items(self, kind: type, above: int) -> None:
        """Put a container on a placeholder, as the unpickler accepts no other."""
        stack = self.stack if above else (self.metastack or [[]])[-1]
        if len(stack) > above and isinstance(stack[-1 - above], Placeholder):
            stack.insert(len(stack) - above, kind())
            self._has_container = True

    def _replace_function(self) -> None:
        """Let a placeholder stand for a function that would be called with one."""
        function, arguments = self.stack[-2:]
        if not isinstance(function, Placeholder) and _has_placeholder(arguments):
            name = getattr(function, "__qualname__", type(function).__name__)
            self.stack[-2] = Placeholder(f"{getattr(function, '__module__', None)}.{name}")

    def pop_mark(self) -> list[Any]:
        """Return what follows a mark; the id of a module passes for that of a storage."""
        items: list[Any] = super().pop_mark()  # type: ignore[no-untyped-call]
        if len(items) == 4 and items[0] == "module" and isinstance(items[1], Placeholder):
            items[0] = AllowedTag(items[0])
        return items


def _has_placeholder(arguments: Any) -> bool:
    return isinstance(arguments, Placeholder) or (
        isinstance(arguments, tuple) and any(map(_has_placeholder, arguments))
    )


class AllowedTag(str):
    """The kind of a persistent id, which passes torch's check for that of a storage."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str(self) == other

    def __ne__(self, other: object) -> bool:
        return other != "storage" and str(self) != other

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def missing_names(data: bytes) -> list[str]:
    """Return the names in a pickle that the restricted unpickler does not allow."""
    return sorted(restricted.get_globals_in_pkl(io.BytesIO(data)) - _allowed_names())


def _allowed_names() -> set[str]:
    return {*restricted._get_allowed_globals(), *restricted._get_user_allowed_globals()}


def is_blocked(name: str) -> bool:
    """Tell whether a name is never allowed, and gets no placeholder."""
    return name.rpartition(".")[0] in restricted._blocklisted_modules


def _with_placeholders(data: bytes) -> bytes:
    """Return a pickle with a placeholder for each name that is not allowed, and special tensors."""
    own = f"{Placeholder.__module__}.{Placeholder.__name__}"
    allowed, stream = _allowed_names() - {own}, io.BytesIO(data)
    parts, begin = [], 0
    for opcode, _, position in pickletools.genops(data):
        if opcode.name != "GLOBAL" or position is None:
            continue
        stream.seek(position + 1)
        module, name = restricted._read_global_instruction(stream.readline)
        whole = f"{module}.{name}"
        if (whole in allowed and name not in SPECIAL_TENSORS) or is_blocked(whole):
            continue
        text = whole.encode()
        made = f"c{Placeholder.__module__}\n{Placeholder.__name__}\n".encode()
        made += b"X" + len(text).to_bytes(4, "little") + text + b"\x85R"
        parts += [data[begin:position], made]
        begin = stream.tell()
    return b"".join([*parts, data[begin:]])
