import copy
import json
import math
import pickle
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from conftest import VOCAB_SIZE, assert_same_text, files_in, make_baseline, make_prompt, make_target
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3nForCausalLM,
    MllamaForCausalLM,
)
from transformers.utils.hub import cached_file

from hf_eagle3 import Eagle3Config, Eagle3ForSpeculation
from hf_eagle3.baselines import BASELINES
from hf_eagle3.checkpoints import export
from hf_eagle3.making import layer_config_for
from hf_eagle3.remote_code.configuration_eagle3 import DEFAULT_TREE_SETTINGS
from hf_eagle3.remote_code.draft_model_eagle3 import check_draft
from hf_eagle3.remote_code.modeling_eagle3 import Eagle3Head, Eagle3RMSNorm


LAYER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def make_inputs(draft, batch_size=2, length=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    config = draft.config
    aux = torch.randn(
        batch_size, length, config.num_aux_hidden_states * config.target_hidden_size, generator=generator
    )
    return torch.randint(0, config.vocab_size, (batch_size, length), generator=generator), aux


def randomize(model, seed=0):
    """Gives every parameter, norms included, values that make a mistake visible."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.dim() == 1)
    return model.eval()


def rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize(("attention", "is_padded"), [("sdpa", False), ("sdpa", True), ("eager", True)])
@pytest.mark.parametrize("layer_types", [["full_attention"], ["sliding_attention", "full_attention"]])
def test_the_last_row_alone_equals_the_last_row(attention, layer_types, is_padded):
    layer_config = {**LAYER, "model_type": "llama", "num_hidden_layers": len(layer_types), "layer_types": layer_types}
    layer_config |= {"sliding_window": 4}
    others = {"has_own_embed_tokens": True, "attn_implementation": attention}
    draft = randomize(Eagle3ForSpeculation(Eagle3Config(transformer_layer_config=layer_config, **others)))
    rows = []
    draft.layers[-1].mlp.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    input_ids, aux = make_inputs(draft, length=12)
    hidden_states, mask = draft.combine_hidden_states(aux), torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    caches = {logits_to_keep: DynamicCache() for logits_to_keep in (0, 1, 2)}
    for begin, end in ((0, 8), (8, 12)):  # a prompt, and a chain below it
        outputs = {}
        for logits_to_keep, cache in caches.items():
            outputs[logits_to_keep] = draft(
                input_ids[:, begin:end],
                hidden_states[:, begin:end],
                mask[:, :end] if is_padded else None,
                cache=cache,
                logits_to_keep=logits_to_keep,
            )
        for name in ("logits", "last_hidden_state"):
            whole = outputs[0][name]
            for kept in (1, 2):
                assert outputs[kept][name].shape == (2, kept, whole.shape[-1])
                torch.testing.assert_close(outputs[kept][name], whole[:, -kept:], atol=3e-5, rtol=1e-5)
    assert rows == [8, 1, 8, 4, 1, 4]
    for layer, whole in zip(caches[1].layers, caches[0].layers):
        torch.testing.assert_close(layer.keys, whole.keys)
        torch.testing.assert_close(layer.values, whole.values)


@pytest.mark.parametrize("norm", ["norm_before_fc", "fc_norm"])
def test_combine_hidden_states(norm):
    """Of a target of another width; concatenated, or apart."""
    layer_ids = [0, 1, 2, 3]
    config = Eagle3Config(
        transformer_layer_config=LAYER,
        target_hidden_size=24,
        eagle_aux_hidden_state_layer_ids=layer_ids,
        **{norm: True},
    )
    draft = randomize(Eagle3ForSpeculation(config))
    _, aux = make_inputs(draft)
    states = list(aux.split(24, dim=-1))
    if norm == "norm_before_fc":
        normed = rms_norm(aux, draft.input_norm.weight)
    else:
        normed = torch.cat([rms_norm(s, norm.weight) for s, norm in zip(states, draft.fc_norm, strict=True)], -1)
    for given in (aux, states):
        fused = draft.combine_hidden_states(given)
        torch.testing.assert_close(fused, normed @ draft.fc.weight.T, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layer_types", [["full_attention"], ["sliding_attention"]])
def test_cached_steps_and_padding_change_nothing(layer_types):
    layer_config = {**LAYER, "model_type": "qwen3", "num_hidden_layers": 1, "layer_types": layer_types}
    layer_config |= {"sliding_window": 4, "use_sliding_window": True}
    draft = randomize(
        Eagle3ForSpeculation(Eagle3Config(transformer_layer_config=layer_config, has_own_embed_tokens=True))
    )
    input_ids, aux = make_inputs(draft)
    hidden_states = draft.combine_hidden_states(aux)
    expected = draft(input_ids, hidden_states).logits
    cache = DynamicCache()
    steps = [draft(input_ids[:, i : i + 3], hidden_states[:, i : i + 3], cache=cache).logits for i in (0, 3, 6)]
    torch.testing.assert_close(torch.cat(steps, 1), expected, atol=1e-5, rtol=1e-4)

    def left_pad(x):
        return torch.cat([x[:, :2], x], dim=1)

    padded = draft(
        left_pad(input_ids),
        left_pad(hidden_states),
        attention_mask=torch.tensor([[0] * 2 + [1] * 9] * 2),
        position_ids=torch.tensor([[0, 0, *range(9)]] * 2),
    )
    torch.testing.assert_close(padded.logits[:, 2:], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "draft_token_ids"),
    [
        ({}, None),
        ({"fc_norm": False, "norm_output": False}, [5, 3, 77]),
        ({"norm_before_fc": True, "norm_before_residual": True}, None),
        ({"num_hidden_layers": 2, "model_type": "qwen3"}, [5, 3, 77]),
        ({"has_own_embed_tokens": True}, [5, 3, 77]),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3], "intermediate_size": 20}, None),
    ],
)
def test_saving_and_loading_keep_everything(tmp_path, target, overrides, draft_token_ids):
    draft = randomize(Eagle3ForSpeculation.from_target(target, draft_token_ids=draft_token_ids, **overrides))
    draft.generation_config.tree_depth = 3
    draft.save_pretrained(tmp_path)
    loaded = Eagle3ForSpeculation.from_pretrained(tmp_path)
    assert loaded.generation_config.tree_depth == 3
    ours, theirs = draft.state_dict(), loaded.state_dict()
    assert set(ours) == set(theirs) == set(load_file(tmp_path / "model.safetensors"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ("embed_tokens.weight" in ours) == overrides.get("has_own_embed_tokens", False)
    assert ("d2t" in ours) == (draft_token_ids is not None)
    input_ids, aux = make_inputs(draft)
    loaded.borrow_embeddings(target)
    expected = draft(input_ids, draft.combine_hidden_states(aux)).logits
    assert torch.equal(loaded(input_ids, loaded.combine_hidden_states(aux)).logits, expected)


def test_copies_share_the_target_s_table_and_pickles_leave_it_out(target):
    draft, token_ids = Eagle3ForSpeculation.from_target(target), make_prompt(5)
    copied, pickled = copy.deepcopy(draft), pickle.loads(pickle.dumps(draft))
    assert copied._borrowed_embedding[0] is draft._borrowed_embedding[0]
    assert copied.lm_head.weight is not draft.lm_head.weight
    with pytest.raises(ValueError, match="stores no embedding table"):
        pickled.embed(token_ids)
    pickled.borrow_embeddings(target)
    for each in (copied, pickled):
        assert torch.equal(each.embed(token_ids), draft.embed(token_ids))


def test_where_settings_of_the_tree_are(target, tmp_path):
    draft = Eagle3ForSpeculation.from_target(target)
    with pytest.raises(AttributeError, match="Set `draft.generation_config.tree_depth`"):
        draft.tree_depth = 3
    draft.save_pretrained(tmp_path)
    for name in ("tree_depth", "output_steps"):
        for loader, kwargs in ((Eagle3ForSpeculation, {}), (AutoModel, {"trust_remote_code": True})):
            with pytest.raises(TypeError, match=f"Pass it to `generate`, or set `draft.generation_config.{name}`"):
                loader.from_pretrained(tmp_path, **{name: 3}, **kwargs)


def test_draft_vocabulary(target):
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=[9, 2, 40, 9])
    assert draft.draft_token_ids.tolist() == [2, 9, 40]
    assert draft.d2t.tolist() == [2, 8, 38]
    assert draft.t2d.nonzero().flatten().tolist() == [2, 9, 40]
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight[[2, 9, 40]])
    full = Eagle3ForSpeculation.from_target(target)
    assert full.d2t is None and torch.equal(full.lm_head.weight, target.lm_head.weight)
    assert type(full.lm_head) is type(draft.lm_head) is Eagle3Head
    with pytest.raises(ValueError, match=f"0 to {VOCAB_SIZE - 1}"):
        Eagle3ForSpeculation.from_target(target, draft_token_ids=[VOCAB_SIZE])
    # A number of tokens, a mask and the like would be taken for ids.
    for ids, what in ((32, "the number 32"), (draft.t2d, "torch.bool"), ([1.5, 2.5], "torch.float32")):
        for use in (full.trim_draft_vocabulary, partial(Eagle3ForSpeculation.from_target, target)):
            with pytest.raises(ValueError, match=f"must be a list of token ids, not {what}"):
                use(draft_token_ids=ids)
    with pytest.raises(ValueError, match="`hidden_size` is 16, but must be 32, the width"):
        Eagle3ForSpeculation.from_target(target, hidden_size=16)
    # A head may have fewer rows than there are tokens.
    short = copy.copy(target)
    short.get_output_embeddings = lambda: torch.nn.Linear(target.config.hidden_size, 50, bias=False)
    assert Eagle3ForSpeculation.from_target(short).draft_token_ids.tolist() == list(range(50))
    with pytest.raises(ValueError, match="0 to 49"):
        Eagle3ForSpeculation.from_target(short, draft_token_ids=[50])


@pytest.mark.parametrize("has_own_head", [True, False])
@pytest.mark.parametrize("draft_token_ids", [None, [5, 3, 77, 8]])
def test_a_trimmed_draft_vocabulary(tmp_path, target, draft_token_ids, has_own_head):
    draft = randomize(Eagle3ForSpeculation.from_target(target, draft_token_ids=draft_token_ids))
    if not has_own_head:  # the checkpoint has none, and the target's serves
        draft.save_pretrained(tmp_path / "whole")
        edit(tmp_path / "whole", lambda tensors: tensors.pop("lm_head.weight"))
        edit_json(tmp_path / "whole" / "config.json", lambda config: config.pop("weights_digest"))
        draft = Eagle3ForSpeculation.from_pretrained(tmp_path / "whole")
        draft.borrow_embeddings(target)
    input_ids, aux = make_inputs(draft)
    before = draft(input_ids, draft.combine_hidden_states(aux)).logits
    places = [draft.draft_token_ids.tolist().index(token) for token in (5, 77)]
    draft.trim_draft_vocabulary(torch.tensor([77, 5, 77]))
    assert draft.draft_token_ids.tolist() == [5, 77] and draft.config.draft_vocab_size == 2
    torch.testing.assert_close(draft(input_ids, draft.combine_hidden_states(aux)).logits, before[..., places])
    draft.save_pretrained(tmp_path / "trimmed")
    loaded = Eagle3ForSpeculation.from_pretrained(tmp_path / "trimmed")
    assert all(torch.equal(draft.state_dict()[name], each) for name, each in loaded.state_dict().items())
    assert loaded.t2d.nonzero().flatten().tolist() == [5, 77]
    for ids, message in (([], "at least one. It has 0 ids"), ([5, 6, VOCAB_SIZE], "2 tokens lacks 2 of them")):
        with pytest.raises(ValueError, match=message):
            draft.trim_draft_vocabulary(ids)
    assert draft.draft_token_ids.tolist() == [5, 77]


@pytest.mark.parametrize("model_type", ["mamba", "rwkv"])
def test_targets_without_attention_are_refused(model_type):
    config = AutoConfig.for_model(model_type, vocab_size=96, hidden_size=32, num_hidden_layers=4)
    with pytest.raises(ValueError, match=f"type '{model_type}': it has no attention"):
        Eagle3ForSpeculation.from_target(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("model_class", "model_type"), [(Gemma3nForCausalLM, "gemma3n_text"), (MllamaForCausalLM, "mllama_text_model")]
)
def test_targets_whose_states_cannot_be_read(model_class, model_type):
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "cross_attention_layers": [1], "pad_token_id": 0}
    sizes |= {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    target = model_class(AutoConfig.for_model(model_type, **sizes))
    with pytest.raises(ValueError, match="which EAGLE-3 drafts cannot read"):
        Eagle3ForSpeculation.from_target(target)


@pytest.mark.parametrize("model_type", ["gemma3n_text", "beam"])
def test_layers_that_differ(model_type):
    """In the widths of their MLPs, or in that some do not rotate."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    layer = layer_config_for(AutoConfig.for_model(model_type), 1)
    assert layer["rope_parameters"]["rope_theta"] > 0 and isinstance(layer["intermediate_size"], int)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 8), (3, 5), (2, 40)])
