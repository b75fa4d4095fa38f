"""DSpark: its published layouts, its Markov head in the tree, and what is refused."""

import json

import pytest
import torch
from block_checkpoints import (
    BLOCK,
    MASK,
    ZLAB_CONFIG,
    naive_logits,
    save_by_speculators,
    speculators_config,
    states_of,
    write_checkpoint,
)
from conftest import (
    assert_same_text,
    each_once,
    features_of,
    generate,
    make_baseline,
    make_batch,
    make_prompt,
    make_target,
)
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, BitsAndBytesConfig

from hf_eagle3.baselines import DFlashConfig, DFlashForSpeculation, block_tree
from hf_eagle3.baselines.block_tree import grow_markov_tree
from hf_eagle3.evaluation.drafts import load_draft, method_of
from hf_eagle3.remote_code.tree_eagle3 import Plan, Prices
from hf_eagle3.training.ttt import draft_loss


RANK = 4
HEADS = {"markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
# As deepseek-ai/dspark_qwen3_4b_block7 and openbmb/MiniCPM5-2B-DSpark: all keys at the top level.
DEEPSPEC_CONFIG = {
    **{key: value for key, value in ZLAB_CONFIG.items() if key not in ("auto_map", "dflash_config")},
    "architectures": ["Qwen3DSparkModel"],
    "mask_token_id": MASK,
    "num_anchors": 512,
    "target_layer_ids": [0, 2],
    "markov_rank": RANK,
    **HEADS,
}
# As SpecForge's `qwen3-8b-dspark.json`, and its newer `qwen3.6-27b-dspark.json`.
SPECFORGE_CONFIG = {
    **ZLAB_CONFIG,
    "architectures": ["DSparkDraftModel"],
    "dflash_config": {
        **ZLAB_CONFIG["dflash_config"],
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        "projector_type": "dspark",
        "markov_rank": RANK,
        **HEADS,
    },
}
NEWER_CONFIG = {
    **SPECFORGE_CONFIG,
    "dflash_config": {**ZLAB_CONFIG["dflash_config"], "projector_type": "dspark"},
    "dspark_config": {"markov_rank": RANK, **HEADS},
}
SPECULATORS = {"architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark", "markov_rank": RANK, **HEADS}
CONFIGS = {
    "deepspec": (DEEPSPEC_CONFIG, True),
    "specforge": (SPECFORGE_CONFIG, True),
    "newer specforge": (NEWER_CONFIG, True),
    "causal": ({**SPECFORGE_CONFIG, "is_causal": True}, True),
    "speculators": (speculators_config(**SPECULATORS, sample_from_anchor=True), True),
    "older speculators": ({k: v for k, v in speculators_config(**SPECULATORS).items() if k != "sample_from_anchor"}, False),
}  # fmt: skip


def heads_of(num_draft_tokens=96, size=32):
    """The tensors that DSpark has beside DFlash's."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"markov_head.markov_w1.weight": (96, RANK), "markov_head.markov_w2.weight": (num_draft_tokens, RANK)}
    shapes |= {"confidence_head.proj.weight": (1, size + RANK), "confidence_head.proj.bias": (1,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def own_head(target, num_tokens=40):
    """A head and a vocabulary of its own, and a copy of the target's table, as DeepSpec saves them."""
    token_ids = torch.arange(1, 1 + 2 * num_tokens, 2)
    tensors = {"d2t": token_ids - torch.arange(num_tokens), "t2d": torch.isin(torch.arange(96), token_ids)}
    tensors["lm_head.weight"] = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(2))
    return {**tensors, "embed_tokens.weight": target.get_input_embeddings().weight.detach().clone()}


