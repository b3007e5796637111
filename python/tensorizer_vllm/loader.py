"""The loader behind the load format: vLLM's default loader, over weights that this package reads.

It builds the model, tells which experts a rank needs and which weights are missing, and does what
is done after loading; only where weights come from is ours.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

if TYPE_CHECKING:
    from .options import Options

#: A parameter that vLLM's own tensorizer format adds to what it writes.
_MARKER = ".vllm_tensorized_marker"

for _name in ("_prepare_weights", "_get_weights_iterator", "get_all_weights", "download_model"):
    if not hasattr(DefaultModelLoader, _name):
        raise ImportError(f"vLLM's DefaultModelLoader has no {_name}")


class StreamLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is not there to be checked
    """Feeds a model's ``load_weights`` with what :func:`tensorizer.iterate` yields.

    Raises:
        ImportError: tensorizer was built for another torch, or is another package.
        ValueError, TypeError, RuntimeError: See :meth:`Options.of`.

    """

    def __init__(self, load_config: Any) -> None:
        from .options import Options

        self._options = Options.of(load_config.model_loader_extra_config)
        # Options are ours; models that are neither here nor at an address are looked up by vLLM.
        plain = copy.copy(load_config)
        plain.model_loader_extra_config = {}
        plain.load_format = "auto"
        super().__init__(plain)
        self._device = torch.device("cpu")
        self._uri: str | None = None

    def download_model(self, model_config: Any) -> None:
        """Download a model that is only known by name; addresses are read when they are loaded."""
        from .files import is_ours

        model = model_config.model
        if self._options.uri is None and not is_ours(model) and not Path(model).exists():
            super().download_model(model_config)

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of a model, and the secondary ones that it asks for."""
        self._device = self._options.place(model)
        # The first source that is asked for are the model's own weights.
        self._uri = self._options.uri if _is_served(model_config) else None
        yield from super().get_all_weights(model_config, model)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        uri, self._uri = self._uri, None
        files = self._files(source) if uri is None else [uri]
        # vLLM reports the time from here on.
        if not getattr(self, "counter_before_loading_weights", 0.0):
            self.counter_before_loading_weights = time.perf_counter()
        return _weights(
            files,
            self._options,
            self._device,
            source,
            getattr(self, "local_expert_ids", None),
        )

    def _files(self, source: Any) -> list[str]:
        """Return the files of a source; vLLM chooses those of a folder, or downloads them."""
        from .files import is_ours, tensors_file, together

        model = source.model_or_path
        if source.allow_patterns_overrides is None and not getattr(source, "subfolder", None):
            own = model if is_ours(model) else tensors_file(model)
            if own is not None:
                return [own]
        # What it is asked with are fields of a source, more of them in later releases.
        asked = inspect.signature(self._prepare_weights).parameters
        given = {name: getattr(source, name) for name in asked if hasattr(source, name)}
        return together(self._prepare_weights(model, **given)[1])


def _weights(
    files: Sequence[str],
    options: Options,
    device: torch.device,
    source: Any,
    experts: set[int] | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of files one after another."""
    from tensorizer import iterate

    for file in files:
        weights: Any = iterate(
            file,
            device,
            buffer_bytes=options.buffer_bytes,
            num_readers=options.num_readers,
            verify_hash=options.verify_hash,
            encryption=options.decryption(),
            filter_func=functools.partial(_is_wanted, file, source, experts),
        )
        with contextlib.closing(weights):
            for name, tensor in weights:
                yield source.prefix + name, tensor
                # Before the next is waited for.
                del tensor


def _is_wanted(file: str, source: Any, experts: set[int] | None, name: Any) -> bool:
    """Tell whether a rank needs a tensor.

    Raises:
        ValueError: The file is not one of a model's weights, as they were published.

    """
    if not isinstance(name, str):
        raise ValueError(f"{file}: expected names of weights, found {name!r} of a nested state")
    if name == _MARKER:
        raise ValueError(
            f"{file} was written by vLLM from a model of its own: load it with "
            "--load-format tensorizer"
        )
    is_unused = getattr(source, "is_unused_weight", None)
    if is_unused is not None and is_unused(name):
        return False
    if experts is None:
        return True
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

    return not should_skip_weight(name, experts)


def _is_served(model_config: Any) -> bool:
    """Tell whether weights are of the model that is served, or of one that drafts for it."""
    if getattr(model_config, "runner_type", None) != "draft":
        return True
    from vllm.config import get_current_vllm_config

    speculative = getattr(get_current_vllm_config(), "speculative_config", None)
    served = getattr(speculative, "target_model_config", None)
    # A model may draft for itself.
    return served is not None and bool(served.model == model_config.model)
