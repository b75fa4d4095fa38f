"""Checkpoints as other projects write them, made here by what is known of their formats."""

import itertools
import json
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from conftest import assert_same_text, make_prompt, make_target
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.checkpoints import export, load_ends, target_class
from hf_eagle3.remote_code import configuration_eagle3


LENGTH = {"original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LENGTH}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def target():
    return make_target("llama", num_hidden_layers=8)


def make_reference(target, rope=None, full=False, own_embedding=False, **overrides):
    """A draft of ours with random weights, to be written by hand in another format."""
    torch.manual_seed(1)
    usual = [2, 4, 5]  # what readers take of eight layers
    overrides = {"fc_norm": False, "norm_output": False, "eagle_aux_hidden_state_layer_ids": usual, **overrides}
    if rope is not None:
        overrides["rope_parameters"] = {**rope, "rope_theta": 5000.0}
    ids = None if full else range(1, 96, 3)
    draft = Eagle3ForSpeculation.from_target(target, ids, has_own_embed_tokens=bool(own_embedding), **overrides).eval()
    for name, parameter in draft.named_parameters():
        if "embed_tokens" not in name or own_embedding == "trained":
            parameter.data += torch.randn_like(parameter) * 0.1
    return draft


def flat(draft, **changes):
    layer = draft.config.transformer_layer_config
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    keys += ("rms_norm_eps", "hidden_act", "max_position_embeddings", "vocab_size")
    config = {**{key: getattr(layer, key) for key in keys}, "rope_theta": layer.rope_parameters["rope_theta"]}
    config |= {"draft_vocab_size": draft.config.draft_vocab_size, "model_type": "llama", "bos_token_id": 1}
    return {**config, "torch_dtype": "float32", "use_cache": True, "transformers_version": "4.50.0", **changes}


def midlayer(draft):
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in draft.state_dict().items()}


def write(folder, config, tensors, kind="safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if kind in ("bin", "old bin"):
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "bin")
    elif kind == "sharded":
        names = sorted(tensors)
        parts = {f"model-{i + 1:05d}-of-00002.safetensors": names[i::2] for i in range(2)}
        for part, part_names in parts.items():
            save_file({name: tensors[name].contiguous() for name in part_names}, folder / part)
        index = {name: part for part, part_names in parts.items() for name in part_names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def edit_config(folder, *dropped, **changes):
    """Changes keys of a `config.json`, and drops others."""
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in dropped}
    (folder / "config.json").write_text(json.dumps(kept | changes))
    return folder


