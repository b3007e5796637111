"""Random state dicts, saved and loaded in every way under modes of torch's dispatcher.

Tensors are of every dtype, strided, expanded, conjugated, views of one storage, parameters, results
of a graph, and of storages that were freed or cut. What torch.save of the same tensors gives is the
measure: each way loads the same, or what cannot be saved is refused and the old file stays. In a
mode of fake tensors, and on the meta device, dtypes and shapes are right, and nothing is written.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import parts
import torch
from scenes import scratch, tensorizer
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ops = torch.ops.tensorizer
#: Seconds for a batch.
LATE = 30.0
#: State dicts of each child.
BATCH = 25
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64,
    torch.complex128, torch.uint16,
]  # fmt: skip
#: Errors for tensors that cannot be saved or loaded.
REFUSALS = (NotImplementedError, RuntimeError, ValueError, TypeError)
State = dict[str, torch.Tensor]


def values(chance: random.Random) -> torch.Tensor:
    shape = [chance.choice([0, 1, 2, 3, 7, 40]) for _ in range(chance.choice([0, 1, 1, 2, 2, 3]))]
    dtype = chance.choice(DTYPES)
    made = torch.randint(0, 2 if dtype is torch.bool else 100, shape)
    return made.to(dtype)


def strided(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    return tensor.movedim(0, -1)[..., :: chance.choice([1, 2])] if tensor.dim() > 1 else tensor


def conjugated(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    if not tensor.dtype.is_complex:
        return tensor
    return tensor.conj().imag if chance.random() < 0.5 else tensor.conj()


def parameter(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    floats = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return torch.nn.Parameter(tensor, requires_grad=floats and chance.random() < 0.5)


def result(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Return a tensor that is no leaf of its autograd graph."""
    if tensor.dtype not in (torch.float32, torch.float64):
        return tensor
    return tensor.requires_grad_() * 2


