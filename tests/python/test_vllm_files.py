"""Files that vLLM's own format has: models whose weights vLLM had changed for its kernels."""

import json
import warnings

import pytest
import tensorizer
import torch
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer

KEY = bytes(range(32))
FP8 = torch.float8_e4m3fn


class Layer(torch.nn.Module):
    """A quantized layer as vLLM builds it, and as it is after the work for the kernels."""

    def __init__(self, device="meta"):
        super().__init__()
        for name, shape in {"weight": (32, 16), "square": (16, 16), "scales": (3,)}.items():
            dtype = torch.float32 if name == "scales" else FP8
            setattr(self, name, parameter(torch.empty(shape, dtype=dtype, device=device)))
        self.input_scale = parameter(torch.empty(3, device=device))
        self.k_scale = parameter(torch.tensor(-1.0))
        self.register_buffer("kv", torch.tensor(1.0))

    def process(self):
        torch.manual_seed(5)
        self.weight = parameter(torch.randn(32, 16).to(self.weight.dtype).t())
        self.square = parameter(torch.randn(16, 16).to(self.weight.dtype).t())
        # As kernels pad it.
        self.scales = parameter(torch.empty_strided((5, 3), (1, 8)).copy_(torch.randn(5, 3)))
        self.input_scale = None
        del self.k_scale
        self.kv = torch.tensor([0.3])
        self.alpha = parameter(torch.randn(()))
        return self


def parameter(tensor):
    return torch.nn.Parameter(tensor, requires_grad=False)


def model(layer):
    root = torch.nn.Module()
    root.layer = layer
    return root


def write(root, path, **options):
    """Write a model as vLLM does."""
    root.vllm_tensorized_marker = parameter(torch.tensor((1,), device="meta"))
    with TensorSerializer(path, **options) as serializer:
        serializer.write_module(root)
    del root.vllm_tensorized_marker


def tensors(root):
    return {
        name: tensor
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]
        if name != "vllm_tensorized_marker"
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        form = (tensor.dtype, tensor.shape, tensor.stride())
        assert form == (expected[name].dtype, expected[name].shape, expected[name].stride()), name
        assert torch.equal(tensor.float(), expected[name].float()), name


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("encrypted", "device"), [(False, "meta"), (False, "cpu"), (True, "cpu")])
def test_changed_weights_are_loaded_as_they_were_saved(tmp_path, recwarn, lazy, encrypted, device):
    processed = model(Layer().process())
    write(processed, tmp_path / "f", encryption=EncryptionParams(KEY) if encrypted else None)
    found = model(Layer(device))
    key = DecryptionParams.from_key(KEY) if encrypted else None
    file = TensorDeserializer(
        tmp_path / "f", "cpu", dtype=torch.bfloat16, lazy_load=lazy, encryption=key
    )
    file.load_into_module(found)
    assert_same(tensors(found), tensors(processed))
    assert found.layer.input_scale is None and found.layer.k_scale is None
    assert not recwarn.list
    # Into what a load has filled, in place.
    addresses = {name: tensor.data_ptr() for name, tensor in tensors(found).items()}
    with torch.no_grad():
        found.layer.weight.zero_()
    file = TensorDeserializer(tmp_path / "f", "cpu", lazy_load=lazy, encryption=key)
    file.load_into_module(found)
    assert_same(tensors(found), tensors(processed))
    assert {name: tensor.data_ptr() for name, tensor in tensors(found).items()} == addresses


def test_a_copy_keeps_the_strides(tmp_path):
    processed = model(Layer().process())
    write(processed, tmp_path / "f", metadata={"a": "b"})
    metadata = dict(tensorizer.info(tmp_path / "f").metadata)
    assert json.loads(metadata.pop("vllm.strides")) == {
        "layer.weight": [1, 16],
        "layer.square": [1, 16],
        "layer.scales": [1, 8],
    }
    assert metadata == {"a": "b"}
    from tensorizer_cli.main import main

    assert main(["cp", str(tmp_path / "f"), str(tmp_path / "g")]) == 0
    found = model(Layer())
    TensorDeserializer(tmp_path / "g", "cpu").load_into_module(found)
    assert_same(tensors(found), tensors(processed))


def test_other_models_have_no_strides(tmp_path):
    with TensorSerializer(tmp_path / "f") as serializer:
        serializer.write_module(model(Layer().process()))
    assert tensorizer.info(tmp_path / "f").metadata == {}
    with pytest.raises(RuntimeError, match="size mismatch for layer.weight"):
        TensorDeserializer(tmp_path / "f", "cpu").load_into_module(model(Layer()))


def test_models_that_are_not_quantized_keep_their_sizes(tmp_path):
    plain = torch.nn.Linear(4, 2)
    plain.register_buffer("kv", torch.ones(1))
    write(plain, tmp_path / "f")
    same = torch.nn.Linear(4, 2)
    same.register_buffer("kv", torch.tensor(3.0))
    TensorDeserializer(tmp_path / "f", "cpu").load_into_module(same)
    assert torch.equal(same.kv, torch.ones(1))
    with pytest.raises(RuntimeError, match="size mismatch for .weight"):
        TensorDeserializer(tmp_path / "f", "cpu").load_into_module(torch.nn.Linear(5, 2))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        "[]",
        *(
            json.dumps({"layer.weight": strides})
            for strides in (
                *([1], [1, 2, 3], "1", None, [1, "16"], [1.0, 16], [-1, 16], [True, 16]),
                *([1, 1 << 40], [0, 0], [1, 1], [1, 512]),
            )
        ),
    ],
)
def test_strides_that_do_not_fit_are_refused(tmp_path, text):
    plain = model(Layer())
    plain.layer.weight = parameter(torch.zeros(32, 16).to(FP8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write(plain, tmp_path / "f", metadata={"vllm.strides": text})
        with pytest.raises(tensorizer.FormatError, match=r"metadata vllm\.strides: expected"):
            TensorDeserializer(tmp_path / "f", "cpu").load_into_module(model(Layer()))
