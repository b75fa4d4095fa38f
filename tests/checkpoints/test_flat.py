"""What drafts of others hold and say, key by key."""

import copy
import gc
import json
import math
import re
import weakref
from pathlib import Path

import pytest
import torch
from checkpoints.test_formats import assert_same, export, make_reference, midlayer, sglang, write
from conftest import assert_not_loaded, each_once, make_prompt, make_target
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import logging

from hf_eagle3 import Eagle3Config, Eagle3ForSpeculation
from hf_eagle3.tensor_names import is_draft


YARN = {"type": "yarn", "factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
LOADERS = [Eagle3ForSpeculation, AutoModel, AutoModelForCausalLM]


@pytest.fixture(scope="module")
def target():
    return make_target("llama", num_hidden_layers=12)


@pytest.fixture(scope="module")
def reference(target):
    return make_reference(target, eagle_aux_hidden_state_layer_ids=[2, 6, 9])


def load(folder, config, tensors, loader=Eagle3ForSpeculation, **kwargs):
    return loader.from_pretrained(write(folder, config, tensors), **kwargs)


# Keys that mean nothing alone, nor together.
NEUTRAL = {
    **{"use_mrope": False, "additional_fc": False, "bias": False, "use_aux_norm": False, "parallel_drafting": False},
    **{"anything": None, "number": 0, "text": "", "entries": [], "mapping": {}, "share": 0.0, "norm_type": "rms"},
    **{"_comment_for_humans": "text", "target_model_type": "qwen3", "target_layer_count": 8, "modal_type": "VLM"},
    **{"decoder_sparse_step": 1, "router_aux_loss_coef": 0.001, "num_experts_per_tok": 8, "num_experts": 128},
    **{"image_token_id": 90, "im_end_id": 5, "eod_token_id": 3, "vision_start_token_id": 91, "image_newline": 3},
    **{
        "truncated_vocab_size": 32,
        "partial_rotary_factor": 1.0,
        "norm_before_residual": False,
        "norm_before_fc": False,
    },
    **{"quantization_config": None, "speculator_config": None, "full_attention_interval": 4, "fc_norm": False},
    **{"use_rotary_pos_emb": True, "is_causal": True, "use_rope": True, "is_neox_style": True, "k_train": 8},
    **{"num_target_layers": 12, "ttt_length": 7, "step_loss_decay": 0.8, "distill_top_k": 1, "train_meta": {"lr": 1}},
    **{"cod_retention": 0.8, "id2label": {"0": "LABEL_0"}, "return_dict": True, "is_encoder_decoder": False},
    **{"attention_bias": True, "mlp_bias": True},  # of the target
    "rope_parameters": {"rope_type": None, "rope_theta": None, "factor": None},
    "rope_scaling": {"rope_type": "default", "mrope_section": None, "alpha": 0},
    "eagle_config": {"use_mtp_layernorm": False, "something_new": None, "other": 0, "use_last_layernorm": True},
}


@pytest.mark.parametrize(
    "changes",
    [
        {**NEUTRAL, "sliding_window": 512, "layer_types": ["full_attention"] * 32},
        {"model_type": "gpt_oss", "num_local_experts": 16, "experts_per_token": 4, "layer_types": ["full_attention"]},
        {
            "model_type": "gpt_oss",
            "architectures": ["GptOssForCausalLMEagle3"],
            "swiglu_alpha": 1.7,
            "swiglu_limit": 7.0,
        },
        {"model_type": "eagle", "architectures": ["Eagle3LlamaForCausalLM"]},  # vLLM's name
        {"sliding_window": 8, "layer_types": ["full_attention"]},
        {"sliding_window": 8, "layer_types": ["sliding_attention"] * 12},  # of the target
        {"sliding_window": 512},
        {"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False},  # SpecForge's for Qwen3
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},  # a text has one position a token
        {"use_mrope": True, "rope_parameters": {"mrope_section": [1, 1, 2], "mrope_interleaved": True}},
        {"norm_before_residual": 0, "fc_norm": 0, "use_aux_hidden_state": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_nothing(tmp_path, target, reference, changes):
    assert_same(load(tmp_path / "draft", sglang(reference, **changes), midlayer(reference)), reference, target)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"use_magic": True, "depth_scale": 0.5}, r"does not know: \['depth_scale', 'use_magic'\]"),
        ({"eagle_config": {"new_norm": True}}, r"does not know: \['eagle_config.new_norm'\]"),
        ({"rope_scaling": {"rope_type": "default", "twist": 2}}, r"rotary embedding .* does not know: \['twist'\]"),
        ({"norm_before_residual": "false"}, "`norm_before_residual` is 'false', but must be true or false"),
        ({"eagle_config": {"use_aux_hidden_state": "no"}}, "`use_aux_hidden_state` is 'no', but must be true or"),
        ({"use_aux_hidden_state": 0}, "EAGLE-1 and 2"),
        ({"draft_vocab_size": "32"}, "`draft_vocab_size` is '32', but must be a positive integer"),
        ({"intermediate_size": 10**12}, "`intermediate_size` is 1000000000000, but must be a positive integer, up to"),
        ({"vocab_size": 10**30}, "`vocab_size` is 10+, but must be a positive integer, up to"),
        ({"rms_norm_eps": math.inf}, "`rms_norm_eps` is inf, but must be a positive number"),
        ({"rope_theta": 10**400}, "`rope_theta` is 10+, but must be a positive number"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "`original_max_position_embeddings` is 0"),
        ({"rope_scaling": {**YARN, "beta_fast": "32"}}, "`beta_fast` is '32', but must be a positive number"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 3}}, "`short_factor` is .* must be a list of 4 num"),
        ({"rope_scaling": {**LONGROPE, "long_factor": ["1"] * 4}}, "`long_factor` is .* must be a list of 4 numbers"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "mistral", "architectures": ["Other"], "swiglu_limit": 7.0}, "does not know: .'swiglu_limit'"),
        ({"partial_rotary_factor": 0.4}, "factor` is 0.4, but must .* an even number of a head's 8 entries"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "`partial_rotary_factor` is 2, but must be at most 1"),
        (
            {"partial_rotary_factor": 1, "rope_parameters": {"partial_rotary_factor": 0.5}},
            "is 1 in config.json, but 0.5",
        ),
        ({"eagle_config": {"partial_rotary_factor": 0.5}}, "does not know: .'eagle_config.partial_rotary_factor'"),
        ({"norm_type": "layer"}, "norm_type"),
        *(
            ({key: False}, f"does not know: .'{key}'")
            for key in ("use_rotary_pos_emb", "is_causal", "use_rope", "is_neox_style", "rope_is_neox_style")
        ),
        ({"eagle_config": {"use_rope": False}}, r"does not know: \['eagle_config.use_rope'\]"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": False},
            r"`layer_types` is \['sliding_attention'\], but `use_sliding_window` is false",
        ),
        ({"layer_types": ["sliding_attention"]}, "'sliding_attention', but no window is on"),
        ({"layer_types": ["chunked_attention"]}, "`layer_types` is .'chunked_attention'"),
        (
            {"sliding_window": 8, "use_sliding_window": True},
            r'`sliding_window` of 8, .* add `"layer_types": \["sliding_attention"\]`.*set `use_sliding_window` to f',
        ),
        (
            {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
            "`alpha` .1000.0.*also set `rope_theta` to 100000000, which vLLM computes",
        ),
        ({"rope_scaling": "yarn"}, "`rope_scaling` is 'yarn', but must be a mapping"),
        ({"rope_scaling": {"type": "linear"}}, r"read as sglang: Missing required keys in `rope_param.*\{'factor'\}"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}, "rope_scaling": YARN},
            "`rope_scaling` says .*'yarn'.*4.0.*, but `rope_parameters` .*'linear'.*8.0.*. Remove the wrong one",
        ),
        ({"rope_scaling": {"factor": 8.0}}, "`rope_scaling` has a `factor` of 8.0, but no `rope_type`. Set it"),
        ({"draft_num_hidden_layers": "two"}, "`draft_num_hidden_layers` is 'two', but must be a positive integer"),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "is 5.0 in config.json, but 6.0 in its `rope_"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1 and 2"),
        ({"use_aux_hidden_state": False}, "EAGLE-1 and 2"),
        ({"kv_lora_rank": 8}, "MLA.*SGLang and vLLM"),
        ({"parallel_drafting": True}, "several tokens in one pass .*only P-EAGLE is supported.*vLLM"),
        ({"parallel_drafting": "yes"}, "`parallel_drafting` is 'yes', but must be true or false"),
        ({"fc_norm": True, "eagle_config": {"fc_norm": False}}, "`fc_norm` is True in config.json, but False"),
        ({"eagle_aux_hidden_state_layer_ids": [1, "5", 8]}, "must be a list of layer numbers"),
        ({"num_aux_layers": 5}, "`num_aux_layers` is 5, but `eagle_aux_hidden_state_layer_ids` does not say"),
        ({"num_aux_hidden_states": 4, "eagle_aux_hidden_state_layer_ids": [1, 5, 8]}, "but there are 3 layer ids"),
        ({"aux_hidden_states_layer_ids": [1, 5, 8], "num_aux_hidden_states": 4}, "but there are 3 layer ids"),
        ({"aux_hidden_states_layer_ids": [1, "5", 8]}, "`aux_hidden_states_layer_ids` is .* must be a list of layer"),
        (
            {"aux_hidden_states_layer_ids": [1, 5, 8], "eagle_aux_hidden_state_layer_ids": [1, 5, 9]},
            r"is \[1, 5, 8\], but `eagle_aux_hidden_state_layer_ids` is \[1, 5, 9\]",
        ),
        (
            {"aux_hidden_states_layer_ids": [1, 5, 8], "target_layer_ids": [1, 5, 9]},
            r"`aux_hidden_states_layer_ids` is \[1, 5, 8\], but `target_layer_ids` is \[1, 5, 9\]",
        ),
        ({"draft_layer_ids": [1, 5, 8]}, r"not know: \['draft_layer_ids'\]. If they do not change .* remove them"),
        ({"eagle_config": {"aux_layer_ids": [1, 5, 8]}}, r"does not know: \['eagle_config.aux_layer_ids'\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused(tmp_path, reference, changes, reason):
    assert_not_loaded(write(tmp_path / "draft", sglang(reference, **changes), midlayer(reference)), reason)


def test_kinds_are_told_by_tensors(tmp_path, reference):
    config, tensors = sglang(reference), midlayer(reference)
    without_norm = {name: tensor for name, tensor in tensors.items() if "hidden_norm" not in name}
    experts = {name.replace("down_proj", "experts.down_proj"): tensor for name, tensor in tensors.items()}
    unnamed = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    of_research = {name.replace("midlayer.hidden_norm", "hidden_norm"): tensor for name, tensor in tensors.items()}
    of_research["lm_head_layernorm.weight"] = of_research.pop("norm.weight")
    mtp = {**without_norm, "pre_fc_norm_hidden.weight": torch.ones(32), "embed_tokens.weight": torch.ones(96, 32)}
    config["num_local_experts"] = 16
    for held, reason in (
        (experts, "draft of experts .MoE, 16"),
        (unnamed, "draft of experts .MoE, 16"),
        ({**tensors, "midlayer.mlp.experts.0.up_proj.weight": torch.ones(3)}, "draft of experts"),
        ({**tensors, "midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(3)}, "MLA"),
        ({**tensors, "mask_hidden": torch.ones(3)}, "parallel draft .P-EAGLE.*Add .*`mask_token_id`"),
        ({**tensors, "edfuse.up_proj.weight": torch.ones(3)}, "it holds .'edfuse.up_proj"),
        ({**tensors, "midlayer.pre_feedforward_layernorm.weight": torch.ones(3)}, "layers hold .'pre_feedforward_"),
        ({name.replace("midlayer", "layers.0"): tensor for name, tensor in mtp.items()}, "multi-token prediction"),
        ({**tensors, "layers.1.self_attn.q_proj.weight": torch.ones(32, 64)}, "each of its layers reads the token"),
        ({name.replace("midlayer", "layers.0"): tensor for name, tensor in without_norm.items()}, "EAGLE-1 and 2"),
        ({name.replace("midlayer", "layers.0"): tensor for name, tensor in of_research.items()}, "research code"),
    ):
        assert_not_loaded(write(tmp_path / "draft", config, held), reason)


@pytest.mark.parametrize(
    "kind, dtype",
    [
        *each_once(["safetensors", "bin", "old bin"], [torch.int8, torch.uint8]),
        *each_once(["safetensors", "bin"], [torch.float8_e4m3fn]),
    ],
)
def test_weights_that_need_scales(tmp_path, reference, dtype, kind):
    """transformers would take them for unscaled floating-point numbers."""
    tensors = midlayer(reference)
    tensors["midlayer.mlp.up_proj.weight"] = tensors["midlayer.mlp.up_proj.weight"].to(dtype)
    folder = write(tmp_path / "draft", sglang(reference), tensors, kind)
    assert_not_loaded(folder, "integers or of 8 bits, such as midlayer.mlp.up_proj.weight")


@pytest.mark.parametrize(
    "quantization, method, dtype",
    [
        ({"quantization_config": {"bits": 4}}, "an unnamed method", torch.int8),
        ({"quantization": {"group_size": 64, "bits": 4}}, "an unnamed method", torch.float8_e4m3fn),
        ({"quantization_config": "fp8"}, "an unnamed method", torch.float8_e4m3fn),
        ({"quantization_config": {"quant_method": "fp8", "bits": 8}}, "fp8", torch.int8),
    ],
)
def test_weights_that_are_quantized(tmp_path, target, reference, quantization, method, dtype):
    """A draft may have its target's configuration, but weights that are not quantized."""
    config, tensors = sglang(reference, **quantization), midlayer(reference)
    assert_same(load(tmp_path / "draft", config, tensors), reference, target)
    tensors["fc.weight"] = tensors["fc.weight"].to(dtype)
    folder = write(tmp_path / "draft", config, tensors)
    assert_not_loaded(folder, f"quantized by {method} .`quantization_config`.*vLLM or SGLang")


@pytest.mark.parametrize("prefix", ["model.", "module.model.", "draft_model."])
def test_prefixes(tmp_path, target, prefix):
    reference = make_reference(target, fc_norm=True, norm_output=True, eagle_aux_hidden_state_layer_ids=[2, 6, 9])
    of_head = "module." if prefix.startswith("module.") else ""
    tensors = {of_head * (name == "lm_head.weight") + name: tensor for name, tensor in reference.state_dict().items()}
    outside = ("lm_head.weight", "module.lm_head.weight", "d2t", "t2d")
    tensors = {name if name in outside else prefix + name: tensor for name, tensor in tensors.items()}
    config = sglang(reference, architectures=["LlamaEagle3DraftModel"], norm_output=True)  # the norms are there
    for loader in (Eagle3ForSpeculation, AutoModel):
        draft = load(tmp_path / "draft", config, tensors, loader)
        assert draft.config.fc_norm
        assert_same(draft, reference, target)


RENAMINGS = [
    lambda name: "model." * name.startswith(("layers", "midlayer")) + name,
    lambda name: "model." * name.startswith(("fc", "norm")) + name,
    lambda name: "model." * name.startswith("norm") + name,
    lambda name: "model." * name.startswith(("lm_head", "d2t", "t2d")) + name,
    lambda name: {"layers": "draft.", "midlayer": "draft.", "fc": "model."}.get(name.split(".")[0], "") + name,
    lambda name: "draft_model." + "model." * name.startswith(("layers", "midlayer")) + name,
]


@pytest.mark.parametrize("rename, names", each_once(RENAMINGS, [midlayer, torch.nn.Module.state_dict]))
def test_prefixes_of_some_names(tmp_path, target, reference, rename, names):
    tensors = {rename(name): tensor for name, tensor in names(reference).items()}
    config = sglang(reference, architectures=["LlamaForCausalLM"])
    for loader in (Eagle3ForSpeculation, AutoModel):
        assert_same(load(tmp_path / "draft", config, tensors, loader), reference, target)


@pytest.mark.parametrize(
    "names, expected",
    [
        (["midlayer.self_attn.o_proj.weight"], True),
        (["fc.weight", "model.midlayer.self_attn.o_proj.weight"], True),
        (["fc.weight", "model.layers.0.self_attn.o_proj.weight", "model.layers.0.hidden_norm.weight"], True),
        (["eagle_module.midlayer.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.weight"], False),
        (["fc.weight", "layers.0.self_attn.o_proj.weight"], True),
        (["model.fc.weight", "model.layers.0.hidden_norm.weight", "lm_head.weight"], True),
        (["d2t", "lm_head.weight"], True),
        (["model.layers.0.self_attn.o_proj.weight", "lm_head.weight"], False),
        (["fc.weight", "conv1.weight"], False),
        (["fc.weight", "model.layers.0.self_attn.o_proj.weight"], False),  # a model with a head of its own
        (["fc.weight", "layers.0.self_attn.o_proj.weight", "layers.1.self_attn.o_proj.weight"], True),
        (["model.fc.weight", "model.layers.1.self_attn.o_proj.weight", "lm_head.weight"], True),
        (["decoder.fc.weight", "decoder.layers.0.self_attn.o_proj.weight", "encoder.conv.weight"], False),  # Xcodec2
        (["fc.weight", "hidden_norm.weight", "layers.0.self_attn.o_proj.weight"], False),  # DFlash
        (["fc.weight", "hidden_norm.weight", "midlayer.self_attn.o_proj.weight"], True),  # SpecForge's experts
        (["fc.weight", "hidden_norm.weight", "lm_head_layernorm.weight"], True),  # speculators' research code
        (["mtp.fc.weight", "mtp.layers.0.self_attn.o_proj.weight", "embed_tokens.weight"], True),
        (["model.layers.0.eh_proj.weight", "model.layers.0.self_attn.o_proj.weight"], True),
        (["mtp.fc.weight", "mtp.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.weight"], False),
        ([], False),
    ],
)
def test_what_a_draft_holds(names, expected):
    assert is_draft(names) is expected


@pytest.mark.parametrize("family", ["gemma4_text", "gpt_oss", "phi3", "qwen3_moe"])
def test_copies_of_the_target_s_configuration(tmp_path, target, reference, family):
    """NeMo Automodel writes such, whose layers are Llama's whatever the target."""
    config = sglang(reference, architectures=["LlamaEagle3DraftModel"], draft_num_hidden_layers=1)
    copied = {**AutoConfig.for_model(family).to_dict(), **config, "model_type": family, "num_hidden_layers": 36}
    copied |= {"head_dim": 8, "rope_parameters": None, "initial_context_length": 4096, "sliding_window": 4}
    copied["allow_global_per_layer_attribute_access"] = True  # for Gemma 4
    assert_same(load(tmp_path / "copied", copied, midlayer(reference)), reference, target)
    copied["layer_types"] = ["sliding_attention"]  # it cuts the target's to a parallel draft's layers
    assert_same(load(tmp_path / "copied", copied, midlayer(reference)), reference, target)
    if family in ("gemma4_text", "gpt_oss"):
        copied["architectures"] = ["OtherEagle3DraftModel"]
        with pytest.raises(ValueError, match="does not know: .*'(per_layer_config|initial_context_length)'"):
            load(tmp_path / "other", copied, midlayer(reference))


@pytest.mark.parametrize(
    "model_type, key, name",
    [("gemma3_text", "hidden_act", "hidden_activation"), ("cohere2", "rms_norm_eps", "layer_norm_eps")],
)
def test_other_names_of_what_is_missing(tmp_path, reference, model_type, key, name):
    config = {**sglang(reference, model_type=model_type), name: "gelu" if key == "hidden_act" else 0.1}
    load(tmp_path / "said", {**config, "hidden_act": "silu", "rms_norm_eps": 1e-5}, midlayer(reference))
    with pytest.raises(ValueError, match=f"does not know: .'{name}'"):
        load(tmp_path / "missing", {**config, key: None}, midlayer(reference))


def test_the_rotary_base_of_angelslim(tmp_path, reference):
    names = {"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama", "rope_theta": 1e6}
    mrope = {"type": "default", "mrope_interleaved": True, "mrope_section": [1, 1, 2]}
    for folder, changes, is_ignored in (
        ("text", {}, True),
        ("mrope", {"rope_scaling": mrope}, False),
        ("same", {"rope_theta": 1e4}, False),
    ):
        config = {**sglang(reference), **names, **changes}
        _, info = load(tmp_path / folder, config, midlayer(reference), output_loading_info=True)
        assert ("AngelSlim trains with 10000" in info["assumed"].get("rope_theta", "")) is is_ignored


def test_original_length_of_phi(tmp_path, reference):
    """It stands outside of the keys of the scaling."""
    config = sglang(reference, rope_scaling=YARN, original_max_position_embeddings=64)
    draft = load(tmp_path / "draft", config, midlayer(reference))
    assert draft.config.transformer_layer_config.rope_parameters["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    "place, advice",
    [
        ("transformer_layer_config", 'add `"speculators_model_type": "eagle3"`'),
        ("text_config", r"Move the keys of the draft's layers from \['text_config'\]"),
    ],
)
def test_sizes_in_another_place(tmp_path, reference, place, advice):
    config = {"architectures": ["LlamaForCausalLMEagle3"], place: sglang(reference)}
    with pytest.raises(ValueError, match=r"lacks \['hidden_size', .*" + advice):
        load(tmp_path / "draft", config, midlayer(reference))


@pytest.mark.parametrize(
    "loader, wrapped",
    each_once(LOADERS, [lambda held: {"state_dict": held}, lambda held: {"model": held, "epoch": 3}]),
)
def test_what_a_trainer_saved_is_taken_for_no_random_model(tmp_path, reference, loader, wrapped):
    folder = write(tmp_path / "draft", sglang(reference), wrapped(midlayer(reference)), "bin")
    with pytest.raises(ValueError, match="holds other things than tensors.* Save the tensors alone"):
        loader.from_pretrained(folder)


@pytest.mark.parametrize(
    "loader, kind, model_type",
    [
        (AutoModel, "safetensors", "llama"),
        (AutoModelForCausalLM, "sharded", "kimi_k2"),
        (AutoModelForCausalLM, "bin", "llama"),
        (AutoModel, "old bin", "llama"),
        (AutoModelForCausalLM, "safetensors", None),
    ],
)
def test_no_draft_is_taken_for_a_random_model(tmp_path, reference, loader, kind, model_type):
    """Though nothing in its configuration says that it is one."""
    config = sglang(reference, architectures=["LlamaForCausalLM"], num_hidden_layers=40, model_type=model_type)
    for name in ("draft_vocab_size", *([] if model_type else ["model_type"])):
        del config[name]
    draft = loader.from_pretrained(write(tmp_path / "draft", config, midlayer(reference), kind))
    assert type(draft) is Eagle3ForSpeculation and draft.config.num_hidden_layers == 1
    assert draft.state_dict().keys() == reference.state_dict().keys()
    assert all(tensor.equal(reference.state_dict()[name]) for name, tensor in draft.state_dict().items())


@pytest.mark.parametrize("loader", LOADERS)
def test_a_draft_without_its_layers_is_taken_for_no_random_model(tmp_path, target, loader):
    reference = make_reference(target, full=True)
    tensors = {name: tensor for name, tensor in reference.state_dict().items() if "layers" not in name}
    with pytest.raises(ValueError, match="in no known EAGLE-3 format.*holds .'fc.weight', 'lm_head.weight', 'norm"):
        load(tmp_path / "draft", sglang(reference), tensors, loader)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_eagle_1_is_taken_for_no_random_model(tmp_path, target, num_layers):
    reference = make_reference(target, num_hidden_layers=num_layers)
    tensors = {name: tensor for name, tensor in reference.state_dict().items() if "hidden_norm" not in name}
    config = sglang(reference, architectures=["LlamaForCausalLM"])
    del tensors["d2t"], tensors["t2d"], config["draft_vocab_size"]
    with pytest.raises(ValueError, match="EAGLE-1 and 2"):
        AutoModelForCausalLM.from_pretrained(write(tmp_path / "draft", config, tensors))


@pytest.mark.parametrize(
    "ids, depth, expected, is_said, place",
    [
        (None, 12, [2, 6, 9], True, "top"),
        ([1, 5, 8], 12, [2, 6, 9], False, "eagle_config"),  # the usual outputs
        ([2, 6, 9], 12, [2, 6, 9], True, "top"),  # the usual inputs
        ([2, 30, 58], 61, [2, 30, 58], True, "both"),
        ([2, 30, 58], 62, [3, 31, 59], True, "eagle_config"),  # of another target they are outputs
        ([3, 15, 27], 36, [4, 16, 28], True, "top"),
        ([24, 30, 36], 36, [24, 30, 36], True, "both"),  # with the state after the last layer
        ([5, 17, 29], 30, [6, 18, 30], True, "top"),
        ([1, 3, 5, 8], 12, [2, 4, 6, 9], True, "eagle_config"),
    ],
)
def test_layer_ids(tmp_path, target, reference, said, ids, depth, expected, is_said, place):
    num_states = 3 if ids is None else len(ids)
    tensors = midlayer(reference) | {"fc.weight": torch.ones(32, 32 * num_states)}
    held = {"eagle_aux_hidden_state_layer_ids": ids}
    config = sglang(reference, **(held if place != "eagle_config" else {}))
    config |= {"eagle_config": held} if place != "top" else {}
    draft = load(tmp_path / "draft", config, tensors)
    draft.save_pretrained(tmp_path / "saved")
    (text,) = said
    assert "vLLM does not load such drafts" in text and "pair_with" in text
    target.config.num_hidden_layers, num_layers = depth, target.config.num_hidden_layers
    try:
        for each in (draft, Eagle3ForSpeculation.from_pretrained(tmp_path / "saved")):
            assert each.resolve_aux_layer_ids(target) == expected
        assert len([text for text in said if str(expected) in text]) == (2 if is_said else 0), said
        draft.pair_with(target)
        draft.save_pretrained(tmp_path / "paired")
    finally:
        target.config.num_hidden_layers = num_layers
    assert not [text for text in said if "such drafts" in text and "paired" in text]
    assert draft.config.eagle_aux_hidden_state_layer_ids == expected and not draft.config.aux_layer_ids_assumed
    assert draft.resolve_aux_layer_ids(target) == expected


@pytest.mark.parametrize(
    "key, ids, how",
    [
        ("eagle_aux_hidden_state_layer_ids", [1, 5, 8], None),
        ("eagle_aux_hidden_state_layer_ids", [8, 1, 5], r"out of order: .* inputs of \[9, 2, 6\].*ids=\[2, 6, 9\]`"),
        ("target_layer_ids", [1, 1, 8], r"twice: .* inputs of \[2, 2, 9\].*correct the wrong one in its config"),
    ],
)
def test_layer_ids_that_engines_read_in_another_order(tmp_path, target, reference, said, ids, how, key):
    folder = write(tmp_path / "draft", sglang(reference, **{key: ids}), midlayer(reference))
    for loader in (Eagle3ForSpeculation, AutoModel):
        draft = loader.from_pretrained(folder)
        assert draft.resolve_aux_layer_ids(target) == [layer_id + 1 for layer_id in ids]
        order = [text for text in said if "lists layers of its target" in text]
        assert len(order) == (how is not None) and all(re.search(how, text) for text in order)
        type(logging.get_logger()).warning_once.cache_clear()
        said.clear()
    draft.pair_with(target)
    draft.save_pretrained(tmp_path / "ours")
    Eagle3ForSpeculation.from_pretrained(tmp_path / "ours")
    assert not [text for text in said if "lists layers" in text]


def test_an_adapter_of_the_target_is_mentioned(tmp_path, target, reference, said):
    """Model-Optimizer writes it beside the draft."""
    folder = write(tmp_path / "draft", sglang(reference), midlayer(reference))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "target"}))
    assert_same(Eagle3ForSpeculation.from_pretrained(folder), reference, target)
    assert [text for text in said if "target.load_adapter" in text and str(folder) in text]


