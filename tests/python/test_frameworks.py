"""Frameworks that save and load with torch, inside the blocks of torch_compat."""

from pathlib import Path

import pytest
import torch
from conftest import assert_same
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving

pytestmark = pytest.mark.long

STEPS, RESUMED_FROM = 6, 3


def assert_equal(found, expected):
    """Compare nested containers of tensors and plain values."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert_same(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def trainer(folder):
    import transformers

    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(50, (32, 16), generator=torch.Generator().manual_seed(4))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        save_steps=RESUMED_FROM,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=5,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return transformers.Trainer(model=model, args=arguments, train_dataset=data)


def losses(trained):
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore")
def test_trainer_saves_and_resumes(tmp_path):
    plain = trainer(tmp_path / "plain")
    plain.train()
    plain_resumed = trainer(tmp_path / "plain")
    plain_resumed.train(resume_from_checkpoint=str(tmp_path / f"plain/checkpoint-{RESUMED_FROM}"))

    with tensorizer_saving(), tensorizer_loading():
        ours = trainer(tmp_path / "ours")
        ours.train()
        checkpoint = tmp_path / f"ours/checkpoint-{RESUMED_FROM}"
        resumed = trainer(tmp_path / "ours")
        resumed.train(resume_from_checkpoint=str(checkpoint))
        optimizer = torch.load(checkpoint / "optimizer.pt")

    # Both of Adam's moments of every parameter are in our file.
    assert (checkpoint / "optimizer.pt.tensors").stat().st_size > 2 * 4 * sum(
        parameter.numel() for parameter in ours.model.parameters()
    )
    assert (checkpoint / "rng_state.pth.tensors").exists()
    expected = torch.load(tmp_path / f"plain/checkpoint-{RESUMED_FROM}/optimizer.pt")
    assert_equal(optimizer, expected)
    assert len(losses(plain)) == STEPS
    assert losses(ours) == losses(plain)
    assert losses(resumed) == losses(plain_resumed)
    assert losses(resumed)[-1] == losses(plain)[-1]
    for name, parameter in plain.model.state_dict().items():
        assert_same(resumed.model.state_dict()[name], parameter)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("safetensors", [True, False])
def test_accelerate_checkpoints(tmp_path, safetensors):
    import accelerate

    def make():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        accelerator = accelerate.Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(model, optimizer, schedule)

    def step(model, optimizer, schedule):
        model(torch.rand(4, 8)).square().sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    accelerator, *first = make()
    step(*first)
    with tensorizer_saving():
        accelerator.save_state(str(tmp_path), safe_serialization=safetensors)
    written = {path.name for path in tmp_path.iterdir()}
    assert "optimizer.bin.tensors" in written
    assert ("pytorch_model.bin.tensors" in written) is not safetensors

    accelerator, *second = make()
    with tensorizer_loading():
        accelerator.load_state(str(tmp_path))
    assert_equal(second[1].state_dict(), first[1].state_dict())
    # The random numbers continue as well.
    step(*first)
    with tensorizer_loading():
        accelerator.load_state(str(tmp_path))
    step(*second)
    assert_equal(second[0].state_dict(), first[0].state_dict())


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_are_left_alone(tmp_path):
    import torch.distributed.checkpoint as dcp

    saved = {"model": {"a": torch.arange(10.0), "b": torch.ones(3, 3)}, "step": 7}
    with tensorizer_saving(), tensorizer_loading():
        dcp.save(saved, checkpoint_id=str(tmp_path))
        loaded = {"model": {"a": torch.zeros(10), "b": torch.zeros(3, 3)}, "step": 0}
        dcp.load(loaded, checkpoint_id=str(tmp_path))
    assert_equal(loaded, saved)
    assert {Path(path).suffix for path in tmp_path.iterdir()} == {".distcp", ""}


def test_packages_are_left_alone(tmp_path):
    from torch.package import PackageExporter, PackageImporter

    with tensorizer_saving(), tensorizer_loading():
        with PackageExporter(tmp_path / "f.package") as package:
            package.save_pickle("data", "tensors.pkl", {"a": torch.arange(4)})
        loaded = PackageImporter(tmp_path / "f.package").load_pickle("data", "tensors.pkl")
    assert_same(loaded["a"], torch.arange(4))
    assert [path.name for path in tmp_path.iterdir()] == ["f.package"]
