"""Checkpoints of block drafts as their makers write them, and a slow and naive reference of their network."""

import copy
import itertools
import json

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from hf_eagle3.training.target_states import TargetStates


MASK, BLOCK = 3, 6

# As in z-lab/Qwen3-4B-DFlash-b16: its keys, with the sizes of the tests' targets.
ZLAB_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": BLOCK,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 512,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.3",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 96,
}
LAYER_KEYS = [
    "attention_bias",
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "sliding_window",
    "use_cache",
    "use_sliding_window",
    "vocab_size",
]
# As `speculators` 0.9.0 saves a draft: its keys, with the sizes of the tests' targets.
SPECULATORS_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [1, 3],
    "block_size": BLOCK,
    "draft_vocab_size": 96,
    "dtype": "float32",
    "mask_token_id": MASK,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": BLOCK - 1,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "me/Target"},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        **{key: ZLAB_CONFIG[key] for key in LAYER_KEYS},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "max_window_layers": 28,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "transformers_version": "5.24.0",
    },
    "transformers_version": "5.24.0",
}


def write_checkpoint(folder, config, **tensors):
    """A checkpoint as its makers write them: the tensors of their network, by their names."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    size, hidden, heads = 32, 48, {"q": 32, "k": 16, "v": 16}
    shapes = {"fc.weight": (size, 2 * size), "hidden_norm.weight": (size,), "norm.weight": (size,)}
    for i in range(2):
        layer = {"input_layernorm": (size,), "post_attention_layernorm": (size,)}
        layer |= {f"self_attn.{name}_proj": (width, size) for name, width in heads.items()}
        layer |= {"self_attn.o_proj": (size, 32), "self_attn.q_norm": (8,), "self_attn.k_norm": (8,)}
        layer |= {"mlp.gate_proj": (hidden, size), "mlp.up_proj": (hidden, size), "mlp.down_proj": (size, hidden)}
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    weights = {name: weight + (1.0 if "norm" in name else 0.0) for name, weight in weights.items()}
    save_file({**weights, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rms_norm(states, weight):
    return states / (states.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight


def rotate(states, positions):
    """Vectors `(N or 1, 8)` of a head at positions `(N,)`."""
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    first, second = states.view(-1, 8).chunk(2, dim=1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def speculators_config(windows=(), **changes):
    """`SPECULATORS_CONFIG`, with windows of 4 in some layers."""
    config = copy.deepcopy(SPECULATORS_CONFIG)
    layers = config["transformer_layer_config"]
    if windows:
        layer_types = ["sliding_attention" if i in windows else "full_attention" for i in range(2)]
        layers |= {"layer_types": layer_types, "sliding_window": 4, "use_sliding_window": True}
    return {**config, **changes}


@torch.no_grad()
def save_by_speculators(folder, model_class, content, target):
    """A random draft of a class of `speculators`, which that saves in `folder / "draft"`."""
    target.save_pretrained(folder / "target")
    content["speculators_config"]["verifier"]["name_or_path"] = str(folder / "target")
    layer_config = Qwen3Config(**content.pop("transformer_layer_config"), attn_implementation="eager")
    theirs = model_class(model_class.config_class(**content, transformer_layer_config=layer_config)).eval()
    theirs.load_verifier_weights()
    for name, weight in theirs.named_parameters():
        if not name.startswith(("embed", "lm_head", "verifier")):
            weight.add_(torch.randn_like(weight) * 0.2)
    theirs.save_pretrained(folder / "draft")
    return theirs


def naive_logits(
    weights, target, aux, root, is_causal=(False, False), windows=(None, None), scale=1.0, of_speculators=False
):
    """
    The papers' network, a token and a head at a time: the block behind a context of states `(C, n * H)`. In `speculators`
    a window is the context before the known token, for all tokens of the block.
    """
    context = rms_norm(aux @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    table = target.get_input_embeddings().weight
    states, num_context = scale * table[torch.tensor([root] + [MASK] * (BLOCK - 1))], len(context)
    for i in range(2):
        layer = {name.removeprefix(f"layers.{i}."): weight for name, weight in weights.items()}
        normed = rms_norm(states, layer["input_layernorm.weight"])
        sources = torch.cat([context, normed])
        outputs = torch.zeros_like(states)
        for head, q in itertools.product(range(4), range(BLOCK)):
            group, at = slice(8 * (head // 2), 8 * (head // 2) + 8), num_context + q
            first = 0 if windows[i] is None else num_context - windows[i] if of_speculators else at - windows[i] + 1
            last = at if is_causal[i] else len(sources) - 1
            if windows[i] is not None and not of_speculators:
                last = min(last, at + windows[i] - 1)
            seen = range(max(first, 0), last + 1)
            query = (normed[q] @ layer["self_attn.q_proj.weight"].T)[8 * head : 8 * head + 8]
            query = rotate(rms_norm(query, layer["self_attn.q_norm.weight"]), torch.tensor([at]))
            keys = (sources[seen] @ layer["self_attn.k_proj.weight"].T)[:, group]
            keys = rotate(rms_norm(keys, layer["self_attn.k_norm.weight"]), torch.tensor(seen))
            values = (sources[seen] @ layer["self_attn.v_proj.weight"].T)[:, group]
            outputs[q, 8 * head : 8 * head + 8] = (keys @ query[0] / 8**0.5).softmax(0) @ values
        states = states + outputs @ layer["self_attn.o_proj.weight"].T
        normed = rms_norm(states, layer["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(normed @ layer["mlp.gate_proj.weight"].T)
        states = states + (gate * (normed @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", target.get_output_embeddings().weight)
    return rms_norm(states, weights["norm.weight"]) @ head.T


@torch.no_grad()
def states_of(target, draft, tokens):
    return TargetStates(target, draft.resolve_aux_layer_ids(target))({"input_ids": tokens})[0]
