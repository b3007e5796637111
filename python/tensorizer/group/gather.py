"""Saving tensors of which several processes have parts: one of them writes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..tensors import sharding
from .members import Members

#: Bytes of tensors that are gathered before they are written, or one tensor that has more.
_BATCH_BYTES = 64 << 20


class Target(Protocol):
    """A file that is written."""

    def write_leaves(self, names: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        """Write tensors."""

    def close(self) -> None:
        """Make the file visible."""

    def abandon(self) -> None:
        """Give the file up."""


class Gathering:
    """The processes of a mesh, which make the same calls; the first of them writes.

    Args:
        tensors: What is to be saved, DTensors among it.

    Raises:
        ValueError: Tensors are of meshes of different processes.

    Attributes:
        members: The processes, which are to join before tensors are gathered.
        writes: Whether this one writes.
        failed: Whether a write has failed, which all know.

    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        ranks = _ranks([tensor for tensor in tensors if sharding.is_sharded(tensor)])
        assert dist.group.WORLD is not None
        self.members = Members(ranks, dist.group.WORLD)
        self.writes = self.members.rank == 0
        self.failed = False

    def join(self) -> None:
        """Meet the others.

        Raises:
            GroupError: One of them was lost, or did not come.

        """
        try:
            self.members.join()
        except BaseException:
            self.failed = True
            raise

    def write(
        self,
        names: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        write: Callable[[slice, list[torch.Tensor]], None],
    ) -> None:
        """Gather tensors a few at a time, and have one process write them.

        Args:
            names: Their names.
            tensors: DTensors and others, the same at all processes. Of others the first process
                writes what it has.
            write: Called at one process, with which of them these are, and them as a whole.

        Raises:
            ValueError: Another process is to write other tensors.
            BaseException: What ``write`` has raised.

        """
        described = [(n, _described(t)) for n, t in zip(names, tensors, strict=True)]
        digest = hashlib.sha256(repr(described).encode()).digest()
        digests = self._agree(None, digest)
        other = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
        if other is not None:
            self.failed = True
            raise ValueError(
                f"rank {other} of those that save together has other tensors than rank 0: expected "
                "the same names, dtypes, shapes and placements in the same order"
            )
        for which in _batches(tensors):
            error: BaseException | None = None
            # All take part in gathering, whatever has happened to one of them.
            try:
                whole = [_whole(tensor) for tensor in tensors[which]]
            except BaseException:
                self.failed = True
                self.members.leave()
                raise
            try:
                if self.writes:
                    write(which, whole)
            except BaseException as raised:
                error = raised
            self._agree(error)

    def save(
        self,
        names: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        opened: Callable[[], Target],
        written: Callable[[], None],
    ) -> None:
        """Have one process open a file, write the whole tensors, and close it; the others wait.

        ``written`` is called at all of them in between.

        Raises:
            BaseException: What has failed at that process, or see :meth:`write`.

        """
        with self.members:
            target, _ = self.members.together(lambda: opened() if self.writes else None)

            def write(which: slice, whole: list[torch.Tensor]) -> None:
                if target is not None:
                    target.write_leaves(names[which], whole)

            try:
                self.write(names, tensors, write)
                self.members.together(written)
            except BaseException:
                if target is not None:
                    target.abandon()
                raise
            self.members.together(lambda: None if target is None else target.close())

    def _agree(self, error: BaseException | None, told: Any = None) -> list[Any]:
        try:
            return self.members.agree(error, told)
        except BaseException:
            self.failed = True
            raise


def _ranks(tensors: Sequence[Any]) -> tuple[int, ...]:
    """Return the ranks of the mesh of which all meshes are a part."""

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


def _described(tensor: Any) -> tuple[Any, ...]:
    """Return what must be the same at all processes."""
    kind: tuple[Any, ...] = ()
    if sharding.is_sharded(tensor):
        kind = (str(tensor.placements), tuple(tensor.device_mesh.shape))
    return str(tensor.dtype), tuple(tensor.shape), *kind


def _whole(tensor: Any) -> torch.Tensor:
    if not sharding.is_sharded(tensor):
        plain: torch.Tensor = tensor
        return plain
    with torch.no_grad():
        # What FSDP keeps on the CPU is gathered where its mesh is.
        whole: torch.Tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()
    return whole


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    start, size = 0, 0
    for at, tensor in enumerate(tensors):
        nbytes = tensor.numel() * tensor.element_size()
        if size and size + nbytes > _BATCH_BYTES:
            yield slice(start, at)
            start, size = at, 0
        size += nbytes
    if tensors:
        yield slice(start, len(tensors))
