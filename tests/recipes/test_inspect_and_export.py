"""`recipes/inspect_draft.py` and `recipes/export.py` as users call them."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from checkpoints.test_formats import edit_config
from conftest import files_in, make_baseline, make_draft, make_prompt, make_target, save_with_code
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.checkpoints import export
from hf_eagle3.making import FORMS


@pytest.fixture
def inspected(run_recipe):
    """`inspected(draft, ...)` returns the lines that the recipe prints, by their names."""

    def inspect(*arguments):
        result = run_recipe("inspect_draft.py", *arguments)
        assert result.returncode == 0, result.stderr[-3000:]
        return {line.split("  ")[0].strip(): line for line in result.stdout.splitlines()}

    return inspect


def test_inspect_and_export(tmp_path, run_recipe, inspected):
    for name, seed in (("target", 0), ("other", 1)):
        make_target("llama", seed=seed).save_pretrained(tmp_path / name)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    make_draft(target, [make_prompt(5)]).save_pretrained(tmp_path / "draft")

    lines = inspected(tmp_path / "draft", "--target", tmp_path / "target")
    assert "speculators" in lines["format"] and "fc_norm, norm_output" in lines["flags"]
    assert "takes it as it is" in lines["vLLM"] and "--to sglang" in lines["SGLang"]
    assert lines["llama.cpp"].endswith("cannot take it: `fc_norm`; `norm_output`")
    assert "cannot take it" in lines["EAGLE's own code"] and "fits" in lines[str(tmp_path / "target")]
    assert str(tmp_path / "target") in lines["target"] and "recipes/push.py" in lines["target"]
    assert len(lines) < 25

    unnamed = Eagle3ForSpeculation.from_pretrained(tmp_path / "draft")
    unnamed.config.speculators_config = None
    unnamed.save_pretrained(tmp_path / "unnamed")
    lines = inspected(tmp_path / "unnamed", "--target", tmp_path / "target")
    assert "takes it after recipes/export.py --to speculators --target TARGET" in lines["vLLM"]

    nowhere = ("--output_dir", tmp_path / "nowhere")
    for option, told in (
        ("--target_gguf", "is for --to"),
        ("--python", "is for --to"),
        ("--revision", "is for --push_"),
    ):
        result = run_recipe("export.py", tmp_path / "draft", "--to", "sglang", option, "x", *nowhere)
        assert result.returncode == 2 and f"{option} {told}" in result.stderr
    assert not (tmp_path / "nowhere").exists()
    result = run_recipe("export.py", tmp_path / "draft", "--to", "sglang", "--output_dir", tmp_path / "sglang")
    assert result.returncode == 0, result.stderr[-3000:]
    ours, theirs = (Eagle3ForSpeculation.from_pretrained(tmp_path / name).state_dict() for name in ("draft", "sglang"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    result = run_recipe("export.py", tmp_path / "draft", "--to", "sglang", "--output_dir", tmp_path / "sglang")
    assert result.returncode != 0 and "is not empty" in result.stderr

    # Back again: vLLM requires the target's name, which SGLang's format does not say.
    back = ("export.py", tmp_path / "sglang", "--to", "speculators", "--output_dir", tmp_path / "back")
    result = run_recipe(*back)
    assert result.returncode != 0 and "Pass --target" in result.stderr and not (tmp_path / "back").exists()
    weights = (tmp_path / "sglang" / "model.safetensors").read_bytes()
    onto_itself = (*back[:-1], tmp_path / "sglang", "--target", tmp_path / "target")
    result = run_recipe(*onto_itself)
    assert result.returncode != 0 and "is not empty" in result.stderr
    assert (tmp_path / "sglang" / "model.safetensors").read_bytes() == weights
    result = run_recipe(*back, "--target", tmp_path / "target")
    assert result.returncode == 0, result.stderr[-3000:]
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("draft", "back"))
    assert ours["verifier_fingerprint"] == theirs["verifier_fingerprint"]
    verifier = {"name_or_path": str(tmp_path / "target"), "architectures": ["LlamaForCausalLM"]}
    assert theirs["speculators_config"]["verifier"] == verifier
    assert theirs["speculators_config"]["proposal_methods"] == ours["speculators_config"]["proposal_methods"]
    result = run_recipe("inspect_draft.py", tmp_path / "draft", "--target", tmp_path / "other")
    assert result.returncode == 1 and "does not fit" in result.stdout and "trained for another model" in result.stdout


JETSPEC = {"layers": "2 x qwen3", "embedding": "the target's", "head": "the target's", "in the block": "causal"}
JETSPEC |= {"block": "6 tokens: one that is known, then masks (token 3)", "vLLM": "takes it as it is"}
JETSPEC["reads"] = "layers [1, 3] of the target's 4 (as its config.json says)"


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("jetspec", JETSPEC),
        ("dflash", {"in the block": "full", "drafting": "5 tokens in one pass", "vLLM": "as it is"}),
        ("dspark", {"drafting": "6 tokens in one pass", "Markov head": "of rank 4"}),
        ("medusa", {"heads": "5, each", "tree": "static, 64 nodes", "reads": "after the final norm"}),
        ("eagle-2", {"layers": "1 x llama", "tree": "by the draft's confidence"}),
    ],
)
def test_drafts_of_other_methods(tmp_path, run_recipe, inspected, method, expected):
    for name, seed in (("target", 0), ("other", 1)):
        make_target("llama", seed=seed).save_pretrained(tmp_path / name)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    make_baseline(method, target).save_pretrained(tmp_path / "draft")
    lines = inspected(tmp_path / "draft", "--target", tmp_path / "target")
    assert all(value in lines[name] for name, value in {"method": method, **expected}.items())
    assert lines[str(tmp_path / "target")].endswith("  fits") and not lines.keys() & {"SGLang", "flags", "format"}
    assert ("vLLM" in lines) == (method in ("jetspec", "dflash"))
    assert method in ("jetspec", "dflash", "dspark", "eagle-2") or "layers" not in lines
    if method == "jetspec":
        result = run_recipe("inspect_draft.py", tmp_path / "draft", "--target", tmp_path / "other")
        assert result.returncode == 1 and "does not fit" in result.stdout and "another model" in result.stdout


def test_a_block_draft_with_windows(tmp_path, inspected):
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "use_sliding_window": True}
    make_baseline("dflash", make_target("llama"), **windows).save_pretrained(tmp_path)
    lines = inspected(tmp_path)
    assert "causal in layers of sliding_attention, full in layers of full_attention" in lines["in the block"]
    assert lines["window"].endswith("7 tokens, from each token") and "vLLM" not in lines


def test_the_first_trees(tmp_path, tokenizer, run_recipe):
    make_target("llama").save_pretrained(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    chat = [{"role": "user", "content": "what is up"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    draft = make_draft(target, [inputs["input_ids"]])
    draft.generation_config.assistant_confidence_threshold = 0.999  # would leave out every tree
    draft.save_pretrained(tmp_path / "draft")
    result = run_recipe("inspect_draft.py", tmp_path / "draft", "--prompt", "a")
    assert result.returncode == 2 and "pass --target" in result.stderr
    arguments = ("inspect_draft.py", tmp_path / "draft", "--target", tmp_path / "target", "--prompt", "what is up")
    arguments += ("--device", "cpu")
    result = run_recipe(*arguments)
    assert result.returncode == 1 and "has no tokenizer" in result.stderr
    tokenizer.save_pretrained(tmp_path / "target")
    result = run_recipe(*arguments, "--steps", 4)
    assert result.returncode == 0, result.stderr[-3000:]

    draft = Eagle3ForSpeculation.from_pretrained(tmp_path / "draft").eval()
    draft.generation_config.update(tree_policy="static", assistant_confidence_threshold=0.0, output_steps=True)
    target.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=60)
    facts, *trees = result.stdout.split("\n\n")
    assert facts.startswith("format") and len(trees) == 5
    assert trees[0].startswith("After 'what is up' the target writes")
    assert sum("✓" in tree for tree in trees) > 0
    for number, (step, printed) in enumerate(zip(draft.last_generation.steps[1:], trees[1:]), start=1):
        assert printed.startswith(f"Step {number}: {len(step.tokens[0]) - 1} tokens drafted")
        assert printed.count("✓") == len(step.accepted[0]) and printed.count("the target's own") == 1
        assert len(printed.strip().splitlines()) == 1 + len(step.tokens[0]) + 1


def test_a_target_that_brings_its_code(tmp_path, tokenizer, run_recipe):
    target = make_target("llama")
    make_draft(target, [make_prompt(5)]).save_pretrained(tmp_path / "draft")
    save_with_code(target, tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    call = ("inspect_draft.py", tmp_path / "draft", "--target", tmp_path / "target", "--prompt", "a", "--steps", 1)
    result = run_recipe(*call, "--device_map", "cpu")
    assert result.returncode == 1 and "trust_remote_code" in result.stdout
    result = run_recipe(*call, "--device_map", "cpu", "--trust_remote_code")
    assert result.returncode == 0 and "Step 1:" in result.stdout, result.stderr[-3000:]


@pytest.fixture(scope="module")
def flat_draft(tmp_path_factory):
    """A folder with a target of twelve layers, and its draft in a format that leaves the layers to the target's depth."""
    folder, target = tmp_path_factory.mktemp("flat"), make_target("llama", num_hidden_layers=12)
    target.save_pretrained(folder / "target")
    target = type(target).from_pretrained(folder / "target")
    export(Eagle3ForSpeculation.from_target(target, **FORMS["classic"]), folder / "draft", "sglang")
    keys = json.loads((folder / "draft" / "config.json").read_text())
    edit_config(folder / "draft", *(name for name in keys if name.startswith("eagle_")))
    return folder


