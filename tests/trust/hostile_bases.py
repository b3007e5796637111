"""Sound files of every format, and changes that make hostile ones of them, all by a seed."""

import gzip
import io
import json
import random
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

import tensorizer
import tensors_bytes
import torch
import torch.distributed.checkpoint as dcp
from tensorizer.distributed import Writer
from tensorizer.torch_compat import tensorizer_saving

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
#: The key of all encrypted files: that of the golden files with a key.
KEY = bytes(range(32))
#: Larger ones would be hit where nothing is of interest.
MOST = 4500
PIECES = [b"\0", b"\xff", b"\x1e[", b'"', b"{", b"}", b"]", b",", b":", b"../", b"/", b"\\u0000",
          b"null", b"1e999", b"-1", b"18446744073709551616", b"PK\x05\x06", b"|TZR|", b"\x80\x02",
          b".", b"R", b"cos\nsystem\n", b"\xc3\x28", b"[" * 200, b'"a":1,', b"F32",
          b"__metadata__"]  # fmt: skip


@dataclass
class Base:
    """A sound file.

    Attributes:
        kind: Its format.
        data: Its bytes.
        path: Where it has its place in its folder.
        encrypted: It needs :data:`KEY`.

    """

    kind: str
    data: bytes
    path: str
    encrypted: bool = False

    @property
    def folder(self) -> str:
        """The folder of several files that it is one of, or nothing."""
        return str(Path(self.path).parent).removeprefix(".")


def golden() -> list[Base]:
    """Return the small sound files of many releases, those with keys included."""
    manifest = json.loads((GOLDEN / "manifest.json").read_text())
    bases = []
    for file in manifest["files"]:
        name = file["file"]
        sound = file["category"] in ("valid", "handmade") and name.endswith(".tensors.gz")
        # Those begin later, or have keys of their own.
        if not sound or "at_offset" in name or "string" in name or "kdf" in name:
            continue
        data = tensors_bytes.tightened(gzip.decompress((GOLDEN / name).read_bytes()))
        if len(data) <= MOST:
            encrypted = tensors_bytes.is_encrypted(data)
            bases.append(Base("tensors", data, "f.tensors", encrypted))
    return bases


def state() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.arange(12.0).reshape(3, 4),
        "bias": torch.arange(3, dtype=torch.bfloat16),
        "layer.scale": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 2),
    }


def saved(folder: Path, **options: object) -> bytes:
    path = folder / "made.tensors"
    tensorizer.save(state(), path, **options)
    data = path.read_bytes()
    path.unlink()
    return data


def of_other_formats(folder: Path) -> list[Base]:
    """Return files of safetensors, shards, and checkpoints: of torch.save, of ranks, in two halves.

    What else such a checkpoint needs is put into the folder.
    """
    from safetensors.torch import save as safetensors_bytes

    packed = safetensors_bytes(state(), {"format": "pt"})
    zipped = io.BytesIO()
    nested = {"w": torch.arange(20.0).reshape(5, 4).t(), "n": {"x": [torch.arange(9)]}}
    torch.save(nested, zipped)
    legacy = io.BytesIO()
    torch.save(nested, legacy, _use_new_zipfile_serialization=False)
    half = {name: tensor for name, tensor in state().items() if name in ("weight", "empty")}
    (folder / "1.safetensors").write_bytes(safetensors_bytes(half))
    (folder / "2.safetensors").write_bytes(safetensors_bytes({"bias": state()["bias"]}))
    weights = {"weight": "1.safetensors", "empty": "1.safetensors", "bias": "2.safetensors"}
    index = json.dumps({"metadata": {"total_size": 54}, "weight_map": weights}).encode()
    ranks = folder / "ranks"
    dcp.save({**state(), "step": 5}, storage_writer=Writer(ranks), no_dist=True)
    shutil.copytree(ranks, folder / "ranks.sound")
    bases = [
        Base("safetensors", packed, "f.safetensors"),
        Base("torch", zipped.getvalue(), "f.pt"),
        Base("torch", legacy.getvalue(), "f.pt"),
        Base("shards", index, "model.safetensors.index.json"),
        Base("shard", (folder / "1.safetensors").read_bytes(), "1.safetensors"),
    ]
    pair = folder / "pair/state.pt"
    pair.parent.mkdir()
    with tensorizer_saving(), pair.open("wb") as file:
        torch.save(state(), file)
    for half in sorted(pair.parent.iterdir()):
        kind = "pair's pickle" if half == pair else "pair's file"
        bases.append(Base(kind, half.read_bytes(), f"pair/{half.name}"))
    for path in sorted(ranks.iterdir()):
        kind = "ranks' index" if path.suffix == ".json" else "ranks' file"
        data = path.read_bytes()
        bases.append(Base(kind, data, f"ranks/{path.name}"))
    return bases