def test_an_adapter_of_the_draft(tmp_path, target, reference):
    """PEFT asks for the configuration of its draft, and transformers would load it into drafts in our format only."""
    folder = write(tmp_path / "draft", sglang(reference), midlayer(reference))
    settings = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = get_peft_model(Eagle3ForSpeculation.from_pretrained(folder), settings)
    for place in ("adapter", "adapters/first"):
        adapted.save_pretrained(tmp_path / place)
    expected = adapted.merge_and_unload()
    assert not expected.layers[0].mlp.up_proj.weight.equal(reference.layers[0].mlp.up_proj.weight)
    inside = {"adapter_kwargs": {"subfolder": "first"}}
    for loader, place, kwargs in (
        (Eagle3ForSpeculation, "adapters", inside),
        (Eagle3ForSpeculation, "adapter", {}),
        (AutoModel, "adapter", {}),
    ):
        loaded = loader.from_pretrained(tmp_path / place, **kwargs)
        assert loaded._hf_peft_config_loaded
        assert_same(loaded, expected, target)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), tmp_path / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    assert_not_loaded(tmp_path / "adapter", "adapter does not hold the tensors that .* Missing: .'layers.0")
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="adapter is an adapter of the draft .*draft, which cannot be loaded.*no folder"):
        Eagle3ForSpeculation.from_pretrained(tmp_path / "adapter")
    folder.mkdir()
    (tmp_path / "elsewhere").rename(folder / "inside")
    with pytest.raises(ValueError, match="cannot be loaded. If it is elsewhere .a `subfolder`.*no config.json"):
        Eagle3ForSpeculation.from_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapters" / "first" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(path.parent)}))
    with pytest.raises(ValueError, match="is an adapter of the draft .*, which cannot be loaded.*is an adapter, too"):
        Eagle3ForSpeculation.from_pretrained(path.parent)


