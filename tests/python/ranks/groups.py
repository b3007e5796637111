"""Loads by groups: every byte is fetched by one rank."""

import os
import resource
import threading
import time
from pathlib import Path

from ranks.common import (
    assert_equal,
    caught,
    cut,
    dist,
    fetch_together,
    group,
    tensorizer,
    tensors,
    torch,
)
from ranks.dtensors import of_format
from tensorizer.file.collective_load import open_collectively
from tensorizer.file.open_file import OpenFile
from tensorizer.group import members, wishes

#: Bytes of a block at most, so that there are many.
BATCH = 1 << 17


def large():
    """Return tensors of several batches each, and small ones."""
    torch.manual_seed(6)
    made = tensors()
    made["rows"] = torch.randn(300, 200)
    made["cube"] = torch.randn(3, 40, 90)
    made["one row"] = torch.randn(1, 1, 9000)
    made["words"] = torch.arange(40_000).to(torch.int16).view(4, 10_000)
    return made


def same(found, expected, what=""):
    """Compare what was loaded by name."""
    assert list(found) == list(expected), what
    for name, tensor in found.items():
        assert_equal(tensor, expected[name], (what, name))


def write(folder):
    """Save them in every format."""
    made = large()
    tensorizer.save(made, f"{folder}/g.tensors")
    key = tensorizer.EncryptionParams(bytes(range(32)))
    tensorizer.save(made, f"{folder}/g.enc.tensors", encryption=key)
    tensorizer.save(made, f"{folder}/g.safetensors")
    os.mkdir(f"{folder}/shards")
    tensorizer.save(made, f"{folder}/shards/g.safetensors", max_shard_size=100_000)
    torch.save(made | {"transposed": made["rows"].t(), "tail": made["rows"][7:]}, f"{folder}/g.pt")


def of_kind(folder, kind):
    """Return a file's path, what it needs to be opened, and its tensors."""
    made = large()
    uri, options, _ = of_format(folder, kind)
    uri = uri.replace("/f.", "/g.")
    if kind == "pt":
        made |= {"transposed": made["rows"].t(), "tail": made["rows"][7:]}
    return uri, options, made


def every_format(folder, kinds):
    """Load everything at all ranks: the first format with each option, others with one."""
    fetch_together(BATCH)
    every = [{"mmap": True}, {"dtype": torch.bfloat16}, {"num_readers": 1}]
    hashes = [{"verify_hash": True}, {"verify_hash": "crc32"}]
    with group():
        for at, kind in enumerate(kinds):
            uri, options, made = of_kind(folder, kind)
            chosen = every + hashes if at == 0 else [every[at % 3]]
            for more in ({}, *chosen, *(hashes[:1] if kind == "enc.tensors" else ())):
                found = tensorizer.load(uri, group=dist.group.WORLD, **options, **more)
                half = "dtype" in more
                expected = {
                    # Floating-point numbers of 8 bits have their scales elsewhere.
                    name: one.bfloat16()
                    if half and one.is_floating_point() and one.itemsize > 1
                    else one
                    for name, one in made.items()
                }
                assert found.keys() == expected.keys()
                for name, tensor in found.items():
                    assert_equal(tensor, expected[name], (kind, more, name))
                    tensor.zero_()  # of its own


def from_servers(addresses):
    """Load by addresses, of which the first rank reads the index for all, and by our streams."""
    fetch_together(BATCH)
    with group():
        made = large()
        made = {name: made[name] for name in ("rows", "cube", "t0")}
        for uri in addresses:
            for source in (uri, tensorizer.stream_io.open_stream(uri)):
                same(tensorizer.load(source, group=dist.group.WORLD, names=list(made)), made, uri)


def traffic(uri, count, streams):
    """Load a file of equal tensors with the batches that there are by default."""
    with group() as (rank, _):
        source = tensorizer.stream_io.open_stream(uri) if streams else uri
        found = tensorizer.load(source, group=dist.group.WORLD)
        assert len(found) == count
        for name, tensor in found.items():
            number = int(name.removeprefix("w"))
            assert tensor[0, 0] == number and tensor[-1, -1] == number
            assert_equal(tensor, torch.full_like(tensor, number), (rank, name))


def pretrained(uri):
    """Load a model of transformers together; return the sums of its weights."""
    with group():
        model = tensorizer.transformers.from_pretrained(uri, group=dist.group.WORLD)
        assert not any(one.is_meta for one in model.state_dict().values())
        return [int(one.view(torch.int32).sum()) for one in model.state_dict().values()]


