"""Checkpoints of the speculators package: the same logits as its own code gives."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checkpoints.make_fixtures import LENGTH, STEPS, VARIANTS, make, run
from checkpoints.test_formats import edit_config
from conftest import assert_not_loaded, each_once, make_prompt, make_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, BitsAndBytesConfig
from transformers.utils import logging

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.checkpoints import export
from hf_eagle3.reading import without_load_report
from hf_eagle3.training.ttt import TTTBatch, ttt_unroll


FIXTURES = Path(__file__).parent / "fixtures"


@torch.no_grad()
def assert_same_logits(folder, expected):
    draft = Eagle3ForSpeculation.from_pretrained(folder).eval()
    fused = draft.combine_hidden_states(expected["hidden_states"])
    logits = draft(expected["input_ids"], fused).logits
    torch.testing.assert_close(logits[0], expected["logits"][0], atol=1e-5, rtol=1e-5)
    if set(draft.config.transformer_layer_config.layer_types) != {"full_attention"}:
        return  # training-time test knows no windows
    # Later drafting steps: what they read at row t of step s we read from the token at t + 1 + s.
    batch = TTTBatch(
        input_ids=F.pad(expected["input_ids"], (1, 0))[:, :-1],
        aux_hidden_states=expected["hidden_states"],
        documents=torch.zeros_like(expected["input_ids"]),
        position_ids=torch.arange(LENGTH)[None],
        **dict.fromkeys(("target_logits", "target_mass", "target_tokens", "labels")),
    )
    for step, (states, *_) in enumerate(ttt_unroll(draft, batch, STEPS)):
        rows = LENGTH - 1 - step
        ours, theirs = draft.lm_head(states)[0, :rows], expected["logits"][step, :rows]
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_fixtures(name):
    expected = load_file(FIXTURES / name / "expected.safetensors")
    assert expected["logits"].std() > 0.5
    assert_same_logits(FIXTURES / name, expected)


@pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="speculators is not installed")
@pytest.mark.parametrize("name", VARIANTS)
def test_the_package_itself(name, tmp_path):
    draft = make(name)
    draft.save_pretrained(tmp_path)
    assert_same_logits(tmp_path, run(draft))


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(name, tmp_path):
    """Saved by us, read again: every tensor and every flag."""
    draft = Eagle3ForSpeculation.from_pretrained(FIXTURES / name)
    draft.save_pretrained(tmp_path)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path, FIXTURES / name))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, FIXTURES / name))
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size"):
        assert ours[flag] == theirs[flag]
    assert ours["eagle_aux_hidden_state_layer_ids"] == theirs["eagle_aux_hidden_state_layer_ids"]
    assert ours["speculators_config"] == theirs["speculators_config"]


def copy_of(folder, name, drop=(), **tensors):
    """Copies a fixture, with other tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((FIXTURES / name / "config.json").read_bytes())
    tensors = load_file(FIXTURES / name / "model.safetensors") | tensors
    tensors = {key: tensor for key, tensor in tensors.items() if key not in drop}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


OURS = ("weights_digest", "auto_map", "config_digest")  # keys that others do not write


def copy_with_layers(folder, **changes):
    """Copies a fixture, with other keys of its layers."""
    copy_of(folder, "classic")
    layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    layer["rope_parameters"] |= changes.pop("rope", {})
    return edit_config(folder, transformer_layer_config=layer | changes)


@pytest.mark.parametrize("loader", [Eagle3ForSpeculation, AutoModel])
def test_fields_that_the_caller_sets(tmp_path, loader):
    """The table is not announced, so that the draft is loaded twice."""
    kwargs = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "norm_before_residual": True, "dtype": torch.bfloat16}
    draft = loader.from_pretrained(FIXTURES / "classic", **kwargs, attn_implementation="eager")
    assert draft.config.has_own_embed_tokens and draft.dtype == torch.bfloat16
    assert draft.config.eagle_aux_hidden_state_layer_ids == [1, 2, 3]
    assert draft.layers[0].config.norm_before_residual and draft.config._attn_implementation == "eager"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("loader", [Eagle3ForSpeculation, AutoModel])
