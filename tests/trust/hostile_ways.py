"""All the ways in which one file is loaded, and what must hold between them."""

import contextlib
import ctypes
import io
import pickle
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import tensorizer
import tensors_bytes
import torch
from hostile_bases import KEY, Base
from tensorizer.distributed.whole_tensors import WholeTensors
from tensorizer.torch_compat import tensorizer_loading
from tensorizer_cli.main import main as command

#: Errors that reading a file may raise, whatever is in it.
REFUSALS = (
    ValueError, OSError, NotImplementedError, MemoryError, KeyError, pickle.UnpicklingError,
    tensorizer.CryptographyError, tensorizer.HashMismatchError,
)  # fmt: skip
#: Words of an error that is one of the library.
DEFECTS = ("defect", "panicked", "PanicException")
#: Characters that a terminal would act on.
UNSHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
Tensors = dict[Any, torch.Tensor]
#: The number of loads by way.
tried: Counter[str] = Counter()
#: Bytes of no tensor that a file here has data for.
LARGE = 1 << 20


def params() -> tensorizer.DecryptionParams:
    return tensorizer.DecryptionParams.from_key(KEY)


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes; of a large one, which can only be of the meta device, some."""
    if nbytes(tensor) > LARGE:
        tensor = tensor.reshape(-1)[:: tensor.numel() // 1000]
    tensor = tensor.detach().contiguous()
    return ctypes.string_at(tensor.data_ptr(), nbytes(tensor)) if nbytes(tensor) else b""


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Module(torch.nn.Module):
    """A module with tensor names that some of the files have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 4))
        self.register_buffer("bias", torch.zeros(3, dtype=torch.bfloat16))
        self.layer = torch.nn.Module()
        self.layer.register_buffer("scale", torch.tensor(0))


def lazily(path: Path, **options: Any) -> Tensors:
    with tensorizer.TensorDeserializer(path, device="cpu", lazy_load=True, **options) as file:
        found = {key: file[key] for key in reversed(list(file.keys()))}
        if not all(isinstance(value, torch.Tensor) for value in found.values()):
            # Nested ones have been read now, and are given once more in order.
            return {name: tensor for _, _, name, tensor in file.read_tensors()}
        return {key: found[key] for key in file}


def read_in_order(path: Path, **options: Any) -> Tensors:
    with tensorizer.TensorDeserializer(path, device="cpu", lazy_load=True, **options) as file:
        return {name: tensor for _, _, name, tensor in file.read_tensors()}


def into_module(path: Path, **options: Any) -> Tensors:
    module = Module()
    with tensorizer.TensorDeserializer(path, device="cpu", **options) as file:
        with contextlib.suppress(RuntimeError):
            # The module may have other names than the file.
            file.load_into_module(module)
    return dict(module.state_dict().items())


def by_operators(path: Path, encryption: Any = None) -> Tensors:
    key = torch.tensor(list(KEY), dtype=torch.uint8) if encryption else None
    try:
        return dict(torch.ops.tensorizer.load(str(path), key=key))
    except RuntimeError as error:
        # All errors of operators are of this class; an error about the file names it.
        known = (str(path.parent), "cannot allocate")
        if not any(text in str(error) for text in known):
            raise
        raise ValueError(str(error)) from None


def of_ranks(path: Path) -> Tensors:
    with WholeTensors(path.parent, verify_hash=True) as whole:
        return dict(zip(whole.names, whole.load(whole.names), strict=True))


def of_pair(path: Path) -> Tensors:
    pickled = path.with_name("state.pt")
    try:
        with tensorizer_loading(verify_hash=True):
            return dict(torch.load(pickled))
    except REFUSALS:
        raise
    except Exception as error:
        # torch raises errors of many classes for a damaged pickle.
        if path == pickled:
            raise pickle.UnpicklingError(str(error)) from None
        raise


def ways(base: Base) -> Iterator[tuple[str, Callable[[Path], Tensors]]]:
    """Yield ways that have the same tensors, the plainest first; then others."""
    if base.folder:
        yield base.folder, {"ranks": of_ranks, "pair": of_pair}[base.folder]
        return
    options: dict[str, Any] = {"encryption": params()} if base.encrypted else {}
    yield "eager", lambda path: tensorizer.load(path, "cpu", **options)
    yield "mapped", lambda path: tensorizer.load(path, "cpu", mmap=True, **options)
    yield "one reader", lambda path: tensorizer.load(path, "cpu", num_readers=1, **options)
    yield "iterated", lambda path: dict(tensorizer.iterate(path, "cpu", **options))
    if base.kind != "torch":
        yield "operators", lambda path: by_operators(path, **options)
    if not base.path.endswith("json"):
        yield (
            "stream",
            lambda path: tensorizer.load(io.BytesIO(path.read_bytes()), "cpu", **options),
        )
    if base.kind in ("tensors", "sealed"):
        yield "lazy", lambda path: lazily(path, **options)
        yield "in order", lambda path: read_in_order(path, **options)


def ours(error: BaseException) -> bool:
    """True if the text of an error is ours, and not that of `torch.load`."""
    theirs = str(error).startswith("Unknown endianness type")
    return not theirs and not isinstance(error, (pickle.UnpicklingError, UnicodeError))


