"""The models' files: written once in each form, with the sums that verify what is loaded."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from harness.case import INDEX, SHARDS, AbsentError, Model, Tensors, shard_names

#: Count and bytes of each model, at full and at toy size.
SIZES = {
    "large": ((201, 2_200_000_000), (5, 10_000_000)),
    "3k": ((3_000, 254_000_000), (100, 3_200_000)),
    "20k": ((20_000, 256_000_000), (300, 3_000_000)),
    "100k": ((100_000, 6_400_000), (1_000, 64_000)),
    "200k": ((200_000, 12_800_000), (2_000, 128_000)),
    "scattered": ((5_000, 105_000_000), (200, 4_000_000)),
    "many-shards": ((300, 12_000_000), (20, 800_000)),
    "5000-shards": ((5_000, 20_000_000), (150, 600_000)),
    "few": ((100, 400_000), (10, 40_000)),
    "versions": ((100, 800_000_000), (10, 8_000_000)),
    "gigabyte": ((14, 940_000_000), (4, 8_000_000)),
    "ranks": ((500, 2_000_000_000), (16, 8_000_000)),
    "adam": ((300, 1_000_000_000), (20, 4_000_000)),
    "llama": ((74, 1_080_000_000), (0, 0)),
    "1.0-MiB": ((1, 1 << 20), (1, 1 << 20)),
    "1.5-MiB": ((1, 3 << 19), (1, 3 << 19)),
    "2.0-MiB": ((1, (2 << 20) - 64), (1, (2 << 20) - 64)),
    "device": ((320, 8_000_000_000), (10, 20_000_000)),
    "device-20k": ((20_000, 1_000_000_000), (200, 2_000_000)),
}
#: A Llama of 1.08 GB, and a small one; the most bytes of a shard.
LLAMA = (
    ({"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8,
      "num_attention_heads": 16, "vocab_size": 32_000}, 290_000_000),
    ({"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
      "num_attention_heads": 4, "vocab_size": 4_000}, 2_600_000),
)  # fmt: skip
KEY = bytes(range(32))
#: Words that are weighed at once: 64 MiB.
PIECE = 1 << 23
#: Adam keeps two moments of each parameter.
MOMENTS = ("exp_avg", "exp_avg_sq")

#: The part of each tensor that a case loads; None leaves the tensor out.
PARTS: dict[str, Callable[[int, torch.Tensor], torch.Tensor | None]] = {
    "all": lambda _, tensor: tensor,
    "half": lambda _, tensor: tensor[: len(tensor) // 2],
    "second half": lambda _, tensor: tensor[len(tensor) // 2 :],
    "one": lambda number, tensor: None if number else tensor,
    "fifth": lambda number, tensor: None if number % 5 else tensor,
}


def model_of(name: str, quick: bool, scale: float = 1) -> Model:
    """Return a model; those of devices are so many times as large."""
    count, total = SIZES[name][quick]
    return Model(name, count, int(total * (scale if name.startswith("device") else 1)))


def checksum(tensors: Tensors) -> dict[str, int]:
    """Read every byte: the sum of the 64-bit words of each tensor, modulo 2^64."""
    return {
        name: int(tensor.detach().flatten().view(torch.int64).sum())
        for name, tensor in tensors.items()
    }


def weighed(tensor: torch.Tensor) -> str:
    """Return dtype, shape, and a sum of the 64-bit words of a tensor, taken on its device.

    Word number n has the weight 2n + 1, modulo 2^64, so that words in a wrong place change the sum,
    unless they are equal to those that belong there.
    """
    words = tensor.detach().flatten().view(torch.int64)
    if hasattr(ctypes.CDLL(None), "fake_cuda_stat"):  # the emulated CUDA has no kernels that sum
        words = words.cpu()
    total = 0
    for number, piece in enumerate(words.split(PIECE)):
        first = 2 * number * PIECE + 1
        weights = torch.arange(first, first + 2 * len(piece), 2, device=words.device)
        total += int((piece * weights).sum())
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {total % 2**64:x}"


def sums(tensors: Tensors, part: str) -> dict[str, object]:
    """Return the sums of a part of tensors; of the part "weighed", those that devices take."""
    if part == "weighed":
        return {name: weighed(tensor) for name, tensor in tensors.items()}
    return dict(checksum(part_of(tensors, part)))


def part_of(tensors: Tensors, part: str) -> dict[str, torch.Tensor]:
    """Return the part of tensors that a case loads."""
    found = ((n, PARTS[part](i, tensor)) for i, (n, tensor) in enumerate(tensors.items()))
    return {name: tensor for name, tensor in found if tensor is not None}


def own(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return copies with memory of their own, as safetensors wants them and models have them."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def as_adam(tensors: Tensors) -> dict[str, object]:
    """Arrange tensors as ``torch.optim.Adam.state_dict()`` does."""
    moments = list(own(tensors).values())
    pairs = zip(moments[::2], moments[1::2], strict=True)
    return {
        "state": {
            number: {"step": torch.tensor(7.0), **dict(zip(MOMENTS, pair, strict=True))}
            for number, pair in enumerate(pairs)
        },
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(len(moments)))}],
    }


def from_adam(state: dict) -> dict[str, torch.Tensor]:
    """Undo :func:`as_adam`."""
    moments = [one[name] for one in state["state"].values() for name in MOMENTS]
    return {f"layers.{number}.weight": tensor for number, tensor in enumerate(moments)}


def write_tensors(tensors: Tensors, path: Path, **options: object) -> None:
    """Write a ``.tensors`` file."""
    import tensorizer

    tensorizer.save(tensors, path, **options)


def write_encrypted(tensors: Tensors, path: Path) -> None:
    """Write an encrypted ``.tensors`` file."""
    import tensorizer

    write_tensors(tensors, path, encryption=tensorizer.EncryptionParams(KEY))


def write_safetensors(tensors: Tensors, path: Path) -> None:
    """Write one safetensors file."""
    from safetensors.torch import save_file

    save_file(own(tensors), path, {"format": "pt"})


def write_shards(tensors: Tensors, folder: Path, names: Iterable[str] | None = None) -> None:
    """Write about as many tensors in each file, in their order, and the index of all."""
    files = list(names or shard_names())
    folder.mkdir()
    keys, each = list(tensors), -(-len(tensors) // len(files))
    where = {}
    for number, name in enumerate(files):
        mine = keys[number * each : (number + 1) * each]
        write_safetensors({key: tensors[key] for key in mine}, folder / name)
        where |= dict.fromkeys(mine, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index))


def write_each(tensors: Tensors, folder: Path) -> None:
    """Write a shard for each tensor."""
    write_shards(tensors, folder, [f"model-{n:05}.safetensors" for n in range(len(tensors))])


def write_pair(tensors: Tensors, folder: Path) -> None:
    """Save the state of Adam as tensorizer's pair of files."""
    from tensorizer.torch_compat import tensorizer_saving

    folder.mkdir()
    with tensorizer_saving():
        torch.save(as_adam(tensors), f"{folder}/state.pt")


