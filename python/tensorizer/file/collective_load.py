"""Loads a file by the members of a process group: every byte is fetched by one of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._native import effective_memory_limit
from .._types import Head
from ..group.exchange import MemoryBudget
from ..group.members import Members
from ..group.tensor_requests import (
    MergedRequests,
    RequestStructure,
    Table,
    TensorRequest,
    merge_requests,
)
from ..streams.addresses import is_address
from ..tensors.handles import cast_dtype, dtype_of
from ..tensors.sharding import Ranges
from .load_plan import LoadPlan
from .progress import ProgressReporter
from .request import Request
from .shared_batches import FillTask, SharedBatches
from .tensor_file import TensorFile, in_batches

#: Bytes of tensors that are held twice while they are cast.
_CAST_BYTES = 256 << 20


def open_collectively(
    members: Members, opened: Callable[[Sequence[Head]], TensorFile]
) -> tuple[TensorFile, bool]:
    """Open a file at all members; the first one reads its index, for all of them.

    Args:
        members: The processes that open it.
        opened: A function that opens it, given the cached headers of the first member.

    Returns:
        The file, and True if each member reads it by itself. They do if it is local to the one
        machine of all members, where they share the page cache; and also if one of them can read it
        from front to back only.

    Raises:
        ValueError: Members have opened different files.

    """
    files: list[TensorFile] = []

    def open_first() -> Sequence[Head]:
        files.append(opened([]))
        return files[0].heads

    def open_with_heads() -> TensorFile:
        if not files:
            files.append(opened(heads))
        return files[0]

    try:
        heads = members.run_on_first(open_first)
        file, found = members.run_on_all(open_with_heads, _summary)
        versions: dict[tuple[str, ...], list[str | None]] = {}
        for rank, one in enumerate(found):
            if one.paths and versions.setdefault(one.paths, one.identities) != one.identities:
                raise ValueError(
                    f"rank {rank} of the group has opened another version of {one.uri} than a rank "
                    "before it: the file or its folder was replaced meanwhile"
                )
            if one.digest != found[0].digest:
                raise ValueError(
                    f"rank {rank} of the group has opened another file than rank 0: {one.uri} has "
                    f"other tensors than {found[0].uri}"
                )
    except BaseException:
        for file in files:
            file.close()
        raise
    machines = {one.machine for one in found}
    one_machine = len(machines) == 1 and machines != {None}
    return file, one_machine or not all(one.seekable for one in found)


class _FileSummary(NamedTuple):
    """A file that a member has opened, as the other members need to know it.

    It has a digest of its tensors, its address, whether it can be read in any order, the machine
    that it is local to, or None, what tells its files from others, and their paths with what
    decides to which files these lead; nothing if it has no paths.
    """

    digest: bytes
    uri: str
    seekable: bool
    machine: str | None
    identities: list[str | None]
    paths: tuple[str, ...]


def _summary(file: TensorFile) -> _FileSummary:
    reader = file.reader
    machine = _machine() if file.is_local else None
    files = reader.files()
    paths: tuple[str, ...] = ()
    namespace = Path("/proc/self/ns/mnt")
    if machine is not None and namespace.exists() and not any(map(is_address, files)):
        root = Path("/").stat()
        view = (machine, str(namespace.readlink()), f"{root.st_dev} {root.st_ino}")
        paths = (*view, *map(os.path.abspath, files))
    return _FileSummary(
        _digest(file), reader.uri, reader.seekable, machine, reader.identities(), paths
    )


def _machine() -> str | None:
    """Return a name of this machine, which changes when it is restarted; None if it is unknown."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else None


def _digest(file: TensorFile) -> bytes:
    """Return a digest that tells the tensors of a file from those of others."""
    reader, every = file.reader, range(len(file))
    digest = hashlib.sha256(repr((reader.pair_id, reader.offsets())).encode())
    for name, length, number in zip(reader.names(every), reader.data_lens(), every, strict=True):
        digest.update(repr((name, length, reader.describe(number))).encode())
    return digest.digest()


def load_collectively(
    members: Members,
    opened: Callable[[Sequence[Head]], TensorFile],
    requested: Callable[[], Request],
    progress: ProgressReporter,
) -> dict[Any, torch.Tensor]:
    """Load the tensors that this member wants together with the other members of a group.

    The progress is finished, too.

    Args:
        members: The members.
        opened: See :func:`open_collectively`.
        requested: Makes the request; an error of it is the error of all.
        progress: Reports the bytes that are loaded.

    """
    file, each_reads = open_collectively(members, opened)
    plans: list[LoadPlan] = []

    def planned() -> LoadPlan:
        plans.append(plan := LoadPlan(requested(), file))
        progress.total = plan.total()
        return plan

    def load() -> dict[Any, torch.Tensor]:
        loaded = planned().load()
        progress.finish()
        return loaded

    def prepare() -> FillTask:
        plan = planned()
        return FillTask(plan, plan.checked_targets() or allocate(plan))

    with file:
        if each_reads:
            file.reader.share_cache()
            return members.run_on_all(load)[0]
        file.keeps_shared = False
        filled = fill_collectively(members, prepare, progress.finish)
        return plans[0].by_key(filled.tensors)


