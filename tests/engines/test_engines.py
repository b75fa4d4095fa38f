"""
The same draft in every engine: it writes transformers' text, and takes as many forwards for every single prompt as our
own loop. The number of forwards tells more than a mean acceptance length: wrong layers move that by a fraction of a
percent.
"""

import pytest
from conftest import load_script
from transformers import AutoTokenizer

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.baselines import DFlashForSpeculation
from hf_eagle3.checkpoints import describe_engines, export
from hf_eagle3.checkpoints.openvino import convert
from hf_eagle3.remote_code.policy_eagle3 import Calibration


environments = load_script("experiments/engines/environments.py")
run_engine, run_transformers, tree = environments.run_engine, environments.run_transformers, environments.tree
write_target = load_script("experiments/engines/target_gguf.py").write_target
MAX_NEW_TOKENS = 64


def ours(target, draft_dir, prompts, **settings) -> dict:
    """What transformers writes, and how many forwards it takes to verify what the draft proposes."""
    plain = run_transformers(target, prompts, MAX_NEW_TOKENS)
    found = run_transformers(target, prompts, MAX_NEW_TOKENS, draft_dir, **settings)
    assert found["tokens"] == plain["tokens"]
    return found


def with_wrong_layers(draft_dir, folder):
    """A copy that reads another state."""
    draft = Eagle3ForSpeculation.from_pretrained(draft_dir)
    draft.config.eagle_aux_hidden_state_layer_ids[0] -= 1
    draft.save_pretrained(folder)
    return folder


def assert_same(found, expected):
    assert found["tokens"] == expected["tokens"]
    assert found["forwards"] == expected["forwards"]


# vLLM -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [3, 6])
@pytest.mark.parametrize("form", ["classic", "eagle3.1", "p-eagle"])
def test_vllm(models, target, prompts, python_of, tmp_path, form, depth):
    draft = models / form / "draft"
    job = {"target": models / "classic" / "target", "draft": draft, "prompts": prompts, "num_draft_tokens": depth}
    job["is_parallel"] = form == "p-eagle"
    assert dict(describe_engines(Eagle3ForSpeculation.from_pretrained(draft)))["vLLM"].startswith("takes it as it is")
    expected = ours(target, draft, prompts, **tree(depth))
    assert_same(run_engine(python_of("vllm"), "vllm", max_new_tokens=MAX_NEW_TOKENS, **job), expected)


@pytest.mark.parametrize("name", ["dflash", "jetspec"])
def test_vllm_with_a_block_draft(models, target, prompts, python_of, block_draft, tmp_path, name):
    """
    Also when the block is causal: vLLM reads that from the saved configuration. Its attention in a block rounds more than
    ours, so one near tie of the draft in a hundred steps may fall the other way.
    """
    draft = block_draft(name)
    expected = ours(target, draft, prompts, **tree(7))
    assert sum(expected["forwards"]) < 0.9 * len(prompts) * MAX_NEW_TOKENS
    wrong = DFlashForSpeculation.from_pretrained(draft)
    wrong.config.is_causal = not wrong.config.is_causal
    wrong.save_pretrained(tmp_path / "wrong")

    def num_others(folder):
        job = {"target": models / "classic" / "target", "draft": folder, "prompts": prompts, "num_draft_tokens": 7}
        found = run_engine(python_of("vllm"), "vllm", max_new_tokens=MAX_NEW_TOKENS, method="dflash", **job)
        assert found["tokens"] == expected["tokens"]
        return sum(abs(a - b) for a, b in zip(found["forwards"], expected["forwards"]))

    assert num_others(draft) <= 3 < num_others(tmp_path / "wrong")


@pytest.mark.parametrize("form", ["classic", "p-eagle"])
def test_vllm_with_the_bare_folder(models, target, cached_target, prompts, python_of, tmp_path, form):
    draft = Eagle3ForSpeculation.from_pretrained(models / form / "draft")
    said = draft.config.speculators_config
    said["verifier"]["name_or_path"] = cached_target
    draft.save_pretrained(tmp_path / "draft")
    expected = ours(target, tmp_path / "draft", prompts, **tree(said["proposal_methods"][0]["speculative_tokens"]))
    job = {"draft": tmp_path / "draft", "bare": True, "prompts": prompts, "max_new_tokens": MAX_NEW_TOKENS}
    assert_same(run_engine(python_of("vllm"), "vllm", **job), expected)