@torch.no_grad()
def assert_same(draft, reference, target):
    """The same network, for this target."""
    for each in (draft, reference):
        each.borrow_embeddings(target)
    width = reference.config.target_hidden_size * reference.config.num_aux_hidden_states
    aux = torch.randn(1, 9, width, generator=torch.Generator().manual_seed(0))
    tokens = make_prompt(9)
    first, second = (each(tokens, each.combine_hidden_states(aux)) for each in (draft.eval(), reference))
    torch.testing.assert_close(first.logits, second.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(first.last_hidden_state, second.last_hidden_state, atol=1e-5, rtol=1e-5)
    assert torch.equal(draft.draft_token_ids, reference.draft_token_ids)
    assert draft.resolve_aux_layer_ids(target) == reference.resolve_aux_layer_ids(target)
    draft.validate_target(target)


def assert_drafts(draft, target):
    """It drafts, and the text is the target's."""
    ours = {"tree_policy": "static", "tree_depth": 3}
    assert assert_same_text(target, draft, make_prompt(9), ours=ours, max_new_tokens=5).drafted_lengths


def safeailab(draft, **changes):
    return flat(draft, architectures=["LlamaForCausalLM"], **changes)


def sglang(draft, **changes):
    return flat(draft, **{"architectures": ["LlamaForCausalLMEagle3"], **changes})


def test_safeailab(tmp_path, target):
    reference = make_reference(target, LLAMA3)
    config = safeailab(reference, rope_scaling=LLAMA3, head_dim=4)  # older versions of its code ignore head_dim
    folder = write(tmp_path / "draft", config, midlayer(reference))
    draft, info = Eagle3ForSpeculation.from_pretrained(folder, output_loading_info=True)
    assert info["format"] == "safeailab"
    assert info["renamed"]["midlayer.hidden_norm.weight"] == "layers.0.hidden_norm.weight"
    assert "eagle_aux_hidden_state_layer_ids" in info["assumed"] and info["assumed"]["norm_before_residual"] is False
    assert draft.config.eagle_aux_hidden_state_layer_ids is None
    assert_same(draft, reference, target)
    assert_drafts(draft, target)


@pytest.mark.parametrize("kind, is_alone", [("bin", False), ("safetensors", True), ("sharded", False), ("bin", True)])
def test_a_variant_of_the_weights(tmp_path, target, kind, is_alone):
    reference = make_reference(target)
    folder = write(tmp_path / "draft", sglang(reference), midlayer(reference), kind)
    for path in [path for path in folder.iterdir() if path.name != "config.json" and "-of-" not in path.name]:
        path.rename(path.with_suffix(f".fp16{path.suffix}"))
    if not is_alone:
        other = {name: tensor + tensor.is_floating_point() for name, tensor in midlayer(reference).items()}
        write(folder, sglang(reference), other)
    for loader in (Eagle3ForSpeculation, AutoModel):
        draft = loader.from_pretrained(folder, variant="fp16")
        assert type(draft) is Eagle3ForSpeculation and draft.fc.weight.equal(reference.fc.weight)
    if is_alone:
        with pytest.raises(OSError, match="no weights"):
            Eagle3ForSpeculation.from_pretrained(folder)
    with pytest.raises(OSError, match="no weights: none of model.bf16.safetensors"):
        Eagle3ForSpeculation.from_pretrained(folder, variant="bf16")


@pytest.mark.parametrize("names", ["midlayer", "layers.0"])
def test_sglang(tmp_path, target, names):
    reference = make_reference(
        target, fc_norm=True, norm_output=True, eagle_aux_hidden_state_layer_ids=[2, 4, 5], head_dim=4
    )
    tensors = midlayer(reference) if names == "midlayer" else reference.state_dict()
    tensors = {name: tensor for name, tensor in tensors.items() if name != "t2d"}  # SGLang needs none
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    eagle_config = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    config = sglang(reference, head_dim=4, fc_norm=True, norm_output=True, eagle_config=eagle_config)
    folder = write(tmp_path / "d", config, tensors)
    draft, info = Eagle3ForSpeculation.from_pretrained(folder, output_loading_info=True)
    assert info["format"] == "sglang" and info["ignored"] == ["midlayer.self_attn.rotary_emb.inv_freq"]
    assert "load it with `norm_output=False`" in info["assumed"]["norm_output"]
    assert not Eagle3ForSpeculation.from_pretrained(folder, norm_output=False).config.norm_output
    # Outputs of layers 1, 3 and 4 enter layers 2, 4 and 5.
    assert draft.config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    assert_same(draft, reference, target)
    assert_drafts(draft, target)


def test_modelopt(tmp_path, target):
    reference = make_reference(target, YARN, norm_before_fc=True)
    eagle_config = {"norm_before_fc": True, "use_last_layernorm": True, "parallel_draft_step": 1}
    eagle_config |= {"use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False}
    eagle_config |= {"parallel_draft_heads_num_layers": 1, "something_new": None}  # as it writes them
    config = sglang(reference, rope_parameters={**YARN, "rope_theta": 5000.0}, eagle_config=eagle_config)
    folder = write(tmp_path / "draft", config, midlayer(reference))
    draft, info = Eagle3ForSpeculation.from_pretrained(folder, output_loading_info=True)
    assert info["format"] == "modelopt" and draft.config.norm_before_fc
    assert_same(draft, reference, target)
    assert_drafts(draft, target)
    config["eagle_config"]["parallel_draft_step"] = 2
    write(folder, config, midlayer(reference))
    with pytest.raises(ValueError, match="several tokens in one pass .*vLLM"):
        Eagle3ForSpeculation.from_pretrained(folder)


@pytest.mark.parametrize("has_t2d, has_head", [(False, True), (True, False)])
def test_tokens_in_order_of_frequency(tmp_path, target, has_t2d, has_head):
    """As Model-Optimizer writes them, which has no `t2d`."""
    reference = make_reference(target)
    if not has_head:
        reference.lm_head.weight.data.copy_(target.lm_head.weight[reference.draft_token_ids])
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    token_ids = reference.draft_token_ids[order]
    tensors = midlayer(reference) | {"d2t": token_ids - torch.arange(32)}
    tensors["lm_head.weight"] = reference.lm_head.weight.data[order]
    for name, is_held in (("t2d", has_t2d), ("lm_head.weight", has_head)):
        if not is_held:
            del tensors[name]
    folder = write(tmp_path / "draft", sglang(reference), tensors)
    assert_same(Eagle3ForSpeculation.from_pretrained(folder), reference, target)


def test_a_mapping_without_d2t(tmp_path, target):
    """`t2d` says the same if the tokens are sorted, as all but Model-Optimizer write them."""
    reference = make_reference(target)
    config, tensors = sglang(reference), midlayer(reference)
    del tensors["d2t"]
    for changes in ({}, {"draft_vocab_size": None}):
        folder = write(tmp_path / "draft", {**config, **changes}, {**tensors, "t2d": tensors["t2d"].byte()})
        assert_same(Eagle3ForSpeculation.from_pretrained(folder), reference, target)


def test_a_table_that_is_the_head(tmp_path, target):
    reference = make_reference(target, full=True, own_embedding="trained")
    reference.lm_head.weight.data = reference.embed_tokens.weight.data.clone()
    tensors = {name: tensor for name, tensor in midlayer(reference).items() if name != "lm_head.weight"}
    folder = write(tmp_path / "draft", sglang(reference, tie_word_embeddings=True), tensors)
    draft = Eagle3ForSpeculation.from_pretrained(folder)
    assert draft.config.has_own_embed_tokens and torch.equal(draft.embed_tokens.weight, reference.embed_tokens.weight)
    assert_same(draft, reference, target)


@pytest.mark.parametrize("to", ["sglang", "safeailab"])
@pytest.mark.parametrize("kind", ["default", "layers", "own embedding", "scaled"])
def test_exports_come_back(tmp_path, target, to, kind):
    overrides = {"fc_norm": True, "norm_output": True} if to == "sglang" else {}
    rope = LLAMA3 if kind == "scaled" and to == "sglang" else None
    if kind == "layers" and to == "sglang":
        overrides = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 5], "norm_before_fc": True}
    reference = make_reference(target, rope, own_embedding=kind == "own embedding", **overrides)
    export(reference, tmp_path / "other", to)
    draft, info = Eagle3ForSpeculation.from_pretrained(tmp_path / "other", output_loading_info=True)
    assert info["format"] == to
    assert_same(draft, reference, target)
    draft.save_pretrained(tmp_path / "back")
    reference.save_pretrained(tmp_path / "ours")
    ours, back = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "back"))
    assert ours.keys() == back.keys() and all(torch.equal(ours[name], back[name]) for name in ours)
    ours, back = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "back"))
    # These belong to the target, which the other formats do not name.
    for config in (ours, back):
        del config["speculators_config"], config["verifier_fingerprint"], config["config_digest"]
    assert ours == back