def test_logits_of_few_rows(shape):
    head, states = Eagle3Head(256, 4096, bias=False), torch.randn(*shape, 256)
    assert head.weight.numel() >= Eagle3Head.MIN_WEIGHTS
    torch.testing.assert_close(head(states), torch.nn.functional.linear(states, head.weight))
    half = copy.deepcopy(head).bfloat16()
    assert torch.equal(half(states.bfloat16()), torch.nn.functional.linear(states.bfloat16(), half.weight))


def test_unscaled_embedding_of_gemma():
    target = make_target("gemma3")
    draft = Eagle3ForSpeculation.from_target(target)
    input_ids = torch.tensor([[3, 4]])
    assert torch.equal(draft.embed(input_ids), target.get_input_embeddings().weight[input_ids])
    assert not torch.equal(draft.embed(input_ids), target.get_input_embeddings()(input_ids))


def test_unknown_override_is_refused(target):
    with pytest.raises(ValueError, match="num_hiden_layers"):
        Eagle3ForSpeculation.from_target(target, num_hiden_layers=2)
    with pytest.raises(ValueError, match="`draft_vocab_size` has no effect here: pass the `draft_token_ids`"):
        Eagle3ForSpeculation.from_target(target, draft_vocab_size=32)
    with pytest.raises(ValueError, match="`dtype` has no effect here"):
        Eagle3ForSpeculation.from_target(target, dtype=torch.bfloat16)


