"""Ranks of torch.distributed: processes that run one function of the folder ``ranks`` together.

Run as a program it forks them, from a process that has imported torch once. What each returns, or
the text of what it raises, comes back by rank.
"""

import contextlib
import importlib
import json
import multiprocessing.util
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

#: Seconds that ranks may take together.
TIMEOUT = 60


class Ranks:
    """Starts processes for each call; ``env`` is what all get besides.

    They do without the credentials and proxies of whoever runs the tests.
    """

    def __init__(self, env=None):
        hidden = ("AWS_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        own = {name: value for name, value in os.environ.items()
               if not name.upper().startswith(hidden)}  # fmt: skip
        own |= {"AWS_EC2_METADATA_DISABLED": "true", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=own | {"OMP_NUM_THREADS": "1"} | (env or {}),
        )

    def start(self, program, world, *args, env=None, by_rank=None, timeout=TIMEOUT):
        """Run ``module.function(*args)`` of ``ranks`` in so many processes, with more variables in
        ``env``, and in ``by_rank`` for some of them; return what became of each: its result, or an
        error's text, or a signal.
        """
        task = {
            "program": program,
            "world": world,
            "args": args,
            "env": env or {},
            "by_rank": {str(rank): more for rank, more in (by_rank or {}).items()},
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
        wrong = [one.get("error", str(one)) for one in found if "result" not in one]
        texts = "\n".join(dict.fromkeys(wrong))
        assert not wrong, f"{program}, {len(wrong)} of {world} ranks\n{texts}"
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
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(task["world"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(task["port"]),
        }
        os.environ |= task["env"] | task["by_rank"].get(str(rank), {})
        signal.signal(signal.SIGINT, signal.default_int_handler)

        module, name = task["program"].split(".")
        warnings.simplefilter("ignore")
        found["result"] = getattr(importlib.import_module(f"ranks.{module}"), name)(*task["args"])
    except BaseException:
        found["error"] = traceback.format_exc()
    (folder / f"{rank}.part").write_text(json.dumps(found, default=str))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    # Sockets by which tensors were sent to other processes lie in a folder.
    multiprocessing.util._run_finalizers()
    os._exit(0)  # threads of torch are not waited for


def _run(task):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        left, stopped = {}, set()
        for rank in range(task["world"]):
            child = os.fork()
            if child == 0:
                _rank(task, rank, folder)
            left[child] = rank
        found = [{} for _ in range(task["world"])]
        end = time.monotonic() + task["timeout"]
        late = False
        while left:
            late = late or time.monotonic() > end
            if late or left.keys() == stopped:
                for child in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            child, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if child == 0:
                time.sleep(0.01)
            elif os.WIFSTOPPED(status):
                stopped.add(child)
            elif os.WIFSIGNALED(status):
                found[left.pop(child)] = {
                    "signal": os.WTERMSIG(status),
                    "late": late,
                    "stopped": child in stopped,
                }
                stopped.discard(child)
            else:
                rank = left.pop(child)
                found[rank] = json.loads((folder / f"{rank}.json").read_text())
        return found


def main():
    # What all of them need, once.
    import ranks.common
    import ranks.dcp_models  # noqa: F401
    import torch._dynamo  # noqa: F401

    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what torch prints
        for line in sys.stdin:
            print(json.dumps(_run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
