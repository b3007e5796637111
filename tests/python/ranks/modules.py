"""Loads into modules whose parameters are DTensors."""

import io
import itertools
import warnings
from pathlib import Path

from ranks.common import (
    KINDS,
    Net,
    as_whole,
    assert_equal,
    assert_same_state,
    caught,
    dist,
    group,
    mesh_of,
    net_of,
    os,
    placed,
    tensorizer,
    torch,
    whole_net,
)
from tensorizer import TensorDeserializer, TensorSerializer
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard


def write(folder):
    """Save a model in every format, and one of the same structure with other values."""
    for name, seed in (("net", 1), ("other", 5)):
        net = whole_net(seed)
        with TensorSerializer(f"{folder}/{name}.tensors") as serializer:
            serializer.write_module(net)
        state = net.state_dict()
        torch.save(state, f"{folder}/{name}.pt")
        state.pop("out.weight")  # tied
        tensorizer.save(state, f"{folder}/{name}.safetensors")


def load(folder, endings):
    """Load models of every kind, on meta and not, lazily and not; return how many of each format.

    Those of the first format in all ways, and of the others in one way of each kind.
    """
    done = []
    whole, numbers = whole_net(), torch.arange(11)
    ways = list(itertools.product((False, True), repeat=2))
    cases = [(kind, *way, endings[0]) for kind in KINDS for way in ways]
    for at, ending in enumerate(endings[1:]):
        cases += [(kind, *ways[(at + n) % 4], ending) for n, kind in enumerate(KINDS)]
    with group(), torch.no_grad():
        for what in cases:
            kind, meta, lazy, ending = what
            net = net_of(kind, meta=meta)
            before = dict(net.named_parameters()) | dict(net.named_buffers())
            file = TensorDeserializer(f"{folder}/net.{ending}", "cpu", lazy_load=lazy)
            count = file.load_into_module(net, strict=True)
            assert count == len(whole.state_dict()) - (ending == "safetensors"), what
            check(net, whole, before, meta, what)
            if kind != "tp":  # that has no plan for all layers
                assert torch.allclose(net(numbers), whole(numbers), atol=1e-5), what
                # After the first pass, FSDP2 has what it needs of its parameters.
                again(f"{folder}/other.{ending}", net, lazy, what)
            done.append(ending)
    return [done.count(ending) for ending in endings]


def check(net, whole, before, meta, what):
    """Compare values, objects, placements, gradients and ties."""
    assert_same_state(net, whole, what)
    after = dict(net.named_parameters()) | dict(net.named_buffers())
    for name, old in before.items():
        new = after[name]
        assert type(new) is type(old), (what, name)
        assert meta or new is old, (what, name)
        assert new.requires_grad == old.requires_grad, (what, name)
        if isinstance(old, DTensor):
            assert new.placements == old.placements, (what, name)
            assert new.device_mesh == old.device_mesh, (what, name)
            assert new.to_local().device.type == "cpu", (what, name)
    assert net.out.weight is net.words.weight, what
    assert not net.norm.weight.requires_grad, what


def again(uri, net, lazy, what):
    """Load other values into a model that was used, and use it."""
    other, numbers = whole_net(5), torch.arange(11)
    TensorDeserializer(uri, "cpu", lazy_load=lazy).load_into_module(net)
    assert_same_state(net, other, what)
    assert torch.allclose(net(numbers), other(numbers), atol=1e-5), what


def training(folder):
    """A step after a load is that of the whole model; the optimizer knows the parameters."""
    numbers = torch.arange(11)
    with group():
        for meta in (False, True):
            net, whole = net_of("fsdp", meta=meta), whole_net()
            early = torch.optim.SGD(net.parameters(), lr=0.5) if not meta else None
            TensorDeserializer(f"{folder}/net.tensors", "cpu", lazy_load=True).load_into_module(net)
            for model, optimizer in (
                (net, early or torch.optim.SGD(net.parameters(), lr=0.5)),
                (whole, torch.optim.SGD(whole.parameters(), lr=0.5)),
            ):
                model(numbers).square().mean().backward()
                optimizer.step()
            for name, parameter in whole.named_parameters():
                found = as_whole(net.get_parameter(name))
                assert torch.allclose(found, parameter, atol=1e-5), (meta, name)


