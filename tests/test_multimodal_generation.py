"""Multimodal targets, with text and with images in the prompt."""

import pytest
import torch
import transformers
from conftest import (
    ALTERNATING,
    BASE,
    DELTA_RULE,
    VOCAB_SIZE,
    WINDOW,
    lookups_of,
    make_draft,
    make_oracle,
    make_prompt,
)
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from hf_eagle3.remote_code.outputs_eagle3 import CAN_SELECT_HIDDEN_STATES


IMAGE = VOCAB_SIZE - 1  # stands for a piece of an image in the prompt
VIDEO = VOCAB_SIZE - 2
NUM_PIECES = 4
VISION = {"hidden_size": 16, "intermediate_size": 32}
TEXT = {**BASE, "initializer_range": 0.3}
SLIDING = {**ALTERNATING, "sliding_window": WINDOW}


def gemma3():
    vision = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    config = Gemma3Config(
        text_config={**TEXT, **SLIDING, "query_pre_attn_scalar": 8},
        vision_config=vision,
        mm_tokens_per_image=NUM_PIECES,
        image_token_index=IMAGE,
    )
    return Gemma3ForConditionalGeneration(config), {"pixel_values": torch.rand(1, 3, 16, 16)}, "token_type_ids"


def gemma4():
    vision = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = Gemma4Config(
        text_config={
            **TEXT,
            **SLIDING,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "use_bidirectional_attention": "vision",
        },
        vision_config={**vision, "pooling_kernel_size": 2, "patch_size": 4, "position_embedding_size": 8},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=VIDEO - 1,
    )
    grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), dim=-1).reshape(1, 16, 2)
    image = {"pixel_values": torch.rand(1, 16, 3 * 4 * 4), "image_position_ids": grid}
    return Gemma4ForConditionalGeneration(config), image, "mm_token_type_ids"


def llama4():
    vision = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    config = Llama4Config(
        text_config={
            **TEXT,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 1, 1, 0],
        },
        vision_config={
            **vision,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "intermediate_size": 64,
        },
        image_token_index=IMAGE,
    )
    return Llama4ForConditionalGeneration(config), {"pixel_values": torch.rand(1, 3, 16, 16)}, None