@pytest.mark.parametrize(("kind", "has_own"), each_once(CONFIGS, [False, True]))
@torch.no_grad()
def test_published_layouts(tmp_path, kind, has_own):
    """The chain is the paper's, by a slow and naive reference, also after saving, and the text is the target's."""
    target, tokens = make_target("llama"), make_prompt(9)
    config, from_anchor = CONFIGS[kind]
    own = {**own_head(target), **heads_of(40)} if has_own else heads_of()
    config = {**config, "draft_vocab_size": 40} if has_own else config
    folder = write_checkpoint(tmp_path / "draft", config, **own)
    draft = AutoModel.from_pretrained(folder).eval()
    assert type(draft) is type(load_draft(str(folder))) is DFlashForSpeculation and method_of(draft) == "dspark"
    assert type(AutoConfig.from_pretrained(folder)) is DFlashConfig and draft.resolve_aux_layer_ids(target) == [1, 3]
    assert draft.config.num_drafted == draft.generation_config.tree_depth == (BLOCK if from_anchor else BLOCK - 1)

    weights = load_file(folder / "model.safetensors")
    aux, root = states_of(target, draft, tokens[:, :-1])[0], int(tokens[0, -1])
    how = {"is_causal": (True, True)} if kind == "causal" else {}
    of_speculators = "speculators" in kind
    logits = naive_logits(weights, target, aux, root, of_speculators=of_speculators, **how)
    token_ids, token, chain = draft.draft_token_ids, root, []
    for row in logits[0 if from_anchor else 1 :]:
        bias = weights["markov_head.markov_w2.weight"] @ weights["markov_head.markov_w1.weight"][token]
        token = int(token_ids[(row + bias).argmax()])
        chain.append(token)

    draft.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["architectures"] == ["Qwen3DSparkModel"] and saved["sample_from_anchor"] is from_anchor
    assert saved["target_layer_ids"] == [0, 2] and not saved["enable_confidence_head"] and "dflash_config" not in saved
    for each in (draft, AutoModel.from_pretrained(tmp_path / "saved").eval()):
        each.borrow_embeddings(target)
        each.validate_target(target)
        block = torch.nn.functional.pad(tokens[:, -1:], (0, BLOCK - 1), value=MASK)
        rows = each.config.first_row + torch.arange(each.config.num_drafted)
        of_block = each(block, each.combine_hidden_states(aux[None]), logits_to_keep=rows).logits
        plan = Plan("draft", BLOCK, BLOCK, 1)
        tree = grow_markov_tree(tokens[:, -1:], of_block, each.markov_head, each.draft_token_ids, plan)
        assert tree.tokens[0].tolist() == [root, *chain]
    assert_same_text(target, each, make_batch([12, 5, 17]))


@pytest.mark.parametrize("from_anchor", [False, True])
@torch.no_grad()
def test_the_network_is_that_of_speculators(tmp_path, monkeypatch, from_anchor):
    """What `speculators` saves and computes, where it is installed."""
    dspark = pytest.importorskip("speculators.models.dspark")
    target, tokens = make_target("llama"), make_prompt(20)
    content = speculators_config(**SPECULATORS, sample_from_anchor=from_anchor)
    theirs = save_by_speculators(tmp_path, dspark.DSparkDraftModel, content, target)
    draft = AutoModel.from_pretrained(tmp_path / "draft").eval()
    draft.borrow_embeddings(target)
    aux, anchor = states_of(target, draft, tokens), 7
    chosen = torch.tensor([anchor]), torch.tensor([True])
    monkeypatch.setattr("speculators.models.dflash.core.select_anchors", lambda *args: chosen)
    seen = []
    monkeypatch.setattr(
        "speculators.models.dspark.core.compute_metrics", lambda logits, *args, **kwargs: (seen.append(logits), {})
    )
    theirs(aux, tokens, torch.ones(tokens.shape), aux[..., :32], torch.zeros_like(tokens), max_anchors=1)
    block = torch.nn.functional.pad(tokens[:, anchor : anchor + 1], (0, BLOCK - 1), value=MASK)
    rows = draft.config.first_row + torch.arange(draft.config.num_drafted)
    logits = draft(block, draft.combine_hidden_states(aux[:, :anchor]), logits_to_keep=rows).logits
    before = tokens[:, anchor : anchor + draft.config.num_drafted]
    torch.testing.assert_close(logits + draft.markov_head(before), seen[0][:, rows], atol=1e-4, rtol=1e-4)


