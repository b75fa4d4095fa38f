import itertools
import json
from dataclasses import fields

import pytest
from conftest import make_target
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from hf_eagle3 import Eagle3Config, Eagle3ForSpeculation
from hf_eagle3.remote_code.configuration_eagle3 import DIGESTED


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def test_every_flag_survives_saving(tmp_path):
    for flag, value in itertools.product(FLAGS, (True, False)):
        Eagle3Config(**{flag: value}).save_pretrained(tmp_path)
        assert getattr(Eagle3Config.from_pretrained(tmp_path), flag) is value
        assert json.loads((tmp_path / "config.json").read_text())[flag] is value


def test_vocab_size_is_the_targets(target):
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=range(10))
    assert draft.config.vocab_size == draft.config.get_text_config().vocab_size == target.config.vocab_size
    assert draft.config.pad_token_id == target.generation_config.pad_token_id


def of_layers(**config):
    return {"transformer_layer_config": config}


SLIDES = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        (of_layers(model_type="gemma2"), "'llama' or 'qwen3'"),
        ({"draft_vocab_size": 100, **of_layers(vocab_size=50)}, "`draft_vocab_size` is 100, but must be from 1 to 50"),
        ({"speculators_model_type": "mtp"}, "expected 'eagle3'"),
        (of_layers(partial_rotary_factor=2), "must be at most 1"),
        ({"speculators_config": {"verifier": "big/model"}}, "but must be a mapping"),
        ({"speculators_config": {"verifier": {"name_or_path": 3}}}, "but must be a mapping"),
        ({"speculators_config": "eagle3"}, "'speculators_config'"),
        ({"verifier_fingerprint": 7}, "'verifier_fingerprint'"),
        ({"verifier_fingerprint": "not base64!"}, "`verifier_fingerprint` is"),
        ({"verifier_fingerprint": "AAAA"}, "`verifier_fingerprint` is"),
        (of_layers(rope_parameters={"rope_theta": None}), "`rope_theta` is None"),
        (of_layers(rope_parameters={"rope_type": "spiral"}), "`rope_type` is 'spiral'"),
        (of_layers(rope_scaling={"rope_type": "su"}), "`rope_type` is 'su'"),
        (of_layers(rope_theta=None), "`rope_theta` is None"),
        (of_layers(**SLIDES), "no window is on"),
        (of_layers(**SLIDES, model_type="qwen3", sliding_window=8, use_sliding_window=False), "no window is on"),
        (of_layers(num_key_value_heads=0), "`num_key_value_heads` is 0"),
        (of_layers(num_attention_heads=4, num_key_value_heads=3), "multiple of"),
        (of_layers(rms_norm_eps="small"), "`rms_norm_eps` is 'small'"),
        (of_layers(hidden_act="surprise"), "`hidden_act` is 'surprise'"),
        (of_layers(surprise=True), "does not know: .'surprise'"),
        (of_layers(**SLIDES | {"layer_types": ["linear_attention"]}), "`layer_types` is"),
        ({"norm_output": None}, "'norm_output' expected bool"),
        ({"draft_vocab_size": 0}, "`draft_vocab_size` is 0"),
        ({"eagle_aux_hidden_state_layer_ids": [1, "2"]}, "'eagle_aux_hidden_state_layer_ids'"),
        ({"eos_token_id": "</s>"}, "'eos_token_id'"),
    ],
)
def test_contradictions_are_refused(arguments, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        Eagle3Config(**arguments)
    if "transformer_layer_config" in arguments:
        with pytest.raises(ValueError, match=message):  # read from a file
            Eagle3Config.from_dict(arguments)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"num_hidden_layers": 32}, [2, 16, 29]),
        ("qwen3", {"num_hidden_layers": 7}, [2, 3, 4]),
        ("llama", {"num_hidden_layers": 6}, [1, 3, 5]),  # the usual three would be two
        ("llama", {"num_hidden_layers": 4}, [1, 2, 3]),
        ("llama", {"num_hidden_layers": 2}, [0, 1]),  # as many as differ
        ("llama", {"num_hidden_layers": 1}, [0]),
    ],
)
def test_default_layers(family, changes, expected):
    draft = Eagle3ForSpeculation.from_target(make_target(family, **changes))
    assert draft.config.eagle_aux_hidden_state_layer_ids == expected


def test_what_a_configuration_has_no_place_for(tmp_path):
    """Settings of the tree would be ignored, and anything else could not be read again."""
    draft = Eagle3ForSpeculation.from_target(make_target("llama"))
    with pytest.raises(AttributeError, match="Set `draft.generation_config.tree_depth`"):
        draft.config.tree_depth = 3
    with pytest.raises(AttributeError, match="Set `draft.generation_config.tree_depth`"):
        Eagle3Config(tree_depth=3)
    draft.config.surprise = True
    with pytest.raises(ValueError, match="could not be loaded again.*'surprise'"):
        draft.save_pretrained(tmp_path / "draft")
    assert not (tmp_path / "draft").exists()
    del draft.config.surprise
    draft.save_pretrained(tmp_path / "draft")


def test_which_fields_the_digest_covers():
    """All that change what a draft computes, and so each new one: a copy of the code knows no later field."""
    own = {field.name for field in fields(Eagle3Config)} - {field.name for field in fields(PreTrainedConfig)}
    about_others = {"speculators_config", "speculators_version", "weights_digest"}
    about_others |= {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert own - set(DIGESTED) == about_others
