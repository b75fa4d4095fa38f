"""Rows of a batch that are finished leave it, where nobody could notice."""

import copy
import inspect
from types import MethodType

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from conftest import (
    assert_an_oracle_gives_the_text,
    assert_gives_its_text,
    assert_same_text,
    generate,
    make_batch,
    make_draft,
    make_target,
    oracle_of,
)
from peft import LoraConfig, get_peft_model
from test_batch_generation import Columns, StopAtLength
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModel, DynamicCache


def end_token(batch, text):
    """The token that ends the rows of a text at the most different lengths, each a few tokens after the prompt."""
    new = text[:, batch["input_ids"].shape[1] :].tolist()

    def num_lengths(token):
        return len({row.index(token) for row in new if token in row[4:] and token not in row[:4]})

    return max({token for row in new for token in row}, key=num_lengths)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3", "gemma4-shared-kv", "llama4", "deepseek_v3"])
def test_rows_that_are_finished_leave_the_batch(family, verified):
    target, batch = make_target(family), make_batch([5, 40, 17, 9, 25, 13], seed=3)
    settings = {"eos_token_id": end_token(batch, generate(target, batch, max_new_tokens=40)), "pad_token_id": 0}
    assert_an_oracle_gives_the_text(target, batch, max_new_tokens=40, **settings)
    num_rows = [len(tree.tokens) for tree in verified]
    assert num_rows[0] == 6 and num_rows == sorted(num_rows, reverse=True) and len(set(num_rows)) > 2


@pytest.mark.parametrize("is_copy", [False, True], ids=["installed", "copy"])
def test_rows_leave_although_the_draft_reads_by_hooks(is_copy, target, tmp_path):
    """Those for the state before the final norm."""
    batch = make_batch([5, 9, 17])
    settings = {"max_new_tokens": 40, "pad_token_id": 0}
    settings["eos_token_id"] = end_token(batch, generate(target, batch, **settings))
    draft = make_draft(target, [batch["input_ids"][2:]], eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    if is_copy:
        draft.save_pretrained(tmp_path)
        draft = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert is_copy == type(draft).__module__.startswith("transformers_modules.")
    draft.generation_config.output_steps = True
    assert {len(step.rows) for step in assert_same_text(target, draft, batch, **settings).steps} == {1, 2, 3}


def test_rows_leave_a_target_in_mixed_precision(target, verified):
    """Whose forward accelerate wraps, as in training."""
    target, batch, settings = copy.deepcopy(target), make_batch([5, 9, 17]), {"max_new_tokens": 40, "pad_token_id": 0}
    settings["eos_token_id"] = end_token(batch, generate(target, batch, **settings))
    target.forward = MethodType(convert_outputs_to_fp32(target.forward.__func__), target)
    assert_an_oracle_gives_the_text(target, batch, **settings)
    assert {len(tree.tokens) for tree in verified} == {1, 2, 3}


@pytest.mark.parametrize(
    ("settings", "policy"),
    [({}, "auto"), ({"temperature": 1.5, "repetition_penalty": 1.1}, "static")],
    ids=["at once", "visited"],
)
def test_rows_that_leave_leave_the_sample_of_the_others(target, verified, policy, settings):
    batch = make_batch([5, 9, 17, 3])
    for seed in range(3):
        kwargs = {"do_sample": True, "max_new_tokens": 40, "pad_token_id": 0, **settings}
        kwargs["eos_token_id"] = end_token(batch, generate(target, batch, seed, **kwargs))
        oracle = oracle_of(target, batch, seed, **kwargs)
        oracle.generation_config.tree_policy = policy
        assert_gives_its_text(oracle, target, batch, seed, **kwargs)
    assert {1, 2, 3, 4} <= {len(tree.tokens) for tree in verified}


@pytest.mark.parametrize(
    "why",
    [
        "returned cache",
        "given cache",
        "argument",
        "array",
        "hook",
        "hook of all modules",
        "module",
        "patched",
        "compiled",
        "stop string",
        "streamer",
    ],
)
def test_rows_stay_where_their_leaving_could_be_noticed(target, verified, why, monkeypatch):
    batch, settings = make_batch([5, 9, 17]), {"max_new_tokens": 40, "pad_token_id": 0}
    settings["eos_token_id"] = end_token(batch, generate(target, batch, **settings))
    forward, layer, caches = target.forward, target.model.layers[2], []

    bias = torch.tensor([0.3, -0.2, 0.1])[:, None, None]  # of each row

    def add_bias(module, args, output):
        return output + bias if module is layer.mlp else output

    def with_bias(*args, bias, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs.logits = outputs.logits + torch.as_tensor(bias)
        return outputs

    if why == "returned cache":
        settings["return_dict_in_generate"] = True
    if why in ("argument", "array"):
        parameters = list(inspect.signature(forward).parameters.values())
        parameters.insert(-1, inspect.Parameter("bias", inspect.Parameter.KEYWORD_ONLY))
        with_bias.__signature__ = inspect.Signature(parameters)
        monkeypatch.setattr(target, "forward", with_bias)
        settings["bias"] = bias if why == "argument" else bias.numpy()
    if why == "module":
        monkeypatch.setitem(layer._modules, "mlp", Steered(layer.mlp, bias))
    if why == "patched":
        mlp = layer.mlp.forward
        monkeypatch.setattr(layer.mlp, "forward", lambda *args: mlp(*args) + bias)
    if why == "compiled":
        monkeypatch.setattr(target, "_compiled_call_impl", target._call_impl)  # as `target.compile()` does
    if why == "streamer":
        settings["streamer"] = Columns()
    if why == "stop string":
        settings |= {"stopping_criteria": [StopAtLength()], "eos_token_id": None}
    hooks = [layer.mlp.register_forward_hook(add_bias)] if why == "hook" else []
    hooks += [register_module_forward_hook(add_bias)] if why == "hook of all modules" else []
    texts, oracle = [], None
    for _ in range(2):
        if why == "given cache":
            caches.append(DynamicCache(config=target.config))
            settings["past_key_values"] = caches[-1]
        output = generate(target, batch, assistant_model=oracle, **settings)
        texts.append(output.sequences if why == "returned cache" else output)
        oracle = oracle or oracle_of(target, batch, text=texts[0])
    for hook in hooks:
        hook.remove()
    assert texts[0].tolist() == texts[1].tolist()
    assert oracle.last_generation.acceptance_length > 1.2 and {len(tree.tokens) for tree in verified} == {3}
    for layers in zip(*(cache.layers for cache in caches)):
        torch.testing.assert_close(layers[0].keys, layers[1].keys, atol=1e-4, rtol=1e-4)


def test_rows_with_adapters_of_their_own(target):
    batch = make_batch([5, 9, 17])
    config = LoraConfig(r=4, lora_alpha=64, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(copy.deepcopy(target), config, adapter_name="one").eval()
    model.add_adapter("other", config)
    names = {"adapter_names": ["one", "other", "__base__"]}
    text = generate(model, batch, **names)
    settings = {"eos_token_id": end_token(batch, text), "pad_token_id": 0, **names}
    oracle = oracle_of(target, batch, text=generate(model, batch, **settings))
    assert oracle.text.tolist() != generate(model, batch, **{**settings, "adapter_names": ["__base__"] * 3}).tolist()
    assert assert_same_text(model, oracle, batch, **settings).acceptance_length > 1.2


class Steered(torch.nn.Module):
    """A layer that adds something of its own to each row."""

    def __init__(self, layer, bias):
        super().__init__()
        self.layer, self.bias = layer, bias

    def forward(self, *args):
        return self.layer(*args) + self.bias
