"""Loading by a group of ranks: every byte is fetched by one, and all end alike."""

import contextlib
import re

import pytest
import tensorizer
import torch
from conftest import ROOT
from ranks import groups
from scripted import FaultServer, Relay

FORMATS = ["tensors", "enc.tensors", "safetensors", "index", "pt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same tensors in every format."""
    folder = tmp_path_factory.mktemp("group")
    groups.write(folder)
    return folder


def test_every_format(ranks, folder):
    ranks.run("groups.every_format", 3, folder, FORMATS)


def test_ranks_may_request_different_tensors(ranks, folder):
    ranks.run("wants.other", 4, folder, FORMATS)


@pytest.mark.parametrize(
    "program", ["many_batches", "local_files", "subgroups", "two_threads", "again"]
)
def test_groups(ranks, folder, program):
    ranks.run(f"groups.{program}", 4, folder)


def test_tensors_come_one_by_one_in_every_format(ranks, folder):
    ranks.run("one_by_one.every_format", 3, folder, FORMATS)


def test_ranks_take_other_tensors_one_by_one(ranks, folder):
    ranks.run("one_by_one.other_wants", 2, folder)


def test_a_rank_that_closes_its_iterator_ends_those_of_the_others(ranks, folder):
    assert ranks.run("one_by_one.closed_early", 3, folder) == ["GroupError"] * 3


def test_an_iterator_that_another_thread_closes_says_so(ranks, folder):
    own, other = ranks.run("one_by_one.closed_by_another_thread", 2, folder, 10)
    assert own == [["ClosedError", "the iterator was closed by another thread"]] * 10
    assert [one[0] for one in other] == ["GroupError"] * 10
    assert all("rank 0 of the group has closed its iterator" in one[1] for one in other)


def test_a_time_limit_is_no_failure_of_the_group(ranks, folder):
    (folder / "late").unlink(missing_ok=True)
    assert ranks.run("one_by_one.time_limit", 2, folder)[0] == ["TimeoutError", True]
    (folder / "late").unlink()
    found = ranks.run("one_by_one.slow_rank", 2, folder)
    assert found == [["TimeoutError", True], ["GroupError"]]


def test_iterators_of_a_local_file_do_not_wait_for_each_other(ranks, folder):
    ranks.run("one_by_one.local_files", 2, folder)


def test_more_ranks_make_no_more_collectives(ranks, tmp_path):
    tensorizer.save({"a": torch.ones(3), "b": torch.zeros(5)}, tmp_path / "tiny.tensors")
    few, many = (ranks.run("groups.collectives", size, tmp_path) for size in (2, 5))
    assert few == [few[0]] * 2 and many == [few[0]] * 5
    of_load, of_local, of_answers = few[0]
    # The file that the first one has opened, whether all have opened the same, what they want,
    # whether they are ready; of the only block, whether all have read, and its bytes; the end.
    assert of_load == 7
    # The first call of all, by which the members connect.
    assert of_local == 1 + 3
    assert of_answers == [1, 2, 2]


def test_one_rank_compares_hashes(ranks, folder):
    ranks.run("groups.verifying", 4, folder)


def test_a_rank_receives_what_it_wants_with_others_and_nothing_else(ranks, folder):
    found = zip(*ranks.run("groups.received", 4, folder), strict=True)
    of_rows, of_names, of_pairs, of_all, of_columns, of_columns_in_one_piece, of_long_rows = found
    assert of_rows == of_names == (0.0,) * 4
    # One rank of each pair, or of all, fetches a batch, which has a header.
    for shares, parts in ((of_pairs, 2), (of_all, 1)):
        assert max(shares) <= 1.1
        assert sum(shares) == pytest.approx(4 - parts, rel=0.1)
    # Each rank fetches a quarter of its columns itself, and batches have headers.
    assert min(of_columns) > 0.7 and max(of_columns) <= 1.1
    # One rank fetches the tensor that is compared with its hash.
    assert sorted(of_columns_in_one_piece) == pytest.approx([0, 1, 1, 1], rel=0.1)
    assert of_long_rows == (0.0,) * 4


@pytest.mark.parametrize("world", [12, pytest.param(48, marks=pytest.mark.long)])
def test_many_ranks_take_few_descriptors(ranks, tmp_path, world):
    tensorizer.save({"a": torch.arange(96_000).view(500, 192)}, tmp_path / "few.tensors")
    found = ranks.run("groups.descriptors", world, tmp_path, 160 + 2 * world)
    of_rows, of_columns = zip(*found, strict=True)
    # The first rank runs the store of torch's group, and gathers the answers of all.
    assert of_rows[0] <= 16 + 2 * world
    assert max(of_rows[1:]) <= 16, of_rows
    # Ranks that load columns have connections to each other.
    assert max(of_columns[1:]) <= 16 + world - 1, of_columns


def test_connections_are_kept_from_load_to_load(ranks, folder):
    # A load that fails at one rank keeps them; an iterator that is not at its end has its own.
    assert ranks.run("groups.connections", 3, folder) == [[1, 1, 2]] * 3


def test_other_collectives_of_the_group_go_on(ranks, folder):
    assert min(ranks.run("groups.beside_others", 2, folder)) > 0


def test_a_call_by_a_rank_outside_the_group_is_refused(ranks, folder):
    wrong = ["ValueError", "this process is not a member of the process group of this call"]
    assert ranks.run("groups.alone", 2, folder) == [wrong] * 2


@pytest.fixture
def addresses(folder, nginx, moto):
    found = []
    for name in ("g.tensors", "g.safetensors", "g.pt"):
        nginx.root.joinpath(name).write_bytes((folder / name).read_bytes())
        moto.client().upload_file(str(folder / name), "bucket", f"group/{name}")
        found += [f"{nginx.http}/{name}", f"s3://bucket/group/{name}"]
    return found


def test_addresses_and_streams(ranks, addresses, moto):
    ranks.run("groups.from_servers", 2, addresses, env=moto.settings())


#: 28 MiB, more than one block of three ranks, of which each tensor has its number as the value of
#: all elements.
COUNT, BYTES = 14, 28 << 20


def traffic(path):
    """Save them; return the most bytes that a group may fetch."""
    tensorizer.save({f"w{n}": torch.full((1024, 512), float(n)) for n in range(COUNT)}, path)
    return 1.02 * path.stat().st_size


def test_every_byte_is_fetched_once(ranks, nginx):
    """Three ranks fetch at most 1.02 files over HTTP; two that load alone fetch two files."""
    for ending in ("tensors", "safetensors"):
        path = nginx.root / f"traffic.{ending}"
        most = traffic(path)
        ranks.run("groups.traffic", 3, f"{nginx.http}/{path.name}", COUNT, False)
        assert BYTES <= nginx.sent(path.name) <= most
    alone = nginx.root / "alone.tensors"
    alone.hardlink_to(nginx.root / "traffic.tensors")
    ranks.run("groups.traffic_alone", 2, f"{nginx.http}/{alone.name}")
    assert nginx.sent(alone.name) >= 2 * BYTES


def test_iterators_fetch_every_byte_once(ranks, nginx):
    path = nginx.root / "one.tensors"
    most = traffic(path)
    ranks.run("one_by_one.traffic", 3, f"{nginx.http}/{path.name}", COUNT)
    assert BYTES <= nginx.sent(path.name) <= most


def test_iterators_hold_their_buffer_and_no_more(ranks, nginx):
    path = nginx.root / "held.tensors"
    # 48 MiB for each rank.
    for columns, count in ((False, 24), (True, 48)):
        tensorizer.save({f"w{n}": torch.full((512, 1024), float(n)) for n in range(count)}, path)
        found = ranks.run("one_by_one.memory", 2, f"{nginx.http}/held.tensors", 8 << 20, columns)
        # A tensor that is handed out belongs to its holder; the readers have buffers too.
        assert max(found) <= (8 + 2 + 24) << 20, [one >> 20 for one in found]


def test_every_byte_is_fetched_once_from_s3(ranks, moto, tmp_path):
    path = tmp_path / "traffic.tensors"
    most = traffic(path)
    moto.client().upload_file(str(path), "bucket", "group/traffic.tensors")
    with Relay(moto.host) as relay:
        env = moto.settings(relay.host)
        ranks.run("groups.traffic", 2, "s3://bucket/group/traffic.tensors", COUNT, False, env=env)
        assert BYTES <= relay.sent <= most


def test_the_examples_of_the_document(nginx, run_script):
    """In the folder of the server."""
    text = (ROOT / "docs/how-to/distributed.md").read_text()
    blocks = re.findall(r'```python title="example.py"\n(.+?)```', text, re.DOTALL)
    assert len(blocks) == 5 and "https://models.example" in text
    example = "\n".join(blocks).replace("https://models.example", nginx.http)
    (nginx.root / "example.py").write_text(example)
    run_script(nginx.root / "example.py")
    saved = tensorizer.load(nginx.root / "saved.tensors")
    for name, tensor in tensorizer.load(nginx.root / "model.safetensors").items():
        assert torch.equal(saved[name], tensor)


# Errors, and ranks that are lost


@pytest.fixture(scope="module")
def failing(folder, tmp_path_factory):
    """Files beside it of which something is wrong."""
    data = bytearray((folder / "g.tensors").read_bytes())
    data[data.index(groups.large()["cube"].numpy().tobytes()) + 1000] ^= 1
    (folder / "damaged.tensors").write_bytes(data)
    (folder / "text").write_text("no file of tensors " * 100)
    tensorizer.save({"rows": torch.zeros(3)}, folder / "other.tensors")
    huge = torch.empty(1 << 46, device="meta")
    tensorizer.save(
        {"small": torch.zeros(3), "huge": huge}, folder / "huge.tensors", allow_meta=True
    )
    return folder


def test_an_error_of_one_is_the_error_of_all(ranks, failing):
    found = ranks.run("lost.errors", 4, failing)
    kinds = {
        "name": "KeyError", "filter": "OSError", "slice": "IndexError", "out": "ValueError",
        "arguments": "ValueError", "file": "FileNotFoundError", "first file": "FileNotFoundError",
        "other file": "ValueError", "format": "FormatError", "key": "CryptographyError",
        "no key": "CryptographyError", "hash": "HashMismatchError", "reader": "ValueError",
        "one hash": "HashMismatchError", "device": "RuntimeError", "memory": "MemoryError",
    }  # fmt: skip
    assert found[0].keys() == kinds.keys()
    for name, kind in kinds.items():
        said = [of_rank[name] for of_rank in found]
        assert said == [said[0]] * 4, name
        assert said[0] is not None and said[0][0] == kind, (name, said[0])


def test_an_error_of_one_ends_the_iterators_of_all(ranks, failing):
    found = ranks.run("one_by_one.errors", 3, failing)
    kinds = {
        "name": "KeyError", "slice": "IndexError", "file": "FileNotFoundError",
        "hash": "HashMismatchError", "progress": "OSError", "order": "ValueError",
    }  # fmt: skip
    for name, kind in kinds.items():
        said = [of_rank[name] for of_rank in found]
        assert said == [said[0]] * 3, name
        assert said[0] is not None and said[0][0] == kind, (name, said[0])
    kinds = [of_rank["interrupt"][0] for of_rank in found]
    assert kinds == ["GroupError", "KeyboardInterrupt", "GroupError"]


def test_iterators_of_a_rank_that_is_killed_end_with_an_error(ranks, folder):
    found = ranks.start("one_by_one.killed", 3, folder)
    assert found[1] == {"signal": 9, "late": False, "stopped": False}
    for rank in (0, 2):
        kind, message, seconds = found[rank]["result"]
        assert kind == "GroupError"
        assert message.startswith("rank 1 of the group is gone")
        # The time-out is 60 s.
        assert seconds < 30


def test_a_server_that_fails_for_one_rank(ranks, failing, tmp_path):
    path = tmp_path / "f.tensors"
    tensorizer.save({f"t{n}": torch.full((512, 512), float(n)) for n in range(12)}, path)
    data = path.read_bytes()
    scripts = {
        "never": lambda number, *_: ("status", 403),
        "later": lambda number, *_: ("status", 403) if number else None,
        "changed": lambda number, *_: ("etag", '"two"') if number else None,
    }
    with contextlib.ExitStack() as opened:
        well = opened.enter_context(FaultServer(data))
        servers = {}
        for name, script in scripts.items():
            bad = opened.enter_context(FaultServer(data, script))
            servers[name] = [well.url, bad.url, well.url, well.url]
        found = ranks.run("lost.servers_that_fail", 4, failing, servers)
    for name, kind in {"never": "PermissionError", "later": "PermissionError",
                       "changed": "OSError"}.items():  # fmt: skip
        said = [of_rank[name] for of_rank in found]
        assert said == [said[0]] * 4, name
        assert said[0] is not None and said[0][0] == kind, (name, said[0])
        assert servers[name][1] in said[0][1]


def test_errors_during_an_exchange_are_raised_at_all_ranks(ranks, folder):
    found = ranks.run("lost.errors_on_the_way", 4, folder)
    told = ["OSError", "[Errno 5] Input/output error: 'somewhere'"]
    for name, at in {"pair": 1, "parts": 1, "read": 1, "first": 1, "delivery": 3, "read columns": 2,
                     "pack": 2, "columns": 1}.items():  # fmt: skip
        said = [of_rank[name] for of_rank in found]
        assert [one and one[:2] for one in said] == [told] * 4, name
        if hasattr(BaseException, "add_note"):
            notes = [None if rank == at else [f"rank {at} of the group failed"]
                     for rank in range(4)]  # fmt: skip
            assert [one[2] for one in said] == notes
    # The text of an exception that cannot be pickled is told to the other ranks.
    odd = [of_rank["odd"][:2] for of_rank in found]
    other = ["GroupError", "rank 1 of the group failed: Odd: one and two"]
    assert odd == [other, ["Odd", "one and two"], other, other]


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_cannot_read(ranks, folder, world):
    said = ["OSError", "[Errno 5] Input/output error: 'somewhere'"]
    assert ranks.run("lost.failing_reads", world, folder, 8) == [[said] * 8] * world


def lost(run, world, how, turn, wait=60):
    """Lose a rank at a place that changes from turn to turn; return what the others say."""
    ranks, folder = run
    place = ("_read", "_packed", "inside")[turn % 3]
    # The first rank hosts the store of the group.
    victim = turn % world
    where = (place, (turn // 2) % 3, (turn // 3) % 2 and place != "inside")
    found = ranks.start("lost.killed", world, folder, how, victim, where, wait)
    assert found[victim] == {"signal": 9, "late": False, "stopped": how == "SIGSTOP"}
    others = [one["result"] for rank, one in enumerate(found) if rank != victim]
    for kind, message, _, trace in others:
        assert kind == "GroupError", trace
        gone = f"rank {victim} of the group is gone", "the process that hosts the store"
        assert message.startswith(gone[victim == 0]), (turn, trace)
    return others


EVERY_PLACE = [pytest.param(world, range(12), marks=pytest.mark.long) for world in (2, 4)]


@pytest.mark.parametrize(("world", "turns"), [(2, range(6)), (4, range(2, 6)), *EVERY_PLACE])
def test_a_rank_that_is_killed(ranks, folder, world, turns):
    for turn in turns:
        for _, _, seconds, _ in lost((ranks, folder), world, "SIGKILL", turn):
            # The time-out is 60 s.
            assert seconds < 30


@pytest.mark.parametrize(("world", "turns"), [(2, [1]), (4, [0, 3]), *EVERY_PLACE])
def test_a_stopped_rank_ends_the_call_at_all_others(ranks, folder, world, turns):
    for turn in turns:
        # The others would wait for the store of one that is stopped.
        for _, _, seconds, _ in lost((ranks, folder), world, "SIGSTOP", turn, 3):
            assert seconds < 25


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_missing_rank_ends_the_call_at_all_others(ranks, folder, how):
    found = ranks.start("lost.killed_before", 4, folder, how)
    for rank in (0, 1, 3):
        kind, message, seconds = found[rank]["result"]
        assert kind == "GroupError"
        assert "rank 2 did not come within 0:00:0" in message
        assert 2 < seconds < 25


@pytest.mark.parametrize(("world", "turns"), [(2, 18), (4, 12)])
def test_interrupts_of_one_rank_end_all(ranks, folder, world, turns):
    found = list(zip(*ranks.run("lost.interrupted", world, folder, turns), strict=True))
    turns = [[outcome for outcome, _ in turn] for turn in found]
    for number, turn in enumerate(turns):
        others = [one for rank, one in enumerate(turn) if rank != number % world]
        # At the very end of a call some ranks have all that they need.
        assert set(others) <= {"done", "told"}, turn
        assert turn[number % world] in ("done", "interrupted"), turn
    assert sum("interrupted" in turn for turn in turns) >= len(turns) // 4
    assert sum(turn.count("told") == world - 1 for turn in turns) >= len(turns) // 4
    # None waits for the time-out, unless this comes before the first line of the call.
    assert sum(late for turn in found for _, late in turn) <= 3


@pytest.mark.parametrize(
    ("world", "step"), [(2, 13), (4, 43), pytest.param(2, 1, marks=pytest.mark.long)]
)
def test_an_interrupt_at_any_line_ends_the_call_at_all_ranks(ranks, folder, world, step):
    """At one of so many lines; connections that are not open are no reason to wait."""
    program = "lost.interrupted_at_lines"
    found = list(zip(*ranks.run(program, world, folder, step), strict=True))
    for turn, of_ranks in enumerate(found[:-1]):
        outcomes = [outcome for outcome, _ in of_ranks]
        assert outcomes.pop(turn % world) == "interrupted", of_ranks
        assert set(outcomes) <= {"done", "told"}, of_ranks
        # The time-out is 10 s.
        assert max(seconds for _, seconds in of_ranks) < 8, of_ranks
    assert {outcome for outcome, _ in found[-1]} == {"done"}
    assert len(found) * step > 200


def test_an_interrupt_while_connecting_ends_the_call_at_all_ranks(ranks, folder):
    """All ranks wait for each other's connections: it connects first, and is interrupted then."""
    found = ranks.run("lost.connecting", 4, folder)
    assert found[0][0] == "KeyboardInterrupt"
    for kind, message, seconds in found[1:]:
        assert kind == "GroupError"
        assert message.startswith("rank 0 of the group failed: KeyboardInterrupt")
        # The time-out is 60 s.
        assert seconds < 30


def test_interrupts_of_a_rank_that_waits_for_others(ranks, folder):
    found = ranks.run("lost.late", 4, folder)
    assert found[0][0] == "KeyboardInterrupt"
    for kind, message, _ in found[1:]:
        assert kind == "GroupError"
        assert message.endswith("its group: rank 0 was interrupted")
    # The time-out is 60 s, and the others come when the call of the first has ended.
    assert max(seconds for *_, seconds in found) < 30


def test_ranks_that_have_opened_two_versions_of_a_folder(ranks, tmp_path):
    said = "rank 1 of the group has opened another version of .*model.safetensors.index.json than"
    found = ranks.run("groups.two_versions", 2, str(tmp_path))
    assert [kind for kind, _ in found] == ["ValueError"] * 2, found
    for _, text in found:
        assert re.match(said, text)
