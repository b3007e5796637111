"""Saves of DTensors: the first rank writes whole tensors."""

import time

from ranks.common import (
    KINDS,
    WAIT,
    Net,
    Replicate,
    Shard,
    assert_equal,
    assert_same_state,
    caught,
    dist,
    fetch_together,
    group,
    net_of,
    placed,
    tensorizer,
    torch,
)
from ranks.lost import limit_waits, wait_at_most
from tensorizer import TensorDeserializer, TensorSerializer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor


def same(uri, expected):
    """Compare what a file holds with tensors."""
    found = tensorizer.load(uri, device="cpu")
    assert found.keys() == expected.keys(), (uri, found.keys())
    for name, tensor in found.items():
        assert_equal(tensor, expected[name], (uri, name))


def models(folder):
    """Save models of every kind by both calls, in both formats."""
    with group():
        expected = net_of("plain").state_dict()
        for kind in KINDS[1:]:
            net = net_of(kind)
            state = net.state_dict()
            path = f"{folder}/{kind}"
            tensorizer.save(state, f"{path}.tensors")
            same(f"{path}.tensors", expected)
            with TensorSerializer(f"{path}.module.tensors") as serializer:
                serializer.write_module(net)
            read = Net().eval()
            TensorDeserializer(f"{path}.module.tensors", "cpu").load_into_module(read)
            assert_same_state(read, net_of("plain"), kind)
            # The first rank has them as a whole, of which two are not to share memory.
            untied = {name: tensor for name, tensor in state.items() if name != "out.weight"}
            tensorizer.save(untied, f"{path}.safetensors")
            same(f"{path}.safetensors", {name: expected[name] for name in untied})


def tied(folder):
    """Return what ranks say of tied DTensors, which safetensors has no place for."""
    with group():
        return [
            caught(lambda kind=kind: tensorizer.save(
                net_of(kind).state_dict(), f"{folder}/tied.{kind}.safetensors"))
            for kind in ("fsdp", "hsdp", "both")
        ]  # fmt: skip


def shapes(folder):
    """Save parts that are uneven, empty, replicated, and not in row-major order."""
    with group() as (_, world):
        line = init_device_mesh("cpu", (world,))
        square = init_device_mesh("cpu", (2, world // 2))
        torch.manual_seed(4)
        whole = {
            "uneven": torch.randn(7, 5),
            "empty part": torch.randn(3, 2),
            "empty": torch.zeros(0, 4),
            "turned": torch.randn(9, 6).t(),
            "square": torch.randn(5, 7),
            "copied": torch.randn(4),
            "half": torch.arange(21).to(torch.bfloat16).view(7, 3),
            "number": torch.tensor(3),
        }
        placements = {
            "uneven": (line, [Shard(0)]), "empty part": (line, [Shard(0)]),
            "empty": (line, [Shard(1)]), "turned": (line, [Shard(1)]),
            "square": (square, [Shard(1), Shard(0)]), "copied": (line, [Replicate()]),
            "half": (square, [Replicate(), Shard(0)]),
        }  # fmt: skip
        state = {
            name: placed(tensor, *placements[name]) if name in placements else tensor
            for name, tensor in whole.items()
        }
        for ending in ("tensors", "safetensors"):
            tensorizer.save(state, f"{folder}/shapes.{ending}")
            same(f"{folder}/shapes.{ending}", whole)
        # The same with meta as torch's default device.
        with torch.device("meta"):
            tensorizer.save(state, f"{folder}/meta.tensors")
        same(f"{folder}/meta.tensors", whole)
        fetch_together(1 << 12)
        with torch.device("meta"):
            found = tensorizer.load(f"{folder}/meta.tensors", device="cpu", group=dist.group.WORLD)
        for name, tensor in found.items():
            assert_equal(tensor, whole[name], name)
        # A nested state dict, and a part of the processes.
        tensorizer.save({"model": [state["uneven"]]}, f"{folder}/nested.tensors")
        same(f"{folder}/nested.tensors", {("model", 0): whole["uneven"]})


def refused(folder):
    """Return what each rank says, by what is wrong."""
    found = {}
    with group() as (rank, world):
        mesh = init_device_mesh("cpu", (world,))
        good = {"x": placed(torch.ones(8, 3), mesh, [Shard(0)])}
        other = {"x" if rank != 1 else "y": good["x"]}

        def module(path):
            with TensorSerializer(path) as serializer:
                serializer.write_state_dict(good)

        found["folder"] = caught(lambda: tensorizer.save(good, f"{folder}/file/x.tensors"))
        found["safetensors"] = caught(lambda: tensorizer.save(good, f"{folder}/file/x.safetensors"))
        found["other"] = caught(lambda: tensorizer.save(other, f"{folder}/other.tensors"))
        part = torch.empty(2, 3, device="meta") if rank == 1 else torch.ones(2, 3)
        meta = {"x": DTensor.from_local(part, mesh, [Shard(0)], run_check=False)}
        found["meta"] = caught(lambda: tensorizer.save(meta, f"{folder}/meta.tensors"))
        found["meta safetensors"] = caught(
            lambda: tensorizer.save(meta, f"{folder}/meta.safetensors")
        )
        for name in ("t.tensors", "t.safetensors"):
            mine = f"{folder}/{rank == 2}.{name}"
            found[name] = caught(lambda mine=mine: tensorizer.save(good, mine))
        found["targets"] = caught(lambda: module(f"{folder}/{rank == 2}.tensors"))
        found["constructors"] = caught(lambda: module(f"{folder}/file/x.tensors"))
        tensorizer.save(good, f"{folder}/well.tensors")
        same(f"{folder}/well.tensors", {"x": torch.ones(8, 3)})
        # A call that one of them does not make, last: the others wait, and it does for them.
        wait_at_most(2)
        found["one"] = caught(
            lambda: module(f"{folder}/file/x.tensors" if rank == 1 else f"{folder}/one.tensors")
        )
        limit_waits(WAIT)
        if rank == 1:
            time.sleep(2)
    return found
