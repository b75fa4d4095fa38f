# Copyright 2026 The hf-eagle3 authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What a target decides about its draft: sizes, rotary embedding, special tokens, the states that it reads."""

from dataclasses import fields
from typing import Any

from transformers import AutoConfig, PreTrainedModel

from .checks_eagle3 import fingerprint
from .configuration_eagle3 import Eagle3Config
from .policy_eagle3 import DEFAULT_TREE_SETTINGS


# Rotary scalings whose parameters mean the same for any head size, so that the draft can take the target's.
PORTABLE_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def config_for_target(target: PreTrainedModel, num_hidden_layers: int, **overrides: Any) -> Eagle3Config:
    """
    The configuration of a fresh draft. See [`Eagle3ForSpeculation.from_target`].

    Raises:
        ValueError: if the target cannot be a verifier, or an override does not exist.
    """
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    if target.config.is_encoder_decoder or embedding is None or head is None:
        raise ValueError(
            f"{type(target).__name__} cannot be an EAGLE-3 target: it must be a decoder-only causal language model "
            "with input and output embeddings."
        )
    text_config = target.config.get_text_config(decoder=True)
    config_fields = {field.name for field in fields(Eagle3Config)} - {"transformer_layer_config"}
    config_overrides = {name: overrides.pop(name) for name in list(overrides) if name in config_fields}
    layer_config = {**layer_config_for(text_config, num_hidden_layers), **overrides}
    known = AutoConfig.for_model(layer_config["model_type"]).to_dict()
    if unknown := sorted(set(overrides) - set(known)):
        raise ValueError(
            f"Unknown overrides {unknown}: neither Eagle3Config nor the {layer_config['model_type']} layer "
            "configuration has such a field."
        )
    if layer_config["hidden_size"] != embedding.weight.shape[-1]:
        raise ValueError(
            f"A draft for {type(target).__name__} is {embedding.weight.shape[-1]} wide, as the embeddings that it takes from it, "
            f"not {layer_config['hidden_size']}."
        )
    return Eagle3Config(
        **{
            "transformer_layer_config": layer_config,
            "draft_vocab_size": text_config.vocab_size,
            "eagle_aux_hidden_state_layer_ids": default_aux_layer_ids(text_config.num_hidden_layers),
            "target_hidden_size": text_config.hidden_size,
            "fc_norm": not config_overrides.get("norm_before_fc", False),
            "norm_output": True,
            "verifier_fingerprint": None if embedding.weight.is_meta else fingerprint(embedding.weight),
            **{
                key: getattr(target.generation_config or text_config, key, None)
                for key in ("bos_token_id", "eos_token_id", "pad_token_id")
            },
            "speculators_config": speculators_config_for(target),
            **config_overrides,
        }
    )


def speculators_config_for(target: PreTrainedModel) -> dict[str, Any]:
    """How to propose, and for whom, in the form that vLLM requires."""
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": DEFAULT_TREE_SETTINGS["tree_depth"],
                "accept_tolerance": 0.0,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"name_or_path": target.config._name_or_path, "architectures": [type(target).__name__]},
    }


def default_aux_layer_ids(num_target_layers: int) -> list[int]:
    """An early, a middle and a late state of the target (EAGLE-3, section 3.1; ids as vLLM and speculators use them)."""
    if num_target_layers < 6:  # too shallow for the usual three: spread what there is
        return [0, num_target_layers // 2, num_target_layers - 1]
    return [2, num_target_layers // 2, num_target_layers - 3]


def layer_config_for(text_config, num_hidden_layers: int) -> dict[str, Any]:
    """Configuration of Llama layers as wide as the target's."""
    stored = text_config.to_dict()

    def get(name):  # attributes that differ by layer (Gemma 4) refuse to be read; what is stored is the common one
        return stored[name] if name in stored else getattr(text_config, name, None)

    num_heads = get("num_attention_heads")
    head_dim = get("head_dim") or text_config.hidden_size // num_heads
    if get("kv_lora_rank") is not None:  # MLA's head sizes mean something else
        head_dim = text_config.hidden_size // num_heads
    rope = get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)  # Gemma 3: one set a layer type
    if rope.get("rope_type", "default") in PORTABLE_ROPE_TYPES:
        # Drafts rotate whole heads at one-dimensional positions.
        rope = {key: value for key, value in rope.items() if key not in ("partial_rotary_factor", "mrope_section")}
    else:
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    return {
        "model_type": "llama",
        "vocab_size": text_config.vocab_size,
        "hidden_size": text_config.hidden_size,
        "intermediate_size": get("intermediate_size") or 4 * text_config.hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": get("max_position_embeddings") or 2048,
        "rms_norm_eps": get("rms_norm_eps") or 1e-6,
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
