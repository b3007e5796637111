"""Loading by the members of a process group: every byte is fetched by one of them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from .._types import Head
from ..group import plan
from ..group.exchange import BATCH_BYTES, Exchange, Shares, batch_bytes
from ..group.members import Members
from ..group.wishes import Merged, Structure, Table, Wish, merged
from ..tensors.exchange import cast_dtype, dtype_of
from .parts import Wanted
from .tensor_file import TensorFile, in_batches

#: Bytes of tensors that are held twice while they are cast.
_CAST_BYTES = 256 << 20
#: Of an encrypted tensor whole pieces of 2 MiB are read, also where a batch begins in one.
_ENCRYPTED_BATCH_BYTES = 8 * BATCH_BYTES


def open_together(members: Members, opened: Callable[[Sequence[Head]], TensorFile]) -> TensorFile:
    """Open a file at all members; the first one reads its index, for all of them.

    Args:
        members: Who opens it.
        opened: Opens it, with what the first member has learnt by that.

    Raises:
        ValueError: Members have opened different files.

    """
    mine: list[TensorFile] = []

    def first() -> Sequence[Head]:
        if members.rank == 0:
            mine.append(opened([]))
        return mine[0].heads if mine else []

    def others() -> TensorFile:
        if not mine:
            mine.append(opened(heads))
        return mine[0]

    try:
        _, (heads, *_) = members.together(first, lambda known: known)
        file, found = members.together(others, lambda file: (_digest(file), file.reader.uri))
        for rank, (digest, uri) in enumerate(found):
            if digest != found[0][0]:
                raise ValueError(
                    f"rank {rank} of the group has opened another file than rank 0: {uri} has "
                    f"other tensors than {found[0][1]}"
                )
    except BaseException:
        for file in mine:
            file.close()
        raise
    return file


def _digest(file: TensorFile) -> bytes:
    """Return what tells the tensors of a file from those of others."""
    reader, every = file.reader, range(len(file))
    digest = hashlib.sha256(repr((reader.pair_id, reader.offsets())).encode())
    for name, length, number in zip(reader.names(every), reader.data_lens(), every, strict=True):
        digest.update(repr((name, length, reader.describe(number))).encode())
    return digest.digest()


def is_read_by_each(members: Members, file: TensorFile) -> bool:
    """Tell whether members read a file each for themselves.

    They do where it is local to the machine that they all are on, whose page cache they share, and
    where it comes to one of them front to back.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text() if file.is_local and boot.exists() else None
    answers = members.tell((file.reader.seekable, machine))
    one_machine = machine is not None and all(found == machine for _, found in answers)
    return one_machine or not all(seekable for seekable, _ in answers)


def fill_together(
    members: Members, wanted: Wanted, tensors: Mapping[int, torch.Tensor], verify: str | None = None
) -> None:
    """Fill tensors, by number, with what this member wants; others may want other tensors.

    Raises:
        BaseException: What has failed here, or at another member.

    """
    file = wanted.file
    lens = file.reader.data_lens()
    numbers = [number for number in wanted.numbers if lens[number]]
    whole = (verify or file.verify) != "nothing"
    found = _merged(members, _wish(wanted, numbers), file, whole)
    alone = Wanted(file, [n for n in numbers if n in found.alone], wanted.parts)

    def fill_alone() -> None:
        # What has no data in the file takes no time.
        for number in wanted.numbers:
            if lens[number] == 0:
                tensors[number].detach().zero_()
        # What a hub publishes is compared before others wait for a batch of this member.
        if whole:
            file.read([], torch.device("cpu"), verify)
        _fill_alone(alone, tensors, verify)

    members.together(fill_alone)
    if found.shared:
        _fill_shared(members, wanted, tensors, verify, found.shared)


def _fill_shared(
    members: Members,
    wanted: Wanted,
    tensors: Mapping[int, torch.Tensor],
    verify: str | None,
    rows: Mapping[int, tuple[int, int]],
) -> None:
    """Fill tensors with what several members want, from batches that one of them fetches."""
    file = wanted.file
    whole = (verify or file.verify) != "nothing"
    all_wanted: list[plan.Wanted] = []

    def shared() -> Shares:
        all_wanted[:] = [_wanted(file, number, ends, whole) for number, ends in rows.items()]
        most = _ENCRYPTED_BATCH_BYTES if file.reader.encrypted else BATCH_BYTES
        total = sum(one.nbytes for one in all_wanted)
        longest = max((one.unit for one in all_wanted), default=0)
        least = file.least(_buffers_on(members, tensors), parts=True)
        return Shares.of(file.memory_limit, batch_bytes(total, members.size, most), longest, least)

    # Members may have limits of their own, and all cut the same batches.
    shares, lens_of_all = members.together(shared, lambda shares: shares.batch)

    def prepared() -> Exchange:
        file.reader.limit_memory(file.memory_limit, shares.beside)
        batches = plan.batches(all_wanted, members.size, min(lens_of_all))
        device = _buffers_on(members, tensors)
        somewhere = any(tensor.is_cuda for tensor in tensors.values())
        return Exchange(
            members,
            batches,
            device=device,
            pinned=device.type == "cpu" and somewhere,
            fetch=lambda batch, buffer: _fetch(file, batch, buffer, verify),
            deliver=lambda batch, buffer: _deliver(wanted, tensors, batch, buffer),
            stop=file.stop,
            at_once=shares.at_once,
        )

    exchange, _ = members.together(prepared)
    exchange.run()


