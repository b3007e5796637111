"""Loads of DTensors and shards, from every format and address."""

import itertools
import threading
import warnings

from ranks.common import (
    DTensor,
    Replicate,
    Shard,
    assert_equal,
    caught,
    cut,
    dist,
    group,
    os,
    placed,
    tensorizer,
    tensors,
    torch,
)
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import _StridedShard


def write(folder):
    """Save the same tensors in every format."""
    made = tensors()
    os.mkdir(f"{folder}/shards")
    tensorizer.save(made, f"{folder}/f.tensors")
    tensorizer.save(made, f"{folder}/f.enc.tensors", encryption=EncryptionParams(key()))
    tensorizer.save(made, f"{folder}/f.safetensors")
    tensorizer.save(made, f"{folder}/shards/f.safetensors", max_shard_size=1000)
    shared = torch.arange(60.0).view(6, 10)
    extra = {"shared": shared, "transposed": shared.t(), "tail": shared[2:]}
    torch.save(made | extra, f"{folder}/f.pt")


def key():
    """Return a key for encrypted files."""
    return bytes(range(32))


def of_format(folder, kind):
    """Return a file's path, what it needs to be opened, and its tensors."""
    made = tensors()
    if kind == "enc.tensors":
        return f"{folder}/f.{kind}", {"encryption": DecryptionParams.from_key(key())}, made
    if kind == "index":
        return f"{folder}/shards/f.safetensors.index.json", {}, made
    if kind == "pt":
        shared = torch.arange(60.0).view(6, 10)
        made |= {"shared": shared, "transposed": shared.t(), "tail": shared[2:]}
    return f"{folder}/f.{kind}", {}, made


def meshes():
    """Return the meshes of all ranks in one and in two dimensions."""
    world = dist.get_world_size()
    return init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))


def every_layout(tensor):
    """Yield DTensors like a tensor on two meshes, in each way in which it can lie."""
    line, square = meshes()
    dims = range(tensor.dim())
    for placements in [*((Shard(dim),) for dim in dims), (Replicate(),)]:
        yield placed(tensor, line, placements)
    ends = {Replicate(), *(Shard(dim) for dim in (0, tensor.dim() - 1) if tensor.dim())}
    for placements in itertools.product(sorted(ends, key=str), repeat=2):
        yield placed(tensor, square, placements)
    for factor in (2, 3) if tensor.dim() else ():
        strided = _StridedShard(0, split_factor=factor)
        local = strided._split_tensor(tensor, 2, with_padding=False)[0]
        yield DTensor.from_local(
            local[square.get_coordinate()[0]],
            square,
            [strided, Replicate()],
            shape=tensor.shape,
            stride=tensor.contiguous().stride(),
        )


def every_placement(folder, kinds):
    """Load like and into DTensors of every layout; return how many."""
    with group():
        return [_every_placement(folder, kind) for kind in kinds]


def _every_placement(folder, kind):
    uri, options, made = of_format(folder, kind)
    left = {name: list(every_layout(tensor.contiguous())) for name, tensor in made.items()}
    count = sum(map(len, left.values()))
    # One load for a layout of each tensor, as a model has them.
    while left := {name: likes for name, likes in left.items() if likes}:
        chosen = {name: likes.pop() for name, likes in left.items()}
        compare(uri, options, chosen, made, wholes=kind == "tensors")
    return count


def compare(uri, options, chosen, made, *, wholes):
    """Load like some DTensors, and into others of their layout.

    If ``wholes``, what all ranks have is gathered too. It follows from what each of them has.
    """
    found = tensorizer.load(uri, like=chosen, **options)
    assert list(found) == list(chosen)
    for name, like in chosen.items():
        what = (name, like.placements)
        assert isinstance(found[name], DTensor), what
        assert found[name].placements == like.placements, what
        assert found[name].device_mesh == like.device_mesh, what
        assert found[name].stride() == like.stride(), what
        assert_equal(found[name].to_local(), like.to_local(), what)
        strided = any(isinstance(p, _StridedShard) for p in like.placements)
        # Gloo gathers these, and torch shards that FSDP2 makes over tensor parallelism only.
        if wholes and like.dtype in (torch.float32, torch.int64) and not strided:
            assert_equal(found[name].full_tensor(), made[name], what)
        with torch.no_grad():
            like.to_local().zero_()
    filled = tensorizer.load(uri, out=chosen, **options)
    for name, like in chosen.items():
        assert filled[name] is like
        assert_equal(like.to_local(), found[name].to_local(), (name, like.placements))


def from_addresses(addresses):
    """Load like DTensors from servers, strings and streams of ours."""
    made = tensors()
    with group():
        line, square = meshes()
        like = {
            "t0": placed(made["t0"], line, [Shard(0)]),
            "t4": placed(made["t4"], square, [Shard(1), Shard(0)]),
            "wide": placed(made["wide"], line, [Shard(1)]),
            "t7": placed(made["t7"], line, [Replicate()]),
        }
        for uri in addresses:
            for source in (uri, tensorizer.stream_io.open_stream(uri)):
                found = tensorizer.load(source, like=like)
                for name, tensor in found.items():
                    assert_equal(tensor.full_tensor(), made[name], (uri, name))


