"""One rank of vLLM on the CPU: loads a model by vLLM's default loader and by ours, and compares.

python vllm_rank.py RANK WORLD STAGES PORT FOLDER ADDRESS

It says what it has done: it has loaded, loaded the sharded state that the ranks have saved, and
reloaded new weights in place.
"""

import os
import re
import sys

import tensorizer
import torch
from vllm import platforms
from vllm.platforms.cpu import CpuPlatform

platforms._current_platform = CpuPlatform()
rank, world, stages, port = map(int, sys.argv[1:5])
folder, address = sys.argv[5:]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
torch.set_num_threads(1)

from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader import get_model, get_model_loader, reload  # noqa: E402
from vllm.model_executor.model_loader.sharded_state_loader import (  # noqa: E402
    ShardedStateLoader,
)

SECOND_LAYER = re.compile(r"layers?\.1\.")


def config_of(load_format, **extra):
    args = EngineArgs(
        model=folder,
        load_format=load_format,
        model_loader_extra_config=extra,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        tensor_parallel_size=world // stages,
        pipeline_parallel_size=stages,
        distributed_executor_backend="external_launcher",
        enable_expert_parallel=folder.endswith("experts"),
        enable_ep_weight_filter=folder.endswith("experts"),
    )
    return args.create_engine_config()


def load(config):
    with set_current_vllm_config(config):
        return get_model(vllm_config=config).state_dict()


with set_current_vllm_config(config_of("auto")):
    address_of_store = f"tcp://127.0.0.1:{port}"
    parallel_state.init_distributed_environment(world, rank, address_of_store, rank, "gloo")
    parallel_state.initialize_model_parallel(world // stages, stages)
expected = load(config_of("auto"))
torch.distributed.barrier()
found = load(config_of("tensorizer_stream", uri=address, buffer_bytes=1 << 20))
assert list(found) == list(expected)
for name, tensor in found.items():
    assert torch.equal(tensor, expected[name]), name
print("loaded", len(found))


def load_saved():
    saved = f"{folder}/sharded"
    os.makedirs(saved, exist_ok=True)
    config = config_of("auto")
    with set_current_vllm_config(config):
        ShardedStateLoader.save_model(get_model(vllm_config=config), saved)
    torch.distributed.barrier()
    again = load(config_of("tensorizer_stream", uri=saved))
    assert list(again) == list(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.items())
    print("loaded its sharded state")


def reload_in_place():
    old, new = f"{folder}/old.tensors", f"{folder}/new.tensors"
    if rank == 0:
        weights = tensorizer.load(f"{folder}/model.safetensors.index.json", "cpu")
        tensorizer.save(weights, old)
        changed = next(filter(SECOND_LAYER.search, weights))
        weights[changed] += 1
        tensorizer.save(weights, new)
    torch.distributed.barrier()
    config = config_of("tensorizer_stream", uri=old)
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
        addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
        config.model_config.model = new
        loader = get_model_loader(config.load_config)
        given = loader.get_all_weights(config.model_config, model)
        reload.initialize_layerwise_reload(model)
        names = []
        model.load_weights((names.append(name), (name, tensor))[1] for name, tensor in given)
        reload.finalize_layerwise_reload(model, config.model_config)
    assert all(map(SECOND_LAYER.search, names)), names
    fresh = load(config_of("tensorizer_stream", uri=new))
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == addresses[name]
        assert torch.equal(parameter, fresh[name]), name
    print("reloaded", len(names))


if stages == 1:
    load_saved()
reload_in_place()
torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)
