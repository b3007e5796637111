"""Ranks of vLLM and SGLang read the weights once: the plugins, by stubs of the engines."""

import pytest
import sglang_stub
import tensorizer
import torch
import vllm_stub
from ranks.engines import NAMES, value


@pytest.fixture(scope="module")
def served(nginx):
    """A checkpoint at a server: its address, and the bytes that were sent of it since the last."""
    folder = nginx.root / "engines"
    folder.mkdir()
    tensors = {name: torch.full((512, 768), value(name)) for name in NAMES}
    tensorizer.save(tensors, folder / "model.safetensors", max_shard_size=9 << 20)
    files = [path.name for path in folder.iterdir()]

    def sent():
        return sum(nginx.sent(f"engines/{name}") for name in files)

    return f"{nginx.http}/engines/model.safetensors.index.json", sent


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stubs")
    vllm_stub.write(folder)
    sglang_stub.write(folder)
    return str(folder)


#: Bytes of all weights, and those of the four requests that find the tensors of three shards.
ALL, HEADS = 24 << 20, 4 * 530_000


@pytest.mark.parametrize(
    ("world", "kind"), [(2, "dense"), (4, "dense"), (2, "lists"), (4, "experts")]
)
def test_ranks_of_vllm_read_once(ranks, stub, served, world, kind):
    uri, sent = served
    before = sent()
    found = ranks.run("engines.vllm", world, stub, uri, {}, kind)
    for rank, names in enumerate(found):
        skipped = {
            f"model.layers.8.experts.{n}.weight"
            for n in range(8)
            if kind == "experts" and n % world != rank
        }
        assert names == sorted(set(NAMES) - skipped)
    assert ALL <= sent() - before <= 1.01 * ALL + HEADS


def test_stages_of_a_pipeline_read_their_own_layers(ranks, stub, served):
    uri, sent = served
    before = sent()
    found = ranks.run("engines.vllm", 4, stub, uri, {}, "stages")
    for rank, names in enumerate(found):
        layers = range(5) if rank < 2 else range(5, 9)
        assert names == sorted(n for n in NAMES if int(n.split(".")[2]) in layers)
    # Both read the gap in the shard that they share.
    assert ALL <= sent() - before <= 1.02 * ALL + 2 * HEADS


def test_ranks_read_by_themselves_if_they_are_told_to(ranks, stub, served):
    uri, sent = served
    before = sent()
    assert (
        ranks.run("engines.vllm", 2, stub, uri, {"distributed": False}, "dense")
        == [sorted(NAMES)] * 2
    )
    assert sent() - before >= 2 * ALL


def test_a_cache_is_filled_by_the_ranks_of_a_machine(ranks, stub, served, tmp_path):
    uri, sent = served
    before, options = sent(), {"cache_dir": str(tmp_path)}
    for _ in range(2):
        found = ranks.run("engines.vllm", 2, stub, uri, options, "dense")
        assert found == [sorted(NAMES)] * 2
    assert ALL <= sent() - before <= ALL + 2 * HEADS


@pytest.mark.parametrize(("world", "forgetful"), [(2, []), (3, [2])])
def test_ranks_reload_what_has_changed(ranks, stub, nginx, world, forgetful):
    """The first rank compares the hashes. A rank that has lost its weights gets them all."""
    old = {name: torch.full((512, 768), value(name)) for name in NAMES}
    new = old | {NAMES[3]: torch.full((512, 768), 50.0)}
    for name, tensors in (("old", old), ("new", new)):
        tensorizer.save(tensors, nginx.root / f"{name}.tensors")
    before = nginx.sent("new.tensors")
    paths = [f"{nginx.http}/{name}.tensors" for name in ("old", "new")]
    found = ranks.run("engines.vllm_reload", world, stub, paths, forgetful)
    values = {name: value(name) for name in NAMES} | {NAMES[3]: 50.0}
    read = NAMES if forgetful else NAMES[3:4]
    assert found == [{name: values[name] for name in read}] * world
    # The first rank opens the file twice, each time with its first MiB.
    assert nginx.sent("new.tensors") - before < len(read) * (ALL // 16) + 2.5 * (1 << 20)


@pytest.mark.parametrize(("distributed", "share"), [("auto", 0), (True, ALL // 2)])
def test_local_files(ranks, stub, tmp_path, distributed, share):
    """Each rank reads a local file by itself, unless it is told otherwise."""
    tensors = {name: torch.full((512, 768), value(name)) for name in NAMES}
    tensorizer.save(tensors, tmp_path / "model.tensors")
    options = {"distributed": distributed}
    assert ranks.run("engines.shares", 2, stub, str(tmp_path), options) == [share] * 2


def test_a_model_that_drafts_is_loaded_by_one_rank_alone(ranks, stub, served):
    uri, _ = served
    assert ranks.run("engines.vllm", 2, stub, uri, {}, "draft") == [sorted(NAMES), []]


@pytest.mark.parametrize("by_uri", [False, True])
def test_ranks_load_what_each_of_them_has_saved(ranks, stub, tmp_path, by_uri):
    """The folders of vLLM's save_sharded_state."""
    for rank in range(2):
        for part, name in enumerate("ab"):
            weights = {f"{name}.weight": torch.full((4, 8), 10.0 * rank + part)}
            tensorizer.save(weights, tmp_path / f"model-rank-{rank}-part-{part}.safetensors")
    folder, options = (".", {"uri": str(tmp_path)}) if by_uri else (str(tmp_path), {})
    found = ranks.run("engines.sharded_state", 2, stub, folder, options)
    assert found == [[[0.0], [1.0]], [[10.0], [11.0]]]


def test_ranks_of_sglang_read_once(ranks, stub, served):
    uri, sent = served
    before = sent()
    assert ranks.run("engines.sglang", 2, stub, uri, {}) == [sorted(NAMES)] * 2
    assert ALL <= sent() - before <= 1.01 * ALL + HEADS