def test_what_is_no_target_and_no_name(target):
    draft = Eagle3ForSpeculation.from_target(target)
    for other in ("org/target", target.config, None):
        for use in (Eagle3ForSpeculation.from_target, draft.validate_target, draft.pair_with):
            with pytest.raises(TypeError, match=f"must be a loaded model, not {type(other).__name__}"):
                use(other)
    for other in (target, draft.config, draft.state_dict()):
        with pytest.raises(TypeError, match=f"the folder or Hub id of a draft, not {type(other).__name__}"):
            Eagle3ForSpeculation.from_pretrained(other)


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_saving_again_in_another_number_of_files(tmp_path, target, variant):
    """transformers leaves a single file beside shards, and would load it."""
    draft, suffix = Eagle3ForSpeculation.from_target(target).half(), "" if variant is None else ".fp16"
    for options in ({}, {"max_shard_size": "10KB"}, {"max_shard_size": "5KB"}, {}):
        draft.norm.weight.data += 1
        draft.save_pretrained(tmp_path, variant=variant, **options)
        single, index = (
            tmp_path / f"model{middle}{suffix}{end}"
            for middle, end in (("", ".safetensors"), (".safetensors.index", ".json"))
        )
        assert (single.exists(), index.exists()) == (not options, bool(options))
        shards = {path.name for path in tmp_path.glob("model*-of-*")}
        assert shards == (set(json.loads(index.read_text())["weight_map"].values()) if options else set())
        again = Eagle3ForSpeculation.from_pretrained(tmp_path, variant=variant)
        assert again.norm.weight.equal(draft.norm.weight)