def test_its_configuration_alone(tmp_path, reference):
    folder = write(tmp_path / "draft", sglang(reference), midlayer(reference))
    config = Eagle3Config.from_pretrained(folder)
    assert config.to_dict() == AutoConfig.from_pretrained(folder).to_dict() and config.draft_vocab_size == 32


@pytest.mark.parametrize("loader", [Eagle3ForSpeculation, AutoModel])
def test_weights_of_the_caller(tmp_path, reference, loader):
    """They would be passed over without a word."""
    folder = write(tmp_path / "draft", sglang(reference), midlayer(reference))
    with pytest.raises(ValueError, match="`state_dict` cannot be passed together with the name of a draft, .*draft"):
        loader.from_pretrained(folder, state_dict=reference.state_dict())


@pytest.mark.parametrize("loader", [Eagle3ForSpeculation, AutoModel])
def test_layer_ids_of_the_caller(tmp_path, target, reference, loader):
    """They are inputs, whatever the checkpoint says."""
    folder = write(
        tmp_path / "draft", sglang(reference, eagle_aux_hidden_state_layer_ids=[1, 5, 8]), midlayer(reference)
    )
    draft = loader.from_pretrained(folder, eagle_aux_hidden_state_layer_ids=[3, 5, 9], dtype=torch.bfloat16)
    assert draft.config.eagle_aux_hidden_state_layer_ids == draft.resolve_aux_layer_ids(target) == [3, 5, 9]
    assert draft.dtype == torch.bfloat16 and not draft.config.aux_layer_ids_assumed
    changed = loader.from_pretrained(folder, norm_output=True, output_attentions=True, torch_dtype=torch.bfloat16)
    assert changed.config.norm_output and changed.config.output_attentions and changed.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "key, place, other",
    [
        ("aux_hidden_states_layer_ids", "top", None),
        ("target_layer_ids", "eagle_config", None),
        ("aux_hidden_states_layer_ids", "eagle_config", [2, 6, 9]),
        ("target_layer_ids", "top", [3, 7, 10]),
    ],
)
def test_layer_ids_of_outputs(tmp_path, target, reference, said, key, place, other):
    """
    AngelSlim's and DeepSpec's count outputs, and so prove what other ids count. Without them, [2, 6, 9] would be the usual
    inputs.
    """
    held = {key: [2, 6, 9], "eagle_aux_hidden_state_layer_ids": other}
    config = sglang(reference, **(held if place == "top" else {"eagle_config": held}))
    for loader in (Eagle3ForSpeculation, AutoModel):
        draft = load(tmp_path / "draft", config, midlayer(reference), loader)
        assert draft.config.eagle_aux_hidden_state_layer_ids == [3, 7, 10] and not draft.config.aux_layer_ids_assumed
        assert draft.resolve_aux_layer_ids(target) == [3, 7, 10]
    assert not [text for text in said if "layer ids" in text]


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma4", "qwen3_next"])
@torch.no_grad()
def test_the_state_after_the_last_layer(family):
    """It is read before the final norm, and what `generate` returns stays as it is."""
    target, prompt = make_target(family), make_prompt(9)
    depth = target.config.num_hidden_layers
    draft = Eagle3ForSpeculation.from_target(target, eagle_aux_hidden_state_layer_ids=[1, 2, depth]).eval()
    read, combine = [], draft.combine_hidden_states
    draft.combine_hidden_states = lambda states: read.append(states) or combine(states)
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_hidden_states": True}
    draft.generation_config.tree_policy, draft.generation_config.assistant_confidence_threshold = "static", 0.0
    drafted = target.generate(prompt, assistant_model=draft, **settings)
    plain = target.generate(prompt, **settings)
    assert drafted.sequences.equal(plain.sequences)
    for ours, theirs in zip(drafted.hidden_states, plain.hidden_states, strict=True):
        torch.testing.assert_close(ours[-1], theirs[-1], atol=1e-4, rtol=1e-4)
    states = read[0][0, :, -32:]
    normed = target(prompt, output_hidden_states=True).hidden_states[-1][0, : len(states)]
    torch.testing.assert_close(target.get_decoder().norm(states), normed, atol=1e-4, rtol=1e-4)
    assert not target._forward_hooks