def all_bases(folder: Path) -> list[Base]:
    sealed = tensorizer.EncryptionParams(KEY, manifest=True)
    own = [Base("tensors", tensors_bytes.tightened(saved(folder)), "f.tensors")]
    own.append(Base("sealed", saved(folder, encryption=sealed), "f.tensors", encrypted=True))
    return [*golden(), *own, *of_other_formats(folder)]


def number(rng: random.Random, size: int, right: int) -> bytes:
    """Return what may stand in a field in place of the right number."""
    bits = 8 * size
    wrong = rng.choice((
        0, 1, right + 1, right - 1, right ^ 1 << rng.randrange(bits), -1, (1 << bits - 1) - 1,
        1 << rng.randrange(bits), right * 2, rng.randrange(256), right + 8, rng.getrandbits(bits),
        1 << bits - 1,
    ))  # fmt: skip
    return (wrong % (1 << bits)).to_bytes(size, "little")


def of_fields(rng: random.Random, data: bytearray) -> bytearray:
    """Change a few fields of a `.tensors` file; often its hashes fit again afterwards."""
    fields = tensors_bytes.all_fields(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        field = rng.choice(fields)
        if field.size in (1, 2, 4, 8):
            right = int.from_bytes(data[field.at : field.at + field.size], "little")
            data[field.at : field.at + field.size] = number(rng, field.size, right)
        else:
            data[field.at + rng.randrange(field.size)] = rng.randrange(256)
    return tensors_bytes.rehash(data) if rng.random() < 0.5 else data


def of_bytes(rng: random.Random, data: bytearray) -> bytearray:
    """Change bytes anywhere: flip, set, cut, double, put in."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if not data:
            break
        at = rng.randrange(len(data))
        # Most of what there is to go wrong is at both ends.
        at = min(at, rng.randrange(len(data))) if rng.random() < 0.5 else at
        match rng.randrange(9):
            case 0 | 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 3:
                data[at : at + 4] = rng.choice((b"\xff" * 4, bytes(4), b"\0\0\0\x80"))
            case 4:
                del data[at : at + rng.randrange(1, 20)]
            case 5:
                data[at:at] = data[at : at + rng.randrange(1, 60)]
            case 6:
                data[at : at + rng.randrange(4)] = rng.choice(PIECES)
            case 7:
                del data[at:]
            case 8:
                data += rng.randbytes(rng.randrange(1, 40))
    return data


def of_header(rng: random.Random, data: bytearray) -> bytearray:
    """Change the JSON of a safetensors file, whose length is right again afterwards."""
    length = struct.unpack_from("<Q", data)[0]
    text = of_bytes(rng, data[8 : 8 + length])
    return bytearray(struct.pack("<Q", len(text))) + text + data[8 + length :]


def of_json(rng: random.Random, data: bytearray) -> bytearray:
    """Change a number or a text of a checkpoint of ranks, whose hash is right again afterwards."""
    from tensorizer.distributed.layout import sealed

    content = json.loads(data)
    content.pop("sha256", None)
    places: list[tuple[object, object]] = []
    waiting: list[object] = [content]
    while waiting:
        node = waiting.pop()
        pairs = list(node.items() if isinstance(node, dict) else enumerate(node))  # type: ignore
        places += [(node, key) for key, _ in pairs]
        waiting += [value for _, value in pairs if isinstance(value, (dict, list))]
    for _ in range(rng.choice((1, 1, 2))):
        node, key = rng.choice(places)
        node[key] = rng.choice((  # type: ignore
            0, 1, -1, 2**31, 2**63, 2**64, 1.5, True, None, "", "a", "../x", "\x1e[0]", [], {},
            [0], {"a": 1}, "float32", "\ud800", [[[0], [1], 0, "weight"]],
        ))  # fmt: skip
    return bytearray(sealed(content))


def mutated(base: Base, rng: random.Random) -> bytes:
    """Return a hostile file."""
    data, chance = bytearray(base.data), rng.random()
    if base.kind == "tensors" and chance < 0.6:
        return bytes(of_fields(rng, data))
    if base.kind in ("safetensors", "shard") and chance < 0.6:
        return bytes(of_header(rng, data))
    if base.kind == "ranks' index" and chance < 0.7:
        return bytes(of_json(rng, data))
    if base.kind in ("ranks' file", "pair's file", "sealed") and chance < 0.7:
        # Only some hundred bytes of the index of 256 KiB are used.
        part = rng.choice((slice(0, 600), slice(262_144, None)))
        changed = of_bytes(rng, data[part])
        data[part] = changed
        return bytes(data)
    return bytes(of_bytes(rng, data))