def test_names_within_a_wrapper(tmp_path):
    folder = write_checkpoint(tmp_path, DEEPSPEC_CONFIG, **heads_of())
    expected, tensors = AutoModel.from_pretrained(folder).state_dict(), load_file(folder / "model.safetensors")
    save_file(
        {f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    draft = AutoModel.from_pretrained(folder)
    assert all(tensor.equal(expected[name]) for name, tensor in draft.state_dict().items())


def test_a_tree_has_the_probabilities_of_its_paths():
    """Each node's is that of its token after its parent's, at its depth."""
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(2, 4, 12, generator=generator), 3 * torch.randn(12, 12, generator=generator)
    roots = torch.tensor([[3], [7]])
    tree = grow_markov_tree(roots, logits, lambda tokens, ids: bias[tokens][..., ids], None, Plan("draft", 9, 30, 3))
    assert int(tree.depths.max()) == 4 and tree.confidences is not None
    for row in range(2):
        nodes = list(zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.depths[row].tolist()))
        assert len({(parent, token) for token, parent, _ in nodes[1:]}) == 30
        for node, (token, parent, depth) in enumerate(nodes[1:]):
            expected = (logits[row, depth - 1] + bias[nodes[parent][0]]).log_softmax(-1)[token]
            torch.testing.assert_close(tree.confidences[row, node], expected)


def test_only_candidates_are_corrected(monkeypatch):
    """They are the most probable tokens of a level before that. The rows of a batch share them."""
    generator, roots, token_ids = torch.Generator().manual_seed(0), torch.tensor([[3], [7]]), torch.arange(1, 37, 3)
    logits, bias = torch.randn(2, 4, 12, generator=generator), 3 * torch.randn(40, 12, generator=generator)
    candidates = logits.log_softmax(-1).amax(0, keepdim=True).topk(6).indices.expand(2, -1, -1)
    others_are_impossible = torch.full_like(logits, -torch.inf).scatter(-1, candidates, logits.gather(-1, candidates))
    trees = []
    for num, each in ((12, others_are_impossible), (3, logits), (12, logits)):
        monkeypatch.setattr(block_tree, "NUM_CANDIDATES", num)
        bias_of, plan = lambda tokens, ids: bias[tokens][..., ids], Plan("draft", 9, 20, 3)
        trees.append(grow_markov_tree(roots, each, bias_of, token_ids, plan))
    expected, tree, whole = trees
    assert tree.tokens.equal(expected.tokens) and tree.parents.equal(expected.parents)
    assert not tree.tokens.equal(whole.tokens)
    torch.testing.assert_close(tree.confidences, expected.confidences)


@pytest.mark.parametrize(("price", "expected"), [(0.1, [0, 1, 1, 1]), (100.0, [0, 1])])
def test_levels_have_a_price(price, expected):
    """They are drafted one by one."""
    logits = torch.zeros(1, 3, 4)
    logits[..., 1] = 9.0
    plan = Plan("draft", 3, 6, 2, Prices(price, [0.5 * num for num in range(7)], [True]))
    tree = grow_markov_tree(torch.tensor([[0]]), logits, lambda tokens, ids: torch.zeros(1, 1, 4), None, plan)
    assert tree.tokens.tolist() == [expected]
    assert not make_baseline("dspark", make_target("llama")).drafts_in_one_pass


@torch.no_grad()
def test_quantized_weights(tmp_path):
    """They can be saved, and loaded again."""
    pytest.importorskip("bitsandbytes")
    target = make_target("llama")
    make_baseline("dspark", target).save_pretrained(tmp_path / "draft")
    quantized = AutoModel.from_pretrained(
        tmp_path / "draft", quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    quantized.save_pretrained(tmp_path / "saved")
    loaded = AutoModel.from_pretrained(tmp_path / "saved").eval()
    assert loaded.is_quantized and loaded.fc.weight.equal(quantized.fc.weight)
    assert assert_same_text(target, loaded, make_batch([9, 5])).drafted_lengths


def test_another_vocabulary_begins_anew():
    target = make_target("llama")
    draft = make_baseline("dspark", target, draft_token_ids=range(5, 45))
    before = draft.markov_head.markov_w2.weight.clone()
    draft.set_draft_vocabulary(range(50, 90), target)
    assert not (draft.markov_head.markov_w2.weight == before).any()


@pytest.mark.parametrize("options", [{}, {"sampled_vocab_size": 8}])
@pytest.mark.parametrize(("method", "head"), [("dspark", "markov_head.markov_w2"), ("p-eagle", "lm_head")])
def test_adapters_of_heads_learn(method, head, options):
    """Also where the loss takes some tokens of the vocabulary."""
    target = make_target("llama")
    draft = make_baseline(method, target)
    draft.borrow_embeddings(target)
    batch = features_of(target, draft, make_prompt(12, batch_size=2))
    get_peft_model(draft, LoraConfig(target_modules=[head, "fc"]))
    draft_loss(draft, batch, BLOCK, **options).loss_sums.sum().backward()
    learned = [name for name, weight in draft.named_parameters() if weight.grad is not None and weight.grad.any()]
    assert {name.split(".lora_B")[0] for name in learned if "lora_B" in name} == {head, "fc"}


@pytest.mark.parametrize("is_sorted", [False, True])
@torch.no_grad()
def test_other_orders_and_fewer_tokens(tmp_path, is_sorted):
    """The Markov head goes with the head."""
    target, tensors = make_target("llama"), {**own_head(make_target("llama")), **heads_of(40)}
    expected = AutoModel.from_pretrained(
        write_checkpoint(tmp_path / "a", {**DEEPSPEC_CONFIG, "draft_vocab_size": 40}, **tensors)
    )
    order = torch.arange(40) if is_sorted else torch.randperm(40, generator=torch.Generator().manual_seed(0))
    token_ids = (tensors["d2t"] + torch.arange(40))[order]
    tensors["d2t"] = token_ids - torch.arange(40)
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        tensors[name] = tensors[name][order].contiguous()
    draft = AutoModel.from_pretrained(
        write_checkpoint(tmp_path / "b", {**DEEPSPEC_CONFIG, "draft_vocab_size": 40}, **tensors)
    )
    for name, tensor in expected.state_dict().items():
        assert tensor.equal(draft.state_dict()[name]), name

    kept = expected.draft_token_ids[::3]
    draft.trim_draft_vocabulary(kept)
    assert draft.markov_head.markov_w2.weight.equal(expected.markov_head.markov_w2.weight[::3])
    assert draft.lm_head.weight.equal(expected.lm_head.weight[::3])
    draft.save_pretrained(tmp_path / "c")
    assert_same_text(target, AutoModel.from_pretrained(tmp_path / "c").eval(), make_batch([9, 5]))


@torch.no_grad()
def test_tokens_added_to_the_target_later():
    """The draft neither knows nor proposes them."""
    target = make_target("llama")
    draft = make_baseline("dspark", target)
    target.resize_token_embeddings(100)
    target.lm_head.weight.data[96:] *= 30  # the text has them
    draft.generation_config.tree_policy = "static"
    settings = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    assert assert_same_text(target, draft, make_batch([9, 5]), **settings).plain_steps < 5
    assert (generate(target, make_batch([9, 5]), **settings) >= 96).any()


@pytest.mark.parametrize(
    ("config", "num_drafted"),
    [
        ({**ZLAB_CONFIG, "markov_rank": 0}, BLOCK - 1),
        ({**ZLAB_CONFIG, "dflash_config": {**ZLAB_CONFIG["dflash_config"], "markov_rank": None}}, BLOCK - 1),
        ({**ZLAB_CONFIG, "sample_from_anchor": True}, BLOCK),
        ({**DEEPSPEC_CONFIG, "markov_rank": 0, "dspark_bonus_anchor": True}, BLOCK - 1),
        ({**DEEPSPEC_CONFIG, "markov_rank": 0, "dspark_bonus_anchor": False}, BLOCK),
        ({**DEEPSPEC_CONFIG, "markov_rank": 0, "markov_head_type": None, "enable_confidence_head": False}, BLOCK),
    ],
)
def test_where_a_block_begins_to_draft(tmp_path, config, num_drafted):
    """DFlash behind the known token, unless its configuration says otherwise, as DeepSpec's."""
    draft = AutoModel.from_pretrained(write_checkpoint(tmp_path, config)).eval()
    assert draft.markov_head is None and draft.config.num_drafted == num_drafted
    assert_same_text(make_target("llama"), draft, make_batch([9, 5]), max_new_tokens=8)


@pytest.mark.parametrize("changes", [{"mask_token_id": 4}, {"target_layer_ids": [0, 1]}, {"is_causal": True}])
def test_a_saved_configuration_that_was_changed(tmp_path, changes):
    make_baseline("dspark", make_target("llama")).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, **changes}))
    with pytest.raises(ValueError, match="This config.json is not what was saved"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_rank": None}, "`markov_rank` of this DSpark draft is None"),
        ({"markov_rank": -1}, "`markov_rank` is -1"),
        *(({"markov_head_type": kind}, f"Markov head of the type '{kind}'") for kind in ("gated", "rnn")),
        ({"sample_from_anchor": 2}, "`sample_from_anchor` is 2, but must be true or false"),
        ({"dspark_bonus_anchor": "no"}, "`dspark_bonus_anchor` is 'no', but must be true or false"),
        (
            {"dspark_bonus_anchor": True, "sample_from_anchor": True},
            "sample_from_anchor, dspark_bonus_anchor contradict",
        ),
        ({"dspark_config": [4]}, "`dspark_config` is .4., but must be a mapping"),
        ({"log_snr_conditioning": True}, "log_snr_conditioning"),
        ({"mask_token_id": None}, "lacks .'mask_token_id'"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, changes, message):
    folder = write_checkpoint(tmp_path, {**DEEPSPEC_CONFIG, **changes}, **heads_of())
    for load in (DFlashForSpeculation.from_pretrained, AutoModel.from_pretrained, AutoConfig.from_pretrained):
        with pytest.raises(ValueError, match=message):
            load(folder)


def test_heads_that_are_missing_or_of_another_size(tmp_path):
    for tensors, message in (
        ({}, "Missing: .'markov_head.markov_w1.weight', 'markov_head.markov_w2.weight'"),
        ({**heads_of(), "markov_head.gate_proj.weight": torch.zeros(4, 36)}, "Unexpected: .'markov_head.gate_proj.weight'"),
        ({**heads_of(), "markov_head.markov_w2.weight": torch.zeros(80, 4)}, "markov_w2.weight"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            AutoModel.from_pretrained(write_checkpoint(tmp_path, DEEPSPEC_CONFIG, **tensors))