@pytest.mark.parametrize(
    "vocabulary, changes",
    [("mapped", {}), ("whole", {"reuse_target_lm_head": True}), ("mapped", {"tie_word_embeddings": True})],
)
def test_the_head_of_the_target(tmp_path, target, vocabulary, changes):
    reference = make_reference(target, full=vocabulary == "whole", eagle_aux_hidden_state_layer_ids=[2, 6, 9])
    rows = target.lm_head.weight[reference.draft_token_ids]
    reference.lm_head.weight.data.copy_(rows)
    tensors = {name: tensor for name, tensor in midlayer(reference).items() if name != "lm_head.weight"}
    config = sglang(reference, **changes)
    draft = load(tmp_path / "draft", config, tensors)
    with pytest.raises(ValueError, match="stores no head"):
        draft.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="stores no head"):
        export(draft, tmp_path / "other", "sglang")
    with pytest.raises(ValueError, match="stores no head"):
        draft(inputs_embeds=torch.ones(1, 2, 32), hidden_states=torch.ones(1, 2, 32))
    assert_same(draft, reference, target)
    draft.lm_head.weight.data += 1  # a copy
    assert target.lm_head.weight[reference.draft_token_ids].equal(rows)
    other = make_target("llama", num_hidden_layers=12, seed=1)
    draft.validate_target(other)
    assert draft.lm_head.weight.equal(other.lm_head.weight[reference.draft_token_ids])
    draft.pair_with(target)
    draft.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        draft.lm_head.weight += 1
    draft.validate_target(copy.deepcopy(target))
    assert draft.lm_head.weight.equal(rows + 1)  # what was trained is its own
    assert_same(Eagle3ForSpeculation.from_pretrained(tmp_path / "saved"), reference, target)


