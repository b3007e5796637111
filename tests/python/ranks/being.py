"""The main function of a rank: calls a function of this folder, and writes its result or error."""

import importlib
import json
import multiprocessing.util
import os
import signal
import sys
import traceback
import warnings

import faults
import torch


def be(task):
    """Be one of the ranks, to the end of the process."""
    os.setsid()  # so that it can be killed with what it starts
    faults.read()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)  # what torch prints
        try:
            module, name = task["program"].split(".")
            function = getattr(importlib.import_module(f"ranks.{module}"), name)
            found = {"result": function(*task["args"])}
        except BaseException:
            found = {"error": traceback.format_exc()}
        json.dump(found, answer, default=str)
    # Sockets by which tensors were sent to other processes lie in a folder.
    multiprocessing.util._run_finalizers()
    sys.stderr.flush()
    os._exit(0)  # threads of torch are not waited for