def others_of_fsdp(folder):
    """Shards of other dimensions, parameters on the CPU, mixed precision."""
    torch.manual_seed(1)
    whole, given = torch.nn.Linear(8, 12), torch.ones(2, 8)
    with group(), torch.no_grad():
        uri = f"{folder}/linear.{dist.get_rank()}.tensors"
        with TensorSerializer(uri) as serializer:
            serializer.write_module(whole)
        for options in (
            {"shard_placement_fn": lambda p: Shard(p.dim() - 1)},
            {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
            {"reshard_after_forward": False},
        ):
            for meta in (False, True):
                with torch.device("meta" if meta else "cpu"):
                    net = torch.nn.Linear(8, 12)
                fully_shard(net, mesh=mesh_of("fsdp"), **options)
                for _ in range(2):
                    TensorDeserializer(uri, "cpu", lazy_load=meta).load_into_module(net)
                    assert_same_state(net, whole, options)
                    close = 0.1 if "mp_policy" in options else 1e-5
                    assert torch.allclose(net(given).float(), whole(given), atol=close), options
                    net.reshard()


def dtypes(folder):
    """A module of another dtype than the file, and dtype=."""
    whole = whole_net()
    with group():
        for meta in (False, True):
            for dtype in (None, torch.bfloat16):
                net = net_of("fsdp", meta=meta)
                if not meta:
                    net = net.to(torch.bfloat16)
                file = TensorDeserializer(f"{folder}/net.tensors", "cpu", dtype=dtype)
                file.load_into_module(net)
                half = not meta or dtype is not None
                expected = whole.up.weight.bfloat16() if half else whole.up.weight
                assert net.up.weight.dtype == expected.dtype, (meta, dtype)
                local = net.up.weight.to_local()
                assert_equal(
                    local, placed(expected.detach(), mesh_of("fsdp"), [Shard(0)]).to_local()
                )


def only_the_own_bytes(folder):
    """Count what is read: the parts of this rank, and what it has as a whole."""
    with group():
        for kind in KINDS:
            net = net_of(kind, meta=True)
            every = [*net.named_parameters(remove_duplicate=False), *net.named_buffers()]
            expected = sum(
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
                for _, tensor in every
            )
            for ending in ("tensors", "pt"):
                file = TensorDeserializer(f"{folder}/net.{ending}", "cpu", lazy_load=True)
                file.load_into_module(net)
                # A storage of torch.save is read once for tensors that share it.
                once = ending == "pt" and not isinstance(net.out.weight, DTensor)
                tied = net.out.weight.nbytes if once else 0
                assert file.total_bytes_read == expected - tied, (kind, ending)


def ties_that_differ(folder):
    """Of one parameter with two names the file may hold two tensors."""
    with group():
        net = whole_net()
        net.out.weight = torch.nn.Parameter(net.out.weight.detach() + 1)
        uri = f"{folder}/untied.{dist.get_rank()}.tensors"
        with TensorSerializer(uri) as serializer:
            serializer.write_module(net)
        for lazy in (False, True):
            tied = net_of("fsdp", meta=True)
            TensorDeserializer(uri, "cpu", lazy_load=lazy).load_into_module(tied)
            assert_equal(as_whole(tied.words.weight), net.words.weight.detach())
            assert_equal(as_whole(tied.out.weight), net.out.weight.detach())


def refused_and_warned(folder):
    """Tensors that do not fit the module are refused before anything is changed."""
    with group():
        net = net_of("fsdp")
        before = {name: as_whole(tensor).clone() for name, tensor in net.named_parameters()}
        wide = Net(width=15).eval()
        uri = f"{folder}/wide.{dist.get_rank()}.tensors"
        with TensorSerializer(uri) as serializer:
            serializer.write_module(wide)
        wrong = caught(lambda: TensorDeserializer(uri, "cpu").load_into_module(net))
        data = bytearray(Path(f"{folder}/net.tensors").read_bytes())
        data[data.index(whole_net().up.weight.detach().numpy().tobytes()) + 5] ^= 1
        damaged = f"{folder}/damaged.{dist.get_rank()}.tensors"
        Path(damaged).write_bytes(data)
        hashes = [
            caught(
                lambda verify=verify: TensorDeserializer(
                    damaged, "cpu", lazy_load=True
                ).load_into_module(net_of("fsdp", meta=True), verify_hash=verify)
            )
            for verify in (True, "crc32")
        ]
        for name, tensor in net.named_parameters():
            assert_equal(as_whole(tensor), before[name])
        some = net_of("fsdp")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            count = TensorDeserializer(f"{folder}/net.tensors", "cpu").load_into_module(
                some, lambda name: name.startswith("up.")
            )
        assert_equal(as_whole(some.up.weight), whole_net().up.weight.detach())
        assert_equal(as_whole(some.down.weight), as_whole(net_of("fsdp").down.weight))
        return [wrong, hashes, count]


def others(folder):
    """mmap=, verify_hash=, streams and encryption with modules."""
    whole = whole_net()
    key = tensorizer.EncryptionParams(bytes(range(32)))
    uri = f"{folder}/net.enc.{os.environ['RANK']}.tensors"
    with TensorSerializer(uri, encryption=key) as serializer:
        serializer.write_module(whole)
    decryption = tensorizer.DecryptionParams.from_key(bytes(range(32)))
    plain = f"{folder}/net.tensors"
    with group():
        for meta in (False, True):
            for file in (
                TensorDeserializer(plain, "cpu", mmap=True),
                TensorDeserializer(plain, "cpu", mmap=True, lazy_load=True),
                TensorDeserializer(plain, "cpu", verify_hash=True),
                TensorDeserializer(plain, "cpu", verify_hash=True, lazy_load=True),
                TensorDeserializer(uri, "cpu", encryption=decryption, lazy_load=True),
                TensorDeserializer(uri, "cpu", encryption=decryption),
                TensorDeserializer(io.BytesIO(Path(plain).read_bytes()), "cpu", lazy_load=True),
            ):
                net = net_of("fsdp", meta=meta)
                file.load_into_module(net)
                assert_same_state(net, whole, (meta, file))


def from_addresses(addresses):
    """Load into models from servers."""
    with group():
        for uri in addresses:
            for lazy in (False, True):
                net = net_of("fsdp", meta=True)
                TensorDeserializer(uri, "cpu", lazy_load=lazy).load_into_module(net)
                assert_same_state(net, whole_net(), uri)