@pytest.fixture
def headless(tmp_path, reference):
    """A draft that stores no head."""
    tensors = {name: tensor for name, tensor in midlayer(reference).items() if name != "lm_head.weight"}
    return load(tmp_path / "draft", sglang(reference), tensors)


def test_a_head_that_is_borrowed_without_gradients_can_be_trained(headless, target):
    draft = headless
    with torch.inference_mode():
        target.generate(make_prompt(5), assistant_model=draft, max_new_tokens=4)
    states = torch.ones(1, 2, 32)
    draft(inputs_embeds=states, hidden_states=states).logits.sum().backward()
    assert draft.lm_head.weight.grad.abs().sum() > 0


def test_a_head_that_is_borrowed_does_not_keep_the_target_s(headless):
    """It is a copy, so memory of a target that is no longer used must be free again."""
    draft, other = headless, make_target("llama", num_hidden_layers=12)
    other.generate(make_prompt(5), assistant_model=draft, max_new_tokens=4)
    head = weakref.ref(other.lm_head)
    del other
    gc.collect()
    assert head() is None and draft.lm_head.out_features > 0


def test_a_head_that_the_target_does_not_have(headless):
    for head in (torch.nn.Linear(32, 90), torch.nn.Linear(16, 96), torch.nn.Linear(32, 96, device="meta")):
        other = make_target("llama", num_hidden_layers=12)
        other.lm_head = head
        with pytest.raises(ValueError, match="stores no head. It needs the target's"):
            headless.validate_target(other)


