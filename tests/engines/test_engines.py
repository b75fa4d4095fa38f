"""
The same draft in every engine: it writes transformers' text, and takes as many forwards for every single prompt as our
own loop. The number of forwards tells more than a mean acceptance length: wrong layers move that by a fraction of a
percent.
"""

import pytest
import torch
from checkpoints import test_plain_forward as plain
from checkpoints.test_formats import write
from conftest import load_script, make_target, make_tokenizer
from transformers import AutoTokenizer, DynamicCache

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.baselines import DFlashForSpeculation
from hf_eagle3.checkpoints import describe_engines, export, sglang
from hf_eagle3.checkpoints.openvino import convert
from hf_eagle3.making import FORMS
from hf_eagle3.remote_code.outputs_eagle3 import aux_hidden_states
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


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def with_form(target, draft_dir, folder, **settings):
    """
    A draft of another form, which cannot propose each fourth token. It has the weights of a trained draft as far as they fit,
    so that some of what it drafts is accepted.
    """
    torch.manual_seed(0)
    draft = Eagle3ForSpeculation.from_target(target, **{**FORMS["classic"], **settings})
    trained = Eagle3ForSpeculation.from_pretrained(draft_dir).state_dict()
    for name, parameter in draft.named_parameters():
        noise = 0.02 * torch.randn_like(parameter)
        parameter.data += noise * (parameter.std() if "embed_tokens" in name else 1)
        if name in trained:
            part = tuple(map(slice, map(min, parameter.shape, trained[name].shape)))
            parameter.data[part] = trained[name][part]
    draft.trim_draft_vocabulary([token_id for token_id in range(draft.config.vocab_size) if token_id % 4])
    draft.save_pretrained(folder)
    return folder


def assert_same(found, expected):
    assert found["tokens"] == expected["tokens"]
    assert found["forwards"] == expected["forwards"]


# vLLM -----------------------------------------------------------------------------------------------------------------


OTHER = {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "has_own_embed_tokens": True}
OTHER |= {"model_type": "qwen3", "eagle_aux_hidden_state_layer_ids": [0, 3, 5, 7]}
OTHER |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
OTHER |= {"sliding_window": 16, "use_sliding_window": True}


@pytest.mark.parametrize("depth", [3, 6])
@pytest.mark.parametrize("form", ["classic", "eagle3.1", "p-eagle", "other"])
def test_vllm(models, target, prompts, python_of, tmp_path, form, depth):
    draft = models / form / "draft"
    if form == "other":
        draft = with_form(target, models / "eagle3.1" / "draft", tmp_path / form, **OTHER)
    job = {"target": models / "classic" / "target", "draft": draft, "prompts": prompts, "num_draft_tokens": depth}
    job["is_parallel"] = form == "p-eagle"
    if form == "other":
        job["settings"] = {"disable_hybrid_kv_cache_manager": True}  # one layer has a window, and one has none
    assert dict(describe_engines(Eagle3ForSpeculation.from_pretrained(draft)))["vLLM"].startswith("takes it as it is")
    expected = ours(target, draft, prompts, **tree(depth))
    assert_same(run_engine(python_of("vllm"), "vllm", max_new_tokens=MAX_NEW_TOKENS, **job), expected)


