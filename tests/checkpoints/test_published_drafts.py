"""
Configurations of drafts that people have published, or train: published_drafts.json, where each is from in `origin`. They
are scaled down here, all other keys are as they are, and the weights are random ones that fit.
"""

import copy
import functools
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
import torch
from checkpoints.test_formats import write
from conftest import EXPERIMENTS, make_prompt, make_target
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig

from hf_eagle3 import Eagle3ForSpeculation


DRAFTS = json.loads((Path(__file__).parent / "published_drafts.json").read_text())
NUM_LAYERS, WIDTH, VOCAB_SIZE, DRAFT_VOCAB_SIZE = 8, 32, 96, 32
SIZES = {"hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": VOCAB_SIZE}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PROMPT = make_prompt(9)


def scale(config):
    config = copy.deepcopy(config)
    layer = config.get("transformer_layer_config", config)
    heads, vocab_size = layer["num_attention_heads"], layer["vocab_size"]
    heads_fill_width = (layer.get("head_dim") or 0) * heads in (0, layer["hidden_size"])
    if "num_key_value_heads" in layer:
        layer["num_key_value_heads"] = 4 // min(4, 2 ** ((heads // layer["num_key_value_heads"]).bit_length() - 1))
    if layer.get("head_dim"):
        layer["head_dim"] = 8 if heads_fill_width else 16
    layer |= SIZES
    if layer["num_hidden_layers"] == 24:
        layer["num_hidden_layers"] = 3
    for key in ("draft_vocab_size", "truncated_vocab_size", "org_vocab_size"):
        if config.get(key) is not None:
            config[key] = VOCAB_SIZE if config[key] == vocab_size else DRAFT_VOCAB_SIZE
    for each in (config, layer, config.get("eagle_config") or {}):
        for key, value in each.items():
            if key.endswith("token_id") and type(value) is int:
                each[key] = SPECIAL.get(key, 90)
            if key in ("max_position_embeddings", "sliding_window", "target_hidden_size") and value:
                each[key] = {"max_position_embeddings": 512, "sliding_window": 64}.get(key, WIDTH)
        for rope in (each.get("rope_scaling") or {}, each.get("rope_parameters") or {}):
            if "original_max_position_embeddings" in rope:
                rope["original_max_position_embeddings"] = 64
            if "mrope_section" in rope:
                rope["mrope_section"] = [1, 1, 2]
    return config


def tensors_for(config, holds):
    """What the maker's own class would hold."""
    layer = config.get("transformer_layer_config", config)
    eagle = {**config, **(config.get("eagle_config") or {})}
    generator = torch.Generator().manual_seed(0)
    head_dim = layer.get("head_dim") or WIDTH // 4
    num_states = len(eagle.get("eagle_aux_hidden_state_layer_ids") or eagle.get("target_layer_ids") or (1, 2, 3))
    sizes = {"q": 4 * head_dim, "k": layer.get("num_key_value_heads", 4) * head_dim}
    sizes |= {"v": sizes["k"], "o": WIDTH}
    draft_vocab_size = config.get("draft_vocab_size") or VOCAB_SIZE
    shapes = {"fc": (WIDTH, num_states * WIDTH), "norm": (WIDTH,), "lm_head": (draft_vocab_size, WIDTH)}
    for index in range(1 if "one layer" in holds else layer["num_hidden_layers"]):
        has_midlayer = "model_type" in config and not index and (not holds or "midlayer" in holds)
        name = "midlayer" if has_midlayer else f"layers.{index}"
        for part, size in sizes.items():
            width = sizes["q"] if part == "o" else 2 * WIDTH if index == 0 else WIDTH
            shapes[f"{name}.self_attn.{part}_proj"] = (size, width)
        for part, shape in {"gate": (48, WIDTH), "up": (48, WIDTH), "down": (WIDTH, 48)}.items():
            shapes[f"{name}.mlp.{'experts.0.' * ('experts' in holds)}{part}_proj"] = shape
        for norm in ("input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if index == 0 else [])):
            shapes[f"{name}.{norm}"] = (WIDTH,)
        if "query norms" in holds:
            shapes |= {f"{name}.self_attn.{part}_norm": (head_dim,) for part in "qk"}
    if eagle.get("norm_before_fc"):
        shapes["input_norm"] = (num_states * WIDTH,)
    if eagle.get("fc_norm"):
        shapes |= {f"fc_norm.{index}": (WIDTH,) for index in range(num_states)}
    if "embedding" in holds:
        shapes["embed_tokens"] = (VOCAB_SIZE, WIDTH)
    if "no head" in holds:
        del shapes["lm_head"]
    if eagle.get("use_aux_hidden_state") is False:
        del shapes["fc"]
    prefix = "model." if "prefix" in holds else ""
    weights = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors = {f"{prefix * (n != 'lm_head')}{n}.weight": weight + (weight.dim() == 1) for n, weight in weights.items()}
    if "mapping without effect" in holds:
        tensors |= {"d2t": torch.zeros(VOCAB_SIZE, dtype=torch.int64), "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool)}
    if "mask" in holds:
        tensors["mask_hidden"] = torch.randn(1, 1, num_states * WIDTH, generator=generator)
    if "norms around layers" in holds:  # Gemma's
        del tensors["layers.0.self_attn.v_proj.weight"]
        tensors |= {f"layers.0.{part}_feedforward_layernorm.weight": torch.ones(WIDTH) for part in ("pre", "post")}
        tensors["layers.0.layer_scalar"] = torch.ones(1)
    if "stacked experts" in holds:
        tensors["hidden_norm.weight"] = tensors.pop("midlayer.hidden_norm.weight")
        for part, shape in {"gate": (16, WIDTH), "up": (16, WIDTH), "down": (WIDTH, 16)}.items():
            del tensors[f"midlayer.mlp.{part}_proj.weight"]
            tensors[f"midlayer.mlp.{part}_weight"] = torch.ones(4, *shape)
    if "fused token" in holds:  # EDSD's
        del tensors["midlayer.input_layernorm.weight"]
        tensors |= {f"edfuse.{part}_proj.weight": torch.ones(48, WIDTH) for part in ("gate", "up")}
        tensors |= {"edfuse.down_proj.weight": torch.ones(WIDTH, 48), "embnorm.weight": torch.ones(WIDTH)}
    if "multi-token prediction" in holds:
        del tensors["layers.0.hidden_norm.weight"]
        tensors |= {f"pre_fc_norm_{part}.weight": torch.ones(WIDTH) for part in ("embedding", "hidden")}
        tensors = {f"mtp.{name}": tensor for name, tensor in tensors.items()}
    if "numbered midlayers" in holds:
        tensors = {name.replace("layers.", "midlayer."): tensor for name, tensor in tensors.items()}
    if "biases" in holds:
        tensors |= {f"layers.0.self_attn.{part}_proj.bias": torch.ones(size) for part, size in sizes.items()}
    if draft_vocab_size < VOCAB_SIZE:
        token_ids = torch.arange(1, VOCAB_SIZE, VOCAB_SIZE // draft_vocab_size)
        tensors["d2t"] = token_ids - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB_SIZE), token_ids)
    return tensors


def save_again(folder):
    """As a trainer that uses transformers 5 saves a configuration."""
    config = json.loads((folder / "config.json").read_text())
    LlamaConfig.from_dict(config).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**saved, "architectures": config.get("architectures")}))