def test_a_draft_of_speculators_without_a_head(tmp_path, said):
    """It is borrowed likewise, and transformers does not say that it is newly initialized."""
    source = Path(__file__).parent / "fixtures" / "norm_output"
    expected = Eagle3ForSpeculation.from_pretrained(source)
    tensors = {name: tensor for name, tensor in expected.state_dict().items() if name != "lm_head.weight"}
    config = json.loads((source / "config.json").read_text())
    for loader in (Eagle3ForSpeculation, AutoModel):
        draft = load(tmp_path / "draft", config, tensors, loader)
        other = make_target("llama", vocab_size=24, hidden_size=8, num_attention_heads=2, num_hidden_layers=5, seed=1)
        other.set_input_embeddings(expected.embed_tokens)
        draft.validate_target(other)
        assert draft.lm_head.weight.equal(other.lm_head.weight[draft.draft_token_ids])
    assert not said


@pytest.mark.parametrize("kind", ["of the target", "trained", "random", "zero"])
def test_a_table_that_is_not_the_target_s(tmp_path, target, reference, said, kind):
    """TorchSpec exported random ones. SGLang ignores the table, vLLM does not."""
    rows = target.get_input_embeddings().weight.detach()
    other = {"of the target": 0, "trained": 0.1 * torch.randn_like(rows), "random": torch.randn_like(rows) - rows}
    table = rows + other.get(kind, -rows)
    draft = load(tmp_path / "draft", sglang(reference), {**midlayer(reference), "embed_tokens.weight": table})
    prompt = make_prompt(9)
    for _ in range(2):
        target.generate(prompt, assistant_model=draft, max_new_tokens=4)
    is_told = [text for text in said if "an embedding table that is unrelated to that of LlamaForCausalLM" in text]
    assert len(is_told) == (kind in ("random", "zero")), said
    del draft.embed_tokens  # as the warning says
    draft.config.has_own_embed_tokens = False
    target.generate(prompt, assistant_model=draft, max_new_tokens=4)
    assert_same(draft, reference, target)
    draft.save_pretrained(tmp_path / "saved")
    assert_same(Eagle3ForSpeculation.from_pretrained(tmp_path / "saved"), reference, target)


