"""Drafts of others by `AutoModel`, once `hf_eagle3` is imported; and everything else as before."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints.test_formats import edit_config
from conftest import assert_same_text, each_once, make_baseline, make_draft, make_prompt, make_target
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaModel,
)

from hf_eagle3 import Eagle3Config, Eagle3ForSpeculation
from hf_eagle3.baselines import DFlashConfig, DFlashForSpeculation
from hf_eagle3.checkpoints import export, load_ends, target_class
from hf_eagle3.tokenizer import load_tokenizer


FIXTURES = Path(__file__).parent / "fixtures"
NAME = "RedHatAI/Tiny-speculator.eagle3"
AUTO_CLASSES = (AutoModel, AutoModelForCausalLM)


def assert_loads(name, auto_class=AutoModel, **kwargs):
    draft = auto_class.from_pretrained(name, trust_remote_code=True, **kwargs)
    expected = Eagle3ForSpeculation.from_pretrained(name, **kwargs)
    assert type(draft) is Eagle3ForSpeculation and draft.dtype == expected.dtype
    assert draft.name_or_path == expected.name_or_path == str(name)
    ours, theirs = ({**each.config.to_dict(), "dtype": None} for each in (draft, expected))
    assert ours == theirs
    theirs = expected.state_dict()
    assert draft.state_dict().keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in draft.state_dict().items())
    return draft


@pytest.mark.parametrize("kind, auto_class", each_once(["classic", "norm_output", "qwen3"], AUTO_CLASSES))
def test_of_speculators(tmp_path, monkeypatch, auto_class, kind):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / kind, NAME)
    assert_loads(NAME, auto_class)
    assert assert_loads(NAME, auto_class, dtype=torch.bfloat16).dtype == torch.bfloat16
    _, info = auto_class.from_pretrained(NAME, output_loading_info=True)
    assert info["format"] == "speculators"
    config, unused = AutoConfig.from_pretrained(NAME, trust_remote_code=True, return_unused_kwargs=True, a_word=1)
    assert type(config) is Eagle3Config and unused == {"a_word": 1}


@pytest.mark.parametrize("to", ["sglang", "safeailab"])
def test_of_other_formats(tmp_path, to):
    target = make_target("llama", num_hidden_layers=8)
    draft = make_draft(
        target, [make_prompt(5)], fc_norm=False, norm_output=False, eagle_aux_hidden_state_layer_ids=[2, 4, 5]
    )
    export(draft, tmp_path / to, to)
    for auto_class in AUTO_CLASSES:
        loaded = assert_loads(tmp_path / to, auto_class, dtype="auto")
    assert AutoConfig.from_pretrained(tmp_path / to).to_dict() == {**loaded.config.to_dict(), "dtype": None}
    _, info = AutoModel.from_pretrained(tmp_path / to, output_loading_info=True)
    assert info["format"] == to
    assert assert_same_text(target, loaded, make_prompt(9), ours={"tree_policy": "static"}).acceptance_length > 1


def test_by_name_of_the_hub(tmp_path, hub):
    """The header of a file tells what it holds: no weights are fetched to know that they are not a draft's."""
    target = make_target("llama", num_hidden_layers=1)  # which is asked about, since drafts have one layer, too
    target.save_pretrained(tmp_path / "target")
    make_baseline("dflash", target).save_pretrained(tmp_path / "dflash")
    shutil.copytree(FIXTURES / "classic", tmp_path / "speculator.eagle3")
    target = make_target("llama", num_hidden_layers=8)
    export(Eagle3ForSpeculation.from_target(target, fc_norm=False, norm_output=False), tmp_path / "sglang", "sglang")
    keys = json.loads((tmp_path / "sglang" / "config.json").read_text())
    of_drafts = [key for key in keys if any(word in key for word in ("eagle", "draft"))]
    edit_config(tmp_path / "sglang", *of_drafts, architectures=["LlamaForCausalLM"])
    found = {}
    for name in ("speculator.eagle3", "sglang", "dflash", "target"):
        HfApi().create_repo(f"me/{name}")
        HfApi().upload_folder(repo_id=f"me/{name}", folder_path=tmp_path / name)
        config = AutoConfig.from_pretrained(f"me/{name}")
        cached = [path.name for path in (tmp_path / "cache" / f"models--me--{name}").rglob("*.safetensors")]
        found[name] = type(config), type(AutoModel.from_pretrained(f"me/{name}")), cached
    assert found == {
        "speculator.eagle3": (Eagle3Config, Eagle3ForSpeculation, []),
        "sglang": (Eagle3Config, Eagle3ForSpeculation, ["model.safetensors"]),
        "dflash": (DFlashConfig, DFlashForSpeculation, []),
        "target": (LlamaConfig, LlamaModel, []),
    }


