"""Packages that stand in for libraries which the tests do not install."""

import sys


def write(files, folder):
    """Write the files of a package, given as texts by name, and return the folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def forget(monkeypatch, *packages):
    """Have packages imported anew, until the test ends."""
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            monkeypatch.delitem(sys.modules, name)


def install(monkeypatch, files, folder, plugin):
    """Have the package of a folder imported, and a plugin anew, until the test ends."""
    forget(monkeypatch, next(iter(files)).partition("/")[0], plugin)
    monkeypatch.syspath_prepend(folder)
    # Modules that a test imports are not for the next one.
    for name in (*files, f"{plugin}/loader.py", f"{plugin}/__init__.py"):
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        monkeypatch.setitem(sys.modules, module, None)
        del sys.modules[module]