def test_models_of_vllm(python_of, tmp_path):
    """They compute what others stored in another format, once it is saved again. `run_vllm_models.py` says how they run."""
    generator, expected, job = torch.Generator().manual_seed(0), {}, []
    forms = plain.FORMS | {"fused": ({}, {}), "old names of norms": ({"fc_norm": True}, {"fc_norm": True})}
    for form, (changes, options) in forms.items():
        config, tensors = {**plain.BASE, **changes}, plain.make_tensors(**options)
        stored = {"fused": plain.fuse, "old names of norms": plain.with_old_names}.get(form, dict)(tensors)
        draft = Eagle3ForSpeculation.from_pretrained(write(tmp_path / "stored", config, stored))
        target = make_target("llama", num_hidden_layers=12, hidden_size=draft.config.target_hidden_size)
        target.save_pretrained(tmp_path / form / "target")
        make_tokenizer().save_pretrained(tmp_path / form / "target")
        draft.pair_with(target)
        draft.save_pretrained(tmp_path / form / "draft")
        aux = torch.randn(12, tensors["fc.weight"].shape[1], generator=generator)
        embeds = torch.randn(12, plain.WIDTH, generator=generator)
        reference = plain.PlainDraft(config, tensors)
        rows = [
            reference(token, reference.fuse(states), i)
            for i, (token, states) in enumerate(zip(embeds.double(), aux.double()))
        ]
        expected[form] = [torch.stack(part).float() for part in zip(*rows)]
        folders = {name: tmp_path / form / name for name in ("target", "draft")}
        job.append(folders | {"aux": aux.tolist(), "embeds": embeds.tolist()})
    found = run_engine(python_of("vllm"), "vllm_models", drafts=job)
    for form, of_form in zip(forms, found["drafts"], strict=True):
        for ours, theirs in zip(expected[form], (of_form["logits"], of_form["states"]), strict=True):
            torch.testing.assert_close(torch.tensor(theirs), ours, atol=2e-5, rtol=2e-5, msg=form)
        # vLLM takes the target's table, and gives later layers a norm that they do not use.
        assert all("embed_tokens" in name or "hidden_norm" in name for name in of_form["unfilled"]), form


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


OF_LLAMA_CPP = {
    "linear": {"rope_parameters": LINEAR, "eagle_aux_hidden_state_layer_ids": [0, 3, 5]},
    "llama3": {"rope_parameters": LLAMA3, "head_dim": 48},
    "flags": {"norm_before_fc": True, "norm_before_residual": True, "has_own_embed_tokens": True},
}


@pytest.mark.parametrize("kind", ["classic", "wrong layers", *OF_LLAMA_CPP])
def test_llama_cpp(models, target, target_gguf, prompts, python_of, tmp_path, kind):
    draft = models / "classic" / "draft"
    if kind in OF_LLAMA_CPP:
        draft = with_form(target, draft, tmp_path / kind, **OF_LLAMA_CPP[kind])
    exported = with_wrong_layers(draft, tmp_path / "wrong") if kind == "wrong layers" else draft
    export(Eagle3ForSpeculation.from_pretrained(exported), tmp_path / "gguf", "gguf", target_gguf=target_gguf)
    job = {"target": target_gguf, "draft": tmp_path / "gguf" / "draft.gguf", "prompts": prompts, "num_draft_tokens": 5}
    found = run_engine(python_of("llama_cpp"), "llama_cpp", max_new_tokens=MAX_NEW_TOKENS, **job)
    expected = ours(target, draft, prompts, **tree(5))
    if kind == "wrong layers":
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


OF_OPENVINO = {
    "linear": {"rope_parameters": LINEAR},
    "llama3": {"rope_parameters": LLAMA3, "head_dim": 48},
    "yarn": {"rope_parameters": YARN, "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "hidden_act": "gelu"},
}


@pytest.mark.parametrize("kind", [*TREES, "wrong layers", *OF_OPENVINO])
def test_openvino(models, target, openvino_target, prompts, python_of, tmp_path, kind, monkeypatch):
    """Which trees it draws depends on probabilities, which it takes as the draft says them."""
    monkeypatch.setattr(Calibration, "power", property(lambda self: 1.0, lambda self, power: None), raising=False)
    draft, (shape, settings) = models / "classic" / "draft", TREES.get(kind, TREES["chain"])
    if kind in OF_OPENVINO:
        draft = with_form(target, draft, tmp_path / kind, **OF_OPENVINO[kind])
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


# SGLang ---------------------------------------------------------------------------------------------------------------
# Its engine does not speculate on CPUs, but its models draft there: `run_sglang.py` says how.

OF_SGLANG = {
    "classic": {},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True, "norm_output": True},
    "layers": {"num_hidden_layers": 3, "rope_parameters": YARN},
    "states": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4, 7], "head_dim": 16},
    "vocabulary": {"draft_token_ids": None, "has_own_embed_tokens": True},
}


def make_random(family, **overrides):
    target = make_target(family, num_hidden_layers=8)
    settings = {**FORMS["classic"], "draft_token_ids": range(1, 96, 3), **overrides}
    draft = Eagle3ForSpeculation.from_target(target, **settings).eval()
    for name, parameter in draft.named_parameters():
        if "embed_tokens" not in name:
            parameter.data += torch.randn_like(parameter) * 0.1
    return target, draft


