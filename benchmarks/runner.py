"""One run of an engine, in a process of its own that is forked off one which has imported torch."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cases import ALL
from harness.case import AbsentError, Case, Engine, Given, Measured, Pairs
from harness.files import checksum, sums_of
from harness.process import HERE, SITES, Process, cpu_seconds, have_memory, status

#: Modules that all processes begin with. Nothing of this package, whose import is measured.
PRELOADED = ("torch", "torch.distributed", "cases")
#: More of them at toy size, where importing them would take most of the time.
PRELOADED_QUICK = (
    "safetensors.torch", "boto3.s3.transfer", "requests", "redis", "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama", "huggingface_hub", "torch._dynamo",
)  # fmt: skip


def added(pairs: Pairs) -> tuple[dict[str, int], int]:
    """Add up each tensor and let it go; return the sums and the bytes."""
    found: dict[str, int] = {}
    total = 0
    for name, tensor in pairs:
        assert name not in found, f"{name} came twice"
        found |= checksum({name: tensor})
        total += tensor.nbytes
        del tensor
    return found, total


def take_modules(engine: Engine) -> None:
    """Import what an engine needs, with the packages and variables that it asks for.

    Raises:
        AbsentError: Something is not installed.

    """
    os.environ.update(engine.env)
    if engine.site:
        if not SITES[engine.site]:
            raise AbsentError(f"no packages of {engine.site}: see benchmarks/README.md")
        sys.path.insert(0, str(SITES[engine.site][0]))
    for module in engine.imports:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
            raise AbsentError(f"{error.name} is not installed") from None


def made(engine: Engine, given: Given) -> dict[str, object]:
    """Run what an engine needs once, before all rounds."""
    take_modules(engine)
    assert engine.make is not None
    engine.make(given)
    return {"verified": True}


def once(case: Case, engine: Engine, given: Given) -> dict[str, object]:
    """Run an engine once; return seconds, bytes and memory, and whether the bytes were right."""
    take_modules(engine)
    if engine.touch:
        checksum({"": torch.ones(1 << 20, dtype=torch.int64)})  # starts torch's threads
    if engine.before is not None:
        given = replace(given, ready=engine.before(given))
    elif engine.saved is not None:
        given = replace(given, ready=given.model.tensors())
    if engine.saved is not None:
        os.sync()
    if not case.device:
        have_memory(given.model.total)
    time.sleep(engine.idle)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins here
    memory, cpu, start = status("VmHWM"), cpu_seconds(), time.perf_counter()
    result = engine.run(given)
    call = seconds = time.perf_counter() - start
    used, peak = cpu_seconds() - cpu, status("VmHWM")
    if isinstance(result, Measured):
        return measured(result, used)
    iterates = isinstance(result, Iterator)
    if engine.saved is not None:
        result = engine.saved(given)
    if iterates:
        sums, total = added(result)
    else:
        sums, total = checksum(result), sum(tensor.nbytes for tensor in result.values())
    if engine.touch and engine.saved is None:
        seconds = time.perf_counter() - start
        used, peak = cpu_seconds() - cpu, status("VmHWM")
        call = seconds if iterates else call
    kept = 0 if iterates or engine.saved is not None else total
    part = engine.part or case.part
    return {
        "seconds": seconds,
        "call_seconds": call,
        "cpu_seconds": used,
        "bytes": total,
        "extra_bytes": peak - memory - kept,
        "verified": sums == sums_of(given.folder, given.model, part),
    }


def measured(result: Measured, cpu: float) -> dict[str, object]:
    """Return the result of an engine that has measured itself."""
    return {
        "seconds": result.seconds,
        "cpu_seconds": cpu if result.cpu is None else result.cpu,
        "bytes": result.bytes,
        "extra_bytes": result.extra,
        "figures": result.figures,
        "verified": result.verified,
    }


def run_one(work: str, case: str, engine: str, given: Given) -> dict[str, object]:
    """Find an engine by its name and run it, or its ``make``."""
    os.setsid()  # what it starts is in its group, and ends with it
    of_case = ALL[case]
    found = next(one for one in of_case.engines if one.name == engine)
    return made(found, given) if work == "make" else once(of_case, found, given)


def preload(quick: bool) -> None:
    """Have all processes begin with torch and the cases imported; the first process decides."""
    # The fork server ignores modules that it cannot import, and has only PYTHONPATH to find them.
    os.environ["PYTHONPATH"] = os.pathsep.join((str(HERE), *filter(None, sys.path[1:])))
    # Without its path, the processes do not import the program that was started, which may have
    # imported what is measured.
    vars(sys.modules["__main__"]).pop("__file__", None)
    modules = [*PRELOADED, *(PRELOADED_QUICK if quick else ())]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)


def measure(
    work: str, case: Case, engine: Engine, given: Given, *, env: Mapping[str, str], timeout: float
) -> Mapping[str, Any]:
    """Run an engine of a case in a process of its own.

    Raises:
        AbsentError: The engine cannot run here.
        RuntimeError: It failed, was too late, or found other bytes than were written.

    """
    process = Process("forkserver", run_one, work, case.name, engine.name, given, **env)
    found = process.result(timeout)
    if not found["verified"]:
        raise RuntimeError("other bytes than were written")
    return found
