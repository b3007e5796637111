"""Loading by the members of a process group: every byte is fetched by one of them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .._native import known_limit
from .._types import Head
from ..group import plan
from ..group.exchange import BATCH_BYTES, Buffers, Exchange, GivenUp, Shares, batch_bytes
from ..group.members import Members
from ..group.wishes import Merged, Structure, Table, Wish, merged
from ..tensors.exchange import cast_dtype, dtype_of
from .parts import Wanted
from .tensor_file import TensorFile, in_batches

#: Bytes of tensors that are held twice while they are cast.
_CAST_BYTES = 256 << 20
#: Of an encrypted tensor whole pieces of 2 MiB are read, also where a batch begins in one.
_ENCRYPTED_BATCH_BYTES = 8 * BATCH_BYTES


def open_together(
    members: Members, opened: Callable[[Sequence[Head]], TensorFile]
) -> tuple[TensorFile, bool]:
    """Open a file at all members; the first one reads its index, for all of them.

    Args:
        members: Who opens it.
        opened: Opens it, with what the first member has learnt by that.

    Returns:
        The file, and whether each member reads it for itself: they do where it is local to the
        machine that they all are on, whose page cache they share, and where it comes to one of them
        front to back.

    Raises:
        ValueError: Members have opened different files.

    """
    mine: list[TensorFile] = []

    def first() -> Sequence[Head]:
        mine.append(opened([]))
        return mine[0].heads

    def others() -> TensorFile:
        if not mine:
            mine.append(opened(heads))
        return mine[0]

    try:
        heads = members.first(first)
        file, found = members.together(others, _described)
        for rank, one in enumerate(found):
            if one.digest != found[0].digest:
                raise ValueError(
                    f"rank {rank} of the group has opened another file than rank 0: {one.uri} has "
                    f"other tensors than {found[0].uri}"
                )
    except BaseException:
        for file in mine:
            file.close()
        raise
    machines = {one.machine for one in found}
    one_machine = len(machines) == 1 and machines != {None}
    return file, one_machine or not all(one.seekable for one in found)


class _Described(NamedTuple):
    """A file that a member has opened: what tells it from others, its address, whether it can be
    read in any order, and the machine that it is local to, if it is.
    """  # noqa: D205

    digest: bytes
    uri: str
    seekable: bool
    machine: str | None


def _described(file: TensorFile) -> _Described:
    machine = _machine() if file.is_local else None
    return _Described(_digest(file), file.reader.uri, file.reader.seekable, machine)


def _machine() -> str | None:
    """Return a name of this machine, since it was started."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else None


def _digest(file: TensorFile) -> bytes:
    """Return what tells the tensors of a file from those of others."""
    reader, every = file.reader, range(len(file))
    digest = hashlib.sha256(repr((reader.pair_id, reader.offsets())).encode())
    for name, length, number in zip(reader.names(every), reader.data_lens(), every, strict=True):
        digest.update(repr((name, length, reader.describe(number))).encode())
    return digest.digest()


class Prepared(NamedTuple):
    """What a member wants of a file, and by number the tensors that are to be filled."""

    wanted: Wanted
    tensors: Mapping[int, torch.Tensor]


def fill_together(
    members: Members, prepare: Callable[[], Prepared], finish: Callable[[], None] | None = None
) -> Prepared:
    """Fill tensors with what this member wants; others may want other tensors.

    Args:
        members: All that fill tensors of the same file.
        prepare: Called once at each.
        finish: Called once at each when all its tensors are filled.

    Raises:
        BaseException: What has failed here, or at another member.

    """
    numbers: list[int] = []

    def prepared() -> tuple[Prepared, Wish]:
        found = prepare()
        lens = found.wanted.file.reader.data_lens()
        numbers.extend(number for number in found.wanted.numbers if lens[number])
        return found, _wish(found.wanted, numbers)

    def told(found: tuple[Prepared, Wish]) -> tuple[bytes, Table, bool, bool]:
        (wanted, _), wish = found
        limited = known_limit(wanted.file.memory_limit) is not None
        return wish.structure.digest(), wish.table, wanted.file.verify != "nothing", limited

    (mine, wish), of_all = members.together(prepared, told)
    any_limit = any(limited for *_, limited in of_all)
    # Hashes are of whole tensors: where one member compares them, all cut none.
    whole = any(verifies for *_, verifies, _ in of_all)
    wanted, tensors = mine
    wishes = [(digest, table) for digest, table, *_ in of_all]
    found = _merged(members, wanted.file, wish, wishes, whole=whole)
    alone = Wanted(wanted.file, [n for n in numbers if n in found.alone], wanted.parts)
    sharing = _Sharing(members, mine, found.shared, whole=whole)

    def fill_alone() -> Shares:
        empty = set(wanted.numbers).difference(numbers)
        for number in empty:
            tensors[number].detach().zero_()
        # A hash of the whole file is compared before others wait for a batch of this member.
        if wanted.file.verify != "nothing":
            wanted.file.read([], torch.device("cpu"))
        _fill_alone(alone, tensors)
        if finish is not None and not found.exchanges:
            finish()
        shares = sharing.shares()
        if not any_limit:
            sharing.prepare(shares)
        return shares

    shares, lens_of_all = members.together(fill_alone, lambda shares: shares.batch)
    if found.exchanges:
        if any_limit:
            # Members may have limits of their own, and all cut the same batches.
            members.together(lambda: sharing.prepare(shares, min(lens_of_all)))
        members.agree(sharing.exchange(finish))
    return mine


