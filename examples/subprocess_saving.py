"""Saves a model in a process of its own while training goes on here.

python examples/subprocess_saving.py [PATH]

The state is copied once, into shared memory, so that training may change the model at once; the
other process writes the copy. The file appears when it is whole: whichever of the processes is
killed before, the path keeps what it had. ``tensorizer.save_async`` does the same with a thread,
which is enough unless this process may end before the file is written.
"""

import sys
import time

import torch
import torch.multiprocessing as mp
from tensorizer import TensorDeserializer, TensorSerializer


def write(path: str, state: dict[str, torch.Tensor]) -> None:
    """Run in the other process."""
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict(state)


def start_saving(path: str, model: torch.nn.Module) -> mp.Process:
    """Copy the state of a model and start to save it."""
    state = {
        name: tensor.detach().to("cpu", copy=True).share_memory_()
        for name, tensor in model.state_dict().items()
    }
    # A forked process would inherit threads and CUDA in a state that it cannot use.
    process = mp.get_context("spawn").Process(target=write, args=(path, state))
    process.start()
    return process


def main(path: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    saving, steps = None, 0
    while saving is None or saving.is_alive():
        if steps == 10:
            saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            saving = start_saving(path, model)
        optimizer.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        time.sleep(0.01)  # where a GPU would be at work
        steps += 1
    saving.join()
    if saving.exitcode != 0:
        raise SystemExit(f"the save failed: {saving.exitcode}")

    with TensorDeserializer(path, "cpu") as loaded:
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        changed = not torch.equal(loaded["0.weight"], model[0].weight)
    print(f"the state of step 10 is in {path}; {steps - 10} steps were done meanwhile")
    assert changed


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "checkpoint.tensors")
