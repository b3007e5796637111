"""Models, tokenizers and adapters of transformers, diffusers and PEFT, from a folder or an address.

One call reads the configuration, builds the model of the library, and loads its weights::

    from tensorizer.transformers import from_pretrained, load_tokenizer

    model = from_pretrained("s3://bucket/llama", device="cuda")
    tokenizer = load_tokenizer("s3://bucket/llama")

The libraries are imported by these calls, and not by this module.
"""

from .adapters import load_adapter
from .configs import load_config, load_processor, load_tokenizer
from .models import from_pretrained

__all__ = ["from_pretrained", "load_adapter", "load_config", "load_processor", "load_tokenizer"]

for _public in (from_pretrained, load_adapter, load_config, load_processor, load_tokenizer):
    # So that tracebacks, reprs and pickles show the public names.
    _public.__module__ = __name__

del _public