def traffic_alone(uri):
    """Do so with each rank by itself."""
    with group():
        tensorizer.load(uri)


def local_files(folder):
    """Of a local file each rank reads what it wants, and maps it if it is told to."""
    with group() as (rank, world):
        uri, _, made = of_kind(folder, "tensors")
        big = {"big": torch.randn(1 << 20)}
        if rank == 0:
            tensorizer.save(big, f"{folder}/big.tensors")
        dist.barrier()
        pt, _, also = of_kind(folder, "pt")
        from tensorizer.file import collective_load

        def never(*_, **__):
            raise AssertionError("exchanged")

        collective_load.fill_collectively = never
        found = tensorizer.load(uri, group=dist.group.WORLD)
        assert found.keys() == made.keys()
        for name, tensor in found.items():
            assert_equal(tensor, made[name])
        found = tensorizer.load(f"{folder}/big.tensors", group=dist.group.WORLD, mmap=True)
        assert "big.tensors" in Path("/proc/self/maps").read_text()
        out = {"rows": torch.zeros(300, 200)}
        tensorizer.load(uri, group=dist.group.WORLD, out=out)
        assert_equal(out["rows"], made["rows"])
        shard = tensorizer.Shard(0, rank, world)
        with open(uri, "rb") as file:
            found = tensorizer.load(file, group=dist.group.WORLD, names=["rows"], shard=shard)
        assert_equal(found["rows"], cut(made["rows"], 0, world, rank))
        # Views of one storage share it, as without a group.
        found = tensorizer.load(pt, group=dist.group.WORLD)
        assert found["tail"].untyped_storage().data_ptr() == (
            found["rows"].untyped_storage().data_ptr()
        )
        assert_equal(found["transposed"], also["transposed"])


def alone(folder):
    """A group of one, and a group that this rank is no member of."""
    with group() as (rank, world):
        uri, _, made = of_kind(folder, "tensors")
        groups = [dist.new_group([number]) for number in range(world)]
        found = tensorizer.load(uri, group=groups[rank], names=["t0"])
        assert_equal(found["t0"], made["t0"])
        return caught(lambda: tensorizer.load(uri, group=groups[rank - 1], names=["t0"]))


