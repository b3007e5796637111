"""Loads a file by the members of a process group: every byte is read by one of them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from .._types import Head
from ..group.members import Members
from ..group.wishes import MergedWishes, Table, Wish, decoded_columns, decoded_table, merged
from ..streams.addresses import is_address
from ..tensors.handles import dtype_of
from ..tensors.sharding import Ranges
from .exchange import Exchange
from .load_plan import LoadPlan
from .open_file import OpenFile
from .progress import ProgressReporter
from .read_ahead import ReadAhead

#: Functions that open the file, and that choose tensors of it.
_Opens: TypeAlias = Callable[..., OpenFile]
_Plans: TypeAlias = Callable[[OpenFile], LoadPlan]
#: The most bytes that a member holds beside the tensors of a load.
_LOAD_BYTES = 1 << 30
#: The kinds of hashes, the weakest first.
_VERIFICATIONS = ("nothing", "crc32", "all")


def open_collectively(members: Members, opened: _Opens) -> tuple[OpenFile, bool]:
    """Open a file at all members; the first one reads its index, for all of them.

    Args:
        members: The processes that open it.
        opened: A function that opens it, given the cached headers of the first member as
            ``heads``.

    Returns:
        The file, and True if each member reads it by itself. They do if it is local to the one
        machine of all members, where they share the page cache, or if the first member reads it
        from a cache; and also if one of them can read it from front to back only.

    Raises:
        ValueError: Members have opened different files.

    """
    files: list[OpenFile] = []

    def opened_once(heads: Sequence[Head]) -> OpenFile:
        if not files:
            files.append(opened(heads=heads))
        return files[0]

    try:
        _, from_all = members.run_on_all(
            lambda: opened_once([]).heads if members.rank == 0 else [], lambda found: found
        )
        file, told = members.run_on_all(
            lambda: opened_once(from_all[0]),
            lambda file: tuple(_summary(file, members.prefers_cache)),
        )
        found = [_FileSummary(*one) for one in told]
        _refuse_different(members, file.reader.uri, found)
    except BaseException:
        for file in files:
            file.close()
        raise
    machines = {one.machine for one in found}
    alone = len(machines) == 1 and machines != {None} and not members.shares_local_files
    return file, alone or found[0].from_cache or not all(one.seekable for one in found)


class _FileSummary(NamedTuple):
    """A file that a member has opened, as the other members need to know it.

    It has a digest of its tensors, whether it can be read in any order, whether it is read from a
    cache, and digests of the machine that it is local to, or None, of its paths with what decides
    to which files these lead, or None, and of what tells its files from others.
    """

    tensors: bytes
    seekable: bool
    from_cache: bool
    machine: bytes | None
    paths: bytes | None
    identities: bytes


def _summary(file: OpenFile, prefers_cache: bool) -> _FileSummary:
    reader = file.reader
    machine = _machine() if file.is_local else None
    files = reader.files()
    paths = None
    namespace = Path("/proc/self/ns/mnt")
    if machine is not None and namespace.exists() and not any(map(is_address, files)):
        root = Path("/").stat()
        view = (machine, str(namespace.readlink()), f"{root.st_dev} {root.st_ino}")
        paths = _digest((*view, *map(os.path.abspath, files)))
    return _FileSummary(
        _digest_of_tensors(file),
        reader.seekable,
        prefers_cache and machine is None,
        None if machine is None else _digest(machine),
        paths,
        _digest(reader.identities()),
    )


def _refuse_different(members: Members, uri: str, found: Sequence[_FileSummary]) -> None:
    """Refuse different files of members.

    Raises:
        ValueError: A member has opened another file.

    """
    versions: dict[bytes, bytes] = {}
    replaced = [
        rank
        for rank, one in enumerate(found)
        if one.paths and versions.setdefault(one.paths, one.identities) != one.identities
    ]
    others = [rank for rank, one in enumerate(found) if one.tensors != found[0].tensors]
    if not replaced and not others:
        return
    uris = members.agree(None, uri)
    if replaced:
        raise ValueError(
            f"rank {replaced[0]} of the group has opened another version of {uris[replaced[0]]} "
            "than a rank before it: the file or its folder was replaced meanwhile"
        )
    raise ValueError(
        f"rank {others[0]} of the group has opened another file than rank 0: {uris[others[0]]} "
        f"has other tensors than {uris[0]}"
    )


def _machine() -> str | None:
    """Return a name of this machine, which changes when it is restarted; None if it is unknown."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else None


