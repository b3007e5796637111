"""Saves tensors that are sharded among several processes: one of them writes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..streams import targets
from ..tensors import sharding, without_data
from ..tensors.batches import in_batches
from .members import Members

#: Bytes of tensors that are gathered before they are written, or one tensor that has more.
_BATCH_BYTES = 64 << 20


class GatheredSave:
    """The processes of a mesh, which make the same calls; the first of them writes.

    Args:
        tensors: The tensors to save, some of them DTensors.
        target: The path or address that this process names, which must be the same at all of them;
            other files are not compared.

    Raises:
        ValueError: Tensors are of meshes of different processes.

    Attributes:
        members: The processes, which must join before tensors are gathered.
        writes: True if this process writes.
        failed: True if a write has failed, at all processes alike.

    """

    def __init__(self, tensors: Sequence[torch.Tensor], target: Any) -> None:
        ranks = _common_ranks([tensor for tensor in tensors if sharding.is_sharded(tensor)])
        assert dist.group.WORLD is not None
        self.members = Members(ranks, dist.group.WORLD)
        self.writes = self.members.rank == 0
        self.failed = False
        self._target = targets.spellings(target)

    def join(self) -> None:
        """Meet the other processes.

        Raises:
            GroupError: A process was lost, or did not come.

        """
        with self._noted():
            self.members.join()

    def write(
        self,
        names: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        write: Callable[[slice, list[torch.Tensor]], None],
    ) -> None:
        """Gather tensors a few at a time, and have one process write them.

        Args:
            names: The names of the tensors.
            tensors: DTensors and others, described alike at all processes. Of those that are no
                DTensors, the first process writes its own.
            write: Called at the writing process, with a slice of the tensors, and with these
                tensors as wholes.

        Raises:
            ValueError: Another process has other tensors, or names another target, or a DTensor
                has no data.
            BaseException: The error of ``write``.

        """
        with self._noted():
            named = list(zip(names, tensors, strict=True))
            described = [(name, _properties(tensor)) for name, tensor in named]
            digest = hashlib.sha256(repr(described).encode()).digest()
            sharded = {name: tensor for name, tensor in named if sharding.is_sharded(tensor)}
            check = functools.partial(without_data.refuse, sharded, sharded.values())
            _, answers = self.members.run_on_all(check, lambda _: (digest, self._target))
            targets.refuse_different([target for _, target in answers])
            for rank, (found, _) in enumerate(answers):
                if found != answers[0][0]:
                    raise ValueError(
                        f"rank {rank} of this collective save has other tensors than rank 0: "
                        "expected the same names, dtypes, shapes and placements in the same order"
                    )
            lens = [tensor.numel() * tensor.element_size() for tensor in tensors]
            for batch in in_batches(range(len(tensors)), lens.__getitem__, _BATCH_BYTES):
                selected = slice(batch[0], batch[-1] + 1)
                # All processes must take part in gathering, whatever has failed at one of them.
                try:
                    whole = [_gathered(tensor) for tensor in tensors[selected]]
                except BaseException:
                    self.members.leave()
                    raise
                save = functools.partial(write, selected, whole)
                self.members.run_on_all(save if self.writes else lambda: None)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Remember that a step has failed."""
        try:
            yield
        except BaseException:
            self.failed = True
            raise


def _common_ranks(tensors: Sequence[Any]) -> tuple[int, ...]:
    """Return the ranks of the mesh that contains all meshes."""

    def ranks(meshes: Iterable[Any]) -> list[tuple[int, ...]]:
        return sorted({tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes}, key=len)

    meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in tensors}.values()
    roots = [getattr(mesh, "_get_root_mesh", lambda mesh=mesh: mesh)() for mesh in meshes]
    for found in (ranks(meshes), ranks(roots)):
        if all(set(other) <= set(found[-1]) for other in found):
            return found[-1]
    raise ValueError(
        f"tensors are of meshes of different processes, {list(found[0])} and {list(found[-1])}: "
        "save them to files of their own"
    )


def _properties(tensor: Any) -> tuple[Any, ...]:
    """Return the properties of a tensor that must be the same at all processes."""
    kind: tuple[Any, ...] = ()
    if sharding.is_sharded(tensor):
        kind = (str(tensor.placements), tuple(tensor.device_mesh.shape))
    return str(tensor.dtype), tuple(tensor.shape), *kind


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    if not sharding.is_sharded(tensor):
        return tensor
    with torch.no_grad():
        # Parts that FSDP keeps on the CPU are gathered on the device of their mesh.
        moved: Any = tensor.to(tensor.device_mesh.device_type)
        whole: torch.Tensor = moved.full_tensor()
    return whole
