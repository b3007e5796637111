"""One rank of vLLM on the CPU: loads a model by vLLM's default loader and by ours, and compares.

python vllm_rank.py RANK WORLD STAGES PORT FOLDER ADDRESS
"""

import os
import sys

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
from vllm.model_executor.model_loader import get_model  # noqa: E402
from vllm.model_executor.model_loader.sharded_state_loader import (  # noqa: E402
    ShardedStateLoader,
)


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
if stages == 1:
    saved = f"{folder}/sharded"
    os.makedirs(saved, exist_ok=True)
    config = config_of("auto")
    with set_current_vllm_config(config):
        ShardedStateLoader.save_model(get_model(vllm_config=config), saved)
    torch.distributed.barrier()
    again = load(config_of("tensorizer_stream", uri=saved))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.items())
print(len(found), "weights are those of the default loader")
torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)