def inferred(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


#: Tensors that are saved like others.
WHOLE: dict[str, Callable[[torch.Tensor, random.Random], torch.Tensor]] = {
    "plain": lambda tensor, _: tensor,
    "strided": strided,
    "expanded": lambda tensor, _: tensor.unsqueeze(0).expand(3, *tensor.shape),
    "tail": lambda tensor, _: torch.cat([tensor.reshape(-1)] * 3)[tensor.numel() :],
    "conjugated": conjugated,
    "parameter": parameter,
    "result": result,
    "inference": inferred,
}


def cut(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Shorten its storage, which must be its own; of no elements nothing can be too short."""
    storage = tensor.untyped_storage()
    storage.resize_(chance.choice([0, storage.nbytes() // 2, storage.nbytes() - 1]))
    return tensor


def made(chance: random.Random) -> tuple[State, State, str | None, Counter]:
    """Return a state dict, what it holds, the name of what cannot be saved, and the kinds."""
    state, wanted, kinds = {}, {}, Counter()
    short = None
    for number in range(chance.randint(1, 8)):
        kind = chance.choice(list(WHOLE))
        tensor = WHOLE[kind](values(chance), chance)
        state[f"{kind}.{number}"], kinds[kind] = tensor, kinds[kind] + 1
        if chance.random() < 0.2 and tensor.dim():
            state[f"view.{number}"], kinds["view"] = tensor.detach()[:1], kinds["view"] + 1
    # The expected tensors are those that torch.save and torch.load give.
    with io.BytesIO() as file:
        torch.save(state, file)
        file.seek(0)
        wanted = torch.load(file, weights_only=True)
    if chance.random() < 0.2:
        short = f"short.{len(state)}"
        whole = torch.ones(chance.randint(1, 50), dtype=chance.choice([torch.float32, torch.int16]))
        state[short], kinds["short"] = cut(whole, chance), 1
    items = list(state.items())
    chance.shuffle(items)
    return dict(items), wanted, short, kinds


class Logs(TorchDispatchMode):
    """Sees what is dispatched, and changes nothing."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Sees torch's functions, and changes nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def two_modes():
    with Logs(), Calls():
        yield


@contextlib.contextmanager
def another_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


#: Modes in which all is as without them.
MODES: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "dispatch mode": Logs,
    "function mode": Calls,
    "two modes": two_modes,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "deterministic": deterministic,
    "default dtype": another_default,
    "default device": lambda: torch.device("cpu"),
}


def by_serializer(state: State, path: Path) -> None:
    with tensorizer.TensorSerializer(path) as file:
        file.write_state_dict(state)


SAVES: dict[str, Callable[[State, Path], object]] = {
    "save": tensorizer.save,
    "save_async": lambda state, path: tensorizer.save_async(state, path).result(),
    "serializer": by_serializer,
    "operator": lambda state, path: ops.save(str(path), state),
    "safetensors": lambda state, path: tensorizer.save(state, path, format="safetensors"),
}


def lazily(path: Path) -> State:
    with tensorizer.TensorDeserializer(path, "cpu", lazy_load=True) as file:
        return {name: file[name] for name in file}


def vmapped(path: Path) -> State:
    """Load under a transform of functorch, whose own tensor is not among those of the file."""
    found: State = {}

    def function(x: torch.Tensor) -> torch.Tensor:
        found.update(ops.load(str(path)))
        return x + 1

    torch.func.vmap(function)(torch.ones(3))
    return found


def differentiated(path: Path) -> State:
    """Load in forward mode: threads of the backward one may abort in a process that was forked."""
    found: State = {}

    def function(x: torch.Tensor) -> torch.Tensor:
        found.update(tensorizer.load(path, "cpu"))
        return x.sum()

    torch.func.jvp(function, (torch.ones(3),), (torch.ones(3),))
    return found


def into(path: Path) -> State:
    out = {name: torch.empty(one.shape, dtype=getattr(torch, one.dtype))
           for name, one in tensorizer.info(path).tensors.items()}  # fmt: skip
    ops.load(str(path), list(out), list(out.values()))
    return out


LOADS: dict[str, Callable[[Path], State]] = {
    "load": lambda path: tensorizer.load(path, "cpu"),
    "mapped": lambda path: tensorizer.load(path, "cpu", mmap=True),
    "operator": lambda path: ops.load(str(path)),
    "lazy": lazily,
    "iterate": lambda path: dict(tensorizer.iterate(path, "cpu")),
    "into": into,
    "vmap": vmapped,
    "jvp": differentiated,
}


def bits(tensor: torch.Tensor) -> list:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).tolist()


def differs(found: State, wanted: State) -> str | None:
    """Return what is not the same, bit for bit."""
    if found.keys() != wanted.keys():
        return f"names {sorted(found)} for {sorted(wanted)}"
    for name, tensor in wanted.items():
        other = found[name]
        if type(other) not in (torch.Tensor, torch.nn.Parameter):
            return f"{name} is a {type(other).__name__}"
        if (other.dtype, other.shape) != (tensor.dtype, tensor.shape) or bits(other) != bits(
            tensor
        ):
            return f"{name}: {other} for {tensor}"
    return None


def faked(path: Path, wanted: State, load: Callable[[Path], State]) -> str | None:
    """Load where tensors are only thought: right shapes without data, or a refusal."""
    with FakeTensorMode():
        try:
            found = load(path)
        except (*REFUSALS, AssertionError):
            # The last is torch's own, of operators that give tensors and take none.
            return None
    for name, tensor in found.items():
        if (tensor.shape, tensor.dtype) != (wanted[name].shape, wanted[name].dtype):
            return f"fake {name}: {tensor} for {wanted[name].shape}"
        plain = not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
        if plain and bits(tensor) != bits(wanted[name]):
            return f"{name} is no fake tensor, and has other data"
    return None


def refused_whole(state: State, path: Path, save: Callable) -> str | None:
    """Save fake tensors, which hold no data: that is refused, or nothing is written."""
    before = path.read_bytes()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {name: mode.from_tensor(tensor.detach().clone()) for name, tensor in state.items()}
        with contextlib.suppress(*REFUSALS, AssertionError):
            save(fakes, path)
    return None if path.read_bytes() == before else "fake tensors are written over a file"