def test_a_folder_may_be_empty(tmp_path, target, monkeypatch):
    """Windows does not replace folders."""

    def replace(path, other):
        assert not Path(other).exists()
        return path.rename(other)

    monkeypatch.setattr(Path, "replace", replace)
    folder = tmp_path / "other"
    folder.mkdir()
    export(make_reference(target), folder, "sglang")
    assert (folder / "config.json").exists()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    export(make_reference(target), tmp_path / "link", "sglang")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere" / "config.json").exists()


@pytest.mark.parametrize("to", ["sglang", "safeailab"])
def test_a_table_that_readers_would_replace_is_not_exported(tmp_path, target, to):
    trained = make_reference(target, own_embedding="trained")
    with pytest.raises(ValueError, match="would draft something else"):
        export(trained, tmp_path / "other", to)
    unknown = make_reference(target, own_embedding=True)
    unknown.config.verifier_fingerprint = None
    with pytest.raises(ValueError, match="--target"):
        export(unknown, tmp_path / "other", to)
    assert not (tmp_path / "other").exists()
    unknown.pair_with(target)
    export(unknown, tmp_path / "other", to)


def test_what_sglang_checks_of_what_we_export(tmp_path, target):
    reference = make_reference(target, fc_norm=True, norm_output=True)
    export(reference, tmp_path / "other", "sglang")
    config, tensors = json.loads((tmp_path / "other" / "config.json").read_text()), {}
    tensors |= load_file(tmp_path / "other" / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["draft_vocab_size"] == 32 and config["fc_norm"] and config["norm_output"]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] and config["rope_scaling"] is None
    # It skips names that it does not know, so that all must be known.
    layer = {f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"}
    layer |= {f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    layer |= {f"midlayer.{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    norms = {f"fc_norm.{i}.weight" for i in range(3)}
    assert tensors.keys() == layer | norms | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors["d2t"].dtype == torch.int64
    _, info = Eagle3ForSpeculation.from_pretrained(tmp_path / "other", output_loading_info=True)
    assert "norm_output" not in info["assumed"]  # ours were trained as they say


@pytest.mark.parametrize(
    "overrides, to, reason",
    [
        ({"norm_before_residual": True}, "sglang", "norm_before_residual"),
        ({"norm_before_fc": True}, "safeailab", "norm_before_fc"),
        ({"model_type": "qwen3"}, "sglang", "Qwen3"),
        ({"num_hidden_layers": 2}, "safeailab", "more than one layer"),
        ({"fc_norm": True}, "safeailab", "fc_norm"),
        ({"head_dim": 4}, "safeailab", "head_dim"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "safeailab", "default three"),
        ({"rope": LLAMA3}, "safeailab", "scaled rotary"),
        ({"rope": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "sglang", "a part of each head"),
        ({"attention_bias": True}, "safeailab", "biases"),
        ({"attention_bias": True}, "sglang", "biases"),
        ({"hidden_act": "gelu"}, "sglang", "an activation"),
        ({"eagle_aux_hidden_state_layer_ids": [2]}, "sglang", "readers skip `fc`"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 4]}, "sglang", "in another order"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 4]}, "sglang", "one state twice"),
        ({}, "onnx", "exported to"),
    ],
)
def test_what_cannot_be_exported(tmp_path, target, overrides, to, reason):
    with pytest.raises(ValueError, match=reason):
        export(make_reference(target, **overrides), tmp_path / "other", to)
    assert not (tmp_path / "other").exists()