def test_weights_are_quantized_on_loading(loader, bits):
    """Also those of drafts with a table of their own, which are read twice."""
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    draft = loader.from_pretrained(FIXTURES / "classic", quantization_config=config)
    assert draft.config.has_own_embed_tokens and not draft.fc.weight.is_floating_point()
    assert draft.config.quantization_config.load_in_8bit == (bits == 8)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_quantized_draft_is_left_to_transformers(tmp_path):
    """Which names the package that reads it."""
    quantization = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    folder = edit_config(copy_of(tmp_path / "draft", "classic"), quantization_config=quantization)
    assert AutoConfig.from_pretrained(folder).quantization_config["load_in_8bit"]
    assert_not_loaded(folder, "bitsandbytes", ImportError)


def test_the_report_of_a_failed_conversion_is_shown(monkeypatch):
    """The error of transformers points to it. Others are hidden."""
    logger, messages = logging.get_logger("transformers.modeling_utils"), []
    monkeypatch.setattr(logger, "callHandlers", lambda record: messages.append(record.getMessage()))
    with without_load_report():
        logger.warning("LOAD REPORT fc.weight MISSING")
        logger.warning("LOAD REPORT fc.weight CONVERSION")
    assert messages == ["LOAD REPORT fc.weight CONVERSION"]