def test_engines_are_named_for_the_target_that_is_given(flat_draft, inspected):
    """llama.cpp wants to know which layers a draft reads."""
    for options, expected in (((), "cannot take it: "), (("--target", flat_draft / "target"), "--to gguf")):
        assert expected in inspected(flat_draft / "draft", *options)["llama.cpp"]


@pytest.mark.parametrize(
    "ids, alone, with_target",
    [
        (
            [1, 5, 8],
            "[2, 6, 9] of the target, if its ids [1, 5, 8] count outputs",
            "[2, 6, 9] of the target's 12 (its",
        ),
        ([2, 6, 9], "[3, 7, 10] of the target, if its ids [2, 6, 9] count outputs", "[2, 6, 9] taken for inputs"),
        ([4, 8, 11], "if its ids [4, 8, 11]", "outputs of layers; 12 is what leaves the last one, before the final n"),
        (None, "since its config.json names none", "[2, 6, 9] of the target's 12 (the usual ones, since"),
    ],
)
def test_which_states_are_read_is_said(tmp_path, flat_draft, inspected, ids, alone, with_target):
    shutil.copytree(flat_draft / "draft", tmp_path / "draft")
    edit_config(tmp_path / "draft", eagle_aux_hidden_state_layer_ids=ids)
    for options, expected in (((), alone), (("--target", flat_draft / "target"), with_target)):
        assert expected in inspected(tmp_path / "draft", *options)["reads"]