class Code:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code of a pickle ran')",))


def test_rotary_scaling_in_old_and_new_keys(tmp_path, target):
    """Newer files have both; where they disagree, transformers goes by the old one."""
    reference = make_reference(target, YARN)
    old = {"type" if key == "rope_type" else key: value for key, value in YARN.items()}
    for name, keys in (
        ("both", {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
        ("old", {"rope_scaling": old, "rope_theta": 5000.0}),
        ("new", {"rope_parameters": old, "rope_theta": 5000.0}),
    ):
        folder = write(tmp_path / name, sglang(reference, **keys), midlayer(reference))
        assert_same(Eagle3ForSpeculation.from_pretrained(folder), reference, target)


def test_bad_checkpoints(tmp_path, target, monkeypatch):
    reference = make_reference(target)
    good, tensors, paper = sglang(reference), midlayer(reference), safeailab(reference)

    def load(config=good, tensors=tensors, kind="safetensors"):
        folder = tmp_path / str(random.random())
        return Eagle3ForSpeculation.from_pretrained(write(folder, config, tensors, kind))

    def without(*names):
        return {name: tensor for name, tensor in tensors.items() if name not in names}

    load()
    load(paper)
    for config, reason in (
        ({**good, "architectures": "LlamaForCausalLM"}, "must be a list of names"),
        ({**good, "eagle_config": "yes"}, "`eagle_config` is 'yes', but must be a mapping"),
        ({**paper, "eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1"),
        (
            {**paper, "eagle_config": {"next_layer_regular": False}},
            "`next_layer_regular` is False, but only drafts with",
        ),
        ({key: value for key, value in good.items() if key != "intermediate_size"}, "lacks .*intermediate_size"),
    ):
        with pytest.raises(ValueError, match=reason):
            load(config)
    outside, beyond, twice = (tensors["d2t"].clone() for _ in range(3))
    outside[-1] = 90
    beyond[0] += 95
    twice[3] += 3  # the next token once more
    fewer = tensors["t2d"] & (torch.arange(96) > 1)
    for held, reason in (
        (make_target("llama").state_dict(), "no known EAGLE-3 format"),
        (without("d2t", "t2d"), "there is no d2t"),
        (without("d2t") | {"t2d": fewer}, "`draft_vocab_size` is 32, but t2d maps 31 tokens"),
        (without("norm.weight"), "Missing: .*norm.weight"),
        ({**tensors, "magic.weight": torch.ones(3)}, "it holds .'magic.weight'., which EAGLE-3 drafts do not have"),
        ({**tensors, "fc.weight": torch.ones(32, 64)}, "Of another shape: .*fc.weight"),
        ({**tensors, "layers.0.hidden_norm.weight": torch.ones(32)}, "two tensors"),
        ({**tensors, "d2t": outside}, "`d2t` does not map"),
        ({**tensors, "d2t": tensors["d2t"].flip(0)}, "`t2d` marks other tokens"),
        (without("t2d") | {"d2t": beyond}, "`d2t` does not map"),
        (without("t2d") | {"d2t": twice}, "`d2t` does not map"),
        ({**tensors, "t2d": tensors["t2d"].roll(1)}, "`t2d` marks other tokens"),
    ):
        with pytest.raises(ValueError, match=reason):
            load(tensors=held)
    with pytest.raises(ValueError, match="other things than tensors"):
        load(tensors={**tensors, "norm.weight": Code()}, kind="bin")
    with pytest.raises(FileNotFoundError, match="no weights"):
        folder = write(tmp_path / "empty", good, tensors)
        (folder / "model.safetensors").unlink()
        Eagle3ForSpeculation.from_pretrained(folder)
    folder = write(tmp_path / "sharded", good, tensors, "sharded")
    part = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]["norm.weight"]
    save_file({name: tensor for name, tensor in load_file(part).items() if name != "norm.weight"}, part)
    with pytest.raises(ValueError, match=r"lists tensors that its files do not hold: \['norm.weight'\]"):
        Eagle3ForSpeculation.from_pretrained(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="lists model-00002"):
        Eagle3ForSpeculation.from_pretrained(folder)
    # Ours with a flag of a later version.
    reference.save_pretrained(tmp_path / "ours")
    edit_config(tmp_path / "ours", use_magic=True)
    with pytest.raises(ValueError, match=r"does not know: \['use_magic'\]"):
        Eagle3ForSpeculation.from_pretrained(tmp_path / "ours")
    # Nor does the code that came with it, which a later version's weights may be pushed beside. Its digest has the flag.
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    with monkeypatch.context() as later:
        later.setattr(configuration_eagle3, "DIGESTED", (*configuration_eagle3.DIGESTED, "use_magic"))
        edit_config(tmp_path / "ours", config_digest=configuration_eagle3.config_digest(config))
    with pytest.raises(ValueError, match="later version of hf-eagle3 saved it"):
        AutoModel.from_pretrained(tmp_path / "ours", trust_remote_code=True)


WAYS = ("truncate", "header", "garbage", "drop", "rename", "reshape", "type", "size", "no size", "flag", "d2t", "t2d")


def corrupt(folder, rng, way):
    """One of many ways to break a checkpoint that a reader can notice."""
    file, weights = folder / "config.json", folder / "model.safetensors"
    config, tensors, content = json.loads(file.read_text()), load_file(weights), weights.read_bytes()
    layer = config.get("transformer_layer_config", config)
    name = rng.choice(sorted(name for name in tensors if name not in ("d2t", "t2d", "lm_head.weight")))
    size = rng.choice(("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"))
    if way == "json":
        return file.write_text(file.read_text()[: rng.randrange(len(file.read_text()) - 1)])
    if way in ("truncate", "header", "garbage"):
        header = struct.pack("<Q", rng.randrange(len(content), 2**60))
        broken = {"truncate": content[: rng.randrange(len(content))], "header": header + content[8:]}
        return weights.write_bytes(broken.get(way, rng.randbytes(rng.randrange(1, 5000))))
    if way == "drop":
        del tensors[name]
    elif way == "rename":
        tensors[name + rng.choice("abc")] = tensors.pop(name)
    elif way == "reshape":
        shape = list(tensors[name].shape)
        shape[rng.randrange(len(shape))] += rng.choice([-1, 1, 7])
        tensors[name] = torch.zeros(shape)
    elif way == "type":
        layer[size] = rng.choice(["many", [1], {"a": 1}, -4, 0, 2.5])
    elif way == "size":
        layer[size] += rng.choice([-3, 1, 5])
    elif way == "no size":
        config["draft_vocab_size"] = rng.choice([1, 7, 33, 95])
    elif way == "flag":
        config[rng.choice(["use_magic", "parallel_heads", "norm_twice"])] = rng.choice([True, 2, "on"])
    elif way == "layers":  # others may count the target's layers where there is one
        layer["num_hidden_layers"] = rng.choice([0, 2, 5]) if layer is not config else 0
    elif way == "d2t":
        tensors["d2t"][rng.randrange(32)] += rng.choice([-200, -3, 3, 500])
    elif way == "t2d":
        tensors["t2d"][rng.randrange(96)] ^= True
    save_file(tensors, weights)
    file.write_text(json.dumps(config))


def test_random_corruptions_are_noticed(tmp_path, target):
    """Each way twice, in our format and in another one. `fuzz_checkpoints.py` tries more."""
    reference, rng = make_reference(target), random.Random(0)
    reference.save_pretrained(tmp_path / "ours")
    write(tmp_path / "other", sglang(reference), midlayer(reference))
    for number, (way, form) in enumerate(itertools.product((*WAYS, "json", "layers"), ("ours", "other") * 2)):
        folder = shutil.copytree(tmp_path / form, tmp_path / str(number))
        corrupt(folder, rng, way)
        try:
            Eagle3ForSpeculation.from_pretrained(folder)
        except (KeyError, IndexError, AttributeError, AssertionError, ZeroDivisionError) as error:
            raise AssertionError(f"{way} ({number}) is a crash, not a message: {error!r}") from error
        except Exception as error:
            assert len(str(error)) > 20, f"{way} ({number}): {error!r}"
        else:
            raise AssertionError(f"{way} ({number}) was not noticed")


def test_a_target_without_its_layers(tmp_path, target):
    target.save_pretrained(tmp_path)
    ends = load_ends(tmp_path)
    assert torch.equal(ends.get_output_embeddings().weight, target.get_output_embeddings().weight)
    assert len(ends.model.layers) == 0 and ends.config.num_hidden_layers == target.config.num_hidden_layers
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.ones(95, 32)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lm_head.weight"):
        load_ends(tmp_path)
    # Its own code would be asked for.
    Eagle3ForSpeculation.from_target(target).save_pretrained(tmp_path / "draft")
    for load in (load_ends, target_class):
        with pytest.raises(ValueError, match="draft is a draft, not a target"):
            load(tmp_path / "draft")