def test_what_is_no_draft_loads_as_before(tmp_path, target, tokenizer):
    target.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config, unused = AutoConfig.from_pretrained(tmp_path, return_unused_kwargs=True, a_word=1, use_cache=False)
    assert type(config) is LlamaConfig and unused == {"a_word": 1} and config.use_cache is False
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is type(target)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == len(tokenizer)
    edit_config(tmp_path, "model_type")
    for changes, message in (
        ({}, "Should have a `model_type` key"),
        ({"speculators_model_type": "dflash"}, "lacks .*mask_token_id.* Add what the draft was trained with"),
        ({"speculators_model_type": "mlp_speculator"}, "of the kind 'mlp_speculator', which hf-eagle3 does not read"),
        ({"model_type": "unheard_of"}, "has model type `unheard_of`"),
    ):
        edit_config(tmp_path, "speculators_model_type", **changes)
        with pytest.raises(ValueError, match=message):
            AutoModel.from_pretrained(tmp_path)
    with pytest.raises(OSError):
        AutoConfig.from_pretrained(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="in no known EAGLE-3 format"):
        Eagle3ForSpeculation.from_pretrained(tmp_path)


def test_a_draft_of_an_unknown_kind_is_no_random_model(tmp_path, target):
    """Its tensors are of no kind that hf-eagle3 knows, but it is called a draft, and is no whole model (AngelSlim's DFlare)."""
    (tmp_path / "draft").mkdir()
    names = ("hidden_norm.weight", "layer_fusion_weights", "layers.0.self_attn.k_proj_target.weight", "norm.weight")
    save_file({name: torch.ones(4) for name in names}, tmp_path / "draft" / "model.safetensors", {"format": "pt"})
    for changes in ({"model_type": "qwen3"}, {"model_type": "unheard_of"}):
        content = {**target.config.to_dict(), "architectures": ["QwenDFlareDraftModel"], **changes}
        (tmp_path / "draft" / "config.json").write_text(json.dumps(content))
        for loader in (AutoConfig, AutoModel, AutoModelForCausalLM):
            with pytest.raises(
                ValueError, match="kind that hf-eagle3 does not know: it is called .'QwenDFlareDraftModel'.*vLLM"
            ):
                loader.from_pretrained(tmp_path / "draft")
        with pytest.raises(ValueError, match="in no known EAGLE-3 format.*It is called .'QwenDFlareDraftModel'.*vLLM"):
            Eagle3ForSpeculation.from_pretrained(tmp_path / "draft")
    code = "from transformers import LlamaConfig, PreTrainedModel\n\n\nclass DFlareModel(PreTrainedModel):\n"
    code += "    config_class = LlamaConfig\n\n    def __init__(self, config):\n        super().__init__(config)\n        self.post_init()\n"
    (tmp_path / "draft" / "dflare.py").write_text(code)
    content |= {"model_type": "llama", "auto_map": {"AutoModel": "dflare.DFlareModel"}}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="pass `trust_remote_code=True`"):
        AutoModel.from_pretrained(tmp_path / "draft")
    theirs = AutoModel.from_pretrained(tmp_path / "draft", trust_remote_code=True)
    assert type(theirs).__name__ == "DFlareModel"
    # A small model, whatever it is called.
    target.save_pretrained(tmp_path / "model")
    edit_config(tmp_path / "model", architectures=["SmallDraftForCausalLM"])
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "model")) is type(target)


@pytest.mark.parametrize(
    ("lacking", "architectures"),
    [
        *((part, ["QwenDFlareDraftModel"]) for part in ("k_proj", "down_proj", "embed_tokens", "norm")),
        ("embed_tokens", "QwenDFlareDraftModel"),
    ],
)
def test_a_draft_of_an_unknown_kind_lacks_a_part(tmp_path, target, lacking, architectures):
    """It may have an embedding of its own, and most of its layers."""
    tensors = {name: tensor for name, tensor in target.state_dict().items() if f".{lacking}." not in name}
    target.save_pretrained(tmp_path, state_dict={**tensors, "layer_fusion_weights": torch.ones(4)})
    edit_config(tmp_path, architectures=architectures)
    for loader in (AutoConfig, AutoModel, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=f"called .'QwenDFlareDraftModel'., and lacks .'{lacking}'. of a whole"):
            loader.from_pretrained(tmp_path)


