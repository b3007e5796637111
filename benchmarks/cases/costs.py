"""Costs that grow: with tensors, with shards, with ranks."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers
import torch
from harness.case import Case, Engine, Given, Measured, Tensors
from harness.servers import TESTS
from ours import LOAD, loading

from cases.servers import skeleton

#: Ranks and tensors of the plan of a load, and loads of one small tensor.
PLANNED, REPEATS = (512, 100_000), 200
ROWS, COLUMNS = 8, 1024


def lazily(given: Given) -> Tensors:
    """Load tensors one by one with a lazy deserializer."""
    import tensorizer

    with tensorizer.TensorDeserializer(given.where, "cpu", lazy_load=True) as file:
        return {name: file[name] for name in wanted(given, file)}


def opened(given: Given) -> Tensors:
    """Load tensors one by one with this package's safe_open."""
    from tensorizer.safetensors import safe_open

    with safe_open(given.where, "pt") as file:
        return {name: file.get_tensor(name) for name in wanted(given, file)}


def wanted(given: Given, file: Any) -> list[str]:
    """Return the names that a case loads: of many shards only one."""
    if given.form == "each":  # the names of all would open all shards
        return ["layers.0.weight"]
    return list(file.keys())


def into_module(given: Given) -> Tensors:
    """Load into a module."""
    import tensorizer

    with tensorizer.TensorDeserializer(given.where, "cpu", lazy_load=True) as file:
        file.load_into_module(given.ready)
    return dict(given.ready.named_parameters())


def named(step: int) -> Callable[[Given], Tensors]:
    """Return a load of one tensor in ``step``; 0 for only the first."""

    def load(given: Given) -> Tensors:
        numbers = range(0, given.model.count, step) if step else [0]
        return loading(names=[f"layers.{number}.weight" for number in numbers])(given)

    return load


def halves(out: bool) -> Callable[[Given], Tensors]:
    """Return a load of the first half of each tensor, into new tensors or given ones."""

    def load(given: Given) -> Tensors:
        import tensorizer

        slices = {f"layers.{n}.weight": (0, 0, 16) for n in range(given.model.count)}
        if out:
            return tensorizer.load(given.where, slices=slices, out=given.ready)
        return tensorizer.load(given.where, "cpu", slices=slices)

    return load


def second_half(given: Given) -> Tensors:
    """Load the second of two shards of each tensor."""
    import tensorizer

    return tensorizer.load(given.where, "cpu", shard=tensorizer.Shard(0, 1, 2))


