"""Make what the server needs: a model without weights in two forms, its weights, a request.

python export.py FOLDER
"""

import sys
from pathlib import Path

import tensorizer
import torch

FEATURES, CLASSES = 16, 4


def build() -> torch.nn.Module:
    """Return the model, whose weights come from a training that is not shown."""
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.GELU(),
        torch.nn.Linear(64, CLASSES),
    ).eval()


def main(folder: Path) -> None:
    torch.manual_seed(0)
    trained = build()
    tensorizer.save(trained.state_dict(), folder / "weights.tensors")

    # The server replaces these weights, so what they are does not matter; but a package keeps
    # equal constants as one, and writes short ones into its code unless it is told otherwise.
    empty = build()
    for tensor in empty.state_dict().values():
        tensor.random_() if tensor.dtype == torch.long else tensor.uniform_()
    torch.jit.script(empty).save(str(folder / "model.pt"))
    program = torch.export.export(empty, (torch.zeros(1, FEATURES),))
    torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(folder / "model.pt2"),
        inductor_configs={"always_keep_tensor_constants": True},
    )

    request = torch.randn(1, FEATURES)
    (folder / "request.txt").write_text(" ".join(map(str, request.flatten().tolist())) + "\n")
    answer = trained(request).flatten().tolist()
    (folder / "expected.txt").write_text(" ".join(map(str, answer)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
