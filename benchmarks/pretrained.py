"""Building a model of transformers: its own loader, `tensorizer.transformers`, and a plain load.

    python benchmarks/pretrained.py --gb 2 --rounds 5

A Llama of random bf16 weights is saved in shards. Each load is made in a process of its own, in
turns, with the files in the page cache; the imports of torch and of the libraries are not timed.
Every tensor's bytes are added up, and the sums must be those of what was saved. The memory is the
growth of the peak resident size during the call.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ENGINES = {
    "tensorizer.load": "tensors = tensorizer.load(folder, 'cpu')",
    "tensorizer.transformers": "model = from_pretrained(folder, device='cpu')",
    "the same, mmap=True": "model = from_pretrained(folder, device='cpu', mmap=True)",
    "transformers": "model = transformers.LlamaForCausalLM.from_pretrained(folder)",
}
CHILD = """
import json, re, sys, time
import torch, transformers, tensorizer
from tensorizer.transformers import from_pretrained
import transformers.models.llama.modeling_llama, transformers.generation
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
transformers.AutoConfig, transformers.LlamaForCausalLM, transformers.GenerationConfig
folder, model, tensors = sys.argv[1], None, None
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
# A first model imports and compiles what later ones have.
config = transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                  num_attention_heads=1, num_key_value_heads=1, vocab_size=8)
small = transformers.LlamaForCausalLM(config)
transformers.LlamaForCausalLM.from_pretrained(
    None, config=config, state_dict=small.state_dict())
tensorizer.load(folder, "cpu", names=["model.norm.weight"])
# Memory that the host of a virtual machine has taken back is slow to come again.
torch.ones(int(sys.argv[2]) // 8, dtype=torch.int64)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
before = peak()
begun = time.perf_counter()
CALL
call = time.perf_counter() - begun
tensors = model.state_dict() if tensors is None else tensors
sums = {name: int(t.view(torch.int64).sum()) for name, t in tensors.items()}
touched = time.perf_counter() - begun
print(json.dumps([call, touched, peak() - before, sums]))
"""


def save(folder: Path, size: float) -> tuple[int, dict[str, int]]:
    """Save a Llama of so many bytes in shards; return its bytes and sums."""
    import torch
    import transformers

    layer = 2 * (4 * 2048 * 2048 + 3 * 2048 * 5632)
    layers = max(1, round((size - 2 * 2 * 32000 * 2048) / layer))
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.uniform_(-0.1, 0.1)
    model.save_pretrained(folder, max_shard_size="700MB")
    tensors = model.state_dict()
    sums = {name: int(tensor.view(torch.int64).sum()) for name, tensor in tensors.items()}
    return sum(tensor.nbytes for tensor in tensors.values()), sums


def run(engine: str, folder: Path, size: int, sums: dict[str, int]) -> tuple[float, float, int]:
    """Load in a process of its own; return the seconds of the call, all seconds, and memory."""
    code = CHILD.replace("CALL", ENGINES[engine])
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(size)],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    call, touched, peak, found = json.loads(done.stdout.splitlines()[-1])
    assert found == sums, f"{engine}: other bytes were loaded"
    return call, touched, peak


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pretrained-"))
    try:
        size, sums = save(folder, arguments.gb * 1e9)
        shards = len(list(folder.glob("*.safetensors")))
        print(f"{size / 1e9:.2f} GB of bf16 in {shards} shards, warm, {arguments.rounds} rounds")
        found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in ENGINES}
        for _ in range(arguments.rounds):
            for name, results in found.items():
                results.append(run(name, folder, size, sums))
        # The library's own loader maps the files, and reads nothing before a tensor is touched.
        plain = statistics.median(touched for _, touched, _ in found["tensorizer.load"])
        print("engine                     call s   touched s          of the load   memory beyond")
        for name, results in found.items():
            call = statistics.median(result[0] for result in results)
            times = sorted(result[1] for result in results)
            touched = statistics.median(times)
            beyond = max(result[2] for result in results) - size
            print(
                f"{name:25} {call:7.3f}   {touched:5.3f} ({times[0]:.3f} to {times[-1]:.3f})"
                f"   {plain / touched:5.2f}        {beyond / 1e6:8.0f} MB"
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
