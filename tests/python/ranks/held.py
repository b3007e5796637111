"""Modules whose weights FSDP holds elsewhere: gathered copies, and flat parts."""

import io

from ranks.common import as_whole, assert_equal, caught, dist, group, mesh_of, tensorizer, torch
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.modules import messages
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)

WAYS = ({"lazy_load": True}, {}, {"mmap": True})
GIVEN = torch.ones(2, 6)


def whole_of(seed):
    """Return a model, whose first layer has two layers."""
    torch.manual_seed(seed)
    block = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 6))
    return torch.nn.Sequential(block, torch.nn.Linear(6, 3))


def saved(folder, module, name):
    """Save the parameters of a module into a file of this rank."""
    path = f"{folder}/{name}.{dist.get_rank()}.tensors"
    tensorizer.save(module.state_dict(), path)
    return path


def used(whole, reshard, **options):
    """Return a model of FSDP2 after a step of training and an evaluation."""
    model = whole
    for part in (model[0], model):
        fully_shard(part, mesh=mesh_of("fsdp"), reshard_after_forward=reshard, **options)
    model.train()(GIVEN).sum().backward()
    with torch.no_grad():
        model.eval()(GIVEN)
    return model


def same(model, whole, what):
    """Compare a model with one that is whole: what it computes, and the parameters that stay."""
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(model(GIVEN), whole(GIVEN), atol=1e-5), what
    for name, found in model.state_dict().items():
        assert_equal(as_whole(found), whole.get_parameter(name).detach(), (what, name))


def after_a_forward_pass(folder):
    """Loads reach the parameters that stay, of the whole model and of each part of it."""
    with group():
        for turn, reshard in enumerate((True, False, 2)):
            # Each part comes in each way, and with each setting.
            for number, at in enumerate(("", "0", "0.1", "1")):
                what = (reshard, way := WAYS[(turn + number) % 3], at)
                model, whole = used(whole_of(1), reshard), whole_of(1)
                part = whole_of(2).get_submodule(at)
                path = saved(folder, part, "part")
                whole.get_submodule(at).load_state_dict(part.state_dict())
                with TensorDeserializer(path, "cpu", **way) as file:
                    file.load_into_module(model.get_submodule(at), strict=True)
                same(model, whole, what)


def saves_after_a_forward_pass(folder):
    """Saves are of the parameters that stay, not of gathered copies in another dtype."""
    with group():
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = used(whole_of(1), False, mp_policy=half)
        path = f"{folder}/half.tensors"
        with TensorSerializer(path) as serializer:
            serializer.write_module(model)
        for name, tensor in tensorizer.load(path, "cpu").items():
            assert_equal(tensor, whole_of(1).get_parameter(name).detach(), name)


def files_of_vllm(folder):
    """Sharded parameters, too, are not cast if they have the dtype of the file."""
    with group():
        source = whole_of(1)
        source.vllm_tensorized_marker = torch.nn.Parameter(torch.zeros(1, device="meta"), False)
        path = f"{folder}/marked.{dist.get_rank()}.tensors"
        with TensorSerializer(path) as serializer:
            serializer.write_module(source)
        half = torch.bfloat16
        for dtype in (torch.float32, half):
            for device in ("cpu", "meta"):
                for way in WAYS:
                    model = whole_of(2).to(device, dtype)
                    fully_shard(model, mesh=mesh_of("fsdp"))
                    with TensorDeserializer(path, "cpu", dtype=half, **way) as file:
                        file.load_into_module(model)
                    found = as_whole(model[0][0].weight)
                    assert_equal(found, source[0][0].weight.detach().to(dtype), (device, way))


def flat(folder):
    """Return what each call says of modules of FSDP's first version, by their form."""
    found = {}
    with group():
        path = saved(folder, whole_of(2), "other")
        for kind in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            for original in (True, False):
                model = flattened(kind, original)
                with torch.no_grad():
                    model(GIVEN)
                for at, part in enumerate((model, model.module, model.module[0])):
                    what = f"{kind.name} {original} {at}"
                    found[what] = [caught(call) for call in calls(path, part)]
                with FullyShardedDataParallel.summon_full_params(
                    model, rank0_only=True, writeback=False
                ):
                    found[f"{kind.name} {original} rank0_only"] = [
                        caught(lambda m=model: messages.serialize_model(m, io.BytesIO()))
                    ]
    return found


def sharded_states(folder):
    """Return what saves say of the states of the first FSDP that are not whole."""
    with group():
        found = []
        for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
            model = flattened(ShardingStrategy.FULL_SHARD, True)
            with FullyShardedDataParallel.state_dict_type(model, kind):
                state = model.state_dict()
            for ending in ("tensors", "safetensors"):
                path = f"{folder}/state.{dist.get_rank()}.{ending}"
                found.append(caught(lambda state=state, path=path: tensorizer.save(state, path)))
        return found


def flattened(kind, original):
    """Return a model of FSDP's first version."""
    return FullyShardedDataParallel(
        whole_of(1), sharding_strategy=kind, use_orig_params=original, device_id=torch.device("cpu")
    )


def calls(path, part):
    """Yield the calls that take a module."""
    for way in WAYS:
        yield lambda way=way: TensorDeserializer(path, "cpu", **way).load_into_module(part)
    yield lambda: TensorDeserializer(path, "cpu", lazy_load=True).verify_module(part)
    yield lambda: write(part)
    yield lambda: messages.serialize_model(part, io.BytesIO())
    yield lambda: messages.deserialize_model(part, io.BytesIO())


def write(part):
    """Write a module into memory."""
    with TensorSerializer(io.BytesIO()) as serializer:
        serializer.write_module(part)


def summoned(folder):
    """Inside summon_full_params all loads reach the flat parameters, and saves are of wholes."""
    with group():
        path = saved(folder, whole_of(2), "other")
        for original in (True, False):
            for options in (*WAYS, {"dtype": torch.float64}):
                for inner in (False, True):
                    what = (original, options, inner)
                    model = flattened(ShardingStrategy.FULL_SHARD, original)
                    with FullyShardedDataParallel.summon_full_params(model):
                        part = model.module if inner else model
                        with TensorDeserializer(path, "cpu", **options) as file:
                            file.load_into_module(part, strict=True)
                        out = f"{folder}/summoned.{dist.get_rank()}.tensors"
                        with TensorSerializer(out) as serializer:
                            serializer.write_module(part)
                    with torch.no_grad():
                        assert torch.allclose(model(GIVEN), whole_of(2)(GIVEN), atol=1e-5), what
                    read = whole_of(3)
                    TensorDeserializer(out, "cpu").load_into_module(read, strict=True)
                    same(read, whole_of(2), what)