def _digest(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()[:16]


def _digest_of_tensors(file: OpenFile) -> bytes:
    """Return a digest that tells the tensors of a file from those of others."""
    reader, every = file.reader, range(len(file))
    digest = hashlib.sha256(repr((reader.pair_id, reader.offsets())).encode())
    for name, length, number in zip(reader.names(every), reader.data_lens(), every, strict=True):
        digest.update(repr((name, length, reader.describe(number))).encode())
    return digest.digest()


def load_collectively(
    members: Members, opened: _Opens, planned: _Plans, reporter: ProgressReporter
) -> dict[Any, torch.Tensor]:
    """Load the tensors that this member wants together with the other members of a group.

    The progress is finished, too.

    Args:
        members: The members.
        opened: See :func:`open_collectively`.
        planned: Plans what this member wants; an error of it is the error of all.
        reporter: Reports the bytes that are loaded.

    Raises:
        BaseException: The error of this member, or of another.

    """
    with members:
        file, each_reads = open_collectively(members, opened)
        with file:
            return load_opened(members, file, planned, reporter, each_reads)


def load_opened(
    members: Members, file: OpenFile, planned: _Plans, reporter: ProgressReporter, each_reads: bool
) -> dict[Any, torch.Tensor]:
    """Load from a file that all members have opened; see :func:`load_collectively`."""

    def load_alone() -> dict[Any, torch.Tensor]:
        loaded = planned(file).load()
        reporter.finish()
        return loaded

    if each_reads:
        file.reader.share_cache()
        loaded, _ = members.run_on_all(load_alone)
        members.complete()
        return loaded
    plan, tensors = _begin(members, file, planned, _LOAD_BYTES, reporter, finishes=True)
    with contextlib.closing(tensors):
        return plan.by_key(dict(itertools.chain.from_iterable(tensors)))


def open_iterator(
    members: Members, opened: _Opens, planned: _Plans, reporter: ProgressReporter, buffer_bytes: int
) -> tuple[LoadPlan, Exchange | ReadAhead]:
    """Open a file at all members. Return the chosen tensors, and their iterator.

    See :func:`load_collectively`; ``buffer_bytes`` is the most that a member holds beside its
    tensors.
    """
    with members:
        file, each_reads = open_collectively(members, opened)
        try:
            if not each_reads:
                return _begin(members, file, planned, buffer_bytes, reporter)
            file.reader.share_cache()
            plan, _ = members.run_on_all(lambda: planned(file))
            members.complete()
            return plan, ReadAhead(plan, buffer_bytes, ready=False)
        except BaseException:
            file.close()
            raise


def _begin(
    members: Members,
    file: OpenFile,
    planned: _Plans,
    buffer_bytes: int,
    reporter: ProgressReporter,
    *,
    finishes: bool = False,
) -> tuple[LoadPlan, Exchange]:
    """Tell the others what this member wants, and begin to exchange.

    If the exchange ``finishes``, it reports at its end that everything is done.
    """
    file.keeps_shared = False
    (plan, wish, _), told = members.run_on_all(
        lambda: _wished(planned(file), buffer_bytes), lambda found: tuple(found[2])
    )
    answers = [_Answer(*one) for one in told]
    # Hashes cover whole tensors: if one member compares them, no member cuts tensors.
    verify = max((one.verify for one in answers), key=_VERIFICATIONS.index)
    wishes = _merged(members, file, wish, answers, whole=verify != "nothing")
    limit = min(one.most for one in answers)

    def begin() -> Exchange:
        # Compares a hash of the whole file now, before others wait for this member.
        if verify != "nothing":
            file.read([], torch.device("cpu"), verify)
        return Exchange(members, plan, wishes, limit, verify, reporter=reporter, finishes=finishes)

    return plan, members.run_on_all(begin)[0]


class _Answer(NamedTuple):
    """The part of its wish that a member tells the others: digests, hashes, and memory."""

    columns: bytes
    table: bytes
    verify: str
    most: int


def _wished(plan: LoadPlan, buffer_bytes: int) -> tuple[LoadPlan, Wish, _Answer]:
    """Return what this member wants, and what it tells the others of it."""
    file = plan.file
    lens = file.reader.data_lens()
    numbers = [number for number in plan.numbers if lens[number]]

    def boxes(number: int, shape: Sequence[int]) -> Sequence[Ranges]:
        if plan.is_cut(number):
            return [box.ranges or ((0, 1),) for box in plan.part(number).boxes]
        return [tuple((0, size) for size in shape)]

    described = zip(numbers, file.reader.describe_all(numbers), strict=True)
    wish = Wish.of(
        (n, boxes(n, shape or (1,)), shape or (1,), dtype_of(dtype).itemsize)
        for n, (dtype, shape) in described
    )
    most = file.reserve_memory(buffer_bytes, numbers, file.length_of(numbers), plan.device)
    table = hashlib.sha256(wish.encoded_table()).digest()
    return plan, wish, _Answer(wish.digest(), table, file.verify, most)


def _merged(
    members: Members, file: OpenFile, mine: Wish, answers: Sequence[_Answer], *, whole: bool
) -> MergedWishes:
    """Return the wishes of all members. Equal ones send nothing more, and others what differs."""
    every = range(len(file))
    in_one_piece = every if whole else file.strided(every)
    tables: list[Table] = [mine.table] * members.size
    if len({one.table for one in answers}) > 1:
        tables = [decoded_table(one) for one in members.all_gather(mine.encoded_table())]
    ranks_of: dict[bytes, list[int]] = {}
    for rank, one in enumerate(answers):
        ranks_of.setdefault(one.columns, []).append(rank)
    columns = [mine.columns]
    if len(ranks_of) > 1:
        # Each different list is sent once.
        firsts = [ranks[0] for ranks in ranks_of.values()]
        sent = members.all_gather(mine.encoded() if members.rank in firsts else b"")
        columns = [decoded_columns(sent[rank]) for rank in firsts]
    wishes = [
        (one, [(rank, tables[rank]) for rank in ranks])
        for one, ranks in zip(columns, ranks_of.values(), strict=True)
    ]
    encrypted = file.reader.encrypted
    return merged(wishes, len(file), members.size, in_one_piece, encrypted=encrypted)