class _Sharing:
    """What several members want, which one of them fetches for the others.

    Args:
        members: All members.
        mine: What this one wants.
        shared: By the ranks of those that want the same, the rows of tensors.
        whole: Whether tensors are fetched in one piece.

    """

    def __init__(
        self,
        members: Members,
        mine: Prepared,
        shared: Mapping[tuple[int, ...], Mapping[int, tuple[int, int]]],
        *,
        whole: bool,
    ) -> None:
        self._members, (self._wanted, self._tensors) = members, mine
        self._file = file = self._wanted.file
        self._parts = {
            ranks: [_wanted(file, number, ends, whole) for number, ends in rows.items()]
            for ranks, rows in shared.items()
        }
        self._exchanges: dict[tuple[int, ...], Exchange] = {}
        self._buffers = Buffers()

    def shares(self) -> Shares:
        """Return how this member shares its memory limit."""
        most = max((self._batch_bytes(*part) for part in self._parts.items()), default=BATCH_BYTES)
        longest = max((one.unit for part in self._parts.values() for one in part), default=0)
        least = self._file.least(self._device(), parts=True)
        return Shares.of(self._file.memory_limit, most, longest, least)

    def _batch_bytes(self, ranks: tuple[int, ...], of_part: Sequence[plan.Wanted]) -> int:
        """Return the length of batches of a part, which all its members know."""
        most = _ENCRYPTED_BATCH_BYTES if self._file.reader.encrypted else BATCH_BYTES
        return batch_bytes(sum(one.nbytes for one in of_part), len(ranks), most)

    def prepare(self, shares: Shares, most: int | None = None) -> None:
        """Make the plans, of batches of ``most`` bytes at most, and take the memory."""
        self._file.reader.limit_memory(self._file.memory_limit, shares.beside)
        device = self._device()
        somewhere = any(tensor.is_cuda for tensor in self._tensors.values())
        self._buffers = Buffers(device, pinned=device.type == "cpu" and somewhere)
        for ranks, of_part in self._parts.items():
            usual = self._batch_bytes(ranks, of_part)
            exchange = Exchange(
                plan.batches(of_part, len(ranks), usual if most is None else min(usual, most)),
                ranks.index(self._members.rank),
                fetch=self._fetch,
                deliver=self._deliver,
                stop=self._file.stop,
                at_once=shares.at_once,
            )
            self._buffers.need(exchange)
            self._exchanges[ranks] = exchange
        self._buffers.make()

    def exchange(self, finish: Callable[[], None] | None) -> BaseException | None:
        """Exchange everything, in the same order at all members; return what has failed here."""
        failed: BaseException | None = None
        for ranks, exchange in self._exchanges.items():
            all_want_it = len(ranks) == self._members.size
            members = self._members if all_want_it else self._members.part(ranks)
            failed = exchange.run(members, self._buffers, failed)
        self._exchanges.clear()
        if isinstance(failed, GivenUp):
            # The member at which it has failed says so.
            return None
        if failed is None and finish is not None:
            try:
                finish()
            except BaseException as error:
                return error
        return failed

    def _device(self) -> torch.device:
        """Return where batches are exchanged."""
        device = torch.device("cpu")
        if self._members.on_device:
            here = [tensor.device for tensor in self._tensors.values() if tensor.is_cuda]
            device = here[0] if here else torch.device("cuda", torch.cuda.current_device())
        return device

    def _fetch(self, batch: plan.Batch, buffer: torch.Tensor) -> None:
        """Read a batch into a buffer, on a thread of its own."""
        file = self._file
        views = _views(file, batch, buffer)
        whole: list[tuple[torch.Tensor, plan.Piece]] = []
        cut: list[tuple[torch.Tensor, plan.Piece]] = []
        for view, piece in zip(views, batch.pieces, strict=True):
            shape = file.reader.describe(piece.number)[1]
            (whole if list(view.shape) == shape else cut).append((view, piece))
        # The device that is current is a matter of each thread.
        with torch.cuda.device(buffer.device) if buffer.is_cuda else contextlib.nullcontext():
            if whole:
                file.fill([view for view, _ in whole], [piece.number for _, piece in whole])
            if cut:
                sliced = file.sliced([(piece.number, piece.ranges) for _, piece in cut])
                sliced.fill([view for view, _ in cut], range(len(cut)))
            if buffer.is_cuda:
                torch.cuda.current_stream().synchronize()

    def _deliver(self, batch: plan.Batch, buffer: torch.Tensor) -> None:
        """Put what this member wants of a batch where it belongs."""
        views = _views(self._file, batch, buffer)
        for view, piece in zip(views, batch.pieces, strict=True):
            tensor = self._tensors.get(piece.number)
            if tensor is None:
                continue
            for box in self._wanted.part(piece.number).boxes:
                common = plan.overlap(piece.ranges, box.ranges)
                if common is None:
                    continue
                source = view[tuple(slice(*ends) for ends in common[0])]
                to = box.of_part(tensor.detach())[tuple(slice(*ends) for ends in common[1])]
                to.copy_(source)


