"""Multimodal targets, with text and with images in the prompt."""

import itertools

import pytest
import torch
from conftest import (
    assert_an_oracle_gives_the_text,
    assert_gives_its_text,
    assert_same_text,
    each_once,
    generate,
    lookups_of,
    make_batch,
    make_draft,
    make_oracle,
    make_prompt,
)
from seeing import (
    IMAGE,
    TEXT,
    VISION,
    gemma3,
    gemma4,
    idefics3,
    llama4,
    llava,
    make,
    make_image,
    make_processor,
    mistral3,
    paligemma,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_vl,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ImageTextToTextPipeline,
    VoxtralRealtimeConfig,
    VoxtralRealtimeForConditionalGeneration,
)

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.remote_code.outputs_eagle3 import CAN_SELECT_HIDDEN_STATES


FAMILIES = [gemma3, gemma4, llama4, qwen3_vl, qwen3_5]
# Of these only the text is compared with that of plain `generate`.
MORE_FAMILIES = [llava, qwen2_vl, qwen2_5_vl, idefics3, mistral3]


SETTINGS = [{}, {"repetition_penalty": 1.3}, {"do_sample": True}]


@pytest.mark.parametrize(
    ("family", "num_images", "settings"),
    [
        *(
            (family, num_images, SETTINGS[(number + num_images) % 3])  # each of these meets each number of images
            for (number, family), num_images in itertools.product(enumerate(FAMILIES), [0, 1, 2])
        ),
        *((family, 1, settings) for family, settings in each_once(MORE_FAMILIES, SETTINGS)),
    ],
)
def test_text_and_images(family, num_images, settings):
    oracle = assert_an_oracle_gives_the_text(*make(family, num_images), **settings)
    assert max(oracle.last_generation.accepted_lengths) >= 4


@pytest.mark.parametrize("family", FAMILIES)
def test_looking_up_what_may_be_an_image(family):
    """The places of images are tokens of the text, too."""
    target, inputs = make(family, 2)
    oracle, num_lookups = assert_an_oracle_gives_the_text(target, inputs), 0
    oracle.generation_config.tree_policy = "auto"
    for seed in range(3):
        with lookups_of(oracle.text, seed, wrong=IMAGE):
            num_lookups += assert_gives_its_text(oracle, target, inputs).lookup_steps
    assert num_lookups > 3


@pytest.mark.parametrize("family", [gemma3, gemma4, llama4, qwen3_vl])
def test_static_caches(family):
    if family is llama4 and not CAN_SELECT_HIDDEN_STATES:
        pytest.skip("transformers before 5.23 makes no masks for static caches of Llama 4, with or without a draft")
    target, inputs = make(family, 2)
    oracle = assert_an_oracle_gives_the_text(target, inputs, cache_implementation="static")
    if CAN_SELECT_HIDDEN_STATES:  # older transformers (5.17) write another text with a static cache than without
        assert oracle.text.tolist() == generate(target, inputs).tolist()
    assert max(oracle.last_generation.accepted_lengths) >= 4


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_the_image_matters(family):
    """Or the tests above would not be about images."""
    target, inputs = make(family, 1)
    with torch.no_grad():
        logits = target(**inputs).logits[:, -1]
        inputs["pixel_values"] = 1 - inputs["pixel_values"]
        assert (target(**inputs).logits[:, -1] - logits).abs().max() > 1e-3


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_batches(family):
    target, inputs = make(family, 1)
    batch = {name: torch.cat([value] * 2) for name, value in inputs.items()}
    batch["input_ids"][1, 12:] = make_prompt(18, seed=3) % 90 + 3
    batch["input_ids"][1, 0], batch["attention_mask"][1, 0] = 0, 0
    assert_an_oracle_gives_the_text(target, batch)


@pytest.mark.parametrize("family", [gemma3, qwen3_vl])
def test_pipelines(family):
    """transformers' own do not pass on the assistant that they were made with."""
    target, _ = make(family, 1)
    draft, processor = make_draft(target, [make_prompt(5) % 90 + 3]), make_processor(family)
    content = [{"type": "image", "image": make_image(0)}, {"type": "text", "text": "what"}]
    results = []
    for assistant in ({}, {"assistant_model": draft}):
        pipeline = ImageTextToTextPipeline(target, processor=processor, **assistant)
        results.append(pipeline(text=[{"role": "user", "content": content}], max_new_tokens=12))
        results.append(pipeline(text="abc", generate_kwargs={"do_sample": False}, max_new_tokens=6))
        assert (draft.last_generation is None) == (not assistant)
    assert results[:2] == results[2:] and draft.last_generation.new_tokens == 6


@pytest.mark.parametrize("num_images", [0, 1])
def test_a_target_that_passes_on_no_tree_is_refused(num_images):
    target, inputs = make(paligemma, num_images)
    draft = Eagle3ForSpeculation.from_target(target).eval()
    with pytest.raises(ValueError, match="does not pass on the positions and the mask"):
        generate(target, inputs, assistant_model=draft)


def test_sound_that_is_heard_with_each_token_is_refused():
    """Siblings in a tree would hear different pieces of it."""
    audio = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 8, "head_dim": 8}
    config = VoxtralRealtimeConfig(text_config={**TEXT, "sliding_window": None}, audio_config=audio)
    target = VoxtralRealtimeForConditionalGeneration(config).eval()
    call = {"input_ids": make_prompt(8), "input_features": torch.rand(1, 8, 8 * 40), "max_new_tokens": 4}
    assert target.generate(**call, num_delay_tokens=6).shape == (1, 12)
    draft = Eagle3ForSpeculation.from_target(target).eval()
    with pytest.raises(ValueError, match="hears a piece of the sound with each token"):
        target.generate(**call, num_delay_tokens=6, assistant_model=draft)


@pytest.mark.parametrize(
    ("lengths", "has_image", "has_mask"),
    [([4, 6], False, True), ([4, 6], True, True), ([6, 6], True, True), ([6, 6], True, False)],
)
def test_images_without_tokens_in_the_text(lengths, has_image, has_mask):
    """GIT caches them all the same. It takes masks of the text, and widens them for an image, even if there is none."""
    vision = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = AutoConfig.for_model("git", **TEXT, vision_config=vision)
    torch.manual_seed(0)
    target, batch = AutoModelForCausalLM.from_config(config).eval(), make_batch(lengths)
    if has_image:
        batch["pixel_values"] = torch.rand(2, 3, 16, 16)
    padding = 6 - batch["attention_mask"].sum(dim=1, keepdim=True)
    if not has_mask:
        del batch["attention_mask"]
    draft = make_oracle(target, generate(target, batch, do_sample=True), padding=padding)
    if not CAN_SELECT_HIDDEN_STATES:
        with pytest.raises(ValueError, match="another mask"):
            generate(target, batch, assistant_model=draft)
        return
    assert max(assert_same_text(target, draft, batch, do_sample=True).accepted_lengths) >= 3


def test_an_untrained_draft_has_tokens_accepted():
    target, inputs = make(qwen3_vl, 0)
    draft = make_draft(target, [inputs["input_ids"]], num_tokens=8)
    assert max(assert_same_text(target, draft, inputs).accepted_lengths) >= 2
