"""The fixture of the tests on the emulated CUDA."""

import os

import emulated
import pytest


@pytest.fixture(autouse=True)
def emulator():
    """Give the emulator, which is as it was after the test."""
    if not emulated.PRESENT:
        why = "this process has no emulated CUDA: run make test-cuda"
        if os.environ.get("REQUIRE_CUDA") == "1":
            pytest.fail(why)
        pytest.skip(why)
    yield emulated
    emulated.heal()
    emulated.delay(int(os.environ.get("FAKE_CUDA_DELAY_US", "200")) / 1e6)
