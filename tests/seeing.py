"""Tiny random targets that see, their processors, and rows with images."""

import numpy as np
import pytest
import torch
import transformers
from conftest import ALTERNATING, BASE, DELTA_RULE, VOCAB_SIZE, WINDOW, make_prompt, make_tokenizer
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


IMAGE = VOCAB_SIZE - 1  # stands for a piece of an image in the prompt
VIDEO = VOCAB_SIZE - 2
NUM_PIECES = 4
VISION = {"hidden_size": 16, "intermediate_size": 32}
TEXT = {**BASE, "initializer_range": 0.3}
SLIDING = {**ALTERNATING, "sliding_window": WINDOW}
ROPE_OF_QWEN = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
TOKENS_OF_QWEN = {"image_token_id": IMAGE, "video_token_id": VIDEO}
TOKENS_OF_QWEN |= {"vision_start_token_id": VIDEO - 1, "vision_end_token_id": VIDEO - 2}


def gemma3():
    vision = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config={**TEXT, **SLIDING, "query_pre_attn_scalar": 8},
        vision_config=vision,
        mm_tokens_per_image=NUM_PIECES,
        image_token_index=IMAGE,
    )
    target = transformers.Gemma3ForConditionalGeneration(config)
    return target, {"pixel_values": torch.rand(1, 3, 16, 16)}, "token_type_ids"


def gemma4():
    vision = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    text = {**TEXT, **SLIDING, "global_head_dim": 8, "use_bidirectional_attention": "vision"}
    config = transformers.Gemma4Config(
        text_config={**text, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE},
        vision_config={**vision, "pooling_kernel_size": 2, "patch_size": 4, "position_embedding_size": 32},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=VIDEO - 1,
    )
    grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), dim=-1).reshape(1, 16, 2)
    image = {"pixel_values": torch.rand(1, 16, 3 * 4 * 4), "image_position_ids": grid}
    return transformers.Gemma4ForConditionalGeneration(config), image, "mm_token_type_ids"


def llama4():
    vision = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    text = {**TEXT, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 16}
    vision |= {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "intermediate_size": 64}
    text["no_rope_layers"] = [1, 1, 1, 0]
    config = transformers.Llama4Config(text_config=text, vision_config=vision, image_token_index=IMAGE)
    return transformers.Llama4ForConditionalGeneration(config), {"pixel_values": torch.rand(1, 3, 16, 16)}, None