@pytest.mark.parametrize("loader", [Eagle3ForSpeculation, AutoModel])
def test_what_training_needs_of_the_target(tmp_path, loader):
    """`speculators` does not save its norm and its head, but converters do."""
    of_target = {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": torch.ones(12, 32)}
    held = loader.from_pretrained(copy_of(tmp_path, "classic", **of_target), dtype=torch.float32).state_dict()
    expected = load_file(FIXTURES / "classic" / "model.safetensors")
    assert held.keys() == expected.keys() and all(held[name].equal(expected[name]) for name in held)


def test_mappings_as_others_write_them(tmp_path):
    """vLLM ignores `t2d`, and a mapping of the whole vocabulary. Of sorted tokens, `t2d` says as much as `d2t`."""
    expected = load_file(FIXTURES / "classic" / "model.safetensors")
    for absent, loader in itertools.product(("t2d", "d2t"), (Eagle3ForSpeculation, AutoModel)):
        draft = loader.from_pretrained(copy_of(tmp_path / "draft", "classic", drop=[absent]))
        assert draft.t2d.equal(expected["t2d"]) and draft.d2t.equal(expected["d2t"])
    folder = copy_of(tmp_path / "draft", "classic", drop=["d2t"], t2d=~expected["t2d"] | (torch.arange(24) < 5))
    with pytest.raises(ValueError, match="`t2d` marks 1[3-9] tokens, but `draft_vocab_size` is 12"):
        Eagle3ForSpeculation.from_pretrained(folder)
    neutral = {"d2t": torch.zeros(24, dtype=torch.long), "t2d": torch.ones(24, dtype=torch.bool)}
    for absent, ids in (((), {}), (("embed_tokens.weight",), {}), ((), {"d2t": torch.arange(24)})):
        folder = copy_of(tmp_path / "draft", "full_vocabulary", absent, **neutral | ids)
        draft = Eagle3ForSpeculation.from_pretrained(folder)
        assert draft.d2t is None and draft.config.has_own_embed_tokens != bool(absent)
    for name in neutral:
        folder = copy_of(tmp_path / "draft", "full_vocabulary", **neutral | {name: 1 - neutral[name].long()})
        with pytest.raises(ValueError, match=rf"Unexpected: \['{name}'\]"):
            Eagle3ForSpeculation.from_pretrained(folder)


@pytest.mark.parametrize("has_head, has_t2d", [(False, True), (True, False)])
def test_tokens_in_order_of_frequency(tmp_path, has_head, has_t2d):
    """As converters copy them from Model-Optimizer's drafts."""
    expected = load_file(FIXTURES / "classic" / "model.safetensors")
    token_ids = expected["d2t"] + torch.arange(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    mapping = {"d2t": token_ids[order] - torch.arange(12), "lm_head.weight": expected["lm_head.weight"][order].clone()}
    drop = [*([] if has_head else ["lm_head.weight"]), *([] if has_t2d else ["t2d"])]
    folder = copy_of(tmp_path / "draft", "classic", drop, **mapping)
    for loader in (Eagle3ForSpeculation, AutoModel):
        draft = loader.from_pretrained(folder)
        assert draft.t2d.equal(expected["t2d"]) and draft.draft_token_ids.equal(token_ids)
        assert draft.lm_head.weight.equal(expected["lm_head.weight"][: len(draft.lm_head.weight)])
    folder = copy_of(tmp_path / "draft", "classic", d2t=expected["d2t"].where(torch.arange(12) > 0, token_ids[1]))
    with pytest.raises(ValueError, match="`d2t` does not map to ascending ids"):  # one token twice
        Eagle3ForSpeculation.from_pretrained(folder)


@pytest.mark.parametrize("is_sorted, has_t2d", [(True, True), (False, True), (True, False)])
def test_ids_instead_of_offsets(tmp_path, is_sorted, has_t2d):
    """As some converters write `d2t`."""
    expected = load_file(FIXTURES / "classic" / "model.safetensors")
    order = torch.arange(12) if is_sorted else torch.randperm(12, generator=torch.Generator().manual_seed(0))
    mapping = {"d2t": (expected["d2t"] + torch.arange(12))[order].int()}
    mapping["lm_head.weight"] = expected["lm_head.weight"][order].clone()
    folder = copy_of(tmp_path / "draft", "classic", () if has_t2d else ("t2d",), **mapping)
    for loader in (Eagle3ForSpeculation, AutoModel):
        held = loader.from_pretrained(folder).state_dict()
        assert all(held[name].equal(expected[name]) for name in ("d2t", "t2d", "lm_head.weight"))


@pytest.mark.parametrize(
    "dtype, offset, is_exact, form",
    [
        (torch.float16, 2047, True, "speculators"),
        (torch.float16, 2049, False, "flat bin"),
        (torch.bfloat16, 255, True, "flat"),
        (torch.bfloat16, 257, False, "speculators"),
        (torch.bfloat16, 257, False, "flat"),
        (torch.float32, 4001, True, "flat bin"),
    ],
)
def test_a_mapping_of_floating_point_numbers(tmp_path, form, dtype, offset, is_exact):
    """2049 in float16 is 2048."""
    token_ids = torch.tensor([1, 5, offset + 2])
    target = make_target("llama", vocab_size=4096)
    draft = Eagle3ForSpeculation.from_target(target, token_ids, fc_norm=False, norm_output=False)
    if form == "speculators":
        draft.save_pretrained(tmp_path / "draft")
        edit_config(tmp_path / "draft", *OURS)
    else:
        export(draft, tmp_path / "draft", "sglang")
    path = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(path)
    tensors["d2t"] = tensors["d2t"].to(dtype)
    save_file(tensors, path, {"format": "pt"})
    if form == "flat bin":
        path.unlink()
        torch.save(tensors, path.with_name("pytorch_model.bin"))
    for loader in (Eagle3ForSpeculation, AutoModel):
        if is_exact:
            assert loader.from_pretrained(tmp_path / "draft").draft_token_ids.equal(token_ids)
        else:
            with pytest.raises(ValueError, match=f"`d2t` is stored in {dtype}.*convert it from the original"):
                loader.from_pretrained(tmp_path / "draft")


def test_ids_that_a_converter_kept(tmp_path, said):
    """Of outputs, where the format counts inputs."""
    target = make_target("llama", num_hidden_layers=12)
    draft = Eagle3ForSpeculation.from_target(target, eagle_aux_hidden_state_layer_ids=[1, 5, 8])
    draft.save_pretrained(tmp_path)
    for is_theirs in (False, True):
        if is_theirs:
            edit_config(tmp_path, *OURS)
        for loader in (Eagle3ForSpeculation, AutoModel):
            draft = loader.from_pretrained(tmp_path, **({} if is_theirs else {"trust_remote_code": True}))
            assert draft.resolve_aux_layer_ids(target) == [1, 5, 8]
            assert len(said) == is_theirs and all(
                "target of 12 layers" in text and "eagle_aux_hidden_state_layer_ids=[2, 6, 9]" in text for text in said
            )
            type(logging.get_logger()).warning_once.cache_clear()
            said.clear()
    Eagle3ForSpeculation.from_pretrained(tmp_path, eagle_aux_hidden_state_layer_ids=[2, 6, 9])
    assert not said


@pytest.mark.parametrize("overrides", [{}, {"fc_norm": False, "norm_before_fc": True}])
def test_a_layer_that_was_only_compared_with(tmp_path, overrides):
    """A trainer also named the last layer, whose state its draft does not read."""
    target, prompt = make_target("llama", num_hidden_layers=8), make_prompt(9)
    draft = Eagle3ForSpeculation.from_target(target, eagle_aux_hidden_state_layer_ids=[2, 4, 5], **overrides)
    draft.save_pretrained(tmp_path)
    edit_config(tmp_path, *OURS, eagle_aux_hidden_state_layer_ids=[2, 4, 5, 7])
    advice = r"reads 3 of its target's states .*, but config.json names 4 layers .the inputs of \[2, 4, 5, 7\].\. .*layer_ids=\[2, 4, 5\]`"
    assert_not_loaded(tmp_path, advice)
    loaded = Eagle3ForSpeculation.from_pretrained(tmp_path, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    assert target.generate(prompt, assistant_model=loaded, max_new_tokens=4).shape == (1, 13)


@pytest.mark.parametrize("is_theirs", [False, True])
def test_a_flag_whose_default_readers_disagree_on(tmp_path, said, is_theirs):
    folder = edit_config(copy_of(tmp_path / "draft", "classic"), *["norm_before_residual"] * is_theirs)
    for loader in (Eagle3ForSpeculation, AutoModel):
        assert loader.from_pretrained(folder).config.norm_before_residual is False
    assert len(said) == is_theirs and all("no `norm_before_residual`" in text for text in said)
    assert loader.from_pretrained(folder, norm_before_residual=True).config.norm_before_residual
    assert len(said) == is_theirs


@pytest.mark.parametrize(
    "copied",
    [
        {"mrope_section": [1, 1, 0], "partial_rotary_factor": 1.0},  # of Qwen3.5
        {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "type": "default"},  # of Qwen3-VL
        {"llama_4_scaling_beta": 0.1, "max_position_embeddings": 64},  # of Ministral 3
    ],
    ids=lambda copied: next(iter(copied)),
)
def test_what_its_trainer_copies_of_the_target(tmp_path, copied):
    """The rotary embedding of its layers does not read these keys. Exports leave them out."""
    folder = copy_with_layers(tmp_path / "draft", rope=copied)
    assert_same_logits(folder, load_file(FIXTURES / "classic" / "expected.safetensors"))
    draft = AutoModel.from_pretrained(folder)
    del draft.embed_tokens
    draft.config.has_own_embed_tokens = False
    export(draft, tmp_path / "sglang", "sglang")
    exported = json.loads((tmp_path / "sglang" / "config.json").read_text())
    assert not copied.keys() & exported["rope_parameters"].keys() - {"partial_rotary_factor", "type"}


def test_heads_rotate_as_they_were_trained(tmp_path, said):
    """Its trainer copies the key for a part of each head. Only its scaled embeddings heed it, and our own drafts."""
    folder = copy_of(tmp_path / "draft", "part_of_head")
    draft = AutoModel.from_pretrained(folder)
    assert len(said) == 1 and "has a `partial_rotary_factor` of 0.5. We rotate whole heads" in said[0]
    draft.save_pretrained(tmp_path / "again")
    assert_same_logits(tmp_path / "again", load_file(FIXTURES / "part_of_head" / "expected.safetensors"))
    assert "partial_rotary_factor" not in (tmp_path / "again" / "config.json").read_text()
    draft.config.transformer_layer_config.rope_parameters["partial_rotary_factor"] = 0.5
    Eagle3ForSpeculation(draft.config).save_pretrained(tmp_path / "ours")
    layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    layer["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}
    edit_config(folder, transformer_layer_config=layer)
    for place in (tmp_path / "ours", folder):
        loaded = Eagle3ForSpeculation.from_pretrained(place).config.transformer_layer_config
        assert loaded.rope_parameters["partial_rotary_factor"] == 0.5


def test_parallel_drafts_of_an_older_version(tmp_path):
    """Version 0.6.0 wrote how a draft was trained into its config.json."""
    reference = Eagle3ForSpeculation.from_target(make_target("llama"), mask_token_id=5)
    reference.save_pretrained(tmp_path)
    training = {"num_depths": 8, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2, "embed_requires_grad": True}
    edit_config(tmp_path, *OURS, **training)
    for loader in (Eagle3ForSpeculation, AutoModel):
        draft = loader.from_pretrained(tmp_path)
        assert draft.config.is_parallel and draft.mask_hidden.equal(reference.mask_hidden)


THETA = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"use_rope": False}, "keys that this version does not know: .'use_rope'"),
        ({"is_neox_style": False}, "keys that this version does not know: .'is_neox_style'"),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}, "rotary embedding .*'alpha'"),
        ({"rope_parameters": {"full_attention": THETA, "sliding_attention": THETA}}, "'full_attention', 'sliding"),
        ({"rope_scaling": {"type": "yarn"}}, "cannot be read.*factor"),
        ({"rope_parameters": {**THETA, "original_max_position_embeddings": None}}, "embeddings` is None"),
        ({"model_type": "eagle3"}, "model_type` is 'eagle3'; a draft has 'llama' or 'qwen3' layers"),
        ({"model_type": None}, "model_type` is None; a draft has 'llama' or 'qwen3' layers"),
        ({"vocab_size": 10**30}, "`vocab_size` is 10+, but must be a positive integer, up to"),
        (
            {"layer_types": ["full_attention"] * 8},
            "`layer_types` has 8 entries, .* are the target's, remove `layer_types` f",
        ),
    ],
    ids=str,
)
def test_layers_that_would_compute_something_else(tmp_path, changes, reason):
    assert_not_loaded(copy_with_layers(tmp_path / "draft", **changes), reason)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": "float8_e4m3fn"}, "`dtype` is 'float8_e4m3fn', but must be a dtype of torch in which it computes"),
        ({"dtype": "int8"}, "`dtype` is 'int8', but must be a dtype of torch in which it computes"),
        ({"quantization_config": {}}, "`quantization_config` is {}, but must be a mapping that names .* Remove it"),
        ({"quantization_config": "fp8"}, "`quantization_config` is 'fp8', but must be a mapping"),
        ({"verifier_fingerprint": "é"}, "`verifier_fingerprint` is 'é', but must be 128 bytes"),
        ({"target_hidden_size": 10**30}, "`target_hidden_size` is 10+, but must be a positive integer, up to"),
    ],
    ids=str,
)
def test_values_that_are_none(tmp_path, changes, reason):
    assert_not_loaded(edit_config(copy_of(tmp_path / "draft", "classic"), **changes), reason, dtype="auto")