@pytest.mark.parametrize("held", [(), ("config.json",)])
def test_a_draft_that_is_not_here_and_no_connection(tmp_path, held, monkeypatch):
    """It is not the draft's files that are wrong."""
    folder = tmp_path / "models--me--draft" / "snapshots" / ("0" * 40)
    for name in held:
        folder.mkdir(parents=True)
        (folder / name).write_text('{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}')
        (tmp_path / "models--me--draft" / "refs").mkdir()
        (tmp_path / "models--me--draft" / "refs" / "main").write_text(folder.name)
    tried = []

    def cached_file_noting(source, name, **kwargs):
        tried.append(kwargs.get("local_files_only", False))
        return cached_file(source, name, **kwargs)

    monkeypatch.setattr("hf_eagle3.tensor_names.cached_file", cached_file_noting)
    with pytest.raises(
        OSError, match="We couldn't connect to" if held else "There is no folder me/draft, .* connect to"
    ):
        Eagle3ForSpeculation.from_pretrained("me/draft", cache_dir=tmp_path)
    assert held or tried.count(False) <= 2  # each takes half a minute


def test_weights_that_could_not_be_loaded_again_are_not_saved(tmp_path, target):
    draft = Eagle3ForSpeculation.from_target(target)
    draft.save_pretrained(tmp_path / "draft")
    before = files_in(tmp_path / "draft")
    with torch.no_grad():
        draft.fc.weight[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"\['fc.weight'\] of this draft have values that are NaN or infinite, so it could not"
    ):
        draft.save_pretrained(tmp_path / "draft")  # over an earlier checkpoint
    assert files_in(tmp_path / "draft") == before
    with pytest.raises(ValueError, match="config.json is a file. Pass a folder"):
        Eagle3ForSpeculation.from_target(target).save_pretrained(tmp_path / "draft" / "config.json")


