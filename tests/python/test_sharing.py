"""Threads get the same tensors of one file, and a load leaves the garbage collector alone."""

import gc
import threading

import tensorizer
import torch
from tensorizer import TensorDeserializer


def test_threads_get_the_same_objects(tmp_path):
    names = [f"t{i}" for i in range(300)]
    tensorizer.save({name: torch.ones(3) for name in names}, tmp_path / "f")
    found = [{} for _ in range(16)]
    barrier = threading.Barrier(16)
    with TensorDeserializer(tmp_path / "f", "cpu", lazy_load=True) as file:

        def read(mine):
            barrier.wait()
            for name in names:
                mine[name] = file[name]

        threads = [threading.Thread(target=read, args=(mine,)) for mine in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(mine[name] is found[0][name] for mine in found for name in names)


def test_the_garbage_collector_is_left_alone(tmp_path):
    tensorizer.save({"a": torch.ones(1 << 20)}, tmp_path / "f")
    states = []

    class Watched:
        def __init__(self, path):
            self.file = open(path, "rb")  # noqa: SIM115

        def read(self, size=-1):
            states.append(gc.isenabled())
            return self.file.read(size)

        def seek(self, *args):
            return self.file.seek(*args)

        def tell(self):
            return self.file.tell()

        def close(self):
            self.file.close()

    assert gc.isenabled()
    try:
        for enabled in (True, False):
            (gc.enable if enabled else gc.disable)()
            states.clear()
            TensorDeserializer(Watched(tmp_path / "f"), "cpu")
            assert states
            assert set(states) == {enabled}
            assert gc.isenabled() == enabled
    finally:
        gc.enable()