def qwen3_vl():
    vision = {**VISION, "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "out_hidden_size": 32}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, **ROPE_OF_QWEN},
        vision_config={**vision, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        **TOKENS_OF_QWEN,
    )
    image = {"pixel_values": torch.rand(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return transformers.Qwen3VLForConditionalGeneration(config), image, "mm_token_type_ids"


def qwen3_5():
    vision = {**VISION, "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(
        text_config={**TEXT, **DELTA_RULE, **ROPE_OF_QWEN},
        vision_config={**vision, "num_position_embeddings": 16},
        **TOKENS_OF_QWEN,
    )
    image = {"pixel_values": torch.rand(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return transformers.Qwen3_5ForConditionalGeneration(config), image, "mm_token_type_ids"


def llava():
    vision = {**VISION, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**vision, "model_type": "clip_vision_model"},
        image_token_index=IMAGE,
        image_seq_length=NUM_PIECES,
    )
    return transformers.LlavaForConditionalGeneration(config), {"pixel_values": torch.rand(1, 3, 16, 16)}, None


def qwen2_vl(
    config_class=transformers.Qwen2VLConfig, model_class=transformers.Qwen2VLForConditionalGeneration, **vision
):
    vision = vision or {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    config = config_class(
        text_config={**TEXT, **ROPE_OF_QWEN},
        vision_config={**vision, "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2},
        **TOKENS_OF_QWEN,
    )
    image = {"pixel_values": torch.rand(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return model_class(config), image, "mm_token_type_ids"


def qwen2_5_vl():
    vision = {**VISION, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]}
    return qwen2_vl(transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration, **vision)


def idefics3():
    config = transformers.Idefics3Config(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    return transformers.Idefics3ForConditionalGeneration(config), {"pixel_values": torch.rand(1, 1, 3, 16, 16)}, None


def mistral3():
    vision = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    config = transformers.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
        vision_config={**vision, "model_type": "pixtral", "head_dim": 8},
        image_token_index=IMAGE,
        spatial_merge_size=2,
    )
    image = {"pixel_values": torch.rand(1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}
    return transformers.Mistral3ForConditionalGeneration(config), image, None


def paligemma():
    """It passes on neither the positions nor the mask of a tree."""
    vision = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = transformers.PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma"},
        vision_config={**vision, "model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False},
        image_token_index=IMAGE,
        projection_dim=32,
        hidden_size=32,
    )
    target = transformers.PaliGemmaForConditionalGeneration(config)
    return target, {"pixel_values": torch.rand(1, 3, 16, 16)}, "token_type_ids"


def mllama():
    """It attends to images in layers of its own, for which there are no drafts."""
    text = {**TEXT, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2}
    vision["image_size"] = 16
    vision |= {"patch_size": 4, "intermediate_layers_indices": [0], "vision_output_dim": 32, "max_num_tiles": 4}
    return transformers.MllamaForConditionalGeneration(
        transformers.MllamaConfig(text_config=text, vision_config=vision)
    )


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


# Turns of texts and images, with and without marks around what the assistant says. Qwen needs tokens between images.
VISION_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}A:"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}"
    "{% else %}U:{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ IMAGE if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}|{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
UNMARKED_TEMPLATE = VISION_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def tokenizer_with(**tokens):
    """A tokenizer with names for tokens of its vocabulary, as those of targets that see have."""
    names = {name: f"<unused{number}>" for name, number in tokens.items()}
    special = {"eos_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>", "extra_special_tokens": names}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer().backend_tokenizer, **special)


def without_video(processor_class):
    """The processor without its check of the class of a video processor, which would need torchvision."""

    class WithoutVideo(processor_class):
        def check_argument_for_proper_class(self, name, argument):
            if name not in ("video_processor", "feature_extractor"):
                return super().check_argument_for_proper_class(name, argument)

    WithoutVideo.__name__ = processor_class.__name__
    return WithoutVideo


def make_processor(family, template=UNMARKED_TEMPLATE):
    """The processor of a tiny target. It writes four tokens for a small image, and Gemma 4's writes 64."""
    if family is gemma3:
        tokenizer = tokenizer_with(image_token=IMAGE, boi_token=VIDEO - 1, eoi_token=VIDEO - 2)
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=NUM_PIECES)
    elif family is gemma4:
        names = {"boi_token": VIDEO - 2, "eoi_token": VIDEO - 3, "audio_token": VIDEO - 1}
        tokenizer = tokenizer_with(image_token=IMAGE, boa_token=VIDEO - 4, eoa_token=VIDEO - 5, **names)
        images = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
        # In older transformers it needs torchvision.
        module = pytest.importorskip("transformers.models.gemma4.processing_gemma4", exc_type=ImportError)
        processor = without_video(module.Gemma4Processor)(None, images, tokenizer, None, image_seq_length=NUM_PIECES)
    else:
        names = {"vision_start_token": VIDEO - 1, "vision_end_token": VIDEO - 2}
        tokenizer = tokenizer_with(image_token=IMAGE, video_token=VIDEO, **names)
        images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=256)
        processor = without_video(transformers.Qwen3VLProcessor)(images, tokenizer, None)
    processor.chat_template = tokenizer.chat_template = template.replace("IMAGE", repr(f".{processor.image_token}."))
    return processor


def make_image(seed, width=16, height=16):
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def vision_rows():
    """Conversations with none, one and two images, and one whose image is gone."""

    def user(content):
        return {"role": "user", "content": content}

    old = {"role": "assistant", "content": "old"}
    two = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]
    return [
        {"images": [make_image(0)], "messages": [user("what is it"), old, user("and"), old]},
        {"images": [make_image(1), make_image(2)], "messages": [user("see"), old, user(two)]},
        {"images": [], "messages": [user("hm"), old]},
        {"images": ["gone.png"], "messages": [user("see"), old]},
    ]