def attempt(name: str, way: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return what a way gave, or the error; None for one that is as it should be."""
    tried[name] += 1
    try:
        return way(), None
    except REFUSALS as error:
        text = str(error)
        if any(word in text for word in DEFECTS):
            return error, f"a defect: {text[:300]}"
        if ours(error) and (found := UNSHOWN.search(text)):
            return error, f"{found[0]!r} in a message: {text[:300]!r}"
        return error, None
    except BaseException as error:
        return error, f"{type(error).__name__}: {str(error)[:300]}"


def shown(result: Any) -> str:
    if isinstance(result, BaseException):
        return f"{type(result).__name__} {str(result)[:300]}"
    return f"{len(result)} tensors"


def compared(one: Tensors, other: Tensors) -> str | None:
    if len(one) != len(other):
        return f"{len(other)} tensors instead of {len(one)}"
    if one.keys() == other.keys():
        other = {name: other[name] for name in one}  # in another order than that of the file
    pairs = zip(one.values(), other.values(), strict=True)
    for name, (a, b) in zip(one, pairs, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape or raw(a) != raw(b):
            return f"tensor {name!r} differs"
    return None


def try_all(base: Base, path: Path, data: bytes, rng: random.Random) -> list[str]:
    """Return what is to be told of a file: how it ended, and findings."""
    found: list[str] = []
    first: Any = None
    for name, way in ways(base):
        result, wrong = attempt(name, lambda way=way: way(path))
        if wrong:
            found.append(f"{name}: {wrong}")
        elif first is None:
            first = result
            how = type(result).__name__ if isinstance(result, BaseException) else "loaded"
            found.append(f"was {how}")
        elif isinstance(first, BaseException) != isinstance(result, BaseException):
            found.append(f"{name}: {shown(result)}, and eager: {shown(first)}")
        elif isinstance(first, dict) and (what := compared(first, result)):
            found.append(f"{name}: {what}")
    if isinstance(first, dict) and not base.folder:
        found += check_slices(base, path, first, rng)
        if base.kind in ("tensors", "sealed"):
            found += check_verified(base, path, data, first)
    if base.kind in ("tensors", "sealed", "safetensors"):
        options = {"encryption": params()} if base.encrypted else {}
        _, wrong = attempt("module", lambda: into_module(path, **options))
        found += [f"module: {wrong}"] if wrong else []
    if not base.folder:
        _, wrong = attempt("info", lambda: tensorizer.info(path))
        found += [f"info: {wrong}"] if wrong else []
    return found


def check_slices(base: Base, path: Path, whole: Tensors, rng: random.Random) -> list[str]:
    slices = {}
    for name, tensor in whole.items():
        if tensor.dim() and nbytes(tensor) <= LARGE:
            dim = rng.randrange(tensor.dim())
            ends = sorted(rng.randrange(tensor.shape[dim] + 1) for _ in range(2))
            slices[name] = (dim, ends[0], ends[1])
    options = {"encryption": params()} if base.encrypted else {}
    result, wrong = attempt(
        "sliced",
        lambda: tensorizer.load(path, "cpu", names=list(slices), slices=slices, **options),
    )
    if wrong:
        return [f"sliced: {wrong}"]
    if isinstance(result, BaseException):
        # Slices of strided tensors are refused.
        return [] if base.kind == "torch" else [f"sliced: {str(result)[:300]}"]
    for name, (dim, start, end) in slices.items():
        expected = whole[name].narrow(dim, start, end - start)
        if expected.shape != result[name].shape or raw(expected) != raw(result[name]):
            return [f"sliced: {name!r} {dim, start, end} differs"]
    return []


def check_verified(base: Base, path: Path, data: bytes, whole: Tensors) -> list[str]:
    """Check with an independent reader that the hashes fit if a load with verification passes."""
    options = {"encryption": params()} if base.encrypted else {}
    verified = partial(tensorizer.load, path, "cpu", verify_hash=True, **options)
    result, wrong = attempt("verified", verified)
    if wrong:
        return [f"verified: {wrong}"]
    if isinstance(result, BaseException):
        return []
    if what := compared(whole, result):
        return [f"verified: {what}"]
    bodies = tensors_bytes.read_index(data)[0]
    for body, (name, tensor) in zip(bodies, result.items(), strict=True):
        plain = raw(tensor) if body.data_len else b""
        if not tensors_bytes.hashes_fit(data, body, plain):
            return [f"verified: tensor {name!r} passed, and its hashes do not fit"]
    return []


def command_lines(base: Base, path: Path, copy: Path) -> list[list[str]]:
    source = str(path.parent if base.folder == "ranks" else path)
    return [["ls", source], ["ls", "-l", source], ["verify", source], ["diff", source, source],
            ["cp", "--force", source, str(copy)]]  # fmt: skip


def commands(base: Base, path: Path) -> list[str]:
    """Try the command on a file; return findings."""
    tried["command"] += 1
    copy = path.with_name("copy.tensors")
    found = ["was command"]
    for arguments in command_lines(base, path, copy):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                status: Any = command(arguments)
            except SystemExit as exit:
                status = exit.code
            except BaseException as error:
                status = f"{type(error).__name__}: {error}"
        found += wrong_command(arguments[0], status, said.getvalue())
        copy.unlink(missing_ok=True)
    return found


def processes(base: Base, path: Path, rng: random.Random) -> list[str]:
    """Try one of the commands as a process of its own; return findings."""
    tried["command as a process"] += 1
    copy = path.with_name("copy.tensors")
    arguments = rng.choice(command_lines(base, path, copy))
    done = subprocess.run([sys.executable, "-m", "tensorizer", *arguments], capture_output=True,
                          text=True, errors="replace", check=False)  # fmt: skip
    copy.unlink(missing_ok=True)
    return wrong_command(arguments[0], done.returncode, done.stdout + done.stderr)


def wrong_command(name: str, status: Any, text: str) -> list[str]:
    """Return what is wrong with how a command ended."""
    if status in (0, 1, 2) and not any(word in text for word in (*DEFECTS, "Traceback")):
        return []
    return [f"command {name}: {status}: {text[-300:]}"]
