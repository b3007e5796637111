"""Saves a real model, loads it back three ways, and draws the speed beside others.

make demo, DEMO=--old for the old package among the others, DEMO=--quick for a tiny model
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import tensorizer
import torch
from bars import draw
from cases import ALL
from harness import files
from harness.case import Given, Model, is_ours
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from runner import measure, preload
from tensorizer.utils import convert_bytes, no_init_or_tensor

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "build/demo.svg"
T = TypeVar("T")
console = Console()


def build_model(quick: bool) -> torch.nn.Module:
    """Build a model of the shapes of Qwen2-0.5B, with random weights; nothing is downloaded.

    Its output layer is a tensor of its own, where that of Qwen2-0.5B is tied to the embedding.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    size = (
        {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 1000,
         "num_attention_heads": 4, "num_key_value_heads": 2}
        if quick
        else {"hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864,
              "vocab_size": 151936, "num_attention_heads": 14, "num_key_value_heads": 2}
    )  # fmt: skip
    config = Qwen2Config(**size, tie_word_embeddings=False)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def shown(progress: Progress, title: str, work: Callable[[], T], path: Path, goal: int) -> T:
    """Run `work` and show how far a file has grown, or that something is going on."""
    task = progress.add_task(title, total=goal or None)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            # A file under construction has a name of its own until it is complete.
            sizes = [p.stat().st_blocks * 512 for p in path.parent.glob(f"*{path.name}*")]
            if goal and sizes:
                progress.update(task, completed=min(max(sizes), goal))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return work()
    finally:
        done.set()
        watcher.join()
        progress.update(task, total=goal or 1, completed=goal or 1)


@torch.jit.script
def scripted_load(path: str):
    return torch.ops.tensorizer.load(path)


def compare(
    folder: Path, state: dict[str, torch.Tensor], progress: Progress, others: list[str]
) -> tuple[Table, list[str]]:
    """Load the same weights with every engine, each in a process of its own; draw the rates.

    Returns a table, and what it says of those that are faster.
    """
    preload(quick=False)
    case = ALL["tensors/3k"]
    size = sum(tensor.nbytes for tensor in state.values())
    model = Model("model", len(state), size)
    for form in ("tensors", "safetensors", "pt"):
        files.WRITERS[form](state, files.local(folder, model, form))
    (folder / "model.all.json").write_text(json.dumps(files.checksum(state)))
    files.warm([folder])
    table = Table(title="Loading the same weights to the CPU, every byte touched and compared")
    for column in ("engine", "seconds", "GB/s", "times as long", "peak memory"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    engines = ["tensorizer", "tensorizer mmap", *others]
    rates: list[tuple[str, float]] = []
    task = progress.add_task("comparing engines", total=len(engines))
    first = None
    found: dict[str, dict[str, float]] = {}
    for name in engines:
        engine = next(one for one in case.engines if one.name == name)
        given = Given(folder, str(folder), model, engine.form, "", folder, str(folder), False)
        runs = [dict(measure("run", case, engine, given, env={}, timeout=300)) for _ in range(3)]
        best = min(runs, key=lambda result: result["seconds"])
        first = first or best
        found[name] = best
        rates.append((name, best["bytes"] / best["seconds"] / 1e9))
        table.add_row(
            name,
            f"{best['seconds']:.3f}",
            f"{rates[-1][1]:.2f}",
            f"{best['seconds'] / first['seconds']:.2f}",
            convert_bytes(best["bytes"] + best["extra_bytes"]),
        )
        progress.advance(task)
    note = f"{len(state)} tensors, {convert_bytes(size)}, in the page cache"
    note += f"; {os.cpu_count()} cores; best of three"
    draw(PICTURE, "Loading the same weights to the CPU, every byte touched", note, rates)
    return table, losses(found)


def losses(found: dict[str, dict[str, float]]) -> list[str]:
    """Return sentences on the others that take less time or memory than the same way of ours."""
    said = []
    for engine, other in found.items():
        if is_ours(engine):
            continue
        # Engines that use the page cache in place take next to no memory.
        way = "tensorizer mmap" if other["extra_bytes"] * 10 < other["bytes"] else "tensorizer"
        ours = found[way]
        if other["seconds"] < ours["seconds"]:
            said.append(
                f"{engine} takes {other['seconds'] / ours['seconds']:.2f} of the time of {way}"
            )
        if other["extra_bytes"] + (64 << 20) < ours["extra_bytes"]:
            more = convert_bytes(ours["extra_bytes"] - other["extra_bytes"])
            said.append(f"{engine} takes {more} less memory than {way}")
    return said


def tell(table: Table, lost: list[str]) -> None:
    """Print the table, and where others are better."""
    console.print(table)
    console.print(
        f"Where it is not the best here: {'; '.join(lost) or 'nowhere'}. tensorizer mmap, "
        "safetensors and torch.load mmap use the page cache in place, the others hold a copy. "
        "Cold disks and servers: docs/explanation/benchmarks.md."
    )


def main() -> None:
    quick = "--quick" in sys.argv
    others = ["safetensors", "torch.load", "torch.load mmap"]
    if "--old" in sys.argv:
        others.insert(0, "tensorizer 2.12.1")
    started = time.perf_counter()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(dir=HERE, prefix="data-demo-") as name,
        Progress(*columns, console=console) as progress,
    ):
        folder = Path(name)
        path = folder / "demo.tensors"
        say = progress.console.print

        named = "a small model" if quick else "a model of the shapes of Qwen2-0.5B"
        task = progress.add_task(f"building {named} with random weights", total=None)
        torch.manual_seed(0)
        model = build_model(quick)
        progress.update(task, total=1, completed=1)
        size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        count = sum(1 for _ in (*model.parameters(), *model.buffers()))
        say(f"Built {named}, random weights: {count} tensors, {convert_bytes(size)}.")

        def save() -> None:
            with tensorizer.TensorSerializer(path) as serializer:
                serializer.write_module(model)

        start = time.perf_counter()
        shown(progress, "saving it with write_module", save, path, size)
        seconds = time.perf_counter() - start
        say(
            f"Saved with both hashes and fsync in {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s."
        )

        empty = no_init_or_tensor(lambda: build_model(quick))
        start = time.perf_counter()

        def load() -> int:
            with tensorizer.TensorDeserializer(path, device="cpu", verify_hash=True) as file:
                return file.load_into_module(empty)

        loaded = shown(progress, "loading it into an empty copy, hashes verified", load, path, 0)
        seconds = time.perf_counter() - start
        rate = size / seconds / 1e9
        say(f"Loaded and verified {loaded} tensors in {seconds:.2f} s, {rate:.2f} GB/s.")
        with torch.no_grad():
            tokens = torch.arange(1, 17).unsqueeze(0)
            expected, found = model(tokens).logits, empty(tokens).logits
        assert torch.equal(expected, found), "the logits differ"
        say(f"Both models give the same {found.numel():,} logits, bit for bit.")

        start = time.perf_counter()
        tensors = shown(
            progress, "loading through TorchScript", lambda: scripted_load(str(path)), path, 0
        )
        seconds = time.perf_counter() - start
        weight = "model.embed_tokens.weight"
        assert torch.equal(tensors[weight], model.get_parameter(weight))
        say(
            "A scripted function that calls torch.ops.tensorizer.load got "
            f"{len(tensors)} tensors in {seconds:.2f} s."
        )
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        del tensors
        table, lost = compare(folder, state, progress, others)
    tell(table, lost)
    console.print(
        f"Done in {time.perf_counter() - started:.0f} s on {os.cpu_count()} cores. "
        f"The rates as a picture: {PICTURE}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