@torch.no_grad()
def drafted(target, draft, prompt, num_draft_tokens):
    """The logits of each step, and the tokens that it drafts."""
    outputs = target(torch.tensor([prompt]), output_hidden_states=True)
    aux = aux_hidden_states(outputs, draft.resolve_aux_layer_ids(target), target.config.num_hidden_layers)
    tokens = torch.tensor([[*prompt[1:], outputs.logits[0, -1].argmax()]])
    draft.borrow_embeddings(target)
    states, cache, logits, drafted = draft.combine_hidden_states(aux), DynamicCache(), [], []
    for _ in range(num_draft_tokens + 1):
        output = draft(tokens, states, cache=cache)
        tokens, states = draft.draft_token_ids[output.logits[:, -1:].argmax(-1)], output.last_hidden_state[:, -1:]
        logits.append(output.logits[0])
        drafted.append(tokens.item())
    return logits, drafted[:-1]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("form", OF_SGLANG)
def test_sglang(python_of, tmp_path, form, family):
    if form != "classic" and family != "llama":
        pytest.skip("one form for each family")
    target, draft = make_random(family, **OF_SGLANG[form])
    target.save_pretrained(tmp_path / "target")
    export(draft, tmp_path / "draft", "sglang")
    prompts = [[3, 5, 7, 9, 11, 13, 40, 2], [50, 60, 70, 1, 2, 3]]
    job = {"target": tmp_path / "target", "draft": tmp_path / "draft", "prompts": prompts, "num_draft_tokens": 4}
    found = run_engine(python_of("sglang"), "sglang", **job)
    assert set(found["ignored"]) <= {"t2d"}
    assert found["unfilled"] == ([] if draft.config.has_own_embed_tokens else ["model.embed_tokens.weight"])
    for prompt, logits, tokens in zip(prompts, found["logits"], found["tokens"]):
        expected, expected_tokens = drafted(target, draft, prompt, job["num_draft_tokens"])
        assert tokens == expected_tokens
        for ours, theirs in zip(expected, logits, strict=True):
            torch.testing.assert_close(torch.tensor(theirs), ours, atol=1e-5, rtol=1e-5)
    draft.config.eagle_aux_hidden_state_layer_ids[0] += 1
    assert not torch.allclose(
        drafted(target, draft, prompts[0], 0)[0][0], torch.tensor(found["logits"][0][0]), atol=0.1
    )


def test_layers_that_sglang_captures(python_of, tmp_path):
    """Of all classes of targets, without those that ask a model within."""
    target, draft = make_random("llama")
    target.save_pretrained(tmp_path / "target")
    export(draft, tmp_path / "draft", "sglang")
    written = [[1, 5, 8], [2, 5, 8], [3, 6, 9], [0, 5, 8]]
    job = {"target": tmp_path / "target", "draft": tmp_path / "draft", "prompts": [], "layer_ids": written}
    captured = run_engine(python_of("sglang"), "sglang", **job)["captured"]
    assert {"LlamaForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"} <= captured.keys()
    for name, of_written in captured.items():
        if None in of_written or name.endswith(("Eagle", "Eagle3", "MTP", "NextN")):  # the latter are drafts
            continue
        draft.config.speculators_config["verifier"]["architectures"] = [name]
        for layer_ids in ([2, 6, 9], [3, 6, 9], [1, 6, 9]):
            draft.config.eagle_aux_hidden_state_layer_ids = layer_ids
            if layer_ids not in of_written:
                with pytest.raises(ValueError, match="adds one to ids that begin with 1"):
                    sglang.write(draft)
                continue
            config, _ = sglang.write(draft)
            ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
            assert of_written[written.index(ids)] == layer_ids, name


# What they would leave out without a word -----------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["gguf", "openvino", "safeailab"])
def test_what_is_refused(models, tmp_path, to):
    draft = Eagle3ForSpeculation.from_pretrained(models / "eagle3.1" / "draft")
    with pytest.raises(ValueError, match="fc_norm.*norm_output.*draft_form=.classic."):
        export(draft, tmp_path / to, to)
    assert not (tmp_path / to).exists()
