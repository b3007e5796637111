"""A trainer's checkpoint: the state of Adam, saved and loaded by torch with and without us."""

from __future__ import annotations

import os
from pathlib import Path

import torch

#: Adam keeps two moments of each parameter, and the number of steps.
MOMENTS = ("exp_avg", "exp_avg_sq")


def nested(tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    """Arrange tensors as ``torch.optim.Adam.state_dict()`` does, each with storage of its own."""
    moments = [tensor.clone() for tensor in tensors.values()]
    pairs = zip(moments[::2], moments[1::2], strict=True)
    return {
        "state": {
            number: {"step": torch.tensor(7.0), **dict(zip(MOMENTS, pair, strict=True))}
            for number, pair in enumerate(pairs)
        },
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(len(moments)))}],
    }


def flat(state: dict, names: list[str]) -> dict[str, torch.Tensor]:
    """Undo :func:`nested`."""
    moments = [one[name] for one in state["state"].values() for name in MOMENTS]
    return dict(zip(names, moments, strict=True))


def load(path: Path, names: list[str], ours: bool) -> dict[str, torch.Tensor]:
    """Load a checkpoint as a trainer does: from our pair of files, or from torch's own file."""
    if not ours:
        return flat(torch.load(f"{path}.pt", weights_only=True), names)
    from tensorizer.torch_compat import tensorizer_loading

    with tensorizer_loading(device="cpu"):
        return flat(torch.load(f"{path}.pair.pt"), names)


def save(state: dict[str, object], out: str, ours: bool) -> None:
    """Save as a trainer would."""
    if not ours:
        torch.save(state, out)
        return
    from tensorizer.torch_compat import tensorizer_saving

    with tensorizer_saving():
        torch.save(state, out)


def files(out: str) -> list[str]:
    """Return what a save has written."""
    return [path for path in (out, f"{out}.tensors") if os.path.exists(path)]
