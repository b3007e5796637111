"""Files opened by the native code as the package opens them."""

from tensorizer._native import Reader, open as native_open


def open_reader(name, heads=None, cache=None):
    """Open an address or a path; without heads it keeps those of its files."""
    source = native_open(name, {"model": True, "heads": heads, "cache": cache})
    try:
        return Reader(source, keep_heads=heads is None)
    finally:
        source.close()