SMALL = {
    "bert": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "granitemoe": {"num_local_experts": 2},  # transformers renames its tensors
    "mamba": {"hidden_size": 16, "num_hidden_layers": 1},
    "opt": {"hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 2, "word_embed_proj_dim": 16},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
}


@pytest.mark.parametrize("model_type", SMALL)
def test_a_whole_model_may_be_called_a_draft(tmp_path, model_type):
    config = AutoConfig.for_model(model_type, vocab_size=64, **{**SMALL["bert"], **SMALL[model_type]})
    model = AutoModel.from_config(config)
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["TinyEagleModel"])
    assert type(AutoModel.from_pretrained(tmp_path)) is type(model)


@pytest.mark.skipif("bailing_hybrid" not in CONFIG_MAPPING, reason="older transformers")
def test_a_whole_model_whose_embedding_has_another_name(tmp_path):
    """In checkpoints of models with a head: transformers renames it with the name of the base model before it."""
    target = make_target("bailing_hybrid")
    target.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["TinyDraftForCausalLM"])
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is type(target)


def test_names_of_whole_models_that_are_called_drafts(tmp_path, target):
    """Those of wrappers, and of models whose configuration transformers does not know."""
    target.config.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["EagleLlamaForCausalLM"])
    tensors = {f"module.{name}": tensor for name, tensor in target.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert type(AutoConfig.from_pretrained(tmp_path)) is LlamaConfig
    edit_config(tmp_path, architectures=["Eagle2_5_VLForConditionalGeneration"], model_type="eagle_2_5_vl")
    with pytest.raises(ValueError, match="`eagle_2_5_vl` but Transformers does not recognize"):
        AutoConfig.from_pretrained(tmp_path)


def test_a_configuration_with_code_of_its_own_is_left_alone(tmp_path, target):
    """Also if its fields have a draft's names."""
    (tmp_path / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    target.config.save_pretrained(tmp_path)
    names = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}, "draft_vocab_size": 64}
    edit_config(tmp_path, **names, architectures=["LlamaForCausalLMEagle3"])
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(config).__name__ == "OwnConfig" and config.draft_vocab_size == 64


def test_our_own_drafts_are_not_read_without_trust_in_their_code(tmp_path, target):
    Eagle3ForSpeculation.from_target(target).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModel.from_pretrained(tmp_path, trust_remote_code=False)


@pytest.mark.parametrize(
    "content, kind",
    [
        ({"medusa_num_heads": 5, "medusa_num_layers": 1}, "a draft of Medusa, not of EAGLE-3. vLLM runs it"),
        ({"model_type": "medusa", "num_heads": 3}, "a draft of Medusa, not of EAGLE-3. vLLM runs it"),
        ({"hydra_num_heads": 4, "hydra_num_layers": 4}, "a draft of Hydra, not of EAGLE-3. The project that trained"),
        ({"model_type": "mlp_speculator", "n_predict": 3}, "an MLP speculator, not of EAGLE-3. vLLM runs it"),
        ({"model_type": "eagle", "model": {}}, "a draft of EAGLE-1 or 2, not of EAGLE-3. vLLM runs it as `eagle`"),
    ],
)
def test_drafts_of_other_methods(tmp_path, content, kind):
    """Their weights are in files of other names."""
    (tmp_path / "config.json").write_text(json.dumps(content))
    for loader in (Eagle3ForSpeculation, AutoModel, AutoConfig):
        with pytest.raises(ValueError, match=kind):
            loader.from_pretrained(tmp_path)


@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle", "hass", "dflash"])
def test_our_drafts_of_other_methods(tmp_path, target, method):
    make_baseline(method, target).save_pretrained(tmp_path)
    advice = "import hf_eagle3" if method == "dflash" else "import hf_eagle3.baselines"
    with pytest.raises(ValueError, match=f"`AutoModel.from_pretrained`, after `{advice}`"):
        Eagle3ForSpeculation.from_pretrained(tmp_path)