def empty_halves(given: Given) -> Tensors:
    """Return tensors that halves are loaded into."""
    rows = (16, given.model.total // given.model.count // 64)
    names = (f"layers.{n}.weight" for n in range(given.model.count))
    return {name: torch.zeros(rows, dtype=torch.float16) for name in names}


def few_descriptors(given: Given) -> None:
    """Leave this process as few descriptors as a shell may give it."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))


def repeated(load: Callable[[Given], Tensors]) -> Callable[[Given], Measured]:
    """Return many loads of one tensor, of which the median counts."""

    def run(given: Given) -> Measured:
        expected = given.model.tensors()
        times, found = [], {}
        for _ in range(REPEATS):
            begun = time.perf_counter()
            found = load(given)
            times.append(time.perf_counter() - begun)
        right = all(torch.equal(found[n].view(torch.int16), t.view(torch.int16))
                    for n, t in expected.items())  # fmt: skip
        return Measured(statistics.median(times), given.model.total, verified=right)

    return run


def plan(kind: str) -> Callable[[Given], Measured]:
    """Return the plan of one of 512 ranks, made from the tables that all of them send."""

    def run(given: Given) -> Measured:
        from tensorizer.group.wishes import Wish, merged

        world, count = (16, 1_000) if given.quick else PLANNED
        shapes = [8192, 1024, 1024, 8192, 28672, 28672, 8192, 8192, 8192, 8192]

        def wish(number: int) -> Any:
            parts, place = (1, 0) if kind == "all" else (world, number)
            each = [(place * -(-n // parts), (place + 1) * -(-n // parts)) for n in shapes]
            wide = kind == "columns"
            boxes = [((0, 4096), ends) if wide else (ends,) for ends in each]
            of = [(4096, n) if wide else (n,) for n in shapes]
            return Wish.of((n, [boxes[n % 10]], of[n % 10], 2) for n in range(count))

        begun = time.process_time()
        mine = wish(0)
        mine.digest()
        own = time.process_time() - begun
        # All ranks have the same tensors; each sends a digest, and its table if they differ.
        wishes = [wish(number) for number in range(0, world, 64)]
        tables = [one.table for one in wishes]
        told = 128 if kind == "all" else 128 + max(len(one.encoded_table()) for one in wishes)
        begun = time.process_time()
        of_all = [(n, tables[n % len(tables)]) for n in range(world)]
        merged([(mine.columns, of_all)], count, world, [], encrypted=False)
        seconds = own + time.process_time() - begun
        return Measured(seconds, cpu=seconds, figures={"MB received": world * told / 1e6})

    return run


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of a call, and what it returns."""
    start = time.process_time()
    found = call()
    return time.process_time() - start, found


def metadata(ranks: int) -> Callable[[Given], Measured]:
    """Return the work on ``checkpoint.json`` of many ranks, whose plans one process makes."""

    def run(given: Given) -> Measured:
        if TESTS not in sys.path:
            sys.path.append(TESTS)
        from dcp_plans import plans_of, saved
        from tensorizer.distributed import Reader, layout

        plans = plans_of(ranks, 50 if given.quick else 5_000, ROWS, COLUMNS)
        _, (found, places) = timed(lambda: saved(plans))
        encode, data = timed(lambda: layout.encoded(found, places))
        Path(given.out, layout.FILE).write_bytes(data)
        first, read = timed(Reader(str(given.out)).read_metadata)
        items, _ = timed(lambda: [read.state_dict_metadata[n] for n in read.state_dict_metadata])
        planning, reads = timed(lambda: reads_of(read, ranks - 1))
        locate, _ = timed(lambda: [read.storage_data[one.storage_index] for one in reads])
        figures = {"MB": len(data) / 1e6, "encoded s": encode, "torch's plan s": planning}
        seconds = first + items + locate
        return Measured(seconds, cpu=seconds, figures=figures)

    return run


def reads_of(found: Any, rank: int) -> list[Any]:
    """Return what torch's planner asks to be read by a rank: its part of every tensor."""
    from torch.distributed.checkpoint import metadata as of_torch, planner_helpers

    sizes = torch.Size([ROWS, COLUMNS])
    part = of_torch.ChunkStorageMetadata(torch.Size([rank * ROWS, 0]), sizes)
    return [
        read
        for name, item in found.state_dict_metadata.items()
        for read in planner_helpers.create_read_items_for_chunk_list(name, item, [part])
    ]


def engine(name: str, run: Callable[[Given], Any], **options: Any) -> Engine:
    """Return an engine whose clock stops when the call returns."""
    return replace(LOAD, name=name, run=run, touch=False, **options)


EACH = (
    engine("tensorizer load", loading()),
    engine("tensorizer load(slices=)", halves(out=False), part="half"),
    engine("tensorizer load(slices=, out=)", halves(out=True), part="half", before=empty_halves),
    engine("tensorizer load(shard=)", second_half, part="second half"),
    engine("tensorizer load_into_module", into_module,
           before=lambda given: skeleton(given.model, parameters=True)),
    engine("tensorizer lazy file[name]", lazily),
    engine("tensorizer safe_open, get_tensor", opened, form="safetensors"),
    replace(peers.SAFETENSORS, name="safe_open, get_tensor", touch=False,
            run=lambda given: dict(peers.iterate_files(given))),
    replace(peers.SAFETENSORS_HALF, name="safe_open, get_slice", touch=False),
)  # fmt: skip
ONE = (
    engine("tensorizer names=", named(0), form="each"),
    engine("tensorizer lazy file[name]", lazily, form="each"),
    engine("tensorizer safe_open", opened, form="each"),
)
SCATTERED = (engine("tensorizer names=", named(5), form="safetensors"),)
FEW = engine("tensorizer", loading(), form="each", before=few_descriptors)
PAIR = (
    engine("tensorizer", repeated(loading())),
    replace(peers.CLONED, run=repeated(peers.CLONED.run), touch=False),
)
PLANS = tuple(engine(f"tensorizer, {kind} wanted", plan(kind), form="")
              for kind in ("all", "rows", "columns"))  # fmt: skip
RANKS = (8, 64, 512)

CASES = [
    Case("costs/tensors", "100,000 tensors of 64 bytes, nothing touched: CPU of each call", EACH,
         "100k"),
    *(Case(f"costs/one-{size}", f"load one tensor of {size.replace('-', ' ')}, median of 200 loads",
           PAIR, size) for size in ("1.0-MiB", "1.5-MiB", "2.0-MiB")),
    Case("costs/one-of-many-shards", "load one tensor of 300 shards, 100 ms away", ONE,
         "many-shards", "one", server="100 ms away", scheme="http"),
    Case("costs/many-shards", "load 300 shards, 100 ms away",
         (engine("tensorizer", loading(), form="each"),), "many-shards", server="100 ms away",
         scheme="http"),
    Case("costs/scattered", "load 1,000 of 5,000 tensors, 21 of 105 MB, from a fast server",
         SCATTERED, "scattered", "fifth", server="unlimited", scheme="http"),
    Case("costs/scattered-slow", "the same from a server of 16 MB/s for each connection",
         SCATTERED, "scattered", "fifth", server="16 MB/s a connection", scheme="http"),
    Case("costs/descriptors", "load 5,000 local shards with 512 descriptors", (FEW,),
         "5000-shards"),
    Case("costs/plan", "the plan of one of 512 ranks for 100,000 tensors", PLANS, "few", rounds=3),
    Case("costs/checkpoint", "checkpoint.json of 5,000 tensors, decoded by one rank",
         tuple(engine(f"tensorizer, {ranks} ranks", metadata(ranks), form="") for ranks in RANKS),
         "few", rounds=3, quick=("tensorizer, 8 ranks",)),
]  # fmt: skip