@pytest.mark.parametrize("cause", ["full disk", "size of shards", "generation config", "meta"])
def test_a_save_that_fails_changes_nothing(tmp_path, target, cause, monkeypatch):
    draft = Eagle3ForSpeculation.from_target(target)
    draft.save_pretrained(tmp_path)
    before, options = files_in(tmp_path), {}
    draft.norm.weight.data += 1
    if cause == "full disk":
        monkeypatch.setattr("transformers.modeling_utils.safe_save_file", mock.Mock(side_effect=OSError(28, "full")))
    elif cause == "size of shards":
        options["max_shard_size"] = "5 gigabytes"
    elif cause == "generation config":
        draft.generation_config.temperature = 0.6
    else:
        draft = draft.to("meta")
    with pytest.raises((OSError, ValueError, NotImplementedError)):
        draft.save_pretrained(tmp_path, **options)
    assert files_in(tmp_path) == before


def test_a_generation_config_of_the_target_is_left_out(tmp_path, target):
    """As other projects copy it. With samples' settings alone, transformers would not save it again."""
    Eagle3ForSpeculation.from_target(target).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "tree_depth": 3}')
    draft = Eagle3ForSpeculation.from_pretrained(tmp_path)
    draft.save_pretrained(tmp_path / "again")
    config = Eagle3ForSpeculation.from_pretrained(tmp_path / "again").generation_config
    assert (config.temperature, config.tree_depth, config.branching_factor) == (None, 3, 8)


def test_a_flag_that_is_changed_has_an_effect_at_once(tmp_path, target):
    """It is what is saved."""
    draft = Eagle3ForSpeculation.from_target(target).eval()
    input_ids, aux = make_inputs(draft)
    outputs = []
    for flag in (False, True):
        draft.config.norm_before_residual = flag
        draft.save_pretrained(tmp_path)
        for each in (draft, Eagle3ForSpeculation.from_pretrained(tmp_path).eval()):
            each.borrow_embeddings(target)
            outputs.append(each(input_ids=input_ids, hidden_states=each.combine_hidden_states(aux)).logits)
    assert outputs[0].equal(outputs[1]) and outputs[2].equal(outputs[3]) and not outputs[1].allclose(outputs[2])


def test_saving_beside_another_model(tmp_path, target):
    draft = Eagle3ForSpeculation.from_target(target)
    target.save_pretrained(tmp_path)
    before = files_in(tmp_path)
    for other in (draft, make_baseline("dflash", target), make_baseline("medusa", target)):
        with pytest.raises(ValueError, match="has config.json of another model, which the draft would damage"):
            other.save_pretrained(tmp_path)
    assert files_in(tmp_path) == before
    # Nor if its configuration is broken or missing, or its weights are in several files.
    for options in ({}, {"max_shard_size": "10KB"}):
        folder = tmp_path / f"broken{len(options)}"
        target.save_pretrained(folder, **options)
        for content in ('{"model_type": "lla', "\ufeff{}", "[]", None):
            (folder / "config.json").unlink() if content is None else (folder / "config.json").write_text(content)
            with pytest.raises(ValueError, match="of another model, which the draft would damage"):
                draft.save_pretrained(folder)
    for _ in range(2):
        draft.save_pretrained(tmp_path / "draft")
        (tmp_path / "draft" / "config.json").write_text('{"speculators_mo')  # cut off
    adapted = get_peft_model(copy.deepcopy(draft), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "draft")
    adapted.save_pretrained(tmp_path / "adapter")
    for folder in (tmp_path / "draft", tmp_path / "adapter"):  # loaded from there, it would have the adapter twice
        with pytest.raises(ValueError, match="has (an adapter|adapter_model.safetensors)"):
            adapted.merge_and_unload().save_pretrained(folder)