def qwen3_vl():
    vision = {**VISION, "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "out_hidden_size": 32}
    config = Qwen3VLConfig(
        text_config={
            **TEXT,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
        },
        vision_config={**vision, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VIDEO - 1,
        vision_end_token_id=VIDEO - 2,
    )
    image = {"pixel_values": torch.rand(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return Qwen3VLForConditionalGeneration(config), image, "mm_token_type_ids"


def qwen3_5():
    vision = {**VISION, "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(
        text_config={
            **TEXT,
            **DELTA_RULE,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
        },
        vision_config={**vision, "num_position_embeddings": 16},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VIDEO - 1,
        vision_end_token_id=VIDEO - 2,
    )
    image = {"pixel_values": torch.rand(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return Qwen3_5ForConditionalGeneration(config), image, "mm_token_type_ids"


def make(family, num_images):
    """A target, and a prompt of 30 tokens with so many images in it."""
    torch.manual_seed(0)
    target, image, type_name = family()
    target.eval()
    for name, weight in target.named_parameters():
        if "projector" in name:  # Gemma 3's begins as zeros
            torch.nn.init.normal_(weight, std=0.3)
    input_ids = make_prompt(30) % (VOCAB_SIZE - 4)
    input_ids[input_ids < 3] = 3
    for start in range(5, 5 + 10 * num_images, 10):
        input_ids[:, start : start + NUM_PIECES] = IMAGE
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if num_images:
        inputs |= {name: torch.cat([value] * num_images) for name, value in image.items()}
    if type_name is not None:
        inputs[type_name] = (input_ids == IMAGE).long()
    if family is llama4:
        try:
            target(**inputs)
        except AttributeError as error:
            pytest.skip(
                f"Llama 4 does not run in transformers {transformers.__version__} by itself, as in 5.24.0: {error}"
            )
    return target, inputs


@pytest.mark.parametrize("num_images", [0, 1, 2])
@pytest.mark.parametrize("family", [gemma3, gemma4, llama4, qwen3_vl, qwen3_5])
def test_text_and_images(family, num_images):
    target, inputs = make(family, num_images)
    for settings in ({}, {"repetition_penalty": 1.3}, {"do_sample": True}):
        settings = {"max_new_tokens": 24, "do_sample": False, **settings}
        torch.manual_seed(0)
        expected = target.generate(**inputs, **settings)
        oracle = make_oracle(target, expected)
        torch.manual_seed(0)
        actual = target.generate(**inputs, assistant_model=oracle, **settings)
        assert actual.tolist() == expected.tolist()
        assert max(oracle.last_generation.accepted_lengths) >= 4


@pytest.mark.parametrize("family", [gemma3, gemma4, llama4, qwen3_vl, qwen3_5])
def test_looking_up_what_may_be_an_image(family):
    """The places of images are tokens of the text, too."""
    target, inputs = make(family, 2)
    expected = target.generate(**inputs, max_new_tokens=40, do_sample=False)
    oracle, num_lookups = make_oracle(target, expected), 0
    oracle.generation_config.tree_policy = "auto"
    for seed in range(5):
        with lookups_of(expected, seed, wrong=IMAGE):
            actual = target.generate(**inputs, assistant_model=oracle, max_new_tokens=40, do_sample=False)
        assert actual.tolist() == expected.tolist()
        num_lookups += oracle.last_generation.lookup_steps
    assert num_lookups > 3


@pytest.mark.parametrize("family", [gemma3, gemma4, llama4, qwen3_vl])
def test_static_caches(family):
    if family is llama4 and not CAN_SELECT_HIDDEN_STATES:
        pytest.skip("transformers before 5.23 makes no masks for static caches of Llama 4, with or without a draft")
    target, inputs = make(family, 2)
    settings = {"max_new_tokens": 24, "do_sample": False, "cache_implementation": "static"}
    expected = target.generate(**inputs, **settings)
    if CAN_SELECT_HIDDEN_STATES:  # older transformers (5.17) write another text with a static cache than without
        assert expected.tolist() == target.generate(**inputs, max_new_tokens=24, do_sample=False).tolist()
    oracle = make_oracle(target, expected)
    actual = target.generate(**inputs, assistant_model=oracle, **settings)
    assert actual.tolist() == expected.tolist()
    assert max(oracle.last_generation.accepted_lengths) >= 4


@pytest.mark.parametrize("family", [gemma3, gemma4, llama4, qwen3_vl, qwen3_5])
def test_the_image_matters(family):
    """Or the tests above would not be about images."""
    target, inputs = make(family, 1)
    with torch.no_grad():
        logits = target(**inputs).logits[:, -1]
        inputs["pixel_values"] = 1 - inputs["pixel_values"]
        assert (target(**inputs).logits[:, -1] - logits).abs().max() > 1e-3


@pytest.mark.parametrize("family", [gemma3, gemma4, llama4, qwen3_vl, qwen3_5])
def test_batches(family):
    target, inputs = make(family, 1)
    batch = {name: torch.cat([value] * 2) for name, value in inputs.items()}
    batch["input_ids"][1, 12:] = make_prompt(18, seed=3) % 90 + 3
    batch["input_ids"][1, 0], batch["attention_mask"][1, 0] = 0, 0
    expected = target.generate(**batch, max_new_tokens=20, do_sample=False)
    draft = make_oracle(target, expected)
    actual = target.generate(**batch, max_new_tokens=20, do_sample=False, assistant_model=draft)
    assert actual.tolist() == expected.tolist()


def test_an_untrained_draft_has_tokens_accepted():
    target, inputs = make(qwen3_vl, 0)
    draft = make_draft(target, [inputs["input_ids"]], num_tokens=8)
    expected = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert target.generate(**inputs, max_new_tokens=24, do_sample=False, assistant_model=draft).equal(expected)
    assert max(draft.last_generation.accepted_lengths) >= 2
