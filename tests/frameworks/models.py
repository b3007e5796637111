"""Tiny models of the libraries with random weights, and what goes into them."""

import torch
import transformers

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = LLAMA | {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}


def ids(**more):
    generator = torch.Generator().manual_seed(5)
    return {"input_ids": torch.randint(3, 64, (2, 9), generator=generator), **more}


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **more)), ids()


def tied_llama():
    return llama(tie_word_embeddings=True)


def mixtral():
    config = transformers.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config), ids()


def qwen2_moe():
    config = transformers.Qwen2MoeConfig(**MOE, shared_expert_intermediate_size=24)
    return transformers.Qwen2MoeForCausalLM(config), ids()


def qwen3_moe():
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MOE, head_dim=8)), ids()


def deepseek():
    config = transformers.DeepseekV3Config(
        **(LLAMA | {"num_key_value_heads": 4}),
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    return transformers.DeepseekV3ForCausalLM(config), ids()


def gemma():
    config = transformers.Gemma3TextConfig(**LLAMA, head_dim=8, sliding_window=4)
    return transformers.Gemma3ForCausalLM(config), ids()


def t5():
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), ids(
        decoder_input_ids=torch.tensor([[0, 4, 5], [0, 6, 7]])
    )


def clip():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "projection_dim": 16}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 64, "eos_token_id": 2, "bos_token_id": 1},
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(6))
    return transformers.CLIPModel(config), ids(pixel_values=pixels)


def unet():
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    generator = torch.Generator().manual_seed(7)
    return model, {
        "sample": torch.rand(2, 4, 8, 8, generator=generator),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": torch.rand(2, 5, 8, generator=generator),
    }


def dit():
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        norm_num_groups=4,
        sample_size=8,
        num_embeds_ada_norm=10,
    )
    return model, {
        "hidden_states": torch.rand(2, 4, 8, 8, generator=torch.Generator().manual_seed(8)),
        "timestep": torch.tensor([3, 4]),
        "class_labels": torch.tensor([1, 2]),
    }


def flux():
    import diffusers

    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 2, 2),
    )
    generator = torch.Generator().manual_seed(9)
    return model, {
        "hidden_states": torch.rand(1, 6, 4, generator=generator),
        "encoder_hidden_states": torch.rand(1, 3, 16, generator=generator),
        "pooled_projections": torch.rand(1, 8, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(3, 3),
    }


TRANSFORMERS = [llama, tied_llama, mixtral, qwen2_moe, qwen3_moe, deepseek, gemma, t5, clip]
DIFFUSERS = [unet, dit, flux]


def made(build, dtype=torch.float32):
    """Return a model in evaluation mode with the same weights each time, and its inputs."""
    torch.manual_seed(11)
    model, inputs = build()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and scales too, which libraries begin as zeros and ones.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    inputs = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    return model.to(dtype).eval(), inputs
