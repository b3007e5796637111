"""The files that the cases of ``format_cases.py`` load, and their description for engines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cases import Model
from format_cases import BUFFER, FORMS, QUICK_BUFFER, Case
from run import prepare as prepare_models

SHARDS = 4
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Given:
    """Files and limits that an engine is given."""

    #: Each file that holds tensors: paths, or addresses.
    files: list[str]
    #: The one path or address that ours takes.
    whole: str
    #: Number of the first rows, by name, that are half of each tensor.
    rows: dict[str, int]
    #: Bytes that iterators may buffer.
    buffer: int


def shards(folder: Path, model: str) -> list[Path]:
    """Return the files of a model, named as Hugging Face names them."""
    of = range(1, SHARDS + 1)
    return [folder / model / f"model-{n:05}-of-{SHARDS:05}.safetensors" for n in of]


def local(folder: Path, case: Case) -> list[Path]:
    """Return the files of a case on this machine."""
    if case.form == "shards":
        return shards(folder, case.model)
    if case.form == "made":
        return []
    return [folder / f"{case.model}.{case.form}"]


def one_file(folder: Path, case: Case) -> Path:
    """Return one file of the same size: baselines are measured without shards."""
    form = "safetensors" if case.form in ("shards", "made") else case.form
    return folder / f"{case.model}.{form}"


def sums(folder: Path, case: Case, half: bool) -> dict[str, int]:
    """Return what the tensors, or halves of them, add up to."""
    return json.loads((folder / f"{case.model}{'.half' if half else ''}.json").read_text())


def given(folder: Path, case: Case, server: str, quick: bool) -> Given:
    """Tell an engine where the files of a case are."""
    paths = local(folder, case)
    bases = {"http": f"http://{server}", "s3": "s3://bucket", None: str(folder)}
    base = bases[case.scheme]
    files = [f"{base}/{path.relative_to(folder)}" for path in paths]
    whole = files[0]
    if case.form == "shards":
        # A server cannot be asked for a folder.
        whole = f"{base}/{case.model}" + (f"/{INDEX}" if case.scheme else "")
    rows = dict.fromkeys(sums(folder, case, half=False), Model.rows // 2)
    return Given(files, whole, rows, QUICK_BUFFER if quick else BUFFER)


def prepare(folder: Path, models: dict[str, Model]) -> None:
    """Write what is not there yet."""
    prepare_models(folder, {name: models[name] for name in FORMS})
    from engines import checksum

    for name, form in FORMS.items():
        halves = folder / f"{name}.half.json"
        if form != "shards" or halves.exists():
            continue
        tensors = models[name].tensors()
        split(tensors, shards(folder, name))
        half = {name: tensor[: Model.rows // 2] for name, tensor in tensors.items()}
        halves.write_text(json.dumps(checksum(half)))


def split(tensors: dict, paths: list[Path]) -> None:
    """Save about as many tensors in each file, in their order, and the index of all."""
    from safetensors.torch import save_file

    paths[0].parent.mkdir(exist_ok=True)
    names = list(tensors)
    each = -(-len(names) // len(paths))
    where = {}
    for number, path in enumerate(paths):
        mine = names[number * each : (number + 1) * each]
        # Each is to have memory of its own.
        save_file({name: tensors[name].clone() for name in mine}, path, {"format": "pt"})
        where |= dict.fromkeys(mine, path.name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (paths[0].parent / INDEX).write_text(json.dumps(index, indent=2))
