"""Saving DTensors: whole tensors are gathered, and one rank writes them."""


def test_models(ranks, tmp_path):
    """FSDP2, with replicas, tensor parallelism, and both; modules and state dicts."""
    ranks.run("saving.models", 4, tmp_path)


def test_tied_tensors_in_safetensors(ranks, tmp_path):
    found = ranks.run("saving.tied", 4, tmp_path)
    assert found == [found[0]] * 4
    for kind, message in found[0]:
        assert kind == "ValueError"
        assert "share" in message
    assert not list(tmp_path.iterdir())


def test_shapes(ranks, tmp_path):
    ranks.run("saving.shapes", 4, tmp_path)


def test_invalid_saves_by_a_group_raise_on_each_rank(ranks, tmp_path):
    (tmp_path / "file").touch()
    found = ranks.run("saving.refused", 4, tmp_path)
    for name in ("folder", "safetensors", "constructors"):
        assert {of_rank[name][0] for of_rank in found} == {"NotADirectoryError"}, name
    for of_rank in found:
        for name in ("t.tensors", "t.safetensors", "targets"):
            assert of_rank[name][0] == "ValueError"
            assert "rank 2 of this collective save names the target" in of_rank[name][1]
        assert of_rank["other"][0] == "ValueError"
        assert "rank 1 of this collective save has other tensors" in of_rank["other"][1]
        for name in ("meta", "meta safetensors"):
            assert of_rank[name][0] == "ValueError"
            assert "'x' is on the meta device, and without data" in of_rank[name][1]
    assert [of_rank["one"][0] for of_rank in found] == ["GroupError", "NotADirectoryError",
                                                        "GroupError", "GroupError"]  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"file", "well.tensors"}


def test_a_rank_that_is_killed(ranks, tmp_path):
    found = ranks.start("lost.save", 4, tmp_path, "SIGKILL")
    assert found[2] == {"signal": 9, "late": False, "stopped": False}
    for rank in (0, 1, 3):
        *_, seconds = found[rank]["result"]
        assert found[rank]["result"][0] != "nothing"
        assert seconds < 25
    assert not (tmp_path / "saved.tensors").exists()