def test_forward_says_what_is_missing(target, tmp_path):
    draft = Eagle3ForSpeculation.from_target(target)
    input_ids, aux = make_inputs(draft)
    with pytest.raises(ValueError, match="combine_hidden_states"):
        draft(input_ids, aux)
    with pytest.raises(ValueError, match="3 target states of 32, 96 in all"):
        draft.combine_hidden_states(aux[..., :-1])
    draft.save_pretrained(tmp_path)
    loaded = Eagle3ForSpeculation.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="borrow_embeddings"):
        loaded(input_ids, loaded.combine_hidden_states(aux))
    with pytest.raises(NotImplementedError, match="assistant_model=draft"):
        draft.generate(input_ids)


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "Missing: .*fc.weight"),
        (lambda t: t.update({"surprise.weight": torch.ones(2)}), "Unexpected: .*surprise"),
        (lambda t: t.update({"fc.weight": torch.ones(3, 3)}), "Of another shape: .*fc.weight"),
        (lambda t: t.update(d2t=t["d2t"].flip(0).contiguous()), "d2t"),
        (lambda t: t.update(d2t=t["d2t"] + 90), "d2t"),
        (lambda t: t.update(t2d=~t["t2d"]), "t2d"),
    ],
)
def test_broken_checkpoints_are_refused(tmp_path, target, change, message):
    Eagle3ForSpeculation.from_target(target, draft_token_ids=[5, 9, 40]).save_pretrained(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        Eagle3ForSpeculation.from_pretrained(tmp_path)


def edit_json(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (lambda c, name=name, value=value: c.update({name: value}), "is not what was saved")
            for name, saved in (("norm_before_residual", False), ("norm_output", True))
            for value in (not saved, None)
        ),
        (lambda c: c.pop("norm_before_residual"), "is not what was saved"),
        (lambda c: c.pop("transformer_layer_config"), "no `transformer_layer_config`|is not what was saved"),
        (lambda c: c["transformer_layer_config"].update(rms_norm_eps=1e-3), "is not what was saved"),
        (lambda c: c["transformer_layer_config"]["rope_parameters"].update(rope_theta=1e6), "is not what was saved"),
        (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), "is not what was saved"),
        (lambda c: c.update(dtype="float17"), "`dtype` is 'float17'|no attribute 'float17'"),
    ],
)
def test_configurations_that_are_not_what_was_saved(tmp_path, target, change, message):
    Eagle3ForSpeculation.from_target(target).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", change)
    for auto_class in (Eagle3ForSpeculation, AutoModel):
        kwargs = {} if auto_class is Eagle3ForSpeculation else {"trust_remote_code": True}
        # The code that was saved checks the digest, and leaves the rest to transformers.
        with pytest.raises((ValueError, AttributeError), match=message):
            auto_class.from_pretrained(tmp_path, **kwargs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["lm_head.weight"].zero_(), "not those that were saved"),
        (lambda t: t["fc.weight"].mul_(1.1), "not those that were saved"),
        (lambda t: t["fc.weight"].view(-1)[3].fill_(math.nan), "fc.weight.* are NaN or infinite"),
        (lambda t: t["norm.weight"].view(-1)[0].fill_(math.inf), "norm.weight.* are NaN or infinite"),
    ],
)
def test_weights_that_are_not_what_was_saved(tmp_path, target, change, message):
    Eagle3ForSpeculation.from_target(target).save_pretrained(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        Eagle3ForSpeculation.from_pretrained(tmp_path)
    if "infinite" not in message:  # on purpose
        edit_json(tmp_path / "config.json", lambda config: config.pop("weights_digest"))
        Eagle3ForSpeculation.from_pretrained(tmp_path)


def test_weights_that_are_what_was_saved(tmp_path, target):
    Eagle3ForSpeculation.from_target(target).save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # may be loaded in any
        Eagle3ForSpeculation.from_pretrained(tmp_path, dtype=dtype).save_pretrained(tmp_path / str(dtype))
        Eagle3ForSpeculation.from_pretrained(tmp_path / str(dtype))
    # A configuration may be taken for other weights.
    config = Eagle3Config.from_pretrained(tmp_path)
    other = Eagle3ForSpeculation.from_target(make_target("llama", seed=1))
    Eagle3ForSpeculation.from_pretrained(None, config=config, state_dict=other.state_dict())
    other.save_pretrained(tmp_path / "other")
    Eagle3ForSpeculation.from_pretrained(tmp_path / "other", config=config)
    with pytest.raises(ValueError, match="`config` is of the class LlamaConfig, but must be of Eagle3Config"):
        Eagle3ForSpeculation.from_pretrained(tmp_path, config=config.transformer_layer_config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not valid JSON"),
        ('{"tree_depth": 4, "tree_po', "is not valid JSON"),
        ('{"tree_policy": "fast"}', "`tree_policy` must be"),
        ('{"tree_depth": -1}', "`tree_depth` must be"),
        ('{"pad_token_id": "x"}', "`pad_token_id` is 'x'"),
    ],
)
def test_broken_generation_configs_are_refused(tmp_path, target, content, message):
    Eagle3ForSpeculation.from_target(target).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        Eagle3ForSpeculation.from_pretrained(tmp_path)


