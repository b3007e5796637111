"""Two jobs of two ranks each that save into one folder at once, of which some are killed.

What is there afterwards is a whole checkpoint of one of them; a load meanwhile finds one, or says
which file is gone.
"""

import os
import random
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import assert_same
from ranks.dcp_failures import ROWS
from ranks.dcp_jobs import value_of
from servers import free_port
from tensorizer.distributed import Reader, Writer
from tensorizer.distributed.whole_tensors import WholeTensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

#: 1 MB of each rank; how often each job saves, and how long another process loads meanwhile.
COLUMNS, SAVES, SECONDS = 2500, 6, 0.4
#: The rounds, of which the first is without kills.
ROUNDS = 4


def environments(kills):
    """Return the variables of two jobs' ranks, and of a process that loads."""
    ports = [str(free_port()) for _ in range(2)]
    jobs = {}
    for number in range(4):
        job, rank = divmod(number, 2)
        jobs[number] = {"JOB": str(job), "RANK": str(rank), "WORLD_SIZE": "2",
                        "MASTER_PORT": ports[job]} | kills.get(number, {})  # fmt: skip
    return jobs | {4: {"JOB": "reader"}}


def possible(found, first, before):
    """Return the values of which one must be there, by what the ranks say that they have saved."""
    values, any_saved = set(), False
    for job in range(2):
        results = [one["result"]["saved"] for one in found[2 * job : 2 * job + 2]
                   if "result" in one]  # fmt: skip
        saved = max(results, key=len)
        last = saved[-1] if saved else None
        values |= {last} - {None}
        following = (first + 1000 * job - 1 if last is None else last) + 1
        # The rank that was killed may have saved one more than it has told.
        values |= {following, following + 1} if len(saved) < SAVES else set()
        any_saved = any_saved or bool(saved)
    return values if any_saved else values | {before}


def test_jobs_save_into_one_folder_and_ranks_are_killed(ranks, tmp_path):
    chance, folder = random.Random(11), tmp_path / "c"
    value, seconds, ended = None, 1.0, []
    for number in range(ROUNDS):
        first = 10_000 * (number + 1)
        victims = {} if number == 0 else {2 * job + chance.randrange(2) for job in range(2)}
        if number % 2:
            victims = {chance.choice(sorted(victims))}
        kills = {one: {"KILL_AFTER": str(chance.uniform(0, seconds))} for one in victims}
        if number == 0:
            # The reader needs a checkpoint from the beginning.
            dcp.save({"rows": rows(), "value": 0}, storage_writer=Writer(folder))
            value = 0
        found = ranks.start("dcp_jobs.save", 5, folder, COLUMNS, first, SAVES, SECONDS,
                            by_rank=environments(kills))  # fmt: skip
        for one in found:
            assert "result" in one or one.get("signal") == signal.SIGKILL, one
        if number == 0:
            results = [one["result"] for one in found[:4]]
            assert [one["error"] for one in results] == [None] * 4
            assert [len(one["saved"]) for one in results] == [SAVES] * 4
            seconds = max(one["seconds"] for one in results)
        loaded = found[4]["result"]
        ended += loaded["seen"]
        now = value_of(folder, COLUMNS)
        assert now in possible(found, first, value), (found, value)
        value = now
        check_all_ways(folder, value)
    assert len(set(ended)) > 2, "the process that loads has seen nothing change"
    dcp.save({"other": 1}, storage_writer=Writer(folder))
    assert len(os.listdir(folder)) == 2, os.listdir(folder)


def rows():
    return torch.zeros(2 * ROWS, COLUMNS)


def check_all_ways(folder, value):
    """Compare what the reader of a whole checkpoint finds with what torch's planner loads."""
    target = {"rows": rows(), "value": 0}
    dcp.load(target, storage_reader=Reader(folder, verify_hash=True))
    with WholeTensors(folder, verify_hash=True) as whole:
        assert whole.names == ["rows"]
        assert_same(next(whole.load(["rows"])), target["rows"])
    assert target["value"] == value
