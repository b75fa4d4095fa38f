"""Which drafts can be measured, and that they run the installed code."""

import json

import pytest
import torch
from checkpoints.test_formats import edit_config
from conftest import make_baseline, make_draft, make_prompt, make_target
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.evaluation.drafts import load_draft, method_of, sampled_digest


# At the end of the code that was saved with a draft.
TELLS = """

def _telling(decode):
    def assisted_decoding(self, *args, **kwargs):
        print("the saved code decodes")
        return decode(self, *args, **kwargs)
    return assisted_decoding


Eagle3ForSpeculation.assisted_decoding = _telling(Eagle3ForSpeculation.assisted_decoding)
"""


@pytest.fixture(scope="module")
def pairing(tmp_path_factory, tokenizer):
    """A folder with a target, prompts, and a draft whose saved code says that it runs."""
    folder, target = tmp_path_factory.mktemp("pairing"), make_target("llama")
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_draft(target, [make_prompt(5)]).save_pretrained(folder / "my-draft")
    with open(folder / "my-draft" / "modeling_eagle3.py", "a") as file:
        file.write(TELLS)
    (folder / "prompts.jsonl").write_text('{"prompt": "what is 3"}\n')
    return folder


def arguments(pairing, *others):
    return ["--target", pairing / "target", "--draft", pairing / "my-draft", "--max_new_tokens", 6, *others]


ONE_TREE = "--batch_sizes 1 --temperatures 0 --depths 1 --branching_factors 2 --budgets 4 --finalists 1 --repeats 1"


@pytest.mark.parametrize(
    ("script", "few"),
    [
        ("recipes/benchmark.py", "--methods plain eagle3 --temperatures 0 --repeats 1"),
        ("experiments/low_precision.py", "--dtypes float32"),
        ("experiments/tree_policy.py", ONE_TREE),
    ],
)
def test_the_saved_code_never_runs(script, few, pairing, run_script):
    result = run_script(script, *arguments(pairing, "--prompts", pairing / "prompts.jsonl"), *few.split())
    assert result.returncode == 0 and "the saved code decodes" not in result.stdout, result.stderr[-3000:]


METHODS = ("medusa", "hydra", "eagle", "eagle-2", "hass", "dflash", "jetspec", "dspark")


@pytest.mark.parametrize(("method", "name"), [*zip(METHODS, METHODS), ("p-eagle", "eagle3")])
def test_drafts_of_all_methods_are_loaded(tmp_path, method, name):
    draft = make_baseline(method, make_target("llama"))
    draft.save_pretrained(tmp_path)
    loaded, info = load_draft(str(tmp_path), output_loading_info=True)
    assert type(loaded) is type(draft) and not loaded.training and not info["missing_keys"]
    assert method_of(loaded) == name
    assert load_draft(str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_what_is_no_draft_is_refused(pairing, tmp_path):
    with pytest.raises(ValueError, match="in no known EAGLE-3 format.*Pass the name of a draft"):
        load_draft(str(pairing / "target"))
    with pytest.raises(OSError):
        load_draft(str(tmp_path / "nothing"))
    make_baseline("dflash", make_target("llama")).save_pretrained(tmp_path)
    dflash = json.loads((tmp_path / "config.json").read_text())["dflash_config"]
    edit_config(tmp_path, "config_digest", dflash_config={**dflash, "selector_rank": 8})
    with pytest.raises(ValueError, match="keys that DFlash does not have: .'selector_rank'"):
        load_draft(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        load_draft(str(tmp_path))


def test_models_are_told_apart_in_moments(pairing):
    target, again = (AutoModelForCausalLM.from_pretrained(pairing / "target") for _ in range(2))
    assert sampled_digest(target) == sampled_digest(again) != sampled_digest(again.bfloat16())
    again = AutoModelForCausalLM.from_pretrained(pairing / "target")
    with torch.no_grad():
        again.model.norm.weight.mul_(1.01)
    assert sampled_digest(target) != sampled_digest(again)
    again.model.norm.to("meta")  # as a `device_map` offloads
    assert sampled_digest(target) != sampled_digest(again)


def test_a_block_draft_is_measured_by_its_name(pairing, tmp_path, run_script):
    target = AutoModelForCausalLM.from_pretrained(pairing / "target")
    make_baseline("jetspec", target).save_pretrained(tmp_path / "jetspec")
    command = ["recipes/benchmark.py", "--target", pairing / "target", "--draft", tmp_path]
    command += ["--draft_subfolder", "jetspec"]
    command += ["--prompts", pairing / "prompts.jsonl", "--max_new_tokens", 6, "--temperatures", 0, "--repeats", 1]
    result = run_script(*command, "--json", tmp_path / "results")
    assert result.returncode == 0, result.stderr[-3000:]
    run, *rows = map(json.loads, (tmp_path / "results").read_text().splitlines())
    assert run["tree"]["tree_depth"] == 5
    assert [row["method"] for row in rows] == ["plain", "prompt-lookup", "jetspec"]
    result = run_script(*command, "--methods", "plain", "eagle3")
    assert result.returncode == 1 and "['eagle3'], but" in result.stderr and "['jetspec']" in result.stderr


def test_an_adapter_is_loaded_with_its_draft(tmp_path):
    make_draft(make_target("llama"), [make_prompt(5)]).save_pretrained(tmp_path / "draft")
    draft = Eagle3ForSpeculation.from_pretrained(tmp_path / "draft")
    adapted = get_peft_model(draft, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = load_draft(str(tmp_path / "adapter"))
    assert isinstance(loaded, Eagle3ForSpeculation)
    assert any("lora" in name and weight.abs().max() > 0 for name, weight in loaded.named_parameters())
