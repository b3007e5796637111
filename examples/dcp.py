"""Saves a model that is spread over several processes, and loads it in another number of them.

python examples/dcp.py [FOLDER] [--ranks 2] [--load-ranks 3]

Each process has its part of every weight (FSDP) and writes a file of its own. torch's distributed
checkpoints find out which process has which part; the writer and reader store and load it. FOLDER
may be ``s3://bucket/folder``. It runs on the CPU, with gloo; on GPUs it is the same code.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from tensorizer.distributed import Reader, Writer
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def make_model(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 10))


def spread(model: torch.nn.Sequential) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)


def save(folder: str) -> None:
    """Save the model of seed 0. Every rank calls it."""
    model = make_model(seed=0)
    spread(model)
    state = {"model": get_model_state_dict(model), "step": 100}
    dcp.save(state, storage_writer=Writer(folder))


def load(folder: str) -> None:
    """Load it into another model. Every rank calls it, as many as there are now."""
    model = make_model(seed=1)
    spread(model)
    state = {"model": get_model_state_dict(model), "step": 0}
    # Tensors are filled in place, the rest is replaced.
    dcp.load(state, storage_reader=Reader(folder, verify_hash=True))
    set_model_state_dict(model, state["model"])

    expected = make_model(seed=0).state_dict()
    for name, part in model.state_dict().items():
        assert torch.equal(part.full_tensor(), expected[name])
    assert state["step"] == 100
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks have loaded {len(expected)} tensors of step 100")


def rank(number: int, ranks: int, meeting: str, folder: str, job) -> None:
    """Run a job as one of several ranks."""
    dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=ranks)
    try:
        job(folder)
    finally:
        dist.destroy_process_group()


def run(job, folder: str, ranks: int) -> None:
    # The ranks find each other by a file; torchrun has a server for that.
    with tempfile.TemporaryDirectory() as temporary:
        meeting = f"file://{temporary}/meeting"
        # Forked, they have torch already. A process that has used CUDA cannot do that.
        mp.start_processes(rank, (ranks, meeting, folder, job), nprocs=ranks, start_method="fork")


def main() -> None:
    parser = argparse.ArgumentParser(description="Save and load a distributed checkpoint.")
    parser.add_argument("folder", nargs="?", default="checkpoint")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--load-ranks", type=int, default=3)
    args = parser.parse_args()
    run(save, args.folder, args.ranks)
    run(load, args.folder, args.load_ranks)

    # One process alone reads what it names, whole. So does: tensorizer cp FOLDER model.safetensors
    weights = {"model": {"0.weight": torch.empty(48, 64)}}
    dcp.load(weights, storage_reader=Reader(args.folder), no_dist=True)
    assert torch.equal(weights["model"]["0.weight"], make_model(seed=0)[0].weight)
    print("one process has loaded a tensor of it")


if __name__ == "__main__":
    main()