#: The function that writes each form of a model; the form is the suffix of the file.
WRITERS: dict[str, Callable[[Tensors, Path], None]] = {
    "tensors": write_tensors,
    "encrypted": write_encrypted,
    "safetensors": write_safetensors,
    "shards": write_shards,
    "each": write_each,
    "pt": lambda tensors, path: torch.save(own(tensors), path),
    "adam": lambda tensors, path: torch.save(as_adam(tensors), path),
    "pair": write_pair,
}


def named(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def write_llama(folder: Path, quick: bool) -> dict[str, torch.Tensor]:
    """Write a Llama in shards; return its tensors as transformers loads them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes, shard = LLAMA[quick]
    torch.manual_seed(17)
    model = LlamaForCausalLM(LlamaConfig(**sizes, dtype=torch.bfloat16)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shard)
    assert len(list(folder.glob("*.safetensors"))) == SHARDS, "not as many shards as are read"
    return named(LlamaForCausalLM.from_pretrained(folder))


def local(folder: Path, model: Model, form: str) -> Path:
    """Return the path of a model in a form."""
    return folder / f"{model.name}.{form}"


def sums_of(folder: Path, model: Model, part: str) -> dict[str, object]:
    """Return the sums of a part of a model."""
    return json.loads((folder / f"{model.name}.{part}.json").read_text())


def prepare(folder: Path, model: Model, forms: Iterable[str], parts: set[str], quick: bool) -> None:
    """Write the forms and sums of a model that are not there yet.

    Raises:
        AbsentError: There is too little room.

    """
    folder.mkdir(parents=True, exist_ok=True)
    size = folder / f"{model.name}.size"
    if not size.exists() or size.read_text() != f"{model.count} {model.total}":
        for path in folder.glob(f"{model.name}.*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        size.write_text(f"{model.count} {model.total}")
    left = [form for form in forms if form and not local(folder, model, form).exists()]
    unknown = [p for p in parts if not (folder / f"{model.name}.{p}.json").exists()]
    if not left and not unknown:
        return
    if shutil.disk_usage(folder).free < model.total * (len(left) + 1):
        raise AbsentError(f"{folder} has no room for {len(left) + 1} x {model.total:,} bytes")
    if model.name == "llama":
        tensors: Tensors = write_llama(local(folder, model, "llama"), quick)
    else:
        tensors = model.tensors()
        for form in left:
            path = local(folder, model, form)
            part = path.with_name(f"part-{path.name}")
            shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
            WRITERS[form](tensors, part)
            part.rename(path)
    for part_name in unknown:
        text = json.dumps(sums(tensors, part_name))
        (folder / f"{model.name}.{part_name}.json").write_text(text)


def inside(paths: Iterable[Path]) -> list[Path]:
    """Return files, and those in folders."""
    return [one for path in paths
            for one in (path.rglob("*") if path.is_dir() else [path]) if one.is_file()]  # fmt: skip


def forget(paths: Iterable[Path]) -> None:
    """Sync files and drop them from the page cache."""
    os.sync()
    for path in inside(paths):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(paths: Iterable[Path]) -> None:
    """Bring files into the page cache from the disk.

    The pages of a file that has just been written may be smaller than those of one that was read,
    and a mapping of them slower.
    """
    files = inside(paths)
    forget(files)
    for path in files:
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(16 << 20)
            while file.readinto(buffer):
                pass


def sync(folder: Path) -> None:
    """Wait until the disk has the files of a folder, and the folder."""
    for path in (*inside([folder]), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
