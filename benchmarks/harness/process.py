"""Processes that measure, and what they measure: memory, bytes read, CPU seconds."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from harness.case import AbsentError

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
OLD_PYTHON = Path(os.environ.get("TENSORIZER_OLD_PYTHON", ROOT / ".venv-old/bin/python"))
CLOUDS = Path(os.environ.get("TENSORIZER_CLOUDS", ROOT / ".venv-clouds"))
#: Folders of packages that come first for some engines; s3fs needs another botocore than boto3,
#: and the read-ahead of safetensors a version that is not released.
SITES = {
    "old": sorted(OLD_PYTHON.parents[1].glob("lib/python*/site-packages")),
    "clouds": sorted(CLOUDS.glob("lib/python*/site-packages")),
    "s3fs": [Path(name) for name in [os.environ.get("BENCHMARK_S3FS")] if name],
    "prefetch": [Path(name) for name in [os.environ.get("BENCHMARK_PREFETCH")] if name],
}


def fresh(size: int) -> mmap.mmap:
    """Return new memory, advised to be backed by huge pages."""
    memory = mmap.mmap(-1, size + (4 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def have_memory(size: int) -> None:
    """Allocate, touch and free 2.5 times so many bytes, so that a measurement need not wait.

    A virtual machine returns memory to its host when it has been free for two seconds, and waits
    for it at the next touch: ten times as long as a load takes, in some rounds and not in others.
    """
    size = size * 5 // 2
    memory = fresh(size)
    for offset in range(0, size, 4096):
        memory[offset] = 1
    memory.close()


def status(field: str) -> int:
    """Return a size of this process in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field))


def bytes_read(field: str = "rchar") -> int:
    """Return the bytes that this process has read: "rchar" by calls, "read_bytes" from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def answer(
    pipe: multiprocessing.connection.Connection,
    environment: dict[str, str],
    function: Callable[..., Mapping[str, object]],
    arguments: tuple,
) -> None:
    """Call a function in a process of its own, and send the result or the text of an error."""
    os.environ.clear()
    os.environ.update(environment)
    # fastsafetensors imports tqdm, whose locks would otherwise leave named semaphores behind.
    multiprocessing.set_start_method("fork", force=True)
    try:
        pipe.send(function(*arguments))
    except AbsentError as error:
        pipe.send(error)
    except BaseException:
        pipe.send(traceback.format_exc())
    pipe.close()
    sys.stdout.flush()
    # Freeing memory is not part of what is measured.
    os._exit(0)


class Process:
    """A function in a process of its own, with the environment of this one and more."""

    def __init__(
        self, method: str, function: Callable[..., Any], *arguments: object, **more: str
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        self.receiver, sender = context.Pipe(duplex=False)
        given = (sender, dict(os.environ) | more, function, arguments)
        self._process = context.Process(target=answer, args=given)
        self._process.start()
        sender.close()

    def result(self, timeout: float) -> Any:
        """Wait at most so many seconds for what the function returns.

        Raises:
            AbsentError: The engine cannot run here.
            RuntimeError: The function failed or was too late.

        """
        try:
            ready = self.receiver.poll(timeout)
            found = self.receiver.recv() if ready else "no result in time"
        except EOFError:
            self._process.join()
            found = f"the process ended with exit code {self._process.exitcode}"
        finally:
            self.close()
        if isinstance(found, AbsentError):
            raise found
        if isinstance(found, str):
            raise RuntimeError(found[-2000:])
        return found

    def close(self) -> None:
        """End the process and those of its group; a rank has no group of its own."""
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.receiver.close()


def joined(rank: int, world: int, port: int, function: Callable[..., Any], rest: tuple) -> Any:
    """Join a group of gloo as one of its ranks, and call a function there."""
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)  # as with torchrun
    dist.init_process_group("gloo", rank=rank, world_size=world)
    found = function(*rest)
    dist.barrier()
    dist.destroy_process_group()
    return found


def ranks(world: int, function: Callable[..., Any], *arguments: object) -> list[Any]:
    """Call a function in ranks of a group of gloo, forked off this process; return all results.

    Raises:
        RuntimeError: A rank failed or was too late; the others are ended.

    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(world):
            started.append(Process("fork", joined, rank, world, port, function, arguments))
            stack.callback(started[-1].close)
        found, until = {}, time.monotonic() + 280
        while len(found) < world:
            left = {one.receiver: n for n, one in enumerate(started) if n not in found}
            # The first rank that fails may not be the first one, which would wait for it.
            ready = multiprocessing.connection.wait(left, max(0.0, until - time.monotonic()))
            for receiver in ready or left:
                found[left[receiver]] = started[left[receiver]].result(0)
        return [found[number] for number in range(world)]


def in_threads(count: int, work: Callable[[int], None]) -> float:
    """Run work in threads, numbered from 0; return the seconds until all have ended.

    Raises:
        Exception: The first error of a thread.

    """
    errors: list[Exception] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    return seconds
