"""The loader of the load format: vLLM's default loader, with weights that this package reads.

vLLM's loader builds the model, selects the experts that a rank needs, reports missing weights, and
does the work after loading. Only the source of the weights is ours.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensorizer_engines.reloading import Reload, loaded_weights
from tensorizer_engines.weights import tensor_parallel_group, weights
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from .sharded_state import ShardedStreamLoader, has_sharded_state

for _name in ("_prepare_weights", "_get_weights_iterator", "get_all_weights", "download_model"):
    if not hasattr(DefaultModelLoader, _name):
        raise ImportError(f"vLLM's DefaultModelLoader has no {_name}")


class VllmStreamLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is not there to be checked
    """Feeds the tensors of :func:`tensorizer.iterate` to a model's ``load_weights``.

    Raises:
        ImportError: tensorizer was built for another torch, or is another package.
        ValueError, TypeError, RuntimeError: See :meth:`LoaderOptions.of`.

    """

    def __init__(self, load_config: Any) -> None:
        from tensorizer_engines.options import LoaderOptions

        self._options = LoaderOptions.of(load_config.model_loader_extra_config)
        # vLLM gets none of our options; it looks up models that are neither local nor at an
        # address.
        plain = copy.copy(load_config)
        plain.model_loader_extra_config = {}
        plain.load_format = "auto"
        super().__init__(plain)
        self._device = torch.device("cpu")
        self._uri: str | None = None
        self._reload: Reload | None = None
        self._group: Any = None
        #: The beginnings of the names of what other stages of a pipeline have.
        self._elsewhere: tuple[str, ...] = ()

    def download_model(self, model_config: Any) -> None:
        """Download a model that is known by name only; addresses are read during the load."""
        from tensorizer_engines.files import is_model_name

        if self._options.uri is None and is_model_name(model_config.model):
            super().download_model(model_config)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load the weights of a model: as they were published, or as ranks of vLLM saved them."""
        loaded_weights(model, str(model_config.model))
        uri = self._options.uri if _is_served(model_config) else None
        folder = uri or getattr(model_config, "model_weights", "") or str(model_config.model)
        if not has_sharded_state(folder):
            super().load_weights(model, model_config)
            return
        config = copy.copy(model_config)
        config.model, config.model_weights = folder, ""
        ShardedStreamLoader(self.load_config, self._options).load_weights(model, config)

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the weights of a model, and the secondary weights that it requests.

        A second call for a model is a reload: it reads the path that vLLM was given, if that is not
        the first one, and only weights that have changed.
        """
        # Determined now: a reload moves the parameters to the meta device before it takes weights.
        self._device = self._options.device_for(model)
        return self._all_weights(model_config, model)

    def _all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        from vllm.model_executor.models.utils import get_pp_missing_layer_names

        is_served, state = _is_served(model_config), "vllm.distributed.parallel_state"
        # A model that drafts is not loaded by all ranks.
        self._group = tensor_parallel_group(state) if is_served else None
        self._elsewhere = tuple(get_pp_missing_layer_names(model))
        path = str(model_config.model)
        loaded = loaded_weights(model, path)
        # The first source that is requested is the model's own weights.
        self._uri = self._options.uri if loaded.path == path and is_served else None
        # A model that sleeps may lose its weights.
        sleeps = bool(getattr(model_config, "enable_sleep_mode", False))
        self._reload = Reload(loaded, self._options, _part_function(), reads_all=sleeps)
        yield from super().get_all_weights(model_config, model)
        self._reload.end()

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        uri, self._uri = self._uri, None
        where = uri or str(source.model_or_path)
        if has_sharded_state(where):
            raise ValueError(
                f"{where} holds what ranks of vLLM have saved, which reload_weights does not take: "
                "expected weights as they were published"
            )
        files = self._files(source) if uri is None else [uri]
        # vLLM reports the time of loading from here on.
        if not getattr(self, "counter_before_loading_weights", 0.0):
            self.counter_before_loading_weights = time.perf_counter()
        experts = getattr(self, "local_expert_ids", None)
        return weights(
            files,
            self._options,
            self._device,
            source.prefix,
            functools.partial(_is_wanted, source, experts, self._elsewhere),
            reload=self._reload,
            group=self._group,
        )

    def _files(self, source: Any) -> list[str]:
        """Return the files of a source; vLLM chooses those of a folder, or downloads them."""
        from tensorizer_engines.files import index_of_shards, weights_file

        model = source.model_or_path
        is_plain = source.allow_patterns_overrides is None and not getattr(source, "subfolder", "")
        if is_plain and (own := weights_file(model)):
            return [own]
        # Its parameters are fields of a source; later releases have more of them.
        asked = inspect.signature(self._prepare_weights).parameters
        given = {name: getattr(source, name) for name in asked if hasattr(source, name)}
        return index_of_shards(self._prepare_weights(model, **given)[1])


def _part_function() -> Callable[[str], str]:
    """Return the function that tells which part of a model is reloaded as a whole, by a name."""
    try:
        importlib.import_module("vllm.model_executor.model_loader.reload")
    except ImportError:
        # This vLLM fills parameters in place, one by one.
        return str
    return _block_of


def _block_of(name: str) -> str:
    """Return the block of a model to which a weight belongs, by its name, such as a layer.

    vLLM makes a module of several in a file, such as ``q_proj``, ``k_proj`` and ``v_proj``, or all
    experts. It reloads each of its modules as a whole, and those of different blocks separately.
    """
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part == "experts":
            return ".".join(parts[:at])
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return ".".join(parts[:-2])


def _is_wanted(
    source: Any, experts: set[int] | None, elsewhere: tuple[str, ...], name: str
) -> bool:
    """Tell whether a rank needs a tensor."""
    # As vLLM's models do, which leave out weights with these names.
    if elsewhere and f"{source.prefix}{name}".startswith(elsewhere):
        return False
    is_unused = getattr(source, "is_unused_weight", None)
    if is_unused is not None and is_unused(name):
        return False
    if experts is None:
        return True
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

    return not should_skip_weight(name, experts)


def _is_served(model_config: Any) -> bool:
    """Tell whether a model is the one that is served, and not one that drafts for it."""
    if getattr(model_config, "runner_type", None) != "draft":
        return True
    from vllm.config import get_current_vllm_config

    speculative = getattr(get_current_vllm_config(), "speculative_config", None)
    served = getattr(speculative, "target_model_config", None)
    # A model may draft for itself.
    return served is not None and bool(served.model == model_config.model)