def one(seed: str, folder: Path) -> dict:
    """Try a state dict; return what it was of, and what is wrong."""
    chance = random.Random(seed)
    torch.manual_seed(chance.randrange(1 << 30))
    state, wanted, short, kinds = made(chance)
    path, old = folder / "f.tensors", {"old": torch.ones(3)}
    tensorizer.save(old, path)
    save, mode = chance.choice(list(SAVES)), chance.choice(list(MODES))
    wrong = []
    kinds |= {f"save in {mode}": 1}
    shares = any(name.startswith(("view", "expanded")) for name in state)
    try:
        with MODES[mode]():
            SAVES[save](state, path)
        if short:
            wrong.append("what has no whole storage was saved")
    except REFUSALS as error:
        theirs = save == "safetensors" and (shares or "safetensors has no" in str(error))
        if not short and not theirs:
            wrong.append(f"it is not saved: {type(error).__name__}: {error}")
        elif short and short not in str(error) and save != "safetensors":
            wrong.append(f"the error does not name {short}: {error}")
        if differs(tensorizer.load(path, "cpu"), old):
            wrong.append("the old file is gone")
        wrong = [f"{save}, {mode}: {text}" for text in wrong]
        return {"kinds": {save: 1}, "tried": kinds | {"refused": 1}, "wrong": wrong}
    load, other = chance.choice(list(LOADS)), chance.choice(list(MODES))
    kinds |= {f"load by {load}": 1, f"load in {other}": 1}
    with MODES[other]():
        found = dict(LOADS[load](path))
    with torch.no_grad():
        wrong += [f"{load}, {other}: {text}" for text in [differs(found, wanted)] if text]
    way = chance.choice(["load", "operator", "lazy", "iterate", "mapped"])
    wrong += [f"{way}: {text}" for text in [faked(path, wanted, LOADS[way])] if text]
    text = refused_whole(wanted, path, SAVES[save])
    wrong += [f"{save}: {text}"] if text else []
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in tensorizer.load(path).items()}
    if shapes != {name: tensor.shape for name, tensor in wanted.items()}:
        wrong.append("other shapes on the meta device")
    return {"kinds": {save: 1}, "tried": kinds | {"saved": 1}, "wrong": wrong}


def batch(seeds: list[str]) -> dict:
    """Try some; an error that is not expected is a finding of its own."""
    # Says where each thread is, if it hangs.
    faulthandler.dump_traceback_later(LATE - 5)
    kinds: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    findings = []
    with scratch() as folder:
        for seed in seeds:
            try:
                said = one(seed, folder)
            except Exception as error:
                wrong = [f"{type(error).__name__}: {error}"]
                said = {"kinds": {"error": 1}, "tried": {}, "wrong": wrong}
            kinds.update(said["kinds"])
            tried.update(said["tried"])
            findings += [f"state {seed}: {text}"[:800] for text in said["wrong"]]
    return {"kinds": kinds, "tried": tried, "findings": findings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts.ending(parser)
    parser.add_argument("--seed", type=int, default=0)
    parts.option(parser)
    arguments = parser.parse_args()
    began = time.monotonic()
    part = parts.divide(arguments.jobs)
    kinds: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    findings: list[str] = []
    inputs = 0
    while not parts.enough(arguments, began, inputs):
        seeds = [f"{arguments.seed}/{part}/{inputs + number}" for number in range(BATCH)]
        status, said, output = parts.in_child(lambda some=seeds: batch(some), LATE)
        if said is None:
            how = "hangs" if status is None else f"ends with {status}"
            findings.append(f"one of states {seeds[0]} to {seeds[-1]} {how}: {output}")
            said = {"kinds": {"crash": len(seeds)}, "tried": {}, "findings": []}
        inputs += len(seeds)
        kinds.update(said["kinds"])
        tried.update(said["tried"])
        findings += said["findings"]
    for finding in findings:
        print(f"FINDING {finding}", file=sys.stderr)
    print(json.dumps({
        "campaign": "state dicts", "inputs": inputs, "what": "random state dicts",
        "kinds": dict(kinds.most_common()), "tried": dict(tried.most_common()),
        "findings": findings[:50], "seconds": round(time.monotonic() - began, 1),
    }))  # fmt: skip
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
