"""Ranks of torch.distributed: forked processes that run one function of this folder together.

What each returns, or the text of what it raises, comes back by rank.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import connection

from processes import FOLDER, start_python
from servers import free_port

#: Seconds that ranks may take together.
TIMEOUT = 150
CODE = f"""
import json, sys
sys.path.insert(0, {FOLDER!r})
from ranks.being import be
be(json.loads(sys.argv[1]))
"""
#: Prefixes of variables that ranks run without: credentials and proxies of the machine.
HIDDEN = ("AWS_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
#: Variables that all of them have.
SETTINGS = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "MASTER_ADDR": "127.0.0.1",
}


def start(program, world, *args, env=None, by_rank=None, timeout=TIMEOUT):
    """Run ``module.function(*args)`` of this folder in so many processes, with more variables in
    ``env``, and in ``by_rank`` for some of them; return what became of each: its result, or an
    error's text, or a signal.
    """
    task = json.dumps({"program": program, "args": args}, default=str)
    port, by_rank = str(free_port()), by_rank or {}
    own = {name: text for name, text in os.environ.items() if not name.upper().startswith(HIDDEN)}
    own |= SETTINGS | {"MASTER_PORT": port, "WORLD_SIZE": str(world)} | (env or {})
    with contextlib.ExitStack() as opened:
        ranks, answers = [], []
        for rank in range(world):
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            answers.append(opened.enter_context(tempfile.TemporaryFile()))
            given = own | numbers | by_rank.get(rank, {})
            ranks.append(start_python(CODE, task, env=given, stdout=answers[-1]))
            opened.callback(ranks[-1].close)
        stopped, late = wait(ranks, timeout)
        return [
            became(rank, answer, rank in stopped, late)
            for rank, answer in zip(ranks, answers, strict=True)
        ]


def run(program, world, *args, **options):
    """Do the same where all are to succeed; return the results by rank."""
    found = start(program, world, *args, **options)
    wrong = [one.get("error", str(one)) for one in found if "result" not in one]
    texts = "\n".join(dict.fromkeys(wrong))
    assert not wrong, f"{program}, {len(wrong)} of {world} ranks\n{texts}"
    return [one["result"] for one in found]


def torchrun(world, script):
    """Run a script in its folder as users of torch do, with interpreters of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # torchrun leaves its logs in TMPDIR.
    env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(script.parent)}
    done = subprocess.run(
        [*command, f"--nproc-per-node={world}", script.name],
        cwd=script.parent, env=env, timeout=100, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-3000:]


def wait(ranks, timeout):
    """Wait until all have ended; kill them if they are late, or if those left have been stopped.

    Return those that had been stopped, and whether they were late.
    """
    end = time.monotonic() + timeout
    stopped, late = set(), False
    while left := [rank for rank in ranks if rank.poll() is None]:
        if connection.wait([rank.fork.sentinel for rank in left], 0.1):
            continue
        late = late or time.monotonic() > end
        stopped |= {rank for rank in left if rank.stopped}
        if late or stopped.issuperset(left):
            for rank in left:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
    return stopped, late


def became(rank, answer, stopped, late):
    """Return what has become of a rank."""
    if rank.returncode < 0:
        return {"signal": -rank.returncode, "late": late, "stopped": stopped}
    answer.seek(0)
    found = answer.read()
    return json.loads(found) if found else {"error": f"it ended with {rank.returncode}"}
