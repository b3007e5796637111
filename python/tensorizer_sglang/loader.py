"""The loader of the load format: SGLang's default loader, with weights that this package reads.

SGLang's loader builds the model, and loads and processes the weights; only the source of the
weights is ours. SGLang's own configuration then has the format ``auto``, so that all other code
that reads it, such as that of adapters, still works.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors
from tensorizer_engines import LOAD_FORMAT
from tensorizer_engines.weights import tensor_parallel_group, weights

if TYPE_CHECKING:
    from tensorizer_engines.options import LoaderOptions

#: The attribute of a load configuration that holds our options.
_OPTIONS = "_tensorizer_options"

for _name in ("_prepare_weights", "_get_weights_iterator", "_get_all_weights", "download_model"):
    if not hasattr(DefaultModelLoader, _name):
        raise ImportError(f"SGLang's DefaultModelLoader has no {_name}")


def take_options(original: Callable[[Any], None], config: Any) -> None:
    """Take our options out of a new load configuration, before SGLang processes it.

    Raises:
        ImportError: tensorizer was built for another torch, or is another package.
        ValueError, TypeError, RuntimeError: See :meth:`LoaderOptions.of`.

    """
    if isinstance(config.load_format, str) and config.load_format.lower() == LOAD_FORMAT:
        from tensorizer_engines.options import LoaderOptions

        given = config.model_loader_extra_config or {}
        given = json.loads(given) if isinstance(given, str) else given
        setattr(config, _OPTIONS, LoaderOptions.of(given))
        config.load_format, config.model_loader_extra_config = "auto", {}
    original(config)


def choose_loader(made: Any, load_config: Any, *_: Any, **__: Any) -> Any:
    """Return our loader in place of SGLang's default one, if the configuration has our options.

    Raises:
        ValueError: SGLang loads the model by another loader.

    """
    options = getattr(load_config, _OPTIONS, None)
    if options is None:
        return made
    if type(made) is not DefaultModelLoader:
        raise ValueError(
            f"load format {LOAD_FORMAT}: SGLang loads this model by its {type(made).__name__}, "
            "which takes no other source of weights: expected a model of its default loader"
        )
    return SglangStreamLoader(load_config, options)


class SglangStreamLoader(DefaultModelLoader):  # type: ignore[misc]  # SGLang is not there to be checked
    """Feeds the tensors of :func:`tensorizer.iterate` to a model's ``load_weights``."""

    def __init__(self, load_config: Any, options: LoaderOptions) -> None:
        super().__init__(load_config)
        self._options = options
        self._device = torch.device("cpu")
        self._uri: str | None = None
        self._group: Any = None

    def download_model(self, model_config: Any) -> None:
        """Download a model that is known by name only; addresses are read during the load."""
        from tensorizer_engines.files import is_model_name

        if self._options.uri is None and is_model_name(model_config.model_path):
            super().download_model(model_config)

    def _get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self._device = self._options.device_for(model)
        # The first source that is requested is the model's own weights.
        is_served, state = _is_served(model_config), "sglang.srt.distributed.parallel_state"
        self._uri = self._options.uri if is_served else None
        # A model that drafts is not loaded by all ranks.
        self._group = tensor_parallel_group(state) if is_served else None
        yield from super()._get_all_weights(model_config, model)

    def _get_weights_iterator(
        self, source: Any, *, resolved_source: Any = None, **_: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        uri, self._uri = self._uri, None
        from tensorizer_engines.files import index_of_shards

        if uri is not None:
            files = [uri]
        elif resolved_source is not None:
            files = index_of_shards(list(resolved_source.weight_files))
        else:
            files = self._files(source)
        # SGLang reports the time of loading from here on.
        if not getattr(self, "counter_before_loading_weights", 0.0):
            self.counter_before_loading_weights: float = time.perf_counter()
        number = getattr(self.load_config, "draft_model_idx", None)
        if number is None:
            return weights(files, self._options, self._device, source.prefix, group=self._group)
        every = weights(files, self._options, self._device, group=self._group)
        return self._filter_mtp_weights(every, source.prefix, number)  # type: ignore[no-any-return]

    def _files(self, source: Any) -> list[str]:
        """Return the files of a source; SGLang chooses those of a folder, or downloads them."""
        from tensorizer_engines.files import index_of_shards, weights_file

        model, patterns = source.model_or_path, source.allow_patterns_overrides
        if patterns is None and (own := weights_file(model)):
            return [own]
        folder, files, are_safetensors = self._prepare_weights(
            model, source.revision, source.fall_back_to_pt, patterns
        )
        if are_safetensors and source.model_config is not None:
            # These may be missing in the index.
            files = maybe_add_mtp_safetensors(
                files, folder, "model.safetensors.index.json", source.model_config.hf_config
            )
        return index_of_shards(files)


def _is_served(model_config: Any) -> bool:
    """Tell whether a model is the one that is served, and not one that drafts for it."""
    if not getattr(model_config, "is_draft_model", False):
        return True
    try:
        from sglang.srt.runtime_context import get_model

        # A model may draft for itself, with layers of its own.
        return bool(get_model().model_path == model_config.model_path)
    except (ImportError, AttributeError, ValueError):
        return False