def _wish(wanted: Wanted, numbers: Sequence[int]) -> Wish:
    """Return which rows of tensors this member wants."""
    shapes = (shape for _, shape in wanted.file.reader.describe_all(numbers))

    def rows(number: int, shape: Sequence[int]) -> tuple[int, int, int]:
        if not shape:
            return 0, 1, 1
        first, end = wanted.part(number).rows() if number in wanted.parts else (0, shape[0])
        return first, end, shape[0]

    return Wish.of((n, *rows(n, shape)) for n, shape in zip(numbers, shapes, strict=True))


def _merged(members: Members, mine: Wish, file: TensorFile, whole: bool) -> Merged:
    """Return what all members want. Each different structure travels once."""
    told = members.tell((mine.structure.digest(), mine.table))
    tables: dict[bytes, list[Table]] = {}
    for digest, table in told:
        tables.setdefault(digest, []).append(table)
    structures = [mine.structure]
    if len(tables) > 1:
        digests = [digest for digest, _ in told]
        firsts = [digests.index(digest) for digest in tables]
        sent = members.tell(mine.structure.encoded() if members.rank in firsts else b"")
        structures = [Structure.decoded(sent[rank]) for rank in firsts]
    in_one_piece = range(len(file)) if whole else file.strided(range(len(file)))
    wishes = zip(structures, tables.values(), strict=True)
    return merged(wishes, len(file), list(in_one_piece))


def _fill_alone(wanted: Wanted, tensors: Mapping[int, torch.Tensor], verify: str | None) -> None:
    """Fill tensors with what this member alone wants, without the others."""
    file = wanted.file
    file.reader.limit_memory(file.memory_limit)
    places = {number: tensors[number] for number in wanted.numbers}
    if file.dtype is None:
        if places:
            wanted.fill(places, verify)
        return
    # Tensors to be cast are loaded a few at a time.
    for numbers in in_batches(wanted.numbers, file.reader.memory_len, _CAST_BYTES):
        some = Wanted(file, numbers, wanted.parts)
        for number, tensor in some.load(lambda number: places[number].device, verify).items():
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


def _buffers_on(members: Members, tensors: Mapping[int, torch.Tensor]) -> torch.device:
    """Return where batches are exchanged."""
    device = torch.device("cpu")
    if members.on_device:
        here = [tensor.device for tensor in tensors.values() if tensor.is_cuda]
        device = here[0] if here else torch.device("cuda", torch.cuda.current_device())
    return device


def _views(file: TensorFile, batch: plan.Batch, buffer: torch.Tensor) -> list[torch.Tensor]:
    views = []
    for piece in batch.pieces:
        shape = tuple(stop - start for start, stop in piece.ranges)
        dtype = dtype_of(file.reader.describe(piece.number)[0])
        data = buffer.narrow(0, piece.start, piece.nbytes)
        views.append(data.view(dtype).view(shape))
    return views


def _fetch(file: TensorFile, batch: plan.Batch, buffer: torch.Tensor, verify: str | None) -> None:
    """Read a batch into a buffer, on a thread of its own."""
    views = _views(file, batch, buffer)
    whole: list[tuple[torch.Tensor, plan.Piece]] = []
    cut: list[tuple[torch.Tensor, plan.Piece]] = []
    for view, piece in zip(views, batch.pieces, strict=True):
        shape = file.reader.describe(piece.number)[1]
        (whole if list(view.shape) == shape else cut).append((view, piece))
    # The device that is current is a matter of each thread.
    with torch.cuda.device(buffer.device) if buffer.is_cuda else contextlib.nullcontext():
        if whole:
            file.fill([view for view, _ in whole], [piece.number for _, piece in whole], verify)
        if cut:
            sliced = file.sliced([(piece.number, piece.ranges) for _, piece in cut])
            sliced.fill([view for view, _ in cut], range(len(cut)), verify)
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()


def _deliver(
    wanted: Wanted, tensors: Mapping[int, torch.Tensor], batch: plan.Batch, buffer: torch.Tensor
) -> None:
    """Put what this member wants of a batch where it belongs."""
    for view, piece in zip(_views(wanted.file, batch, buffer), batch.pieces, strict=True):
        tensor = tensors.get(piece.number)
        if tensor is None:
            continue
        for box in wanted.part(piece.number).boxes:
            common = plan.overlap(piece.ranges, box.ranges)
            if common is None:
                continue
            source = view[tuple(slice(*ends) for ends in common[0])]
            to = box.of_part(tensor.detach())[tuple(slice(*ends) for ends in common[1])]
            to.copy_(source)
