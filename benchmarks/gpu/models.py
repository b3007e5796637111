"""Write a model in formats that engines read: models.py FOLDER MODEL COUNT BYTES FORMAT...

The same model every time, so that a format can be added later. A file has its name when it is
complete. ``MODEL.json`` has the sums by which loads are verified.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from checks import Tensors, sums

KEY = bytes(range(32))
#: The format of what engines save: never written here, it needs room.
OUT = "out"
#: All bits but the highest one of the exponents: no float16 is infinite or no number, so that
#: casts to float32 and back give the same bits.
FINITE = 0xBFFF_BFFF_BFFF_BFFF - (1 << 64)


def tensors(count: int, total: int) -> Tensors:
    each = total // count // 2 // 256 * 256
    flat = torch.empty(count * each, dtype=torch.float16)
    words = flat.view(torch.int64)
    generator = torch.Generator().manual_seed(17)
    length = min(words.numel(), 1 << 24)
    block = torch.randint(-(2**63), 2**63 - 1, (length,), generator=generator)
    for number, part in enumerate(words.split(length)):
        # Every part is another one, or a part that goes to the wrong place would not show.
        torch.add(block[: part.numel()], number * 0x9E37_79B9, out=part)
    words &= FINITE
    return {f"layers.{i}.weight": flat[i * each :][:each].view(64, -1) for i in range(count)}


def save_tensors(made: Tensors, path: Path) -> None:
    import tensorizer

    tensorizer.save(made, path)


def save_encrypted(made: Tensors, path: Path) -> None:
    import tensorizer

    tensorizer.save(made, path, encryption=tensorizer.EncryptionParams(KEY))


def save_safetensors(made: Tensors, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(made, str(path))


def save_pt(made: Tensors, path: Path) -> None:
    # As a model has them: each with a storage of its own.
    torch.save({name: tensor.clone() for name, tensor in made.items()}, path)


SAVERS: dict[str, Callable[[Tensors, Path], None]] = {
    "tensors": save_tensors,
    "encrypted": save_encrypted,
    "safetensors": save_safetensors,
    "pt": save_pt,
}


def saved_description(folder: Path, model: str, count: int, total: int) -> dict[str, object] | None:
    """Return what is known of a model that was written before, if it is of this size."""
    try:
        known = json.loads((folder / f"{model}.json").read_text())
    except (OSError, ValueError):
        return None
    return known if (known["count"], known["total"]) == (count, total) else None


def missing(folder: Path, model: str, count: int, total: int, formats: Iterable[str]) -> list[str]:
    """Return the formats that are still to be written."""
    if saved_description(folder, model, count, total) is None:
        return list(formats)
    return [suffix for suffix in formats if not (folder / f"{model}.{suffix}").exists()]


def make_room(
    folder: Path, model: str, total: int, formats: tuple[list[str], tuple[str, ...]], memory: bool
) -> str | None:
    """Return the reason if there is too little space or memory to write formats, else None.

    Deletes partial files, saved files, and files of other models or formats to make room. A folder
    may be in memory.
    """
    left, wanted = formats
    for leftover in (*folder.glob("*.part"), *folder.glob(f"*.{OUT}")):
        leftover.unlink()
    need = int(total * len(left) * 1.02)
    for path in sorted(folder.glob("*.*")):
        name, _, suffix = path.name.partition(".")
        if shutil.disk_usage(folder).free >= need:
            break
        if suffix != "json" and (name != model or suffix not in wanted):
            path.unlink()
    free = shutil.disk_usage(folder).free
    if free < need:
        return f"{folder} has {free:,} bytes of room, and {', '.join(left)} take {need:,}"
    # A tmpfs takes memory; so do the tensors, and their clones for torch.save.
    taken = total * (3 if "pt" in left else 2) + (need if memory else 0)
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if "MemAvailable" in line)
    if available < taken:
        return f"{available:,} bytes of memory are available, and {taken:,} are needed"
    return None


def warm_cache(path: Path) -> None:
    """Read a file once: the first reader of new pages of a tmpfs is slower than all others."""
    buffer = bytearray(16 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def main(folder: Path, model: str, count: int, total: int, formats: list[str]) -> None:
    made = tensors(count, total)
    if saved_description(folder, model, count, total) is None:
        for old in folder.glob(f"{model}.*"):
            old.unlink()
        about = {"count": count, "total": total, "sums": sums(made)}
        (folder / f"{model}.json").write_text(json.dumps(about))
    for suffix in formats:
        path = folder / f"{model}.{suffix}"
        part = folder / f"{model}.part"
        SAVERS[suffix](made, part)
        warm_cache(part)
        part.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
