"""Models that ``tensorizer.safetensors`` saves and loads, beside the library."""

import copy

import pytest
import torch
from safetensors_library import assert_like, result_of, theirs
from tensorizer import safetensors as ours

# Modules


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(10, 10)
        self.b = self.a
        self.c = torch.nn.Linear(10, 10)
        self.c.weight = torch.nn.Parameter(torch.randn(10, 10).t())


class Untied(Tied):
    def __init__(self):
        super().__init__()
        self.b = copy.deepcopy(self.a)


def test_save_model_drops_names_as_the_library_does(tmp_path):
    for model in (Tied(), Untied(), torch.nn.Linear(3, 2)):
        for metadata in (None, {"b.bias": "mine"}):
            given = copy.copy(metadata)
            ours.save_model(model, tmp_path / "ours", metadata)
            assert metadata == given
            theirs.save_model(model, tmp_path / "theirs", given)
            left, right = (theirs.safe_open(tmp_path / n, "pt") for n in ("ours", "theirs"))
            assert left.metadata() == right.metadata()
            assert_like(left.get_tensors(), right.get_tensors())
    for module in (ours, theirs):
        with pytest.raises(ValueError, match=r"non contiguous.*force_contiguous=True"):
            module.save_model(Tied(), tmp_path / "f", force_contiguous=False)
    model = torch.nn.Linear(3, 2)
    model.weight = torch.nn.Parameter(torch.zeros(4, 3)[:2])
    for module in (ours, theirs):
        with pytest.raises(RuntimeError, match="Refusing to save"):
            module.save_model(model, tmp_path / "f")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_load_model(tmp_path, strict, backend):
    models = {"tied": Tied, "untied": Untied, "other": lambda: torch.nn.Linear(10, 10)}
    for saved, make_saved in models.items():
        source = make_saved()
        ours.save_model(source, tmp_path / saved)
        for make_loaded in models.values():
            left, right = make_loaded(), make_loaded()
            mine, library = (
                result_of(
                    lambda m=module, i=into, p=tmp_path / saved: m.load_model(
                        i, p, strict, backend=backend
                    )
                )
                for module, into in ((ours, left), (theirs, right))
            )
            if isinstance(mine[0], set):
                assert (mine[0], sorted(mine[1])) == (library[0], sorted(library[1]))
            else:
                assert mine == library
            if type(source) is type(left):
                for one, other in zip(left.parameters(), source.parameters(), strict=True):
                    assert torch.equal(one, other)


def test_names_that_share(tmp_path):
    base, bits = torch.zeros(3, 3), torch.zeros(8)
    for state in (
        {"A": base, "B": base[:1]},
        {"A": base, "B": base[:1], "C": base},
        {"B": base[:1]},
        {"B": bits[:2], "C": bits[2:], "D": bits[:1]},
        {"A": bits, "C": torch.zeros(2, device="meta"), "E": torch.zeros(0)},
        {"x": bits, "a": bits, "m": bits},
    ):
        mine = ours.sharing._find_shared_tensors(state)
        assert sorted(map(sorted, mine)) == sorted(map(sorted, theirs._find_shared_tensors(state)))
        for options in (
            {},
            {"preferred_names": ["C", "m"]},
            {"discard_names": ["A", "a"]},
            {"preferred_names": ["m", "x"], "discard_names": ["m"]},
        ):
            left, right = (
                result_of(lambda c=call, s=state, o=options: dict(c(s, **o)))
                for call in (ours.sharing._remove_duplicate_names, theirs._remove_duplicate_names)
            )
            assert left == right or left[0] is right[0] is RuntimeError
    for tensor in (base, base[1:], bits, torch.zeros(2, device="meta"), torch.zeros(0)):
        assert ours.storage_ptr(tensor) == theirs.storage_ptr(tensor)
        assert ours.storage_size(tensor) == theirs.storage_size(tensor)