def from_a_pipe(folder):
    """Load what comes front to back: parts and whole tensors in one pass."""
    with group():
        line, _ = meshes()
        made = tensors()
        rank, world = dist.get_rank(), dist.get_world_size()
        like = {name: placed(tensor, line, [Shard(0)]) for name, tensor in made.items()
                if tensor.dim()}  # fmt: skip
        like["t7"] = placed(made["t7"], line, [Replicate()])
        for name in ("f.tensors", "f.safetensors"):
            with pipe(f"{folder}/{name}") as file:
                found = tensorizer.load(file, like=like)
            for name_, tensor in found.items():
                assert_equal(tensor.to_local(), like[name_].to_local(), name_)
            with pipe(f"{folder}/{name}") as file:
                shard = tensorizer.Shard(lambda n: 0 if n != "t7" else None, rank, world)
                shards = tensorizer.load(file, shard=shard)
            for name_, tensor in shards.items():
                assert_equal(tensor, like[name_].to_local(), name_)
            out = {name_: placed(torch.zeros_like(made[name_]), one.device_mesh,
                   one.placements) for name_, one in like.items()}  # fmt: skip
            with pipe(f"{folder}/{name}") as file:
                tensorizer.load(file, out=out)
            for name_, tensor in out.items():
                assert_equal(tensor.to_local(), like[name_].to_local(), name_)