def test_a_head_of_ours_that_is_lost_is_no_target_s(tmp_path, reference):
    reference.save_pretrained(tmp_path)
    tensors = {name: tensor for name, tensor in reference.state_dict().items() if "head" not in name}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="are not those that were saved"):
        Eagle3ForSpeculation.from_pretrained(tmp_path)


def test_deepspec(tmp_path, target, said):
    """It has five states, the layers of Qwen3, the whole vocabulary, and the keys of its target and training."""
    states = [2, 4, 6, 8, 10]
    reference = make_reference(
        target, model_type="qwen3", full=True, own_embedding="trained", eagle_aux_hidden_state_layer_ids=states
    )
    keys = {"num_target_layers": 12, "draft_num_hidden_layers": 1, "target_model_name_or_path": "Qwen/Qwen3-8B"}
    names = {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3"}
    config = sglang(reference, **keys, **names, target_layer_ids=[layer_id - 1 for layer_id in states])
    del config["draft_vocab_size"]
    for loader in (Eagle3ForSpeculation, AutoModel):
        draft = load(tmp_path / "draft", config, reference.state_dict(), loader)
        assert not draft.config.aux_layer_ids_assumed
        assert_same(draft, reference, target)
    assert not [text for text in said if "layer ids" in text]


@pytest.mark.parametrize(
    "key, place", [("mask_token_id", "top"), ("pard_token", "eagle_config"), ("ptd_token_id", "top")]
)
def test_parallel_drafts(tmp_path, target, key, place):
    """As NeMo Automodel saves them, and vLLM reads them."""
    reference = make_reference(
        target, mask_token_id=5, num_hidden_layers=2, eagle_aux_hidden_state_layer_ids=[2, 6, 9], fc_norm=True
    )
    held = {key: 5, "parallel_drafting": True}
    training = {"num_depths": 8, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2, "draft_num_hidden_layers": 2}
    config = sglang(reference, fc_norm=True, **training, **(held if place == "top" else {"eagle_config": held}))
    config["num_hidden_layers"] = 12  # the target's
    tensors = {
        "model." * name.startswith(("fc", "layers", "norm")) + name: tensor
        for name, tensor in reference.state_dict().items()
    }
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, -1)
    for loader in (Eagle3ForSpeculation, AutoModel):
        draft = load(tmp_path / "draft", config, tensors, loader)
        assert draft.config.mask_token_id == 5 and draft.config.speculators_model_type == "peagle"
        assert draft.mask_hidden.equal(reference.mask_hidden)
        assert_same(draft, reference, target)