def test_a_null_for_code(tmp_path):
    folder = edit_config(copy_of(tmp_path / "draft", "classic"), auto_map=None)
    assert type(AutoModel.from_pretrained(folder)) is Eagle3ForSpeculation


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", {"state_dict": {}}])
def test_a_broken_pickle(tmp_path, content):
    folder = copy_of(tmp_path / "draft", "classic")
    weights = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), weights)
    (folder / "model.safetensors").unlink()
    for loader in (Eagle3ForSpeculation, AutoModel):
        loader.from_pretrained(folder)
    torch.save(content, weights) if isinstance(content, dict) else weights.write_bytes(content)
    assert_not_loaded(folder, "pytorch_model.bin (cannot be read|is a Git LFS pointer|holds other things)")
    (folder / "model.safetensors").write_bytes((FIXTURES / "classic" / "model.safetensors").read_bytes())
    Eagle3ForSpeculation.from_pretrained(folder)  # which goes first


def test_old_names_and_missing_flags(tmp_path):
    """The first versions wrote another architecture, fewer flags and the old rotary keys."""
    layer = json.loads((copy_of(tmp_path, "classic") / "config.json").read_text())["transformer_layer_config"]
    layer["rope_theta"] = layer.pop("rope_parameters")["rope_theta"]
    dropped = ("norm_before_fc", "fc_norm", "norm_output", "target_hidden_size", "embed_requires_grad")
    changes = {"architectures": ["Eagle3Speculator"], "speculators_version": "0.1.0", "inference_type": "text"}
    edit_config(tmp_path, *dropped, **changes, enable_sp_ulysses=True, transformer_layer_config=layer)
    assert_same_logits(tmp_path, load_file(FIXTURES / "classic" / "expected.safetensors"))


