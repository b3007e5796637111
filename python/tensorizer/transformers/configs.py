"""Loads configurations, tokenizers and processors of a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._calls import limited
from .._native import hub_is_offline
from .config_sanitizer import drop_entries, names_path, names_vocabulary
from .fetching import FetchedFiles, fetched_files
from .folders import ModelFolder
from .libraries import library
from .remote_code import fetch_code, read_json

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
#: The argument that allows Python files of a folder to run.
_TRUST = "trust_remote_code"
#: Files that any tokenizer may have.
_TOKENIZER = (
    *(TOKENIZER_CONFIG, "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", CONFIG),
)
#: Vocabularies of tokenizers without ``tokenizer.json`` whose class is unknown.
_VOCABULARIES = (
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "source.spm", "target.spm", "tekken.json"),
)
_PROCESSOR = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("audio_tokenizer_config.json", "chat_template.json"),
)
#: Further files beside the weights that inference engines read.
_OF_ENGINES = (
    *("generation_config.json", "params.json", "hf_quant_config.json"),
    *("quantize_config.json", "quant_config.json"),
)
#: Arguments by which the libraries select files on their hub.
_OF_THE_HUB = {
    *("subfolder", "revision", "code_revision", "token", "use_auth_token", "proxies"),
    *("force_download", "gguf_file", "state_dict"),
}


@limited
def load_config(
    uri: str | os.PathLike[Any],
    *,
    trust_remote_code: bool = False,
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> Any:
    """Load the configuration of a model.

    Args:
        uri: A local folder, or the address of one; see :func:`from_pretrained`.
        trust_remote_code: Run Python files of the folder, for models that need them.
        headers: Header fields of the requests.
        timeout: The seconds that the call may take; then it is a ``TimeoutError``.
        kwargs: Arguments of ``AutoConfig.from_pretrained``: attributes to change.

    Returns:
        A configuration of transformers, or the dictionary of a model of diffusers.

    Raises:
        FileNotFoundError: The folder has no ``config.json``.
        ImportError: transformers is not installed.
        TypeError: An argument is for the hub only.
        FormatError: A file is larger than 10 MiB.
        OSError, ValueError: The folder cannot be read, or the configuration is damaged, or the
            library refuses it.

    """
    folder = ModelFolder(uri)
    refuse_hub_arguments(folder, kwargs)
    with fetched_files(folder, headers) as files:
        files.fetch([CONFIG])
        if read_config(files).get("_class_name") is not None:
            return read_json(files.path / CONFIG)
        if trust_remote_code:
            fetch_code(files, [CONFIG])
        with address_in_errors(files):
            config = library("transformers").AutoConfig.from_pretrained(
                files.path, trust_remote_code=trust_remote_code, **kwargs
            )
    (config[0] if isinstance(config, tuple) else config).name_or_path = folder.shown
    return config


@limited
def load_tokenizer(
    uri: str | os.PathLike[Any],
    *,
    trust_remote_code: bool = False,
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> Any:
    """Load the tokenizer of a model.

    Args:
        uri: A local folder, or the address of one; see :func:`from_pretrained`.
        trust_remote_code: Run Python files of the folder, for tokenizers that need them.
        headers: Header fields of the requests.
        timeout: The seconds that the call may take; then it is a ``TimeoutError``.
        kwargs: Arguments of ``AutoTokenizer.from_pretrained``.

    Returns:
        The tokenizer of transformers.

    Raises:
        FileNotFoundError: The folder has no file of a tokenizer.
        ImportError: transformers is not installed.
        TypeError: An argument is for the hub only.
        FormatError: A file is larger than 200 MiB, or a configuration than 10 MiB.
        OSError, ValueError: The folder cannot be read, or the library refuses its content.

    """
    kwargs[_TRUST] = trust_remote_code
    return _from_auto_class(uri, headers, "AutoTokenizer", (), kwargs)


@limited
def load_processor(
    uri: str | os.PathLike[Any],
    *,
    trust_remote_code: bool = False,
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> Any:
    """Load the processor of a model: for several inputs, for images, or for audio.

    Args:
        uri: A local folder, or the address of one; see :func:`from_pretrained`.
        trust_remote_code: Run Python files of the folder, for processors that need them.
        headers: Header fields of the requests.
        timeout: The seconds that the call may take; then it is a ``TimeoutError``.
        kwargs: Arguments of ``AutoProcessor.from_pretrained``.

    Returns:
        The result of ``AutoProcessor``: a processor, an image processor or a feature extractor of
        transformers, or a tokenizer if there is nothing else.

    Raises:
        FileNotFoundError: The folder has neither a processor nor a tokenizer.
        ImportError: transformers is not installed.
        TypeError: An argument is for the hub only.
        FormatError: A file is larger than 200 MiB, or a configuration than 10 MiB.
        OSError, ValueError: The folder cannot be read, or the library refuses its content.

    """
    kwargs[_TRUST] = trust_remote_code
    return _from_auto_class(uri, headers, "AutoProcessor", _PROCESSOR, kwargs)


def fetch_without_weights(files: FetchedFiles) -> list[str]:
    """Fetch all files that a model has beside its weights; return their names.

    Raises:
        OSError, ValueError: See :func:`load_config` and :func:`fetch_code`.

    """
    files.fetch([*_TOKENIZER, *_PROCESSOR, *_VOCABULARIES, *_OF_ENGINES])
    read_config(files)
    fetch_code(files, [*_PROCESSOR[:3], TOKENIZER_CONFIG, CONFIG])
    return files.found()


def _from_auto_class(
    uri: str | os.PathLike[Any],
    headers: Mapping[str, str] | None,
    auto: str,
    extra_files: tuple[str, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return the object that an auto class makes of a tokenizer's and of further files."""
    folder = ModelFolder(uri)
    refuse_hub_arguments(folder, kwargs)
    with fetched_files(folder, headers) as files:
        _fetch_tokenizer(files, extra_files)
        names = [name for name in (*extra_files, *_TOKENIZER, *_VOCABULARIES) if name != CONFIG]
        if not any(map(files.has, names)):
            what = auto.removeprefix("Auto").lower()
            raise refusal(files, names[0], f"no {what}")
        if kwargs[_TRUST]:
            fetch_code(files, [*extra_files[:3], TOKENIZER_CONFIG, CONFIG])
        with address_in_errors(files):
            made = getattr(library("transformers"), auto).from_pretrained(files.path, **kwargs)
    if auto == "AutoTokenizer":
        made.name_or_path = folder.shown
    _show_address(made, files)
    return made