def fill_collectively(
    members: Members, prepare: Callable[[], FillTask], finish: Callable[[], None] | None = None
) -> FillTask:
    """Fill the tensors that this member wants; other members may want others.

    Args:
        members: All members that fill tensors of the same file.
        prepare: Called once at each member; returns its wanted tensors and their memory.
        finish: Called once at each member when all its tensors are filled.

    Raises:
        BaseException: The error of this member, or of another.

    """
    numbers: list[int] = []

    def prepare_request() -> tuple[FillTask, TensorRequest]:
        found = prepare()
        lens = found.wanted.file.reader.data_lens()
        numbers.extend(number for number in found.wanted.numbers if lens[number])
        return found, _request(found.wanted, numbers)

    def describe(found: tuple[FillTask, TensorRequest]) -> tuple[bytes, Table, bool, bool]:
        (wanted, _), request = found
        limited = effective_memory_limit(wanted.file.memory_limit) is not None
        return request.structure.digest(), request.table, wanted.file.verify != "nothing", limited

    (task, request), of_all = members.run_on_all(prepare_request, describe)
    any_limit = any(limited for *_, limited in of_all)
    # Hashes cover whole tensors: if one member compares them, no member cuts tensors.
    whole = any(verifies for *_, verifies, _ in of_all)
    wanted, tensors = task
    requests = [(digest, table) for digest, table, *_ in of_all]
    found = _merged_requests(members, wanted.file, request, requests, whole=whole)
    sharing = SharedBatches(members, task, found.shared, whole=whole)
    read_alone = [n for n in numbers if n in found.alone or n in sharing.read_by_each]
    alone = wanted.subset(read_alone)

    def fill_alone() -> MemoryBudget:
        empty = set(wanted.numbers).difference(numbers)
        for number in empty:
            tensors[number].detach().zero_()
        # Compares a hash of the whole file now, before others wait for a batch of this member.
        if wanted.file.verify != "nothing":
            wanted.file.read([], torch.device("cpu"))
        _fill_alone(alone, tensors)
        if finish is not None and not found.exchanges:
            finish()
        budget = sharing.memory_budget()
        if not any_limit:
            sharing.prepare(budget)
        return budget

    budget, lens_of_all = members.run_on_all(fill_alone, lambda budget: budget.batch_bytes)
    if found.exchanges:
        if any_limit:
            # Members may have different limits, and all must cut the same batches.
            members.run_on_all(lambda: sharing.prepare(budget, min(lens_of_all)))
        members.agree(sharing.exchange(finish))
    return task


def _request(wanted: LoadPlan, numbers: Sequence[int]) -> TensorRequest:
    """Return the ranges of tensors that this member wants."""
    shapes = (shape or [1] for _, shape in wanted.file.reader.describe_all(numbers))

    def ranges(number: int, shape: Sequence[int]) -> Ranges:
        cut = wanted.is_cut(number)
        return (cut and wanted.part(number).bounds()) or tuple((0, size) for size in shape)

    return TensorRequest.of(
        (n, ranges(n, shape), shape) for n, shape in zip(numbers, shapes, strict=True)
    )


def _merged_requests(
    members: Members,
    file: TensorFile,
    mine: TensorRequest,
    of_members: Sequence[tuple[bytes, Table]],
    *,
    whole: bool,
) -> MergedRequests:
    """Return the merged requests of all members. Each different structure is sent once."""
    tables: dict[bytes, list[tuple[int, Table]]] = {}
    for rank, (digest, table) in enumerate(of_members):
        tables.setdefault(digest, []).append((rank, table))
    structures = [mine.structure]
    if len(tables) > 1:
        firsts = [of_structure[0][0] for of_structure in tables.values()]
        sent = members.all_gather(mine.structure.encoded() if members.rank in firsts else b"")
        structures = [RequestStructure.decoded(sent[rank]) for rank in firsts]
    every = range(len(file))
    in_one_piece = every if whole else file.strided(every)
    requests = list(zip(structures, tables.values(), strict=True))
    return merge_requests(requests, len(file), in_one_piece, (members.rank, members.size))


def _fill_alone(wanted: LoadPlan, tensors: Mapping[int, torch.Tensor]) -> None:
    """Fill the tensors that this member alone wants, without the others."""
    file = wanted.file
    file.reader.limit_memory(file.memory_limit)
    if not wanted.numbers:
        return
    if file.dtype is None:
        wanted.fill(tensors)
        return
    # Tensors to be cast are loaded a few at a time.
    length = file.length_of(wanted.numbers)
    most = file.reserve_memory(_CAST_BYTES, wanted.numbers, length) // 2
    for numbers in in_batches(wanted.numbers, length, most):
        for number, tensor in wanted.subset(numbers).load_new().items():
            tensors[number].detach().copy_(tensor)


def allocate(wanted: LoadPlan) -> dict[int, torch.Tensor]:
    """Return new tensors to load the wanted ones into.

    Raises:
        MemoryError: There is not enough memory on the host.
        torch.OutOfMemoryError: There is not enough memory on a device.

    """
    made = {}
    for number in wanted.numbers:
        dtype = cast_dtype(dtype_of(wanted.file.reader.describe(number)[0]), wanted.file.dtype)
        shape, device = wanted.part(number).shape, wanted.device_of(number)
        try:
            made[number] = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            if device.type != "cpu":
                raise
            raise MemoryError(f"tensor {wanted.file.reader.name(number)!r}: {error}") from error
    return made
