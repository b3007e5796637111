"""Print the folder of torch's libraries, without importing torch."""

import importlib.util
from pathlib import Path

spec = importlib.util.find_spec("torch")
print(Path(spec.submodule_search_locations[0]) / "lib")