def test_vllm_s_server(models, target, prompts, python_of, tmp_path):
    draft = models / "eagle3.1" / "draft"
    job = {"target": models / "classic" / "target", "draft": draft, "prompts": prompts, "num_draft_tokens": 4}
    expected = ours(target, draft, prompts, **tree(4))
    assert_same(run_engine(python_of("vllm"), "vllm", max_new_tokens=MAX_NEW_TOKENS, server=True, **job), expected)


def test_vllm_with_wrong_layers(models, target, prompts, python_of, tmp_path):
    draft = models / "classic" / "draft"
    wrong = with_wrong_layers(draft, tmp_path / "wrong")
    job = {"target": models / "classic" / "target", "draft": wrong, "prompts": prompts, "num_draft_tokens": 3}
    found, expected = (
        run_engine(python_of("vllm"), "vllm", max_new_tokens=MAX_NEW_TOKENS, **job),
        ours(target, draft, prompts, **tree(3)),
    )
    assert found["tokens"] == expected["tokens"] and found["forwards"] != expected["forwards"]


# llama.cpp ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def target_gguf(models, target):
    path = models / "target.gguf"
    write_target(target, AutoTokenizer.from_pretrained(models / "classic" / "target"), path)
    return path


@pytest.mark.parametrize("wrong", [False, True])
def test_llama_cpp(models, target, target_gguf, prompts, python_of, tmp_path, wrong):
    draft = models / "classic" / "draft"
    exported = with_wrong_layers(draft, tmp_path / "wrong") if wrong else draft
    export(Eagle3ForSpeculation.from_pretrained(exported), tmp_path / "gguf", "gguf", target_gguf=target_gguf)
    job = {"target": target_gguf, "draft": tmp_path / "gguf" / "draft.gguf", "prompts": prompts, "num_draft_tokens": 5}
    found = run_engine(python_of("llama_cpp"), "llama_cpp", max_new_tokens=MAX_NEW_TOKENS, **job)
    expected = ours(target, draft, prompts, **tree(5))
    if wrong:
        assert found["tokens"] == expected["tokens"] and found["forwards"] != expected["forwards"]
    else:
        assert_same(found, expected)


# OpenVINO GenAI -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def openvino_target(models, python_of):
    folder = models / "target-openvino"
    if not folder.exists():
        convert(python_of("openvino"), models / "classic" / "target", folder)
    return folder


TREES = {
    "chain": (tree(5), {"num_assistant_tokens": 5}),
    "tree": (tree(6, 8, 24), {"tree_depth": 6, "branching_factor": 8, "num_assistant_tokens": 24}),
}


@pytest.mark.parametrize("kind", ["chain", "tree", "wrong layers"])
def test_openvino(models, target, openvino_target, prompts, python_of, tmp_path, kind, monkeypatch):
    """Which trees it draws depends on probabilities, which it takes as the draft says them."""
    monkeypatch.setattr(Calibration, "power", property(lambda self: 1.0, lambda self, power: None), raising=False)
    draft, (shape, settings) = models / "classic" / "draft", TREES.get(kind, TREES["chain"])
    exported = with_wrong_layers(draft, tmp_path / "wrong") if kind == "wrong layers" else draft
    python = python_of("openvino")
    export(Eagle3ForSpeculation.from_pretrained(exported), tmp_path / "openvino", "openvino", python=python)
    job = {"target": openvino_target, "draft": tmp_path / "openvino", "prompts": prompts, **settings}
    found, expected = (
        run_engine(python, "openvino", max_new_tokens=MAX_NEW_TOKENS, **job),
        ours(target, draft, prompts, **shape),
    )
    if kind == "wrong layers":
        assert found["tokens"] == expected["tokens"] and found["forwards"] != expected["forwards"]
    else:
        assert_same(found, expected)


# What they would leave out without a word -----------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["gguf", "openvino", "safeailab"])
def test_what_is_refused(models, tmp_path, to):
    draft = Eagle3ForSpeculation.from_pretrained(models / "eagle3.1" / "draft")
    with pytest.raises(ValueError, match="fc_norm.*norm_output.*draft_form=.classic."):
        export(draft, tmp_path / to, to)
    assert not (tmp_path / to).exists()