def test_what_vllm_checks_of_what_we_save(tmp_path):
    """Names, shapes and keys that vLLM 0.33 goes by."""
    draft = Eagle3ForSpeculation.from_pretrained(FIXTURES / "norm_output")
    draft.save_pretrained(tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert "model_type" not in config  # with one, a checkpoint is not taken for one of speculators
    assert config["architectures"] == ["Eagle3DraftModel"] and config["speculators_model_type"] == "eagle3"
    speculators_config = config["speculators_config"]
    assert speculators_config["algorithm"] == "eagle3" and speculators_config["default_proposal_method"] == "greedy"
    (method,) = speculators_config["proposal_methods"]
    assert method["proposal_type"] == "greedy" and method["speculative_tokens"] == 3
    assert speculators_config["verifier"] == {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny"}
    assert config["auto_map"].keys() == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    layer_config = config["transformer_layer_config"]
    assert layer_config["model_type"] == "llama" and layer_config["vocab_size"] == 24
    assert layer_config["layer_types"] == ["full_attention"] * layer_config["num_hidden_layers"]
    assert layer_config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4] and layer_config["num_aux_hidden_states"] == 3
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size")
    # Readers disagree on what a missing one means.
    assert all(config[flag] is not None for flag in (*flags, "target_hidden_size"))
    width = layer_config["hidden_size"]
    norms = dict.fromkeys(("norm", "layers.0.hidden_norm", "fc_norm.0", "fc_norm.1", "fc_norm.2"), (width,))
    shapes = {"fc": (width, 3 * width), "layers.0.self_attn.q_proj": (2 * 4, 2 * width), "lm_head": (12, width)}
    assert all(tensors[f"{name}.weight"].shape == shape for name, shape in {**norms, **shapes}.items())
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    token_ids = torch.arange(12) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero().flatten(), token_ids)


