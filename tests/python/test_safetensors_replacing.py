"""Code that imported safetensors' functions by name, in blocks where they are ours."""

import sys
import threading
import types

import numpy
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from conftest import assert_same
from servers import Nginx
from tensorizer import safetensors as ours

NAMES = ("load", "load_file", "load_model", "save", "save_file", "save_model")
theirs = types.SimpleNamespace(
    **{name: getattr(safetensors.torch, name) for name in NAMES}, safe_open=safetensors.safe_open
)


@pytest.fixture(scope="module")
def nginx(tmp_path_factory):
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    yield server
    server.stop()


def module_with(code):
    module = types.ModuleType(f"uses_safetensors_{len(sys.modules)}")
    sys.modules[module.__name__] = module
    exec(code, vars(module))
    return module


@pytest.fixture
def user():
    module = module_with(
        "import safetensors.torch as library\n"
        "from safetensors import safe_open\n"
        "from safetensors.torch import load_file, save_file as save\n"
        "def load(path):\n    return load_file(path)\n"
    )
    yield module
    del sys.modules[module.__name__]


def is_replaced(user):
    state = {
        issubclass(user.safe_open, ours.safe_open),
        user.load_file is not theirs.load_file,
        user.save is not theirs.save_file,
        issubclass(safetensors.safe_open, ours.safe_open),
        issubclass(safetensors.torch.safe_open, ours.safe_open),
        *(getattr(safetensors.torch, n) is not getattr(theirs, n) for n in NAMES),
    }
    assert len(state) == 1, "all or nothing"
    return state.pop()


def test_code_that_imported_the_names_uses_ours(tmp_path, nginx, user):
    tensors = {"a": torch.randn(3, 4)}
    with ours.tensorizer_safetensors():
        assert is_replaced(user)
        # Into new folders and from addresses, which the library cannot do.
        user.save(tensors, nginx.root / "new" / "f.safetensors")
        assert_same(user.load(f"{nginx.http}/new/f.safetensors")["a"], tensors["a"])
        with user.safe_open(f"{nginx.http}/new/f.safetensors", framework="pt") as file:
            assert isinstance(file, user.safe_open)
            assert file.get_slice("a")[1, 2] == tensors["a"][1, 2]
        assert user.load_file.__name__ == "load_file"
        assert user.library.load(user.library.save(tensors)).keys() == {"a"}
        late = module_with("from safetensors.torch import load_file, safe_open")
        assert late.load_file is user.load_file
    assert not is_replaced(user)
    assert (late.load_file, late.safe_open) == (theirs.load_file, theirs.safe_open)
    del sys.modules[late.__name__]


def test_files_for_numpy_in_a_block(tmp_path):
    with ours.tensorizer_safetensors():
        safetensors.numpy.save_file({"a": numpy.arange(3)}, tmp_path / "f")
        assert safetensors.numpy.load_file(tmp_path / "f")["a"].tolist() == [0, 1, 2]
        assert ours.load_file(tmp_path / "f")["a"].tolist() == [0, 1, 2]


def test_all_is_restored_whatever_happens(user):
    own = module_with("from tensorizer.safetensors import load_file")
    with pytest.raises(KeyError):
        with ours.tensorizer_safetensors():
            with ours.tensorizer_safetensors():
                assert is_replaced(user)
            assert is_replaced(user)
            user.load_file = len
            raise KeyError
    # A name that other code has replaced, or that was ours before the block, stays.
    assert user.load_file is len
    assert own.load_file is ours.load_file
    user.load_file = theirs.load_file
    assert not is_replaced(user)
    del sys.modules[own.__name__]

    @ours.tensorizer_safetensors()
    def function():
        return is_replaced(user)

    assert function()
    assert not is_replaced(user)


def test_functions_moved_to_other_names_in_the_block_are_restored(user):
    class Holder:
        pass

    user.nothing = None
    with ours.tensorizer_safetensors():
        user.moved, user.load_file = user.load_file, None
        user.nothing = user.safe_open
        Holder.kept = user.save
        gone = sys.modules.pop(user.__name__)
        own = vars(gone)["save"]
    sys.modules[user.__name__] = user
    # A module is restored even if it is not in sys.modules, and so are our functions under other
    # names.
    assert user.save is theirs.save_file is not own
    assert user.moved is theirs.load_file
    assert user.load_file is None
    assert Holder.kept is own
    with ours.tensorizer_safetensors():
        user.moved = safetensors.torch.load_file
        user.nothing = user.save
    assert (user.moved, user.nothing) == (theirs.load_file, theirs.save_file)
    user.load_file, user.safe_open = theirs.load_file, theirs.safe_open
    assert not is_replaced(user)


def test_blocks_that_overlap_in_threads(user):
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def run():
        with ours.tensorizer_safetensors():
            inside.set()
            leave.wait()
            seen.append(is_replaced(user))

    thread = threading.Thread(target=run)
    with ours.tensorizer_safetensors():
        thread.start()
        inside.wait()
    # The other thread's block counts for this one too.
    assert is_replaced(user)
    leave.set()
    thread.join()
    assert seen == [True]
    assert not is_replaced(user)


def test_a_sharded_model_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=4, n_embd=128, n_head=4, vocab_size=2000, n_positions=64
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.arange(50)[None]
    with ours.tensorizer_safetensors():
        model.save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = []
    with ours.tensorizer_safetensors():
        loaded.append(transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval())
    loaded.append(transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval())
    with torch.no_grad():
        expected = model(ids).logits
        for one in loaded:
            assert torch.equal(one(ids).logits, expected)