def test_a_branch_for_sglang(tmp_path, hub, run_recipe):
    """From the Hub, and back to a branch of the same repo, over HTTP."""
    make_draft(make_target("llama"), [make_prompt(5)]).save_pretrained(tmp_path / "draft")
    repo, folder = "me/tiny-speculator.eagle3", str(tmp_path / "sglang")
    files = files_in(tmp_path / "draft")
    others = {f"small/{name}": content for name, content in files.items()}
    hub.repos[repo] = {"main": [files], "two": [others]}
    code = {**files, "README.md": b"# Mine", "notes.json": b"{}"}
    hub.repos["me/others"] = {"main": [{**code, **others}], "refs/pr/1": [{}]}
    in_folder = (repo, "--draft_revision", "two", "--draft_subfolder", "small", "--to", "sglang", "--output_dir")
    for command in (
        ("export.py", repo, "--to", "sglang", "--output_dir", folder, "--push_to", repo, "--revision", "sglang"),
        ("inspect_draft.py", repo, "--draft_revision", "sglang"),  # the branch is read by its format
        ("export.py", repo, "--to", "sglang", "--output_dir", f"{folder}-2", "--push_to", "exports"),  # a new repo
        # A draft in a folder of a branch, over the main branch of a repo and into a pull request.
        ("export.py", *in_folder, f"{folder}-3", "--push_to", "me/others", "--revision", "main"),
        ("export.py", *in_folder, f"{folder}-4", "--push_to", "me/others", "--revision", "refs/pr/1"),
    ):
        result = run_recipe(*command)
        assert result.returncode == 0, result.stderr[-3000:]
        assert ("format            sglang" in result.stdout) == (command[0] == "inspect_draft.py")
    branches = hub.repos[repo]
    assert len(branches["main"]) == 1
    pushed = branches["sglang"][-1]
    exported = {name: pushed[name] for name in ("config.json", "model.safetensors")}
    assert hub.repos["me/exports"]["sglang"][-1] == exported
    of_branches = hub.repos["me/others"]
    kept = {**others, "README.md": b"# Mine", "notes.json": b"{}"}
    assert of_branches["main"][-1] == {**kept, **exported} and of_branches["refs/pr/1"][-1] == exported
    assert json.loads(pushed["config.json"])["architectures"] == ["LlamaForCausalLMEagle3"]
    assert not [name for name in pushed if name.endswith(".py")] and "generation_config.json" not in pushed
    assert pushed["model.safetensors"] == (tmp_path / "sglang" / "model.safetensors").read_bytes()


def test_a_branch_does_not_name_a_folder(tmp_path, monkeypatch, run_recipe):
    draft = make_draft(make_target("llama"), [make_prompt(5)])
    (tmp_path / "secret" / "target").mkdir(parents=True)
    draft.config.speculators_config["verifier"]["name_or_path"] = str(tmp_path / "secret" / "target")
    draft.save_pretrained(tmp_path / "draft")
    for name in ("create_branch", "create_commit", "list_repo_files"):
        monkeypatch.setattr(HfApi, name, lambda *args, **kwargs: [])
    made = []

    def create_repo(api, repo_id, **kwargs):
        made.append(kwargs)
        return SimpleNamespace(repo_id=repo_id)

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    command = ("export.py", tmp_path / "draft", "--to", "speculators", "--output_dir")
    run_recipe(*command, tmp_path / "pushed", "--push_to", "me/draft", "--private")
    run_recipe(*command, tmp_path / "kept")
    named = {name: "secret" in (tmp_path / name / "config.json").read_text() for name in ("pushed", "kept")}
    assert named == {"pushed": False, "kept": True} and made == [{"private": True, "exist_ok": True}]
