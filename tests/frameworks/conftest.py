"""The fixtures and servers of the other tests, for the libraries of an environment of its own."""

import importlib.util
import os
import sys
from pathlib import Path

# No library is to ask a server that a test has not started.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

PYTHON = Path(__file__).parents[1] / "python"
sys.path.insert(0, str(PYTHON))
_spec = importlib.util.spec_from_file_location("python_conftest", PYTHON / "conftest.py")
_shared = importlib.util.module_from_spec(_spec)
sys.modules["python_conftest"] = _shared
_spec.loader.exec_module(_shared)
globals().update({name: value for name, value in vars(_shared).items() if name[:1] != "_"})
