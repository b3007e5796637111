"""Ranks of serving engines, which load a model by the plugins: stubs of vLLM and of SGLang."""

import json
import sys
from types import SimpleNamespace

from ranks.common import counting_shares, dist, group, torch

#: Tensors of 1 MiB each; some of them are of experts.
NAMES = [*(f"model.layers.{n}.weight" for n in range(8)),
         *(f"model.layers.8.experts.{n}.weight" for n in range(8))]  # fmt: skip


def value(name):
    """Return the value of all elements of a weight."""
    return float(NAMES.index(name) + 1)


class Model(torch.nn.Module):
    """Takes weights as engines' models do; some take them one by one, some list them first."""

    def __init__(self, lists, missing=()):
        super().__init__()
        self.lists, self.missing, self.found = lists, missing, {}

    def named_parameters(self, *args, **options):
        return iter(())

    def load_weights(self, weights):
        if self.lists:
            weights = list(weights)
        for name, tensor in weights:
            self.found[name] = tensor if self.lists else tensor.clone()
        return set(self.found)


def checked(model):
    """Return the names of the weights that a model has got, all of which are right."""
    for name, tensor in model.found.items():
        assert tensor.shape == (512, 768) and (tensor == value(name)).all(), name
    return sorted(model.found)


def vllm(stub, model_path, options, kind):
    """Load by the plugin for vLLM."""
    sys.path.insert(0, stub)
    with group() as (rank, world):
        import tensorizer_vllm
        from vllm.distributed import parallel_state

        tensorizer_vllm.register()
        from vllm.model_executor import model_loader

        stage = rank * 2 // world if kind == "stages" else 0
        groups = [dist.new_group([n, n + 1]) for n in range(0, world - 1, 2)]
        parallel_state.group = groups[stage] if kind == "stages" else dist.group.WORLD
        missing = [f"model.layers.{n}." for n in range(9) if n // 5 != stage]
        experts = {n for n in range(8) if n % world == rank} if kind == "experts" else None
        config = SimpleNamespace(
            model=model_path,
            revision=None,
            experts=experts,
            runner_type="draft" if kind == "draft" else "generate",
            build=lambda: Model(kind == "lists", missing if kind == "stages" else ()),
        )
        if kind == "draft" and rank:
            return []
        load = SimpleNamespace(
            load_format="tensorizer_stream", model_loader_extra_config=options, download_dir=None
        )
        return checked(model_loader.get_model_loader(load).load_model(None, config))


def shares(stub, model_path, options):
    """Load by the plugin for vLLM; return the bytes of shares that this rank has read."""
    read = counting_shares()
    vllm(stub, model_path, options, "dense")
    return sum(read)


def vllm_reload(stub, paths, forgetful):
    """Load by the plugin for vLLM, and reload; return the names and values that were read."""
    sys.path.insert(0, stub)
    with group() as (rank, _):
        import tensorizer_vllm
        from tensorizer_engines.reloading import loaded_weights
        from vllm.distributed import parallel_state

        tensorizer_vllm.register()
        from vllm.model_executor import model_loader

        parallel_state.group = dist.group.WORLD
        config = SimpleNamespace(
            model=paths[0],
            revision=None,
            experts=None,
            runner_type="generate",
            build=lambda: Model(lists=False),
        )
        load = SimpleNamespace(
            load_format="tensorizer_stream", model_loader_extra_config={}, download_dir=None
        )
        model = model_loader.get_model_loader(load).load_model(None, config)
        if rank in forgetful:
            loaded_weights(model, paths[0]).files = []
        config.model, model.found = paths[1], {}
        model.load_weights(model_loader.get_model_loader(load).get_all_weights(config, model))
        return {name: tensor.mean().item() for name, tensor in model.found.items()}


def sharded_state(stub, folder, options):
    """Load by the plugin for vLLM what this rank has saved; return the values of its weight."""
    sys.path.insert(0, stub)
    with group():
        import tensorizer_vllm
        from vllm.distributed import parallel_state

        tensorizer_vllm.register()
        from vllm.model_executor import model_loader

        parallel_state.group = dist.group.WORLD
        config = SimpleNamespace(
            model=folder,
            revision=None,
            runner_type="generate",
            build=lambda: torch.nn.ModuleDict(
                {name: torch.nn.Linear(8, 4, bias=False) for name in ("a", "b")}
            ).requires_grad_(False),
        )
        load = SimpleNamespace(load_format="tensorizer_stream", model_loader_extra_config=options)
        loader = model_loader.get_model_loader(load)
        model = loader.load_model(None, config)
        try:
            next(loader.get_all_weights(config, model))
        except ValueError as error:
            assert "what ranks of vLLM have saved" in str(error)
        else:
            raise AssertionError("saved weights were reloaded as published ones")
        return [module.weight.unique().tolist() for module in model.values()]


def sglang(stub, model_path, options):
    """Load by the plugin for SGLang."""
    sys.path.insert(0, stub)
    with group():
        from sglang.srt import plugins
        from sglang.srt.distributed import parallel_state

        plugins.load_plugins()
        parallel_state.group = dist.group.WORLD
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader import get_model_loader

        extra = LoadConfig(load_format="tensorizer_stream", model_loader_extra_config=options)
        config = SimpleNamespace(
            model_path=model_path, hf_config=None, build=lambda: Model(lists=False)
        )
        return checked(get_model_loader(extra).load_model(model_config=config, device_config=None))


def sglang_itself(uri, folder):
    """Load by SGLang's own loader, from an address by the plugin and from a folder without it."""
    with group() as (rank, world):
        from sglang.srt import plugins
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.distributed import parallel_state
        from sglang.srt.model_loader import loader as loaders
        from sglang.srt.runtime_context import get_parallel

        plugins.load_plugins()
        # SGLang asks its server for its settings; there is none.
        loaders.get_server_args = lambda: None
        loaders.get_model = lambda: SimpleNamespace(
            weight_loader_disable_mmap=False,
            weight_loader_prefetch_checkpoints=False,
            weight_loader_prefetch_num_threads=1,
            weight_loader_drop_cache_after_load=False,
            model_checksum=None,
        )
        parallel_state.init_distributed_environment(world, rank, local_rank=rank, backend="gloo")
        # Without the communicators of GPUs.
        tensor_parallel = parallel_state.GroupCoordinator(
            [list(range(world))],
            rank,
            "gloo",
            use_pynccl=False,
            use_mscclpp=False,
            use_custom_allreduce=False,
            use_torch_symm_mem_all_reduce=False,
            use_hpu_communicator=False,
            use_xpu_communicator=False,
        )
        parallel_state._TP = parallel_state._PP = tensor_parallel
        config = SimpleNamespace(model_path=folder, revision=None, hf_config=None)

        def load(**options):
            made = loaders.get_model_loader(LoadConfig(**options), None)
            model = Model(lists=False)
            found = made._get_all_weights(config, model)
            made.load_weights_and_postprocess(model, found, torch.device("cpu"))
            return model.found

        with get_parallel().override(tp_group=tensor_parallel):
            expected = load()
            found = load(
                load_format="tensorizer_stream", model_loader_extra_config=json.dumps({"uri": uri})
            )
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        return sorted(found)
