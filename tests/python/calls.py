"""A file on a server that stalls, for tests of calls that wait."""

import threading

import pytest
import tensorizer
import torch

MB = 1 << 20
TENSORS = {f"t{n}": torch.full((MB // 4,), float(n)) for n in range(8)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("calls") / "f.tensors"
    tensorizer.save(TENSORS, path)
    return path.read_bytes()


@pytest.fixture(autouse=True)
def settings(no_settings_of_the_machine, monkeypatch):
    monkeypatch.setenv("TENSORIZER_STALL_SECONDS", "60")


@pytest.fixture
def moto_keys(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hu5hw0rd")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def stalls(number, start, end):
    """Let the file be opened, and send only a part of what follows."""
    return None if number == 0 else ("stall", 100_000)


def in_thread(work):
    """Run some work on a thread; return the thread, and the list that gets its error."""
    errors = []

    def run():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors
