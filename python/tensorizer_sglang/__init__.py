"""SGLang's load format ``tensorizer_stream``: the entry point that registers it.

Importing this imports neither torch, SGLang nor tensorizer.
"""

import functools

from tensorizer_engines import LOAD_FORMAT, warn_of_unsupported_engine

#: The class and the function of SGLang that are hooked.
_CONFIG = "sglang.srt.configs.load_config.LoadConfig.__post_init__"
_LOADER = "sglang.srt.model_loader.loader.get_model_loader"


@functools.cache
def register() -> None:
    """Register the load format; SGLang calls this in each of its processes.

    If this SGLang does not support it, or has an unknown interface for it, a warning is logged and
    nothing is registered: SGLang goes on with its own formats.
    """
    try:
        from sglang.srt.arg_groups.choices import add_load_format_choices
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from .loader import choose_loader, take_options

        add_load_format_choices([LOAD_FORMAT])
        HookRegistry.register(_CONFIG, take_options, HookType.AROUND)
        HookRegistry.register(_LOADER, choose_loader, HookType.AFTER)
    except Exception as error:
        warn_of_unsupported_engine("SGLang", error)