def test_what_to_do_with_a_whole_model(tmp_path, target):
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="It is a whole model. .*load a small model by `AutoModelForCausalLM`"):
        Eagle3ForSpeculation.from_pretrained(tmp_path)
    weights = {**target.state_dict(), "eagle_module.fc.weight": torch.ones(32, 96)}
    target.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match="a target with a draft in training. .*export_hf_checkpoint.py"):
        Eagle3ForSpeculation.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["/drafts/mine", "./mine", "outputs/quickstart/draft"])
def test_folders_that_do_not_exist(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"There is no folder {name}"):
        Eagle3ForSpeculation.from_pretrained(name)


@pytest.mark.parametrize("load", [target_class, load_tokenizer, load_ends])
def test_a_target_that_is_not_here_and_no_connection(tmp_path, monkeypatch, load):
    """Each file that is asked for takes half a minute."""
    asked = []

    def ask(*args, **kwargs):
        asked.append(args)
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", ask)
    with pytest.raises(OSError, match="There is no folder models/target, and the Hub cannot be asked"):
        load("models/target")
    assert len(asked) == 1


@pytest.mark.parametrize("loader", [Eagle3ForSpeculation, AutoModel])
def test_what_is_said_of_broken_files(tmp_path, loader):
    shutil.copytree(FIXTURES / "classic", tmp_path / "draft")
    for kind in ("eagle", "eagle3_lc"):
        edit_config(tmp_path / "draft", speculators_model_type=kind)
        with pytest.raises(ValueError, match=f"is a draft of speculators of the kind '{kind}'"):
            loader.from_pretrained(tmp_path / "draft")
    (tmp_path / "draft" / "config.json").unlink()
    with pytest.raises(ValueError, match="draft(: There is| has .*, but) no config.json"):
        loader.from_pretrained(tmp_path / "draft")
    draft = Eagle3ForSpeculation.from_target(make_target("llama"), fc_norm=False, norm_output=False)
    export(draft, tmp_path / "bin", "sglang")
    torch.save(draft.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "model.safetensors").unlink()
    weights = (tmp_path / "bin" / "pytorch_model.bin").read_bytes()
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(weights[:-900])
    with pytest.raises(ValueError, match="pytorch_model.bin cannot be read. Check that it is complete"):
        loader.from_pretrained(tmp_path / "bin")
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * 'a'}\nsize 848000000\n"
    for name in ("pytorch_model.bin", "model.safetensors"):  # which goes first
        (tmp_path / "bin" / name).write_text(pointer)
        with pytest.raises(ValueError, match=f"{name} is a Git LFS pointer, not the file itself. Run `git lfs pull`"):
            loader.from_pretrained(tmp_path / "bin")
        (tmp_path / "bin" / name).unlink()
    for content, reason in (
        ("[]", "does not hold a JSON object"),
        ('{"weight_map": {}', "index.json is not valid JSON"),
        ('{"weight_map": {}}', "has no `metadata`. If it is complete, add"),
        ('{"metadata": {}, "weight_map": []}', "does not say which file holds which tensor"),
        ('{"metadata": {}, "weight_map": {}}', "does not say which file holds which tensor"),
    ):
        (tmp_path / "bin" / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ValueError, match=reason):
            loader.from_pretrained(tmp_path / "bin")


@pytest.mark.parametrize("content", ["null", "[]", '"a"', "5"])
def test_a_config_that_is_no_object(tmp_path, content):
    Eagle3ForSpeculation.from_target(make_target("llama")).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(content)
    loaders = [each.from_pretrained for each in (Eagle3Config, Eagle3ForSpeculation, AutoConfig, AutoModel)]
    for load in (*loaders, target_class, load_tokenizer):
        with pytest.raises(ValueError, match="config.json does not hold a JSON object"):
            load(tmp_path, trust_remote_code=True)


def test_a_broken_draft_of_others(tmp_path):
    shutil.copytree(FIXTURES / "classic", tmp_path / "draft")
    edit_config(tmp_path / "draft", norm_before_fc=True)
    with pytest.raises(ValueError, match="input_norm.weight"):
        AutoModel.from_pretrained(tmp_path / "draft")
    edit_config(tmp_path / "draft", norm_before_fc=False, new_flag=True)
    with pytest.raises(ValueError, match="keys that this version does not know"):
        AutoConfig.from_pretrained(tmp_path / "draft")
