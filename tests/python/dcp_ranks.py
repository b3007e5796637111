"""Ranks of torch.distributed: processes that run one function of ``ranks`` together.

Run as a program it forks them, from a process that has imported torch once. What each returns, or
the text of what it raises, comes back by rank.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from servers import free_port

#: Seconds that ranks may take together, and that a rank waits for another.
TIMEOUT, GLOO_TIMEOUT = 60, 15


class Ranks:
    """Starts processes for each call; ``env`` is what all get besides."""

    def __init__(self, env=None):
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
        )

    def start(self, program, world, *args, env=None, timeout=TIMEOUT):
        """Run ``module.function(*args)`` of ``ranks`` in so many processes, where ``env`` has more
        variables by rank; return what became of each: its result, an error's text, or a signal.
        """
        task = {
            "program": program,
            "world": world,
            "args": args,
            "env": {str(rank): more for rank, more in (env or {}).items()},
            "timeout": timeout,
            "port": free_port(),
        }
        self.process.stdin.write(json.dumps(task, default=str) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the process that starts ranks has ended"
        return json.loads(line)

    def run(self, program, world, *args, **options):
        """Do the same where all are to succeed; return the results by rank."""
        found = self.start(program, world, *args, **options)
        for rank, one in enumerate(found):
            assert "result" in one, f"rank {rank} of {world}: {one.get('error') or one}"
        return [one["result"] for one in found]

    def stop(self):
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


def _rank(task, rank, folder):
    """Be one of the ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.setsid()  # so that it can be killed with what it starts
    found = {}
    try:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(task["world"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(task["port"]),
        }
        os.environ |= task["env"].get(str(rank), {})
        module, name = task["program"].split(".")
        warnings.simplefilter("ignore")
        found["result"] = getattr(importlib.import_module(f"ranks.{module}"), name)(*task["args"])
    except BaseException:
        found["error"] = traceback.format_exc()
    (folder / f"{rank}.part").write_text(json.dumps(found))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    # Gloo's threads, and what a save in the background left, are not waited for.
    os._exit(0)


def _run(task):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        left = {}
        for rank in range(task["world"]):
            child = os.fork()
            if child == 0:
                _rank(task, rank, folder)
            left[child] = rank
        found = [{} for _ in range(task["world"])]
        end = time.monotonic() + task["timeout"]
        killed = False
        while left:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                if time.monotonic() > end and not killed:
                    killed = True
                    for other in left:
                        os.kill(other, signal.SIGKILL)
                time.sleep(0.01)
                continue
            rank = left.pop(child)
            if os.WIFSIGNALED(status):
                found[rank] = {"signal": os.WTERMSIG(status), "late": killed}
            else:
                found[rank] = json.loads((folder / f"{rank}.json").read_text())
        return found


def main():
    # What all of them need, once.
    import ranks.dcp_models  # noqa: F401
    import torch._dynamo  # noqa: F401  # which DTensor imports when it is first used

    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what torch prints
        for line in sys.stdin:
            print(json.dumps(_run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