def read_config(files: FetchedFiles) -> dict[str, Any]:
    """Return the content of ``config.json``, which must have been fetched.

    Raises:
        FileNotFoundError: The folder has none; the message names the kind of folder if it is known.
        PermissionError: The server refuses it.
        ValueError: It is not a JSON object.

    """
    if files.has(CONFIG):
        return read_json(files.path / CONFIG)
    files.fetch(["adapter_config.json", "model_index.json"])
    if files.has("adapter_config.json"):
        raise FileNotFoundError(
            f"no {CONFIG} at {files.folder.shown}, which is the folder of an adapter: load the "
            "model that it is for, and give both to "
            "tensorizer.transformers.load_adapter(model, uri)"
        )
    if files.has("model_index.json"):
        raise FileNotFoundError(
            f"no {CONFIG} at {files.folder.shown}, which is the folder of a pipeline: load each of "
            "its models by its own folder, and give them to the pipeline"
        )
    raise refusal(files, CONFIG, f"no {CONFIG}", ": pass config=, or the folder that has it")


def refuse_hub_arguments(folder: ModelFolder, kwargs: dict[str, Any]) -> None:
    """Refuse arguments that the address replaces, and remove those that have no effect here.

    Any kind of weights is read without running code, and of a local folder nothing but local files.

    Raises:
        TypeError: There is an argument that the address replaces.

    """
    if kwargs.pop("use_safetensors", None) is False:
        raise TypeError(
            "use_safetensors=False is not supported: pass the address of the file of weights"
        )
    if kwargs.get("weights_only") is True:
        del kwargs["weights_only"]
    local_only = kwargs.pop("local_files_only", False)
    if local_only and folder.path is None and not (folder.is_of_hub and hub_is_offline()):
        raise TypeError(
            f"local_files_only=True, and {folder.shown} is not local; with HF_HUB_OFFLINE=1, hf:// "
            "addresses are read from the hub's cache on this machine"
        )
    for name in sorted(_OF_THE_HUB & kwargs.keys()):
        if kwargs.pop(name) not in (None, False, ""):
            raise TypeError(
                f"{name}= is not supported: the address says which files are read, as in "
                "hf://org/repo@revision/folder, and HF_TOKEN holds the token"
            )


