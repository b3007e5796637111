"""Measurements in processes of their own, which are forked off one that has imported torch."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)


def preload(*modules: str) -> None:
    """Have all processes begin with these modules imported; the first process decides."""
    # The fork server ignores modules that it cannot import, and has only PYTHONPATH to find them.
    os.environ["PYTHONPATH"] = os.pathsep.join((HERE, *filter(None, sys.path[1:])))
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


def answer(
    pipe: multiprocessing.connection.Connection,
    given: tuple[dict[str, str], str | None, str, str, tuple],
) -> None:
    """Run as such a process: send the result, or the text of an error."""
    environment, packages, module, function, arguments = given
    os.environ.clear()
    os.environ.update(environment)
    if packages is not None:
        sys.path.insert(0, packages)
    # fastsafetensors imports tqdm, whose locks would otherwise leave named semaphores behind.
    multiprocessing.set_start_method("fork", force=True)
    try:
        pipe.send(getattr(importlib.import_module(module), function)(*arguments))
    except BaseException:
        pipe.send(traceback.format_exc())
    pipe.close()
    sys.stdout.flush()
    # Freeing memory is not part of what is measured.
    os._exit(0)


class Measurement:
    """A function that runs in a process of its own, with the environment of this one.

    Args:
        name: The name of what it measures, for messages.
        function: Its path, as ``module:function``.
        *arguments: The function's arguments. It returns a mapping, in which ``verified`` is True if
            the bytes were right.
        packages: A folder whose packages come before all others.

    """

    def __init__(
        self, name: str, function: str, *arguments: object, packages: str | None = None
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self._name = name
        self._receiver, sender = context.Pipe(duplex=False)
        given = (dict(os.environ), packages, *function.split(":"), arguments)
        self._process = context.Process(target=answer, args=(sender, given))
        self._process.start()
        sender.close()

    def result(self, timeout: float = 600) -> Mapping[str, object]:
        """Wait at most so many seconds for what it found.

        Raises:
            RuntimeError: If it failed, was too late, or found other bytes than were written.

        """
        try:
            ready = self._receiver.poll(timeout)
            found = self._receiver.recv() if ready else f"nothing after {timeout} seconds"
        except EOFError:
            self._process.join()
            found = f"ended with exit code {self._process.exitcode}"
        finally:
            self.close()
        if isinstance(found, str):
            raise RuntimeError(f"{self._name} failed:\n{found[-2000:]}")
        if not found["verified"]:
            raise RuntimeError(f"{self._name} loaded other bytes than were written")
        return found

    def close(self) -> None:
        """End the process, if it has not ended."""
        self._process.kill()
        self._process.join()
        self._receiver.close()