def _wish(wanted: Wanted, numbers: Sequence[int]) -> Wish:
    """Return which rows of tensors this member wants."""
    shapes = (shape for _, shape in wanted.file.reader.describe_all(numbers))

    def rows(number: int, shape: Sequence[int]) -> tuple[int, int, int]:
        if not shape:
            return 0, 1, 1
        first, end = wanted.part(number).rows() if number in wanted.parts else (0, shape[0])
        return first, end, shape[0]

    return Wish.of((n, *rows(n, shape)) for n, shape in zip(numbers, shapes, strict=True))


def _merged(
    members: Members,
    file: TensorFile,
    mine: Wish,
    told: Sequence[tuple[bytes, Table]],
    *,
    whole: bool,
) -> Merged:
    """Return what all members want. Each different structure travels once."""
    tables: dict[bytes, list[tuple[int, Table]]] = {}
    for rank, (digest, table) in enumerate(told):
        tables.setdefault(digest, []).append((rank, table))
    structures = [mine.structure]
    if len(tables) > 1:
        firsts = [of_structure[0][0] for of_structure in tables.values()]
        sent = members.tell(mine.structure.encoded() if members.rank in firsts else b"")
        structures = [Structure.decoded(sent[rank]) for rank in firsts]
    every = range(len(file))
    in_one_piece = every if whole else file.strided(every)
    wishes = list(zip(structures, tables.values(), strict=True))
    return merged(wishes, len(file), in_one_piece, (members.rank, members.size))


def _fill_alone(wanted: Wanted, tensors: Mapping[int, torch.Tensor]) -> None:
    """Fill tensors with what this member alone wants, without the others."""
    file = wanted.file
    file.reader.limit_memory(file.memory_limit)
    places = {number: tensors[number] for number in wanted.numbers}
    if not places:
        return
    if file.dtype is None:
        wanted.fill(places)
        return
    # Tensors to be cast are loaded a few at a time.
    most = file.hold(_CAST_BYTES, wanted.numbers, file.reader.memory_len) // 2
    for numbers in in_batches(wanted.numbers, file.reader.memory_len, most):
        some = Wanted(file, numbers, wanted.parts)
        for number, tensor in some.load(lambda number: places[number].device).items():
            places[number].detach().copy_(tensor)


def made_for(wanted: Wanted, device_of: Callable[[int], torch.device]) -> dict[int, torch.Tensor]:
    """Return new tensors for what is wanted.

    Raises:
        MemoryError: There is not enough on the host.
        torch.OutOfMemoryError: There is not enough on a device.

    """
    made = {}
    for number in wanted.numbers:
        dtype = cast_dtype(dtype_of(wanted.file.reader.describe(number)[0]), wanted.file.dtype)
        shape, device = wanted.part(number).shape, device_of(number)
        try:
            made[number] = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            if device.type != "cpu":
                raise
            raise MemoryError(f"tensor {wanted.file.reader.name(number)!r}: {error}") from error
    return made


def _wanted(file: TensorFile, number: int, rows: tuple[int, int], whole: bool) -> plan.Wanted:
    dtype, shape, _ = file.reader.describe(number)
    whole = whole or file.is_strided(number)
    return plan.Wanted(number, tuple(shape), dtype_of(dtype).itemsize, rows, whole)


def _views(file: TensorFile, batch: plan.Batch, buffer: torch.Tensor) -> list[torch.Tensor]:
    views = []
    for piece in batch.pieces:
        shape = tuple(stop - start for start, stop in piece.ranges)
        dtype = dtype_of(file.reader.describe(piece.number)[0])
        data = buffer.narrow(0, piece.start, piece.nbytes)
        views.append(data.view(dtype).view(shape))
    return views