@pytest.mark.parametrize(
    "prefix, table", each_once(["", "model.", "_orig_mod.", "module."], [(), ("embed_tokens.weight",)])
)
def test_names_of_tensors_that_wrappers_and_converters_change(tmp_path, prefix, table):
    """vLLM takes `midlayer`, too."""
    expected = load_file(FIXTURES / "classic" / "model.safetensors")
    outside = () if prefix == "_orig_mod." else ("lm_head.weight", "d2t", "t2d")
    names = {name: name.replace("layers.0.", "midlayer.") for name in expected}
    names |= {name: prefix + names[name] for name in expected if name not in outside}
    if prefix in ("_orig_mod.", "module."):  # a layer may be compiled, or wrapped, too
        wrapper = prefix if prefix == "_orig_mod." else "_fsdp_wrapped_module._checkpoint_wrapped_module."
        names = {name: theirs.replace("midlayer.", f"midlayer.{wrapper}") for name, theirs in names.items()}
    drop = [name for name in expected if names[name] != name or name in table]
    renamed = {names[name]: tensor for name, tensor in expected.items() if name not in table}
    folder = copy_of(tmp_path / "draft", "classic", drop, **renamed)
    for loader in (Eagle3ForSpeculation, AutoModel):
        draft = loader.from_pretrained(folder, dtype=torch.float32)
        held = draft.state_dict()
        assert held.keys() == expected.keys() - set(table)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in held.items())
