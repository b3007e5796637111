"""The model of the examples: one of Hugging Face's hub, or a small GPT-2 that needs no network."""

from transformers import AutoConfig, GPT2Config, PreTrainedConfig


def config_of(model: str | None) -> PreTrainedConfig:
    """Return the configuration of a folder or of a name of the hub; of a small GPT-2 for None."""
    if model is not None:
        return AutoConfig.from_pretrained(model)
    size = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **size)