def test_generation_configs_that_could_not_be_loaded_are_not_saved(tmp_path, target):
    draft = Eagle3ForSpeculation.from_target(target)
    draft.generation_config.tree_policy = "fast"
    with pytest.raises(ValueError, match="`tree_policy` must be"):
        draft.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("elsewhere", "to"),
    [
        ("../outside/{}", None),
        ("{outside}/{}", "sglang"),
        ("..\\outside\\{}", None),
        ("shards/../../outside/{}", None),
    ],
)
def test_files_outside_of_a_checkpoint_are_not_read(tmp_path, target, elsewhere, to):
    folder, outside = tmp_path / "draft", tmp_path / "outside"
    draft = Eagle3ForSpeculation.from_target(target)
    draft.save_pretrained(folder, max_shard_size="10KB")
    if to is not None:
        export(draft, tmp_path / "other", to)
        (folder / "config.json").write_text((tmp_path / "other" / "config.json").read_text())
    index = folder / "model.safetensors.index.json"
    part = json.loads(index.read_text())["weight_map"]["fc.weight"]
    outside.mkdir()
    (folder / part).rename(outside / part)
    name = elsewhere.format(part, outside=outside)
    edit_json(index, lambda content: content["weight_map"].update({"fc.weight": name}))
    with pytest.raises(ValueError, match="is not in its folder"):
        Eagle3ForSpeculation.from_pretrained(folder)
    if to is None:
        index.rename(folder / "model.safetensors.index.fp16.json")
        with pytest.raises(ValueError, match="is not in its folder"):
            Eagle3ForSpeculation.from_pretrained(folder, variant="fp16")


def test_the_installed_class_runs_no_code_of_a_folder(tmp_path, target):
    Eagle3ForSpeculation.from_target(target).save_pretrained(tmp_path)
    for file in (*tmp_path.glob("*.py"), *tmp_path.glob("*/*.py")):
        file.write_text("raise SystemExit('was run')")
    draft = Eagle3ForSpeculation.from_pretrained(tmp_path, trust_remote_code=True)
    with pytest.raises(NotImplementedError):
        draft.generate()


def test_embedding_of_a_checkpoint_that_does_not_announce_it(tmp_path, target):
    draft = Eagle3ForSpeculation.from_target(target, has_own_embed_tokens=True)
    draft.save_pretrained(tmp_path)
    for name in ("has_own_embed_tokens", "auto_map", "config_digest"):  # as others write it
        edit_json(tmp_path / "config.json", lambda config, name=name: config.pop(name))
    loaded = Eagle3ForSpeculation.from_pretrained(tmp_path, output_hidden_states=True, output_attentions=True)
    assert torch.equal(loaded.embed_tokens.weight, target.get_input_embeddings().weight)
    assert loaded.config.output_attentions and loaded.config.output_hidden_states


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn", "dynamic"])
def test_rope_of_the_target(rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 5e5, "factor": 4.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    target = make_target("llama", rope_parameters=rope)
    draft = Eagle3ForSpeculation.from_target(target)
    if rope_type == "dynamic":  # not portable
        assert draft.rotary_emb.rope_type == "default"
    else:
        assert torch.equal(draft.rotary_emb.inv_freq, target.model.rotary_emb.inv_freq)


def test_a_table_of_its_own_in_another_dtype():
    target = make_target("llama")
    draft = Eagle3ForSpeculation.from_target(target, has_own_embed_tokens=True).eval()
    draft.embed_tokens.double()
    assert_same_text(target, draft, make_prompt(5))


def test_norms_keep_the_dtype_under_autocast(monkeypatch):
    """GPUs compute them in float32 there, since torch 2.12, which would make float32 of the keys that are kept."""
    rms_norm = nn.functional.rms_norm
    monkeypatch.setattr(nn.functional, "rms_norm", lambda *arguments: rms_norm(*arguments).float())
    assert Eagle3RMSNorm(8)(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_file_of_weights_that_was_cut_off_is_named(draft, tmp_path):
    draft.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    for cut in (content[:-10], content[:40], content + b" ", b"", b"x" * 100):
        file.write_bytes(cut)
        with pytest.raises(
            ValueError, match=r"model.safetensors is not a complete safetensors file .*Download it again"
        ):
            Eagle3ForSpeculation.from_pretrained(tmp_path)


def test_a_draft_without_weights_is_refused(target, draft):
    with pytest.raises(ValueError, match="are on meta: .*not loaded"):
        target.generate(make_prompt(5), assistant_model=copy.deepcopy(draft).to("meta"), max_new_tokens=3)


class OnGpu(torch.nn.Parameter):
    """Says that it is on a GPU."""

    device = torch.device("cuda:1")


@pytest.mark.parametrize("part", ["fc", "layers", "norm", "lm_head", "embed_tokens"])
def test_a_draft_on_several_devices(target, part):
    """As `device_map="auto"` splits it over GPUs, if there are several. Only its own embedding table may be elsewhere."""
    draft = Eagle3ForSpeculation.from_target(target, has_own_embed_tokens=True)
    for module in draft.get_submodule(part).modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, OnGpu(parameter.detach()))
    refusal = pytest.raises(ValueError, match=r"are on cpu, cuda:1: .*split over devices.*without `device_map='auto'`")
    with nullcontext() if part == "embed_tokens" else refusal:
        check_draft(draft, target)
    for module in draft.get_submodule(part).modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach().to("meta")))
    with pytest.raises(ValueError, match="are on cpu, meta: they are offloaded"):
        check_draft(draft, target)