@functools.cache
def target_and_text(family):
    """A target, and what it writes without a draft."""
    kinds = conftest.FAMILIES | conftest.RECURRENT
    changes = {"num_hidden_layers": NUM_LAYERS}
    if family in kinds:
        for key in {"layer_types", "no_rope_layers"} & kinds[family][1].keys():
            pattern = kinds[family][1][key]
            changes[key] = (list(pattern) * NUM_LAYERS)[:NUM_LAYERS]
        target = make_target(family, **changes)
    else:
        kind = {"hunyuan": "hunyuan_v1_dense"}.get(family, family)
        config = AutoConfig.for_model(kind, **{**conftest.BASE, **conftest.MOE, **changes})
        torch.manual_seed(0)
        target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return target, target.generate(PROMPT, max_new_tokens=4, do_sample=False)


def a_target_of(num_layers):
    text_config = SimpleNamespace(num_hidden_layers=num_layers)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: text_config))


@pytest.mark.parametrize(
    "name, auto_class", list(zip(DRAFTS, itertools.cycle([AutoModel, AutoModelForCausalLM]))), ids=list(DRAFTS)
)
def test_a_published_draft(tmp_path, name, auto_class):
    """It is what it says, or refused with the reason, whoever loads it; and a random model by nobody."""
    entry = DRAFTS[name]
    config, holds = scale(entry["config"]), entry.get("holds", [])
    folder = write(tmp_path / name, config, tensors_for(config, holds))
    loaders = [Eagle3ForSpeculation, auto_class]
    if "refused" in entry:
        for loader in (*loaders, AutoConfig):
            with pytest.raises(ValueError, match=entry["refused"]):
                loader.from_pretrained(folder)
        return
    drafts = [loader.from_pretrained(folder).eval() for loader in loaders]
    if "model_type" in config and len(config.get("layer_types", [])) < 2:  # the rest LlamaConfig refuses
        save_again(folder)
        drafts += [AutoModel.from_pretrained(folder).eval()]
    weights = drafts[0].state_dict()
    for draft in drafts:
        assert type(draft) is Eagle3ForSpeculation
        assert draft.state_dict().keys() == weights.keys()
        assert all(tensor.equal(weights[key]) for key, tensor in draft.state_dict().items())
        assert draft.resolve_aux_layer_ids(a_target_of(entry["layers"])) == entry["reads"]
    draft = drafts[-1]
    # A target of as few layers has its early, middle and late states elsewhere.
    draft.config.aux_layer_ids_assumed = False
    ids = [round(layer_id * NUM_LAYERS / entry["layers"]) for layer_id in entry["reads"]]
    draft.config.eagle_aux_hidden_state_layer_ids = ids
    target, text = target_and_text(entry["target"])
    assert target.generate(PROMPT, assistant_model=draft, max_new_tokens=4, do_sample=False).equal(text)


def test_each_has_an_outcome():
    assert all(("reads" in entry) != ("refused" in entry) for entry in DRAFTS.values())
    num_read = sum("reads" in entry for entry in DRAFTS.values())
    page = (EXPERIMENTS.parent / "docs" / "drafts.md").read_text(encoding="utf-8")
    assert f"configurations of {len(DRAFTS)} drafts" in page and f"{num_read} load" in page