def refusal(files: FetchedFiles, name: str, what: str, advice: str = "") -> OSError:
    """Return the error for a file that the server refuses, or that is missing."""
    if name in files.refused:
        return files.refused[name]
    return FileNotFoundError(f"{what} at {files.folder.shown}{advice}")


def _fetch_tokenizer(files: FetchedFiles, extra_files: tuple[str, ...]) -> None:
    """Fetch the files that a tokenizer may need, its vocabularies in a second round.

    Configurations from an address are changed so that they name no files of this machine.
    """
    files.fetch([*extra_files, *_TOKENIZER])
    cls = _tokenizer_class(files)
    known = getattr(cls, "vocab_files_names", None)
    if isinstance(known, dict):
        files.fetch(name for name in known.values() if isinstance(name, str))
    elif not files.has("tokenizer.json"):
        files.fetch(_VOCABULARIES)
    if files.folder.path is None:
        for name in filter(files.has, (TOKENIZER_CONFIG, "special_tokens_map.json")):
            drop_entries(files.path / name, names_vocabulary)
        for name in filter(files.has, extra_files):
            if name.endswith("config.json"):
                drop_entries(files.path / name, names_path)


def _tokenizer_class(files: FetchedFiles) -> Any:
    """Return the class that the configuration of the tokenizer names, or None.

    Without it the library uses the name in ``config.json``, which is checked too.

    Raises:
        ValueError: It is not a name, or that of something else in the library.

    """
    transformers = library("transformers")
    base = library("transformers.tokenization_utils_base").PreTrainedTokenizerBase
    for config in (TOKENIZER_CONFIG, CONFIG):
        config_json = read_json(files.path / config) if files.has(config) else {}
        name = config_json.get("tokenizer_class")
        if name is None:
            continue
        found = getattr(transformers, name, None) if isinstance(name, str) else name
        is_tokenizer = isinstance(found, type) and issubclass(found, base)
        # Stand-ins for classes whose libraries are missing, and classes of remote code, are
        # allowed.
        if not is_tokenizer and not hasattr(found, "_backends") and found is not None:
            raise ValueError(
                f"tokenizer_class in {config} of {files.folder.shown} is {name!r}: expected the "
                "name of a tokenizer"
            )
        return found if config == TOKENIZER_CONFIG else None
    return None


@contextmanager
def address_in_errors(files: FetchedFiles) -> Iterator[None]:
    """Make errors of the library name the address instead of a temporary folder."""
    try:
        yield
    except (OSError, ValueError) as error:
        text = str(error)
        if files.folder.path is not None or str(files.path) not in text:
            raise
        text = text.replace(str(files.path), files.folder.shown)
        try:
            renamed = type(error)(text)
        except TypeError:
            # Errors such as those of JSON and of UTF-8 are made of more than a text.
            renamed = OSError(text) if isinstance(error, OSError) else ValueError(text)
        raise renamed from error


def _show_address(made: Any, files: FetchedFiles) -> None:
    """Replace the temporary folder by the address in a tokenizer, or a processor and its parts."""
    for part in (made, *getattr(made, "__dict__", {}).values()):
        attributes = getattr(part, "__dict__", {})
        arguments = attributes.get("init_kwargs")
        for holder in (attributes, arguments if isinstance(arguments, dict) else {}):
            for name, value in holder.items():
                if isinstance(value, (str, Path)) and str(value) == str(files.path):
                    holder[name] = files.folder.shown