def test_a_draft_that_is_offloaded_is_refused(target, draft, tmp_path):
    """Where `device_map="auto"` finds no room for its head. The mapping of tokens stays on the device."""
    draft.save_pretrained(tmp_path)
    places = {**{name.split(".")[0]: "cpu" for name in draft.state_dict()}, "lm_head": "disk"}
    offloaded = {"device_map": places, "offload_folder": tmp_path / "offloaded"}
    with pytest.raises(ValueError, match="they are offloaded, .* whole on one device"):
        target.generate(make_prompt(5), assistant_model=Eagle3ForSpeculation.from_pretrained(tmp_path, **offloaded))


def test_a_draft_is_loaded_without_its_weights(draft, tmp_path):
    draft.save_pretrained(tmp_path)
    loaded = Eagle3ForSpeculation.from_pretrained(tmp_path, device_map="meta")
    assert loaded.config.draft_vocab_size < loaded.config.vocab_size
    assert all(tensor.is_meta for tensor in loaded.state_dict().values())


@pytest.mark.parametrize("cast", ["bfloat16", "half", "to"])
def test_rotary_frequencies_are_never_rounded(cast, tmp_path):
    """As those of a fresh draft for a target in bfloat16 would be, while it is trained."""
    target = make_target("llama")
    exact = dict(Eagle3ForSpeculation.from_target(target).rotary_emb.named_buffers())
    draft = Eagle3ForSpeculation.from_target(make_target("llama").bfloat16()).float()
    for changed in (
        draft,
        draft.to("meta").to_empty(device="cpu"),
        BASELINES["eagle"].draft_class.from_target(target),
    ):
        changed = changed.to(torch.bfloat16) if cast == "to" else getattr(changed, cast)()
        assert changed.lm_head.weight.dtype in (torch.bfloat16, torch.float16)
        assert {name: table.dtype for name, table in changed.rotary_emb.named_buffers()} == dict.fromkeys(
            exact, torch.float
        )
    draft = Eagle3ForSpeculation.from_target(target)
    draft.save_pretrained(tmp_path)
    loaded = Eagle3ForSpeculation.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for changed in (loaded, draft.to(torch.bfloat16), draft.float()):
        for name, table in changed.rotary_emb.named_buffers():
            assert torch.equal(table, exact[name])


def test_settings_of_a_draft_that_has_none(tmp_path):
    """As those of others have none: each can be set, and left out of a call."""
    Eagle3ForSpeculation.from_target(make_target("llama")).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    draft = Eagle3ForSpeculation.from_pretrained(tmp_path)
    assert {name: getattr(draft.generation_config, name) for name in DEFAULT_TREE_SETTINGS} == DEFAULT_TREE_SETTINGS
    draft.generation_config.update(tree_policy="static", tree_depth=2)
    assert draft.generation_config.tree_depth == 2 and draft.generation_config.tree_policy == "static"