def test_midlayers_with_numbers(tmp_path, target):
    """Model-Optimizer's first exporter."""
    reference = make_reference(target, num_hidden_layers=2, eagle_aux_hidden_state_layer_ids=[2, 6, 9])
    tensors = {name.replace("layers.", "midlayer."): tensor for name, tensor in reference.state_dict().items()}
    for loader in (Eagle3ForSpeculation, AutoModel):
        assert_same(load(tmp_path / "draft", sglang(reference), tensors, loader), reference, target)


def test_layers_of_the_target_that_are_counted(tmp_path, target, reference):
    draft, info = load(
        tmp_path / "draft", sglang(reference, num_hidden_layers=40), midlayer(reference), output_loading_info=True
    )
    assert "the target has 40" in info["assumed"]["num_hidden_layers"]
    assert_same(draft, reference, target)


@pytest.mark.parametrize(
    "family, ids, written",
    [
        ("llama", [2, 6, 9], [1, 5, 8]),
        ("llama", [3, 6, 9], [2, 5, 8]),
        ("llama", [1, 6, 9], [0, 5, 8]),
        ("llama", [2, 6, 12], [1, 5, 11]),
        ("gpt_oss", [3, 6, 9], [2, 5, 8]),
        ("gpt_oss", [3, 6, 12], [2, 5, 11]),  # as they are, if the greatest is the number of layers
        ("deepseek_v3", [2, 6, 9], [1, 5, 8]),  # one is added, if the first is 1
        ("deepseek_v3", [3, 6, 9], [3, 6, 9]),  # as they are
        ("deepseek_v3", [1, 6, 9], None),
    ],
)
def test_layer_ids_that_sglang_reads(tmp_path, family, ids, written):
    changes = {"layer_types": ["sliding_attention", "full_attention"] * 6} if family == "gpt_oss" else {}
    target = make_target(family, num_hidden_layers=12, **changes)
    draft = make_reference(target, eagle_aux_hidden_state_layer_ids=ids)
    if written is None:
        with pytest.raises(ValueError, match="adds one to ids that begin with 1"):
            export(draft, tmp_path / "other", "sglang")
        return
    export(draft, tmp_path / "other", "sglang")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == written
    back = Eagle3ForSpeculation.from_pretrained(tmp_path / "other")
    assert back.resolve_aux_layer_ids(target) == ids
    if ids[0] != 2:  # for which SGLang must be told apart
        with pytest.raises(ValueError, match="this draft does not name its target"):
            export(back, tmp_path / "again", "sglang")


def test_the_norm_of_later_layers_that_sglang_reads(tmp_path, target):
    """SGLang calls it `hidden_norm`. It would skip `input_layernorm`, and normalize by ones."""
    draft = make_reference(target, num_hidden_layers=3, norm_before_fc=True)
    export(draft, tmp_path / "other", "sglang")
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    for i in (1, 2):
        names = [f"layers.{i}.{name}.weight" for name in ("hidden_norm", "input_layernorm")]
        assert all(torch.equal(tensors[name], draft.layers[i].input_layernorm.weight) for name in names)
    back, info = Eagle3ForSpeculation.from_pretrained(tmp_path / "other", output_loading_info=True)
    assert info["ignored"] == ["layers.1.hidden_norm.weight", "layers.2.hidden_norm.weight"]
    assert_same(back, draft, target)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert (
        config["num_hidden_layers"] == 3
        and config["norm_before_fc"] is config["eagle_config"]["norm_before_fc"] is True
    )
    alone = {name: weight for name, weight in tensors.items() if name != "layers.2.input_layernorm.weight"}
    assert_same(load(tmp_path / "alone", config, alone), draft, target)
    with pytest.raises(ValueError, match="layers.2.hidden_norm.weight and layers.2.input_layernorm.weight differ"):
        load(tmp_path / "differ", config, {**tensors, "layers.2.hidden_norm.weight": torch.ones(32)})