def subgroups(folder):
    """Two groups at once, and one after another with other members, many times."""
    fetch_together(BATCH)
    with group() as (rank, world):
        uri, options, made = of_kind(folder, "tensors")
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        crossed = [dist.new_group([0, 2]), dist.new_group([3, 1])]
        for turn in range(6):
            name = ("rows", "cube", "t1", "words")[(turn + rank // 2) % 4]
            found = tensorizer.load(uri, group=pairs[rank // 2], names=[name])
            assert_equal(found[name], made[name], turn)
            name = ("t0", "words", "rows")[turn % 3]
            found = tensorizer.load(uri, group=crossed[rank % 2], names=[name, "t2"])
            assert_equal(found[name], made[name], turn)
            if turn % 5 == 0:
                found = tensorizer.load(uri, group=dist.group.WORLD, names=["t0"])
                assert_equal(found["t0"], made["t0"], turn)
        del options, world


def beside_others(folder):
    """Other collectives of the same group run on another thread at the same time."""
    fetch_together(BATCH)
    with group() as (rank, world):
        uri, _, made = of_kind(folder, "tensors")
        wrong, sums = [], []
        # Each load lets some more begin while it runs: without a limit, all may end before it.
        allowed = threading.Semaphore(10)

        def add():
            # As many at every rank.
            for number in range(150):
                allowed.acquire()
                tensor = torch.full((50,), float(number + rank))
                dist.all_reduce(tensor)
                expected = world * number + world * (world - 1) / 2
                sums.append(number)
                if not (tensor == expected).all():
                    wrong.append((number, tensor))

        def wanted(name):
            allowed.release()
            return True

        thread = threading.Thread(target=add)
        thread.start()
        beside = 0
        for _ in range(6):
            before = len(sums)
            found = tensorizer.load(uri, group=dist.group.WORLD, filter_func=wanted)
            beside += len(sums) - before
            for name, tensor in found.items():
                assert_equal(tensor, made[name])
        allowed.release(150)
        thread.join()
        assert not wrong, wrong[:2]
        assert len(sums) == 150
        return beside


def two_threads(folder):
    """Two threads load at once, each with a group of its own of the same ranks, and of others."""
    fetch_together(BATCH)
    with group() as (rank, _):
        uri, _, made = of_kind(folder, "tensors")
        groups = [dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3]),
                  dist.new_group([3, 2, 1])]  # fmt: skip
        names = ["rows", "cube", "words"]
        errors = []

        def load(number):
            try:
                for turn in range(6):
                    time.sleep((turn * 7 + rank * 3 + number) % 5 / 500)
                    found = tensorizer.load(uri, group=groups[number], names=[names[number]])
                    assert_equal(found[names[number]], made[names[number]])
            except BaseException as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=load, args=(n,)) for n in range(3 if rank else 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors


def again(folder):
    """A process group that is left and made anew, over one store, as torchrun has it."""
    fetch_together(BATCH)
    uri, _, made = of_kind(folder, "tensors")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world, rank == 0)
    for turn in range(3):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        for _ in range(1 + turn):
            found = tensorizer.load(uri, group=dist.group.WORLD, names=["rows"])
            assert_equal(found["rows"], made["rows"])
        dist.barrier()
        dist.destroy_process_group()
        store.add(f"left {turn}", 1)
        while store.add(f"left {turn}", 0) < world:
            time.sleep(0.001)
        # Gloo takes the addresses of before for those of now.
        for key in store.list_keys() if rank == 0 else ():
            if "tensorizer" not in key and "/0/" in key:
                store.delete_key(key)
        store.add("next", rank == 0)
        while rank and turn < 2 and store.add("next", 0) <= turn:
            time.sleep(0.001)
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < world:
        time.sleep(0.001)


def many_batches(folder):
    """Batches of a few bytes, which are dealt out unevenly, and one of all."""
    with group():
        uri, _, made = of_kind(folder, "tensors")
        for size in (1, 100, 1 << 30):
            fetch_together(size)
            names = ["t0", "t5", "t7", "half", "bool"] if size < 1 << 30 else list(made)
            found = tensorizer.load(uri, group=dist.group.WORLD, names=names)
            same(found, {name: made[name] for name in names}, size)


def verified(address):
    """Load from a hub in many batches, and verify; return what each rank says."""
    fetch_together(1 << 18)
    with group():
        return caught(
            lambda: tensorizer.load(address, "cpu", group=dist.group.WORLD, verify_hash=True)
        )


def limited(path, limit):
    """Load a file within a memory limit, or one of each rank; return whether that was right, or the
    error.
    """
    fetch_together()
    expected = tensorizer.load(path)
    with group():
        if isinstance(limit, list):
            limit = limit[dist.get_rank()]
        try:
            found = tensorizer.load(path, group=dist.group.WORLD, memory_limit=limit)
        except ValueError as error:
            return str(error)
        same(found, expected)
    return "the same"


def connections(folder):
    """Count the sets of connections of loads: a few, one that fails at one rank, and others."""
    made, new = [], dist.ProcessGroupGloo
    dist.ProcessGroupGloo = lambda *args: made.append(args) or new(*args)
    fetch_together(BATCH)
    uri, found = f"{folder}/g.tensors", []
    with group() as (rank, _):
        for _ in range(3):
            same(tensorizer.load(uri, group=dist.group.WORLD), large())
        same(dict(tensorizer.iterate(uri, group=dist.group.WORLD)), large())
        found.append(len(made))
        # A load that fails at some ranks, then loads while an iterator is not at its end.
        caught(lambda: tensorizer.load(uri, group=dist.group.WORLD, names=["no"] if rank else None))
        found.append(len(made))
        tensors = tensorizer.iterate(uri, group=dist.group.WORLD)
        first = next(tensors)
        same(tensorizer.load(uri, group=dist.group.WORLD), large())
        same(dict([first, *tensors]), large())
        same(tensorizer.load(uri, group=dist.group.WORLD), large())
        found.append(len(made))
    return found


def collectives(folder):
    """Count the collectives of a load of tiny tensors, and of answers of some lengths."""
    counts = []
    run = members.Members._run

    def counting(*args):
        counts.append(args)
        return run(*args)

    members.Members._run = counting
    with group() as (_, size):
        tensorizer.load(f"{folder}/tiny.tensors", group=dist.group.WORLD)
        of_local = len(counts)
        fetch_together(BATCH)
        tensorizer.load(f"{folder}/tiny.tensors", group=dist.group.WORLD)
        of_load = len(counts) - of_local
        some = members.Members.of(dist.group.WORLD)
        with some:
            # Short answers, a long one of one member, and long ones of all.
            found = []
            for value in ("x", "x" * 5000 * (dist.get_rank() == 0), "x" * (1000 + dist.get_rank())):
                before = len(counts)
                told = some.agree(None, (dist.get_rank(), value))
                assert [rank for rank, _ in told] == list(range(size))
                assert told[dist.get_rank()][1] == value and len(told[0][1]) >= 1
                found.append(len(counts) - before)
    return of_load, of_local, found


def verifying(folder):
    """Load with hashes that one rank compares, of rows that all want and of rows of its own."""
    fetch_together(BATCH)
    with group() as (rank, world):
        uri, _, made = of_kind(folder, "tensors")
        options = {"group": dist.group.WORLD, "verify_hash": rank == 0}
        same(tensorizer.load(uri, **options), made)
        shard = tensorizer.Shard(0, rank, world)
        found = tensorizer.load(uri, names=["rows", "cube"], shard=shard, **options)
        for name, tensor in found.items():
            assert_equal(tensor, cut(made[name], 0, world, rank), name)


def received(folder):
    """Return the bytes that each rank receives from others, as a multiple of what it wants.

    With rows of its own, with names of its own, with rows that two ranks want, with everything, and
    with columns of its own: of tensors that are cut, of those in one piece, and of long rows.
    """
    counts = []
    exchange, all_to_all = members.Members.exchange, members.Members.all_to_all

    def counted_exchange(self, block, ends):
        counts.append(block.nbytes - (ends[self.rank] - (0, *ends)[self.rank]))
        return exchange(self, block, ends)

    def counted_all_to_all(self, received, *args):
        counts.append(received.nbytes)
        return all_to_all(self, received, *args)

    members.Members.exchange, members.Members.all_to_all = counted_exchange, counted_all_to_all
    fetch_together(BATCH)
    found = []
    with group() as (rank, world):
        uri, _, made = of_kind(folder, "tensors")
        names = ["rows", "words"]
        few = [name for at, name in enumerate(made) if at % world == rank]
        two = ["rows", "cube"]
        by_columns = {"shard": tensorizer.Shard(1, rank, world)}
        calls = [
            ({"names": names, "shard": tensorizer.Shard(0, rank, world)}, names),
            ({"names": few}, few),
            ({"names": names, "shard": tensorizer.Shard(0, rank // 2, world // 2)}, names),
            ({"names": names}, names),
            ({"names": two, **by_columns}, two),
            ({"names": ["rows"], **by_columns, "verify_hash": True}, ["rows"]),
            ({"names": ["words"], **by_columns}, ["words"]),
        ]
        for options, expected in calls:
            counts.clear()
            wishes._MIN_LONG_RUN = 5000 if expected == ["words"] else 1 << 20
            loaded = tensorizer.load(uri, group=dist.group.WORLD, **options)
            assert list(loaded) == expected
            shard = options.get("shard")
            for name, tensor in loaded.items():
                part = made[name]
                if shard is not None:
                    part = cut(part, shard.dim, shard.world, shard.rank)
                assert_equal(tensor, part, name)
            wanted = sum(tensor.nbytes for tensor in loaded.values())
            found.append(sum(counts) / wanted)
    return found


def descriptors(folder, most):
    """Load with few descriptors; return how many more there are than of torch.

    That is once for loads of the whole, and once more for those of columns.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    fetch_together(BATCH)

    def count():
        return len(os.listdir("/proc/self/fd"))

    whole = torch.arange(96_000).view(500, 192)
    counts = []
    with group() as (rank, world):
        dist.barrier()
        before = count()
        for shard in (None, tensorizer.Shard(1, rank, world)):
            for _ in range(2):
                uri = f"{folder}/few.tensors"
                found = tensorizer.load(uri, group=dist.group.WORLD, shard=shard)
                assert_equal(found["a"], whole if shard is None else cut(whole, 1, world, rank))
            counts.append(count() - before)
    return counts


def two_versions(folder):
    """Open a checkpoint whose folder is exchanged before the second rank opens it."""
    path = Path(folder)

    def opened(heads):
        if dist.get_rank() == 1:
            (path / "v1").rename(path / "old")
            (path / "v2").rename(path / "v1")
        return OpenFile(path / "v1", heads=heads)

    with group():
        if dist.get_rank() == 0:
            for version in (1, 2):
                made = {name: torch.full((900,), version) for name in "ab"}
                tensorizer.save(made, path / f"v{version}/model.safetensors", max_shard_size=8000)
        dist.barrier()

        def load():
            with members.Members.of(dist.group.WORLD) as together:
                open_collectively(together, opened)

        return caught(load)
