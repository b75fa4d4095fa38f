# SPDX-License-Identifier: Apache-2.0
"""
Checks of values in configurations that others wrote. They do not ship with drafts, because the digest of a configuration
shows that it is as we saved it.
"""

from typing import Any

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
# These may be null, which stands for a default.
OPTIONAL_SIZES = ("draft_vocab_size", "head_dim", "num_key_value_heads", "target_hidden_size")


def check_sizes(config_dict: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: if a size is not a positive integer.
    """
    for name in (*SIZES, *OPTIONAL_SIZES):
        value = config_dict.get(name, 1)
        is_default = value is None and name in OPTIONAL_SIZES
        if not is_default and (type(value) is not int or value < 1):
            raise ValueError(f"`{name}` is {value!r}, but must be a positive integer.")
    num_heads, num_key_value_heads = (config_dict.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if num_heads and num_key_value_heads and num_heads % num_key_value_heads:
        raise ValueError(
            f"`num_attention_heads` ({num_heads}) must be a multiple of `num_key_value_heads` ({num_key_value_heads})."
        )


def check_layer_config(layer_config: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: if a value of a `transformer_layer_config` is of the wrong type or out of range.
    """
    check_sizes(layer_config)
    rope = layer_config.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}  # transformers refuses other types
    rope_type, activation = rope.get("rope_type", "default"), layer_config.get("hidden_act", "silu")
    if rope_type not in (rope_types := ["default", *ROPE_INIT_FUNCTIONS]):
        raise ValueError(f"`rope_type` is {rope_type!r}, but must be one of {rope_types}.")
    if activation not in ACT2FN:
        raise ValueError(f"`hidden_act` is {activation!r}, which transformers does not know.")
    numbers = {**layer_config, **rope}
    for name in ("rope_theta", "rms_norm_eps", "factor"):
        value = numbers.get(name, 1)
        may_be_null = value is None and (name == "factor" or name not in rope)
        if not may_be_null and not (type(value) in (int, float) and value > 0):
            raise ValueError(f"`{name}` is {value!r}, but must be a positive number.")