class pipe:
    """The end of a pipe that gives the bytes of a file."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        reading, writing = os.pipe()

        def feed():
            try:
                with open(self.path, "rb") as source, os.fdopen(writing, "wb") as file:
                    file.write(source.read())
            except BrokenPipeError:
                pass

        self.thread = threading.Thread(target=feed)
        self.thread.start()
        self.file = os.fdopen(reading, "rb", buffering=0)
        return self.file

    def __exit__(self, *exc):
        self.file.close()
        self.thread.join()


def options(folder):
    """mmap=, verify_hash=, dtype=, names=, filter_func=, num_readers= beside like= and shard=."""
    with group() as (rank, world):
        line, square = meshes()
        made = tensors()
        uri = f"{folder}/f.tensors"
        like = {
            "t0": placed(made["t0"], line, [Shard(0)]),
            "t4": placed(made["t4"], square, [Shard(1), Shard(0)]),
            "half": placed(made["half"], line, [Shard(0)]),
            "wide": placed(made["wide"], line, [Shard(1)]),
        }
        for more in ({"mmap": True}, {"verify_hash": True}, {"verify_hash": "crc32"},
                     {"num_readers": 2}, {"mmap": True, "verify_hash": True}):  # fmt: skip
            for name, tensor in tensorizer.load(uri, like=like, **more).items():
                assert_equal(tensor.to_local(), like[name].to_local(), (name, more))
                tensor.to_local().zero_()  # nobody else sees it
        for name, tensor in tensorizer.load(uri, like=like, dtype=torch.float16).items():
            expected = like[name].to_local()
            expected = expected.half() if expected.is_floating_point() else expected
            assert_equal(tensor.to_local(), expected, name)
        some = tensorizer.load(uri, like=like, names=["wide", "t1", "t0"])
        assert list(some) == ["wide", "t1", "t0"]
        assert type(some["t1"]) is torch.Tensor
        assert_equal(some["t1"], made["t1"])
        assert isinstance(some["t0"], DTensor)
        fewer = tensorizer.load(uri, like=like, filter_func=lambda name: name != "t0")
        assert list(fewer) == ["t4", "half", "wide"]
        shard = tensorizer.Shard(0, rank, world)
        halves = tensorizer.load(uri, shard=shard, names=["t0"], dtype=torch.bfloat16)
        assert_equal(halves["t0"], cut(made["t0"], 0, world, rank).bfloat16())


def what_to_be_like(folder):
    """Plain, meta and sharded tensors, and what is no tensor."""
    with group():
        line, _ = meshes()
        made = tensors()
        uri = f"{folder}/f.tensors"
        with torch.device("meta"):
            empty = torch.empty(10, 6)
        on_meta = DTensor.from_local(
            torch.empty(cut(made["t1"], 0, dist.get_world_size(), dist.get_rank()).shape,
                        device="meta"),
            line, [Shard(0)], shape=(7, 5), stride=(5, 1), run_check=False,
        )  # fmt: skip
        parameter = torch.nn.Parameter(placed(made["t4"], line, [Shard(1)]))
        like = {"t0": empty, "t1": on_meta, "t2": made["t2"], "t4": parameter,
                "step": 7, "names": ["a"], "nothing": None}  # fmt: skip
        found = tensorizer.load(uri, like=like)
        assert list(found) == ["t0", "t1", "t2", "t4"]
        assert type(found["t0"]) is torch.Tensor and found["t0"].device.type == "cpu"
        assert isinstance(found["t1"], DTensor) and found["t1"].to_local().device.type == "cpu"
        assert isinstance(found["t4"], DTensor) and not isinstance(found["t4"], torch.nn.Parameter)
        for name, tensor in found.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert_equal(whole, made[name], name)
        # A name for which like= has no tensor is loaded as without like=.
        assert_equal(tensorizer.load(uri, names=["t0"], like={"t0": 5})["t0"], made["t0"])
        with torch.device("meta"):  # torch's default device is not where they go
            kept = tensorizer.load(uri, "cpu", like={"t0": empty})["t0"]
        assert_equal(kept, made["t0"])


def refused(folder):
    """Return the errors of refused loads: placements, shapes, dtypes, memory, arguments."""
    with group() as (rank, world):
        line, _ = meshes()
        made = tensors()
        uri = f"{folder}/f.tensors"

        def load(**options):
            return caught(lambda: tensorizer.load(uri, **options))

        partial = DTensor.from_local(made["t0"], line, [Partial()], run_check=False)
        sharded = placed(made["t0"], line, [Shard(0)])
        wrong = placed(torch.zeros(12, 6), line, [Shard(0)])
        of_half = placed(made["t0"].half(), line, [Shard(0)])
        shape = [len(cut(made["t0"], 0, world, rank)), 6]
        turned = DTensor.from_local(
            torch.zeros(shape[::-1]).t(), line, [Shard(0)], shape=(10, 6), stride=(6, 1),
            run_check=False,
        )  # fmt: skip
        module = torch.nn.Linear(6, 10, bias=False)
        module.weight = torch.nn.Parameter(partial, requires_grad=False)
        tensorizer.save({"weight": made["t0"]}, f"{folder}/linear.{rank}.safetensors")
        file = TensorDeserializer(f"{folder}/linear.{rank}.safetensors", "cpu")
        shard = tensorizer.Shard(0, rank, world)
        return {
            "partial": load(like={"t0": partial}),
            "partial out": load(out={"t0": partial}),
            "partial module": caught(lambda: file.load_into_module(module)),
            "shape": load(like={"t0": wrong}),
            "plain shape": load(like={"t0": torch.zeros(12, 6)}),
            "shape out": load(out={"t0": wrong}),
            "dtype out": load(out={"t0": of_half}),
            "turned": load(out={"t0": turned}),
            "slice": load(like={"t0": sharded}, slices={"t0": (0, 0, 2)}),
            "slice of shard": load(shard=shard, slices={"t0": (0, 0, 2)}, names=["t0"]),
            "two": load(like={"t0": sharded}, shard=shard),
            "missing": load(like={"nope": sharded}),
            "no dimension": load(shard=tensorizer.Shard(1, rank, world), names=["t2"]),
        }


def outside_the_mesh(folder):
    """Load on a mesh of some ranks: the others have nothing of it."""
    with group() as (rank, world):
        made = tensors()
        mesh = DeviceMesh("cpu", list(range(world // 2)))
        like = {name: placed(made[name], mesh, [Shard(0)]) for name in ("t0", "t4", "wide")}
        for more in ({}, {"dtype": torch.float16}):
            found = tensorizer.load(f"{folder}/f.tensors", like=like, **more)
            for name, tensor in found.items():
                if rank < world // 2:
                    expected = cut(made[name], 0, world // 2, rank)
                    half = more and expected.is_floating_point()
                    assert_equal(tensor.to_local(), expected.half() if half else expected)
                else:
                    assert tensor.to_local().numel() == 0
        tensorizer.load(f"{folder}/f.tensors", out=like)


def plain_shards(folder, kinds):
    """Load with shard=, along each dimension."""
    with group() as (rank, world):
        for kind, dim in itertools.product(kinds, (0, -1)):
            uri, options, made = of_format(folder, kind)
            shard = tensorizer.Shard(
                lambda name, dim=dim, made=made: dim if made[name].dim() else None, rank, world
            )
            found = tensorizer.load(uri, shard=shard, **options)
            assert found.keys() == made.keys()
            for name, tensor in found.items():
                whole = made[name]
                assert_equal(tensor, cut(whole, dim, world, rank) if whole.dim() else whole, name)
            one = tensorizer.load(
                uri, names=["t4"], shard=tensorizer.Shard(1, rank, world), **options
            )
            assert_equal(one["t4"], cut(made["t4"], 1, world, rank))


def bytes_of_ranks(addresses):
    """Load the own rows of a large tensor, each rank from an address of its own."""
    with group() as (rank, world):
        line, _ = meshes()
        like = DTensor.from_local(
            torch.empty(1 << 22 >> (world.bit_length() - 1), device="meta"), line, [Shard(0)]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = tensorizer.load(addresses[rank], like={"large": like})["large"].to_local()
        first = rank * found.numel()
        assert torch.equal(found, torch.arange(first, first + found.numel(), dtype=torch.float32))
        return found.nbytes
