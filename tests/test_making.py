"""What a draft is told of its target when it is made."""

import os

import pytest
import torch
from conftest import make_target
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.making import architecture_of
from hf_eagle3.remote_code.target_eagle3 import gathered


class MyLlama(LlamaForCausalLM):
    pass


class Wrapped(torch.nn.Module):  # as DDP does
    def __init__(self, model):
        super().__init__()
        self.module = model


@pytest.mark.parametrize(
    "wrap",
    [
        lambda target: target,
        lambda target: get_peft_model(target, LoraConfig(r=4, target_modules=["q_proj"])),
        lambda target: get_peft_model(target, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")),
        torch.compile,
        lambda target: torch.compile(get_peft_model(target, LoraConfig(r=4, target_modules=["q_proj"]))),
        Wrapped,
        lambda target: MyLlama(target.config),
    ],
    ids=["plain", "peft", "peft of a task", "compile", "compile of peft", "ddp", "subclass"],
)
def test_the_architecture_is_the_model_s(wrap):
    assert architecture_of(wrap(make_target("llama"))) == "LlamaForCausalLM"


def test_the_architecture_of_a_sharded_model():
    target = make_target("llama")
    target.__class__ = type("FSDPLlamaForCausalLM", (FSDPModule, LlamaForCausalLM), {})  # as `fully_shard` does
    assert architecture_of(target) == "LlamaForCausalLM"


def test_a_target_in_a_folder_is_named_by_its_whole_path(tmp_path, monkeypatch):
    """A relative one would look like an id of the Hub from other directories."""
    monkeypatch.chdir(tmp_path)
    make_target("llama").save_pretrained("models/target")
    target = AutoModelForCausalLM.from_pretrained("models/target")
    draft = Eagle3ForSpeculation.from_target(target)
    assert draft.config.verifier == os.path.join(tmp_path, "models/target")
    target.config._name_or_path = "org/Model-8B"
    draft.pair_with(target)
    assert draft.config.verifier == "org/Model-8B"


class QuantizedWeight(torch.nn.Parameter):
    """Like torchao's, which have the dtype of what they stand for."""

    def detach(self):
        return self

    def dequantize(self):
        return self.data.round(decimals=2)

    def __getitem__(self, index):
        raise NotImplementedError


def test_a_quantized_head_of_the_target():
    target = make_target("llama")
    target.lm_head.weight = QuantizedWeight(target.lm_head.weight.data)
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=[3, 5])
    assert draft.lm_head.weight.equal(target.lm_head.weight.data[[3, 5]].round(decimals=2))
    packed = QuantizedWeight(torch.zeros(4, dtype=torch.uint8), requires_grad=False)  # like bitsandbytes'
    assert gathered(packed) is packed


def test_layers_that_are_unpacked_at_the_first_forward():
    """As of compressed-tensors, by a hook of the whole model. Training runs only its base, and a draft takes the head."""
    pytest.importorskip("trl")
    from hf_eagle3.training.target_states import TargetStates

    target, inputs = make_target("llama"), {"input_ids": torch.tensor([[5, 6, 7]])}
    expected = TargetStates(target, [1, 2, 3])(inputs)
    layers = [module for module in target.modules() if isinstance(module, torch.nn.Linear)]
    weights = []

    def pack():
        weights[:] = [layer._parameters.pop("weight") for layer in layers]
        handle = target.register_forward_pre_hook(lambda *args: unpack(handle))

    def unpack(handle):
        handle.remove()
        for layer, weight in zip(layers, weights):
            layer.weight = weight

    pack()
    assert all(map(torch.equal, TargetStates(target, [1, 2, 3])(inputs), expected))
    pack()
    assert Eagle3ForSpeculation.from_target(target).lm_head.weight.equal(target.lm_head.weight)


def test_a_draft_that_is_unpacked_at_the_first_forward():
    """As of compressed-tensors. Decoding runs only its layers."""
    target = make_target("llama")
    draft = Eagle3ForSpeculation.from_target(target)
    weight = draft.fc._parameters.pop("weight")

    def unpack(*args):
        draft.fc.weight = weight

    draft.ct_decompress_hook = draft.register_forward_pre_hook(unpack)
    draft.validate_target(target)
    assert draft.fc.weight is weight
