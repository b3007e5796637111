"""Forget one call of the driver at a time, and see that a test notices: `make test-long`.

The emulated driver does nothing where FAKE_CUDA_MUTATE says so. Fails if a mutation survives, or
if the tests fail without one.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT / "tests/cuda/emulator"
#: Exit codes of pytest after a failed test, and of a process that was aborted or has crashed.
TEST_FAILED, CRASHES = 1, (-6, -11)
#: Exit code of build.sh if torch is no build for CUDA 13.
NO_CUDA_BUILD = 77


class Mutation(NamedTuple):
    """A call that is forgotten, and the test that notices."""

    what: str
    call: str
    test: str


GPU = "tests/python/gpu/test_cuda.py::test_"
STREAMS = "tests/cuda/test_streams.py::test_"
STORAGE = "tests/cuda/test_storage.py::test_"

MUTATIONS = [
    Mutation(
        "a load does not wait for what was begun on its memory",
        "cuStreamWaitEvent:own",
        GPU + "memory_that_is_still_being_written_is_not_overtaken",
    ),
    Mutation(
        "a save does not wait for what is being computed",
        "cuStreamWaitEvent:own",
        GPU + "a_save_waits_for_what_is_being_computed",
    ),
    Mutation(
        "the consumer's stream does not wait for the copies",
        "cuStreamWaitEvent:torch",
        GPU + "loaded_tensors_can_be_used_at_once_on_the_current_stream",
    ),
    Mutation(
        "the consumer's stream waits for one of two streams",
        "cuStreamWaitEvent:torch/2",
        STREAMS + "both_streams_of_a_load_are_waited_for",
    ),
    Mutation(
        "events are not recorded on our streams",
        "cuEventRecord:own",
        STREAMS + "pinned_memory_is_not_filled_again_while_it_is_copied",
    ),
    Mutation(
        "events are not recorded on the consumer's stream",
        "cuEventRecord:torch",
        GPU + "tensors_that_are_filled_in_place_are_read_before",
    ),
    Mutation(
        "pinned memory is filled again before its upload has ended",
        "cuEventQuery:upload",
        STREAMS + "pinned_memory_is_not_filled_again_while_it_is_copied",
    ),
    Mutation(
        "pinned memory is read before its download has ended",
        "cuEventQuery:download",
        GPU + "saves_are_the_same_bytes",
    ),
    Mutation(
        "a load that fails does not wait for its copies",
        "cuStreamSynchronize:upload",
        STREAMS + "a_load_that_fails_has_ended_its_copies",
    ),
    Mutation(
        "a save that fails does not wait for its copies",
        "cuStreamSynchronize:download",
        STREAMS + "a_save_that_fails_has_ended_its_copies",
    ),
    Mutation(
        "cuFile reads into new memory that is still in use",
        "cuEventQuery",
        STORAGE + "memory_is_not_read_into_while_it_is_used",
    ),
    Mutation(
        "cuFile reads into memory of the caller that is still in use",
        "cuStreamSynchronize:wait",
        STORAGE + "memory_of_the_caller_is_not_read_into_while_it_is_used",
    ),
    Mutation(
        "a load goes on within the capture of a graph",
        "cuStreamIsCapturing",
        GPU + "a_graph_that_is_captured_refuses_and_others_are_not_disturbed",
    ),
    Mutation(
        "calls spoil the capture of a graph by another thread",
        "cuThreadExchangeStreamCaptureMode",
        STREAMS + "a_load_does_not_disturb_a_capture_of_another_thread",
    ),
    Mutation(
        "a thread keeps the context that it has entered",
        "cuCtxPopCurrent",
        STREAMS + "a_call_leaves_nothing_behind",
    ),
    Mutation(
        "events are not destroyed",
        "cuEventDestroy",
        STREAMS + "events_that_are_given_up_are_destroyed",
    ),
    Mutation(
        "memory is unmapped while it is pinned",
        "cuMemHostUnregister",
        STREAMS + "a_call_leaves_nothing_behind",
    ),
    Mutation(
        "memory is not pinned",
        "cuMemHostRegister",
        STREAMS + "copies_are_those_of_pinned_memory",
    ),
]


def run(tests, mutation=""):
    """Run tests on the emulator; return how they ended, what they said and the seconds."""
    command = ["sh", EMULATOR / "run.sh", sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    begun = time.perf_counter()
    done = subprocess.run(
        [*command, "-q", "-x", "--tb=line", "--timeout=100", "--timeout-method=thread", *tests],
        cwd=ROOT,
        env=os.environ | {"REQUIRE_CUDA": "1", "FAKE_CUDA_MUTATE": mutation},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout, time.perf_counter() - begun


def main():
    """Print the table; return the process's exit status."""
    built = subprocess.run(["sh", EMULATOR / "build.sh", sys.executable]).returncode
    if built:
        return 0 if built == NO_CUDA_BUILD else built
    code, output, seconds = run(sorted({mutation.test for mutation in MUTATIONS}))
    if code:
        print(output, f"the tests fail without a mutation ({code})", sep="\n")
        return 1
    print(f"without a mutation, the tests pass ({seconds:.0f} s)\n")
    survivors = 0
    for what, call, test in MUTATIONS:
        code, output, seconds = run([test], call)
        caught = code in (TEST_FAILED, *CRASHES) and "Timeout" not in output
        survivors += not caught
        outcome = "caught by" if caught else f"SURVIVES ({code})"
        print(f"{what:58}  {call:34}  {outcome} {test.rpartition('/')[2]}  {seconds:.1f} s")
        if not caught:
            print(output)
    print(f"\n{len(MUTATIONS)} mutations, {survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
