"""What NVIDIA Model-Optimizer exports: SGLang's form, with more in `eagle_config`."""

from .flat import EAGLE_KEYS, check_eagle_config, layer_config_of, tensors_of
from .sglang import KEYS, finish
from .sglang import matches as is_sglang


NAME = "modelopt"
# What each of its flags must say for the network to be the one that is implemented here.
EXPECTED = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}


def matches(config: dict) -> bool:
    eagle_config = config.get("eagle_config") or {}
    return is_sglang(config) and bool(eagle_config.keys() & {*EXPECTED, "norm_before_fc"})


def read(config: dict, tensors: dict):
    layer_config = layer_config_of(config, tensors, KEYS)
    ours, report = tensors_of(tensors, config)
    eagle_config = config["eagle_config"]
    # How deep the heads are that are not there where each step drafts one token.
    check_eagle_config(eagle_config, {*EAGLE_KEYS, *EXPECTED, "norm_before_fc", "parallel_draft_heads_num_layers"})
    for flag, expected in EXPECTED.items():
        if eagle_config.get(flag, expected) not in (expected, None):
            raise ValueError(f"`{flag}` is {eagle_config[flag]}; only drafts with {expected} are supported.")
    norm_before_fc = bool(eagle_config.get("norm_before_fc"))
    return finish(NAME, config, ours, layer_config, report, eagle_config, norm_before_fc=norm_before_fc)
