"""Block drafts: the network and its published layouts, the tree of one pass, and what is read of the text."""

import heapq
import json
import math
from types import SimpleNamespace

import pytest
import torch
from block_checkpoints import (
    BLOCK,
    MASK,
    SPECULATORS_CONFIG,
    ZLAB_CONFIG,
    naive_logits,
    save_by_speculators,
    speculators_config,
    states_of,
    write_checkpoint,
)
from conftest import (
    BLOCK_DRAFTS,
    assert_an_oracle_gives_the_text,
    assert_same_text,
    generate,
    make_baseline,
    make_batch,
    make_prompt,
    make_target,
)
from safetensors.torch import load_file, save_file
from trainers import make_trainer
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.baselines import DFlashConfig, DFlashForSpeculation, block_tree
from hf_eagle3.baselines.block_tree import grow_block_tree, grow_markov_tree
from hf_eagle3.baselines.dflash import BlockProposer, spread_layer_ids
from hf_eagle3.remote_code.modeling_eagle3 import Eagle3RotaryEmbedding
from hf_eagle3.remote_code.policy_eagle3 import Calibration
from hf_eagle3.remote_code.tree_eagle3 import GenerationCall, Plan, Prices
from hf_eagle3.tokenizer import load_tokenizer


# JetSpec has the same layout, and says that its block is causal. Later drafts of z-lab have windows, all in `dflash_config`.
JETSPEC_CONFIG = {**ZLAB_CONFIG, "dflash_config": {**ZLAB_CONFIG["dflash_config"], "causal_head": True}}
WINDOWED_CONFIG = {
    **{key: value for key, value in ZLAB_CONFIG.items() if key not in ("block_size", "rope_scaling", "rope_theta")},
    "dflash_config": {
        **ZLAB_CONFIG["dflash_config"],
        "block_size": BLOCK,
        "final_logit_softcapping": 20.0,
        "input_embedding_scale": 2.0,
        "output_multiplier": 0.5,
    },
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": 4,
    "use_sliding_window": True,
}
# Model-Optimizer says in `dflash_config` that all layers have windows, which are as long as a block or longer.
MODELOPT_CONFIG = {
    **ZLAB_CONFIG,
    "dflash_config": {**ZLAB_CONFIG["dflash_config"], "causal": False, "use_swa": True, "swa_window_size": BLOCK},
    "sliding_window": BLOCK,
}
CONFIGS = {"z-lab": ZLAB_CONFIG, "jetspec": JETSPEC_CONFIG, "windowed": WINDOWED_CONFIG}
SETTINGS = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


def open_spec_config(config, first=1, **changes):
    """The Open Spec Config that later versions of `speculators` write instead of a `config.json` of theirs."""
    names = ("draft_vocab_size", "mask_token_id", "sample_from_anchor", "sliding_window_non_causal")
    settings = {
        "method": "dflash",
        "speculative_tokens": config["block_size"] - 1,
        "target_layer_ids": [id_ - 1 + first for id_ in config["aux_hidden_state_layer_ids"]],
        "target_layer_start_idx": first,
        "training_framework": "vllm-project/speculators",
        "training_framework_version": "0.10.0",
        "verifier": config["speculators_config"]["verifier"]["name_or_path"],
        **{name: config[name] for name in names},
    }
    return {
        **config["transformer_layer_config"],
        "architectures": ["DflashDraftModel"],
        "dtype": "float32",
        "open_spec_config_version": "0.0.0",
        "speculative_config": {**settings, **changes},
        "speculators_metadata": {
            "auto_map": {"": "config.DFlashSpeculatorConfig"},
            "speculators_version": "0.10.0",
            "transformers_version": "5.24.0",
            "verifier_architectures": ["LlamaForCausalLM"],
        },
        "target_hidden_size": None,
    }


@pytest.mark.parametrize("kind", list(CONFIGS))
@torch.no_grad()
def test_published_layouts(tmp_path, kind):
    """The network is the papers', by a slow and naive reference, and the text is the target's."""
    target, tokens = make_target("llama"), make_prompt(9, batch_size=2)
    folder = write_checkpoint(tmp_path / "draft", CONFIGS[kind])
    draft = AutoModel.from_pretrained(folder).eval()
    assert type(draft) is DFlashForSpeculation and type(AutoConfig.from_pretrained(folder)) is DFlashConfig
    assert draft.resolve_aux_layer_ids(target) == [1, 3] and draft.generation_config.tree_depth == BLOCK - 1
    draft.validate_target(target)
    aux = states_of(target, draft, tokens[:, :-1])
    block = torch.nn.functional.pad(tokens[:, -1:], (0, BLOCK - 1), value=MASK)
    draft.borrow_embeddings(target)
    logits = draft(block, draft.combine_hidden_states(aux)).logits
    how = {"jetspec": {"is_causal": (True, True)}, "z-lab": {}}.get(
        kind, {"is_causal": (True, False), "windows": (4, None), "scale": 2.0}
    )
    weights = load_file(folder / "model.safetensors")
    for row in range(2):
        expected = naive_logits(weights, target, aux[row], int(tokens[row, -1]), **how)
        if kind == "windowed":
            expected = 20 * (expected * 0.5 / 20).tanh()
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)
    for batch in (make_batch([9]), make_batch([12, 5, 17])):
        assert_same_text(target, draft, batch)


@pytest.mark.parametrize(
    ("changes", "is_causal"),
    [
        ({}, False),
        ({"dflash_config": {**MODELOPT_CONFIG["dflash_config"], "causal": True}}, True),
        # Nothing says so: vLLM takes the types of the layers.
        ({"dflash_config": {**MODELOPT_CONFIG["dflash_config"], "causal": None}}, False),
        (
            {
                "dflash_config": {**MODELOPT_CONFIG["dflash_config"], "causal": None, "swa_window_size": None},
                "layer_types": ["sliding_attention"] * 2,
            },
            True,
        ),
    ],
)
@torch.no_grad()
def test_windows_of_all_layers(tmp_path, changes, is_causal):
    target, tokens = make_target("llama"), make_prompt(9)
    folder = write_checkpoint(tmp_path / "draft", {**MODELOPT_CONFIG, **changes})
    draft = AutoModel.from_pretrained(folder).eval()
    draft.save_pretrained(tmp_path / "saved")
    aux = states_of(target, draft, tokens[:, :-1])
    block = torch.nn.functional.pad(tokens[:, -1:], (0, BLOCK - 1), value=MASK)
    weights, how = load_file(folder / "model.safetensors"), {"is_causal": (is_causal,) * 2, "windows": (BLOCK,) * 2}
    expected = naive_logits(weights, target, aux[0], int(tokens[0, -1]), **how)
    for each in (draft, AutoModel.from_pretrained(tmp_path / "saved").eval()):
        each.borrow_embeddings(target)
        logits = each(block, each.combine_hidden_states(aux)).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "causal", "is_causal", "window"),
    [
        ({"use_swa": True, "swa_window_size": 5}, None, (True, False), 5),
        ({"use_swa": True, "swa_window_size": 5}, False, (False, False), 5),
        ({"use_swa": True}, None, (True, False), 4),
        ({"swa_window_size": 5}, False, (False, False), 5),
        ({"use_swa": False, "swa_window_size": 5}, None, (True, False), 5),
    ],
)
def test_windows_of_some_layers(tmp_path, keys, causal, is_causal, window):
    """As in vLLM, types of layers that name windows come first, and the size of the windows is `swa_window_size` if there is one."""
    config = {**ZLAB_CONFIG, "layer_types": ["sliding_attention", "full_attention"]}
    config["dflash_config"] = {**config["dflash_config"], "causal": causal, **keys}
    for size in (4, None) if window == 5 else (4,):
        config |= {"sliding_window": size, "use_sliding_window": size is not None}
        draft = AutoModel.from_pretrained(write_checkpoint(tmp_path / "draft", config))
        draft.save_pretrained(tmp_path / "saved")
        for each in (draft, AutoModel.from_pretrained(tmp_path / "saved")):
            layer_config = each.config.transformer_layer_config
            assert layer_config.layer_types == config["layer_types"] and layer_config.sliding_window == window
            assert tuple(map(each.config.is_causal_in, layer_config.layer_types)) == is_causal


@pytest.mark.parametrize(("key", "model_type"), [("rope_scaling", "qwen3"), ("rope_parameters", "llama")])
def test_the_original_length_beside_the_rotary_embedding(tmp_path, key, model_type):
    """The frequencies are those of transformers' Qwen3."""
    yarn, original = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}, {"original_max_position_embeddings": 64}
    config = {**ZLAB_CONFIG, "head_dim": 32, "rope_theta": 1e4, "model_type": model_type, key: yarn, **original}
    read = AutoConfig.from_pretrained(write_checkpoint(tmp_path, config)).transformer_layer_config
    names = ("head_dim", "max_position_embeddings", "hidden_size", "num_attention_heads")
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(rope_parameters=dict(yarn), **original, **{name: config[name] for name in names})
    )
    assert Eagle3RotaryEmbedding(read).inv_freq.equal(theirs.inv_freq)
    other = Qwen3RotaryEmbedding(Qwen3Config(rope_parameters=dict(yarn), **{name: config[name] for name in names}))
    assert not theirs.inv_freq.equal(other.inv_freq)
    config[key] = {**yarn, "original_max_position_embeddings": 128}
    with pytest.raises(ValueError, match="is 64 in config.json, but 128 in its"):
        AutoConfig.from_pretrained(write_checkpoint(tmp_path, config))


@pytest.mark.parametrize(
    ("config", "how", "has_own"),
    [
        (speculators_config(), {}, True),
        (speculators_config(windows=[0]), {"is_causal": (True, False), "windows": (4, None)}, False),
        (speculators_config(windows=[0, 1]), {"is_causal": (True, True), "windows": (4, 4)}, True),
        (speculators_config(windows=[0], sliding_window_non_causal=True), {"windows": (4, None)}, False),
        # A newer version, with Domino's keys in each draft.
        (speculators_config(projector_type="dflash", emb_dim=256, shift_label=False, max_anchors=512), {}, False),
    ],
)
@torch.no_grad()
def test_the_layout_of_speculators(tmp_path, config, how, has_own):
    """Layer ids count inputs, and a draft with fewer tokens than the target has its own head."""
    target, tokens, generator = make_target("llama"), make_prompt(9, batch_size=2), torch.Generator().manual_seed(2)
    own = {}
    if has_own:
        token_ids = torch.arange(1, 81, 2)
        own = {"d2t": token_ids - torch.arange(40), "t2d": torch.isin(torch.arange(96), token_ids)}
        own["lm_head.weight"] = torch.randn(40, 32, generator=generator)
        own["embed_tokens.weight"] = target.get_input_embeddings().weight + 0  # as older versions save
        own["verifier_norm.weight"] = torch.randn(32, generator=generator)
        config = {**config, "draft_vocab_size": 40}
    folder = write_checkpoint(tmp_path / "draft", config, **own)
    draft = AutoModel.from_pretrained(folder).eval()
    assert type(draft) is DFlashForSpeculation and type(AutoConfig.from_pretrained(folder)) is DFlashConfig
    assert draft.resolve_aux_layer_ids(target) == [1, 3] and draft.generation_config.tree_depth == BLOCK - 1
    shallow = AutoModel.from_pretrained(folder, generation_config=GenerationConfig(tree_depth=1))
    assert shallow.generation_config.tree_depth == 1
    assert draft.config.verifier == "me/Target" and draft.config.has_own_embed_tokens == has_own
    draft.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["dflash_config"]["target_layer_ids"] == [0, 2]
    aux = states_of(target, draft, tokens[:, :-1])
    block = torch.nn.functional.pad(tokens[:, -1:], (0, BLOCK - 1), value=MASK)
    weights = load_file(folder / "model.safetensors")
    expected = [
        naive_logits(weights, target, aux[row], int(tokens[row, -1]), of_speculators=True, **how) for row in range(2)
    ]
    drafts = (draft, AutoModel.from_pretrained(tmp_path / "saved").eval())
    for each, batch in zip(drafts, (make_batch([9]), make_batch([12, 5, 17]))):
        each.validate_target(target)
        each.borrow_embeddings(target)
        logits = each(block, each.combine_hidden_states(aux)).logits
        torch.testing.assert_close(logits, torch.stack(expected), atol=1e-4, rtol=1e-4)
        if has_own:
            assert each.draft_token_ids.equal(token_ids) and each.lm_head.weight.equal(own["lm_head.weight"])
        assert assert_same_text(target, each, batch).drafted_lengths


def test_training_saves_a_head_of_the_draft_s_own(tmp_path, tokenizer):
    """In the precision of the target, for which the trainer copies the draft."""
    target, head = make_target("llama").bfloat16(), torch.randn(96, 32, generator=torch.Generator().manual_seed(2))
    folder = write_checkpoint(tmp_path / "draft", SPECULATORS_CONFIG, **{"lm_head.weight": head})
    settings = {"model": AutoModel.from_pretrained(folder), "max_steps": 1, "ttt_steps": 3, "ttt_warmup": 0}
    trainer = make_trainer(tmp_path / "run", tokenizer, target=target, **settings)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModel.from_pretrained(tmp_path / "saved")
    assert loaded.dtype == torch.bfloat16 and torch.equal(loaded.lm_head.weight, head.bfloat16())


@torch.no_grad()
def test_each_step_has_the_windows_of_speculators(tmp_path, monkeypatch):
    """The decoder's masks, with a cache and a longer text than the windows."""
    target = make_target("llama")
    draft = AutoModel.from_pretrained(write_checkpoint(tmp_path, speculators_config(windows=[0, 1]))).eval()
    draft.generation_config.tree_policy, draft.generation_config.output_steps = "static", True
    draft.borrow_embeddings(target)
    text, seen, forward = make_prompt(9)[0], [], draft.forward
    monkeypatch.setattr(draft, "forward", lambda **kwargs: seen.append(forward(**kwargs)) or seen[-1])
    target.generate(text[None], **SETTINGS, assistant_model=draft)
    steps = draft.last_generation.steps
    assert len(seen) == sum(step.source == "draft" for step in steps) > 10
    weights = load_file(tmp_path / "model.safetensors")
    how = {"is_causal": (True, True), "windows": (4, 4), "of_speculators": True}
    for step in steps:
        if step.source == "draft":
            aux = states_of(target, draft, text[None, :-1])[0]
            expected, logits = naive_logits(weights, target, aux, int(text[-1]), **how), seen.pop(0).logits[0]
            torch.testing.assert_close(logits, expected[1 : 1 + len(logits)], atol=1e-4, rtol=1e-4)
        text = torch.cat([text, torch.tensor(step.new_tokens[0])])


@torch.no_grad()
def test_the_network_is_that_of_speculators(tmp_path, monkeypatch):
    """What `speculators` saves and computes, where it is installed."""
    core = pytest.importorskip("speculators.models.dflash.core")
    target, tokens = make_target("llama"), make_prompt(20)
    theirs = save_by_speculators(tmp_path, core.DFlashDraftModel, speculators_config(windows=[0]), target)
    draft = AutoModel.from_pretrained(tmp_path / "draft").eval()
    draft.borrow_embeddings(target)
    aux = states_of(target, draft, tokens)
    for anchor in (3, 12):
        chosen = torch.tensor([anchor]), torch.tensor([True])
        monkeypatch.setattr(core, "select_anchors", lambda *args: chosen)  # noqa: B023
        documents = torch.zeros_like(tokens)
        expected = theirs._backbone_forward(
            aux, tokens, torch.ones(tokens.shape), aux[..., :32], documents, max_anchors=1
        )[1]
        block = torch.nn.functional.pad(tokens[:, anchor : anchor + 1], (0, BLOCK - 1), value=MASK)
        logits = draft(block, draft.combine_hidden_states(aux[:, :anchor])).logits
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_network_is_that_of_transformers():
    """Which has it under another name, in newer versions."""
    assistant = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")
    from transformers import MuseGlimmerAssistantConfig

    target = make_target("llama")
    draft = make_baseline("dflash", target)
    layer_config = draft.config.transformer_layer_config.to_dict()
    keys = MuseGlimmerAssistantConfig().to_dict().keys() & layer_config.keys() - {"model_type", "sliding_window"}
    config = MuseGlimmerAssistantConfig(
        **{key: layer_config[key] for key in keys}, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=[0, 2]
    )
    theirs = assistant.MuseGlimmerAssistantModel(config).eval()
    names = {"encoder.fc": "fc", "encoder.output_norm_enc": "hidden_norm"}
    own = draft.state_dict()

    def of_draft(name):
        prefix = next((each for each in names if name.startswith(each + ".")), None)
        return own[name if prefix is None else name.replace(prefix, names[prefix])]

    theirs.load_state_dict({name: of_draft(name) for name in theirs.state_dict()})
    aux, embeds = torch.randn(2, 9, draft.fc.in_features), torch.randn(2, BLOCK, 32)
    ours = draft(inputs_embeds=embeds, hidden_states=draft.combine_hidden_states(aux)).last_hidden_state
    positions = torch.arange(9 + BLOCK)[None]
    expected = theirs(noise_embeds=embeds, context_hidden_states=aux, position_ids=positions).last_hidden_state
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", list(BLOCK_DRAFTS))
@torch.no_grad()
def test_a_cache_and_padding_change_nothing(method):
    target = make_target("llama")
    draft = make_baseline(method, target)
    draft.borrow_embeddings(target)
    context, block = torch.randn(2, 9, 32), make_prompt(BLOCK, batch_size=2)
    expected = draft(block, context).logits
    outputs = draft(block, context[:, :5])
    outputs.cache.crop(-BLOCK)
    torch.testing.assert_close(draft(block, context[:, 5:], cache=outputs.cache).logits, expected)
    rows = torch.tensor([1, 4])
    kept = draft(block, context, logits_to_keep=rows).logits
    torch.testing.assert_close(kept, expected[:, rows])
    torch.testing.assert_close(draft(block, context, logits_to_keep=2).logits, expected[:, -2:])
    padded = torch.cat([torch.full((2, 3, 32), 1e3), context], dim=1)
    mask = (torch.arange(3 + 9 + BLOCK) >= 3).long().expand(2, -1)
    positions = (torch.arange(3 + 9 + BLOCK) - 3).clamp(min=0).expand(2, -1)
    torch.testing.assert_close(draft(block, padded, attention_mask=mask, position_ids=positions).logits, expected)
    changed = block.clone()
    changed[:, -1] += 1
    changes = (draft(changed, context).logits != expected).any(-1).any(0)
    assert changes.tolist() == ([False] * (BLOCK - 1) + [True] if method == "jetspec" else [True] * BLOCK)
    with pytest.raises(ValueError, match="one of `input_ids` and `inputs_embeds`"):
        draft(hidden_states=context)


# The tree ---------------------------------------------------------------------------------------------------------


def naive_tree(log_probs, num_nodes, width):
    """A heap of paths (DDTree): always the most probable one that may be added. Returns paths by tokens."""
    log_probs, best = log_probs.tolist(), log_probs.argsort(dim=-1, descending=True).tolist()
    heap = [(-log_probs[0][best[0][rank]], (best[0][rank],)) for rank in range(width)]
    heapq.heapify(heap)
    paths = []
    while heap and len(paths) < num_nodes:
        value, path = heapq.heappop(heap)
        paths.append(path)
        if len(path) < len(log_probs):
            level = len(path)
            for token in best[level][:width]:
                heapq.heappush(heap, (value - log_probs[level][token], (*path, token)))
    return set(paths)


def paths_of(tokens, parents):
    paths = [()]
    for token, parent in zip(tokens[1:], parents[1:]):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize(
    ("depth", "num_nodes", "width"), [(5, 24, 8), (3, 40, 3), (15, 64, 24), (1, 4, 9), (7, 12, 1), (4, 200, 2)]
)
def test_the_best_paths(depth, num_nodes, width):
    generator = torch.Generator().manual_seed(depth)
    logits = torch.randn(3, depth, 24, generator=generator) * torch.tensor([0.3, 2.0, 8.0])[:, None, None]
    tree = grow_block_tree(torch.full((3, 1), 7), logits, None, Plan("draft", depth, num_nodes, width))
    log_probs = logits.log_softmax(-1)
    for row in range(3):
        paths = paths_of(tree.tokens[row].tolist(), tree.parents[row].tolist())
        assert len(set(paths)) == len(paths) and set(paths) == naive_tree(log_probs[row], num_nodes, width)
        said = [log_probs[row, len(path) - 1, path[-1]] for path in paths]
        torch.testing.assert_close(tree.confidences[row], torch.stack(said))
        assert tree.depths[row, 1:].tolist() == [len(path) for path in paths]
    if width == 1:
        assert tree.parents.tolist() == [[0, *range(depth)]] * 3


def test_thresholds_and_prices():
    root, plan = torch.tensor([[7]]), Plan("draft", 3, 24, 8)
    logits = torch.tensor([[[0.6, 0.3, 0.1], [0.8, 0.1, 0.1], [0.5, 0.4, 0.1]]]).log()

    def sizes(**changes):
        threshold = changes.pop("threshold", 0.0)
        return grow_block_tree(root, logits, None, plan._replace(**changes), threshold).num_nodes - 1

    assert sizes(threshold=0.2) == 5  # 0.6, 0.48, 0.3, 0.24, 0.24
    prices = [0.25 * num for num in range(25)]
    # 0.6 and 0.48 and 0.3 bring more than they cost. Levels cost nothing, whatever their price.
    assert sizes(prices=Prices(100.0, prices, [True])) == 3
    assert sizes(prices=Prices(0.0, [float(num) for num in range(25)], [True])) == 0
    assert sizes(prices=Prices(0.0, [float(num) for num in range(25)], [True], must_verify=True)) == 1
    assert sizes(num_nodes=1) == 1


def test_rows_that_do_not_hold_up_the_batch_are_worth_nothing():
    sure, unsure = torch.tensor([[9.0, 0, 0]] * 3), torch.zeros(3, 3)
    logits, prices = torch.stack([sure, unsure]), [0.5 * num for num in range(25)]
    for rows, expected in (([True, False], 3), ([False, True], 0)):
        plan = Plan("draft", 3, 24, 8, Prices(0.0, prices, rows))
        assert grow_block_tree(torch.zeros(2, 1, dtype=torch.long), logits, None, plan).num_nodes == 1 + expected


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_draft_gets_a_tree(broken):
    logits = torch.randn(2, 4, 12)
    logits[0, 1] = broken
    tree = grow_block_tree(torch.zeros(2, 1, dtype=torch.long), logits, None, Plan("draft", 4, 20, 4))
    assert tree.num_nodes == 21 and (tree.parents < torch.arange(21).clamp(min=1)).all()
    assert set(paths_of(tree.tokens[1].tolist(), tree.parents[1].tolist())) == naive_tree(
        logits[1].log_softmax(-1), 20, 4
    )


# Decoding ---------------------------------------------------------------------------------------------------------


def make_talker(method, target, lengths, num_tokens):
    """A draft whose vocabulary is what the target says most often, so that some of it is accepted."""
    said = target.generate(**make_batch(lengths), **SETTINGS)[:, max(lengths) :]
    tokens, counts = said.unique(return_counts=True)
    draft = make_baseline(method, target, draft_token_ids=tokens[counts.argsort(descending=True)[:num_tokens]])
    draft.generation_config.update(tree_policy="static", num_assistant_tokens=40)
    draft.generation_config.output_steps = True
    return draft


@pytest.mark.parametrize(
    ("method", "family"), [("dflash", "llama"), ("dspark", "llama"), ("jetspec", "qwen3_5"), ("dspark", "qwen3_5")]
)
@torch.no_grad()
def test_each_tree_is_that_of_the_text_so_far(monkeypatch, method, family):
    """In a batch of which rows advance at their own pace: by one pass of the draft over all states of one row."""
    monkeypatch.setattr(Calibration, "RATE", 0.0)
    target = make_target(family, seed=int(family != "llama"))
    # Trees, and chains, which rows take in step.
    lengths, num_tokens, width = ([12, 5, 17], 5, 8) if family == "llama" else ([9], 3, 1)
    draft = make_talker(method, target, lengths, num_tokens)
    draft.borrow_embeddings(target)
    batch, padding = make_batch(lengths), [max(lengths) - length for length in lengths]
    target.generate(**batch, **SETTINGS, assistant_model=draft)
    rows = [prompt[pad:] for prompt, pad in zip(batch["input_ids"], padding)]
    num_trees = num_accepted = 0
    for step in draft.last_generation.steps:
        for i, row in enumerate(step.rows):
            text, tree = rows[row], (step.tokens[i], step.parents[i])
            if step.source == "draft" and len(text) < lengths[row] + SETTINGS["max_new_tokens"]:
                block = torch.nn.functional.pad(text[None, -1:], (0, BLOCK - 1), value=MASK)
                context = draft.combine_hidden_states(states_of(target, draft, text[None, :-1]))
                depth = len(set(map(len, paths_of(*tree))))
                of_levels = draft.config.first_row + torch.arange(depth)
                logits = draft(block, context, logits_to_keep=of_levels).logits
                plan, ids = Plan("draft", depth, len(tree[0]) - 1, width), draft.draft_token_ids
                if draft.markov_head is None:
                    expected = grow_block_tree(text[None, -1:], 2.0 * logits, ids, plan)
                else:
                    expected = grow_markov_tree(text[None, -1:], logits, draft.markov_head, ids, plan, power=2.0)
                expected = set(paths_of(expected.tokens[0].tolist(), expected.parents[0].tolist()))
                assert set(paths_of(*tree)) == expected
                num_trees, num_accepted = num_trees + 1, num_accepted + len(step.accepted[i])
            rows[row] = torch.cat([text, torch.tensor(step.new_tokens[i])])
    assert num_trees > 10 and num_accepted > 3


@torch.no_grad()
def test_a_row_that_waits_leaves_the_others_alone():
    """It is near the end of a static cache while another one has much to read."""
    target = make_target("llama")
    draft, plan = make_baseline("dflash", target), Plan("draft", 3, 12, 3)
    call = GenerationCall(target, target.get_input_embeddings(), plan, 0.0, Calibration(1.0), 20)
    both, alone = draft.proposer(call), draft.proposer(call)
    states = torch.randn(2, 28, draft.fc.in_features)
    trees = []
    for rows, proposer in (([0, 1], both), ([1], alone)):
        for begin, counts in ((0, [16, 4]), (16, [0, 12])):
            length, counts = max(counts), [counts[row] for row in rows]
            positions = torch.arange(begin, begin + length).expand(len(rows), -1)
            part = states[rows, begin : begin + length]
            proposer.observe(SimpleNamespace(tokens=positions, states=part, positions=positions, counts=counts))
            tree = proposer.propose(plan, torch.full((len(rows), 1), 7))
        trees.append(tree)
    assert torch.equal(trees[0].tokens[1:], trees[1].tokens) and torch.equal(trees[0].parents[1:], trees[1].parents)
    torch.testing.assert_close(trees[0].confidences[1:], trees[1].confidences)


@torch.no_grad()
def test_one_pass_a_step():
    target, prompt = make_target("llama"), make_prompt(9)
    draft, calls = make_baseline("dflash", target), []
    draft.generation_config.tree_policy = "static"
    draft.register_forward_hook(lambda *args: calls.append(1))
    for depth in (1, 3, 5, 20):
        calls.clear()
        draft.generation_config.tree_depth = depth
        target.generate(prompt, **SETTINGS, assistant_model=draft)
        assert len(calls) == draft.last_generation.target_forwards - 1 - draft.last_generation.plain_steps


@pytest.mark.parametrize(
    ("method", "do_sample"), [("dflash", True), ("jetspec", False), ("dspark", False), ("dspark", True)]
)
def test_what_knows_the_text_is_accepted(method, do_sample):
    settings = {"method": method, "do_sample": do_sample, "max_new_tokens": 40}
    draft = assert_an_oracle_gives_the_text(make_target("llama"), make_batch([12, 5, 17]), **settings)
    assert draft.last_generation.acceptance_length > 2.5


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_a_draft_guesses_by_the_same_noise(monkeypatch, method):
    """Of the target's own distribution, the most probable guess is the very sample."""
    monkeypatch.setattr(block_tree, "NUM_CANDIDATES", 90)  # in another order than the vocabulary
    target, prompt = make_target("llama"), make_prompt(9)
    draft = make_baseline(method, target)
    if draft.markov_head is not None:
        torch.nn.init.zeros_(draft.markov_head.markov_w2.weight)
    draft.generation_config.update(tree_policy="static", num_assistant_tokens=1, tree_depth=1)
    settings = {**SETTINGS, "do_sample": True, "temperature": 1.5, "max_new_tokens": 30}
    tokens = prompt

    class Knowing(DFlashForSpeculation):
        def forward(self, *args, logits_to_keep, **kwargs):
            outputs = super().forward(*args, logits_to_keep=logits_to_keep, **kwargs)
            length = int(kwargs["position_ids"][0, 0]) + 1
            outputs.logits = target(tokens[:, :length]).logits[:, -1:].expand_as(outputs.logits)
            return outputs

    tokens = generate(target, prompt, **settings)
    draft.__class__ = Knowing
    assert assert_same_text(target, draft, prompt, **settings).acceptance_length == pytest.approx(2, abs=0.1)


def test_states_that_nothing_has_asked_for_are_dropped(monkeypatch):
    """A text that is decoded plainly for long: what is left is context with a gap."""
    monkeypatch.setattr(BlockProposer, "MAX_UNREAD", 3)
    target, batch = make_target("llama"), make_batch([12, 5])
    draft = make_baseline("dflash", target)
    kept = []
    monkeypatch.setattr(
        "hf_eagle3.remote_code.policy_eagle3.DraftingTrial.take_plain_step",
        lambda self: len(kept) < 12 and not kept.append(1),
    )
    stats = assert_same_text(target, draft, batch, max_new_tokens=40)
    assert stats.drafted_lengths and stats.plain_steps >= 12


# Saving, loading, and what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_what_is_saved_is_the_layout_that_was_read(tmp_path, kind):
    folder = write_checkpoint(tmp_path / "draft", CONFIGS[kind])
    draft, target = DFlashForSpeculation.from_pretrained(folder), make_target("llama")
    for pair in (lambda: None, lambda: draft.pair_with(target)):
        pair()
        draft.save_pretrained(tmp_path / "saved")
        saved, ours = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "saved", folder))
        assert saved["architectures"] == ["DFlashDraftModel"] and saved["model_type"] == "qwen3"
        assert saved["dflash_config"].items() >= ours["dflash_config"].items() and "auto_map" not in saved
        qwen = Qwen3Config().to_dict().keys() - {"tie_word_embeddings", "transformers_version", "use_cache"}
        assert all(saved[key] == ours[key] for key in ours.keys() & saved.keys() & qwen if key != "max_window_layers")
        weights, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "saved", folder))
        assert weights.keys() == expected.keys() and all(each.equal(expected[name]) for name, each in weights.items())
        loaded = AutoModel.from_pretrained(tmp_path / "saved")
        for name in (
            "block_size",
            "mask_token_id",
            "is_causal",
            "eagle_aux_hidden_state_layer_ids",
            "output_multiplier",
        ):
            assert getattr(loaded.config, name) == getattr(draft.config, name)
        assert loaded.config.verifier_fingerprint == draft.config.verifier_fingerprint
        assert loaded.config.transformer_layer_config.layer_types == draft.config.transformer_layer_config.layer_types
    assert not list((tmp_path / "saved").rglob("*.py"))
    with pytest.raises(ValueError, match="trained for another model"):
        make_target("llama", seed=1).generate(make_prompt(5), assistant_model=loaded)
    broken = load_file(tmp_path / "saved" / "model.safetensors")
    broken["fc.weight"][0, 0] += 1
    save_file(broken, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not those that were saved"):
        AutoModel.from_pretrained(tmp_path / "saved")


def test_files_of_an_earlier_draft_do_not_stay(tmp_path):
    """Neither a file beside shards, nor an index beside a file, nor code of older versions."""
    (tmp_path / "slots_eagle3.py").write_text("# SPDX-License-Identifier: Apache-2.0\n")
    (tmp_path / "my_eagle3.py").write_text("# SPDX-License-Identifier: Apache-2.0\n")
    target = make_target("llama")
    draft = make_baseline("dflash", target)
    for size in ("50GB", "20KB", "50GB"):
        draft.fc.weight.data += 1
        draft.save_pretrained(tmp_path, max_shard_size=size)
        assert torch.equal(AutoModel.from_pretrained(tmp_path).fc.weight, draft.fc.weight)
        assert (tmp_path / "model.safetensors").exists() == (size == "50GB")
        assert (tmp_path / "model.safetensors.index.json").exists() == (size != "50GB")
    assert [path.name for path in tmp_path.glob("*.py")] == ["my_eagle3.py"]


def test_a_draft_that_could_not_be_loaded_again_is_not_saved(tmp_path):
    draft = make_baseline("dflash", make_target("llama"))
    draft.config.mask_token_id = 96
    with pytest.raises(ValueError, match="could not be loaded again.*`mask_token_id` is 96"):
        draft.save_pretrained(tmp_path / "draft")
    draft.fc.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"\['fc.weight'\] of this draft have values that are NaN or infinite"):
        draft.save_pretrained(tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def test_a_draft_vocabulary_is_saved(tmp_path):
    target = make_target("llama")
    draft = make_baseline("dflash", target, draft_token_ids=range(5, 50))
    draft.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded.draft_token_ids, torch.arange(5, 50))
    assert_same_text(target, loaded, make_prompt(9))
    assert torch.equal(loaded.lm_head.weight, target.lm_head.weight[5:50])


OF_TARGETS = {
    "llama": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 16},
    "qwen3_vl_text": {"rope_scaling": {"mrope_section": [2, 1, 1], "rope_type": "default", "mrope_interleaved": True}},
    "qwen2_5_vl_text": {"rope_scaling": {"mrope_section": [2, 1, 1], "type": "mrope"}},
}


@pytest.mark.parametrize("model_type", OF_TARGETS)
def test_the_configuration_of_a_target(tmp_path, model_type):
    """SpecForge makes the draft's of it. The tensors show Qwen3's layers, whatever it says."""
    expected = DFlashForSpeculation.from_pretrained(write_checkpoint(tmp_path / "qwen3", ZLAB_CONFIG))
    config = {**ZLAB_CONFIG, **OF_TARGETS[model_type], "model_type": model_type}
    folder = write_checkpoint(tmp_path / "draft", config)
    for loader in (AutoModel, DFlashForSpeculation):
        draft = loader.from_pretrained(folder)
        assert type(draft) is DFlashForSpeculation and draft.config.eagle_aux_hidden_state_layer_ids == [1, 3]
        tensors = draft.state_dict()
        assert all(tensors[name].equal(tensor) for name, tensor in expected.state_dict().items())
        assert draft.rotary_emb.inv_freq.equal(expected.rotary_emb.inv_freq)
    refusals = (
        ({"head_dim": None, "rope_theta": None}, r"lacks \['head_dim', 'rope_theta'\]"),
        ({"attn_output_gate": True}, "attn_output_gate"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "these drafts rotate whole heads"),
        ({"use_rope": False}, "use_rope"),
    )
    for changes, message in refusals if model_type == "llama" else ():
        with pytest.raises(ValueError, match=message):
            AutoModel.from_pretrained(write_checkpoint(tmp_path / "broken", {**config, **changes}))


@pytest.mark.parametrize("loader", [AutoModel, AutoModelForCausalLM])
def test_layers_of_another_kind_are_no_random_model(tmp_path, loader):
    config = {**ZLAB_CONFIG, "model_type": "llama"}
    for name, shape in (
        ("self_attn.g_proj.weight", (4, 32)),
        ("self_attn.q_proj.bias", (32,)),
        ("mlp.experts.w", (1,)),
    ):
        folder = write_checkpoint(tmp_path / "draft", config, **{f"layers.0.{name}": torch.zeros(shape)})
        with pytest.raises(ValueError, match=f"layers of 'llama', .* differ in .'{name}'.*such as vLLM"):
            loader.from_pretrained(folder)
    tensors = load_file(write_checkpoint(tmp_path / "draft", ZLAB_CONFIG) / "model.safetensors")
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(prefixed, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    if loader is AutoModel:  # only names differ
        draft = loader.from_pretrained(tmp_path / "draft")
        assert all(draft.state_dict()[name].equal(tensor) for name, tensor in tensors.items())
    else:
        with pytest.raises(ValueError, match="for this kind of AutoModel"):
            loader.from_pretrained(tmp_path / "draft")
    code = "from transformers import LlamaConfig, PreTrainedModel\n\n\nclass DFlashDraftModel(PreTrainedModel):\n"
    code += "    config_class = LlamaConfig\n\n    def __init__(self, config):\n        super().__init__(config)\n        self.post_init()\n"
    auto_map = {loader.__name__: "dflash.DFlashDraftModel", "AutoModel": "dflash.DFlashDraftModel"}
    folder = write_checkpoint(tmp_path / "own", {**config, "auto_map": auto_map}, **{"layers.0.g": torch.zeros(1)})
    (folder / "dflash.py").write_text(code)
    theirs = loader.from_pretrained(folder, trust_remote_code=True)
    assert type(theirs).__module__.startswith("transformers_modules.")


@pytest.mark.parametrize(
    "key, value",
    [("attention_mode", "gqa"), ("projector_type", "dflash"), ("num_target_layers", 4), ("is_neox_style", True)],
)
def test_defaults_that_are_written_out(tmp_path, key, value):
    config = {**ZLAB_CONFIG, "dflash_config": {**ZLAB_CONFIG["dflash_config"], key: value}}
    assert type(AutoModel.from_pretrained(write_checkpoint(tmp_path / "draft", config))) is DFlashForSpeculation
    if isinstance(value, str):
        config["dflash_config"][key] = "other"
        with pytest.raises(ValueError, match=f"keys that DFlash does not have: .'{key}'"):
            AutoModel.from_pretrained(write_checkpoint(tmp_path / "draft", config))


def test_code_that_is_trusted_is_theirs(tmp_path):
    folder = write_checkpoint(tmp_path / "draft", ZLAB_CONFIG)
    code = "from transformers import Qwen3Config, PreTrainedModel\n\n\nclass DFlashDraftModel(PreTrainedModel):\n"
    code += "    config_class = Qwen3Config\n\n    def __init__(self, config):\n        super().__init__(config)\n        self.post_init()\n"
    (folder / "dflash.py").write_text(code)
    for loader in (AutoModel, AutoModelForCausalLM):  # which would make a random Qwen3 for the second
        theirs = loader.from_pretrained(folder, trust_remote_code=True)
        assert type(theirs).__module__.startswith("transformers_modules.") and type(theirs.config) is Qwen3Config


@pytest.mark.parametrize(
    ("dflash", "depth", "count", "expected"),
    [({}, 36, 5, [1, 9, 17, 25, 33]), ({"target_layer_ids": None}, 28, 2, [1, 25]), (None, 13, 1, [6])],
)
def test_layer_ids_that_are_left_out(tmp_path, said, dflash, depth, count, expected):
    """They are those that trainers take then, for instance [1, 9, 17, 25, 33] of 36 layers."""
    config = {**ZLAB_CONFIG, "layer_types": None, "mask_token_id": MASK}
    config |= {"dflash_config": dflash, "num_hidden_layers": count, "num_target_layers": depth}
    read = AutoConfig.from_pretrained(write_checkpoint(tmp_path, config))
    assert read.eagle_aux_hidden_state_layer_ids == [layer_id + 1 for layer_id in expected]
    assert [text for text in said if f"no `target_layer_ids`. We take the outputs of layers {expected}" in text]


@pytest.mark.parametrize(
    ("depth", "count", "num_states", "expected"),
    [(36, 1, 5, [1, 9, 17, 25, 33]), (5, 2, None, [1, 2])]
    + [(5, 3, None, None), (36, 2, 37, None), (4, 1, None, None), (4, 2, None, None), (2, 2, None, None)],
)
def test_how_many_states_are_spread(tmp_path, depth, count, num_states, expected):
    """verl-SpeCo says how many by `num_context_layers`. Small targets have not enough layers."""
    config = {**ZLAB_CONFIG, "layer_types": None, "dflash_config": {"mask_token_id": MASK}}
    config |= {"num_hidden_layers": count, "num_target_layers": depth, "num_context_layers": num_states}
    folder = write_checkpoint(tmp_path, config)
    if expected is None:
        with pytest.raises(ValueError, match="`target_layer_ids` is None"):
            AutoConfig.from_pretrained(folder)
    else:
        assert AutoConfig.from_pretrained(folder).eagle_aux_hidden_state_layer_ids == [id_ + 1 for id_ in expected]


def test_keys_of_training_and_of_the_target(tmp_path):
    """SpecForge's DTA is another training of the same network. NeMo Automodel copies the target's configuration."""
    config = {**ZLAB_CONFIG, **OF_TARGETS["qwen3_moe"], "decoder_sparse_step": 1, "num_context_layers": 2}
    config["torch_dtype"] = "None"  # Model-Optimizer's
    config["dflash_config"] = {**config["dflash_config"], "training_mode": "vp_drafter", "prefix_weight_base": 0.9}
    assert type(AutoModel.from_pretrained(write_checkpoint(tmp_path, config))) is DFlashForSpeculation


def test_nemo_automodel_s_copy_of_qwen3_5(tmp_path):
    """Its layers are Qwen3's, and rotate whole heads. Only `architectures` says so."""
    expected = AutoModel.from_pretrained(write_checkpoint(tmp_path / "qwen3", ZLAB_CONFIG))
    config = {**AutoConfig.for_model("qwen3_5_moe_text").to_dict(), **ZLAB_CONFIG, "partial_rotary_factor": 0.25}
    config |= {"attn_output_gate": True, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "is_causal": False}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    config["rope_parameters"] |= {"mrope_section": [1, 1, 2], "mrope_interleaved": True}
    assert_refused(write_checkpoint(tmp_path / "other", config), "attn_output_gate.*linear_conv_kernel_dim")
    config["architectures"] = ["Qwen3DFlashDraftModel"]
    for causal in (None, True):  # DFlash and JetSpec
        config["dflash_config"] = {**ZLAB_CONFIG["dflash_config"], "causal": causal}
        draft = AutoModel.from_pretrained(write_checkpoint(tmp_path / "draft", config))
        assert draft.config.is_causal is bool(causal)
        assert draft.rotary_emb.inv_freq.equal(expected.rotary_emb.inv_freq)
        assert all(tensor.equal(expected.state_dict()[name]) for name, tensor in draft.state_dict().items())
        draft.save_pretrained(tmp_path / "saved")
        assert "partial_rotary_factor" not in (tmp_path / "saved" / "config.json").read_text()


def test_names_of_torchspec(tmp_path):
    folder = write_checkpoint(tmp_path, ZLAB_CONFIG)
    expected, tensors = AutoModel.from_pretrained(folder).state_dict(), load_file(folder / "model.safetensors")
    for name, ours in (("context_norm", "hidden_norm"), ("context_proj", "fc"), ("final_norm", "norm")):
        tensors[f"{name}.weight"] = tensors.pop(f"{ours}.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for loader in (AutoModel, DFlashForSpeculation):
        draft = loader.from_pretrained(folder)
        assert type(draft) is DFlashForSpeculation
        assert all(tensor.equal(expected[name]) for name, tensor in draft.state_dict().items())


def assert_refused(folder, message):
    for load in (DFlashForSpeculation.from_pretrained, AutoModel.from_pretrained, AutoConfig.from_pretrained):
        with pytest.raises(ValueError, match=message):
            load(folder)


def test_layer_ids_that_angelslim_repeats(tmp_path):
    folder = write_checkpoint(tmp_path / "draft", {**ZLAB_CONFIG, "aux_hidden_states_layer_ids": [0, 2]})
    assert AutoModel.from_pretrained(folder).config.eagle_aux_hidden_state_layer_ids == [1, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aux_hidden_states_layer_ids": [0, 1]}, "aux_hidden_states_layer_ids"),
        ({"dflash_config": {"mask_token_id": MASK}, "num_target_layers": None}, "`target_layer_ids` is None"),
        ({"dflash_config": {"mask_token_id": MASK}, "num_target_layers": "4"}, "`target_layer_ids` is None"),
        ({"dflash_config": {**ZLAB_CONFIG["dflash_config"], "causal": "off"}}, "`causal` is 'off', but must be true or false"),
        ({"dflash_config": {**ZLAB_CONFIG["dflash_config"], "use_swa": "no"}}, "`use_swa` is 'no', but must be true or false"),
        ({"block_size": None}, "lacks .'block_size'"),
        ({"block_size": None, "rope_parameters": 3}, "lacks .'block_size'"),
        ({"dflash_config": {**ZLAB_CONFIG["dflash_config"], "use_swa": True}}, "there is no `swa_window_size`"),
        *(({"dflash_config": {**ZLAB_CONFIG["dflash_config"], "use_swa": True, "swa_window_size": size}}, f"`swa_window_size` is {size!r}, but must be a positive") for size in (-1, 0, "6")),
        *(({**WINDOWED_CONFIG, "sliding_window": size}, f"`sliding_window` is {size}, but must be a positive") for size in (-1, 0)),
        *(({key: value}, key) for key, value in (("first_token", "next"), ("bonus_token", True), ("target_state_scale", 2.0), ("eagle_config", {"norm_before_fc": True}), ("topk", 4))),
        ({"partial_rotary_factor": 0.25}, "rotate whole heads. Remove it, also within `rope_parameters`"),
        ({"dspine_config": {"transfer_rank": 4}, "architectures": ["DSpineDraftModel"]}, "dspine_config.*'DSpineDraftModel'.*vLLM"),
        ({"dflash_config": {**ZLAB_CONFIG["dflash_config"], "attention_sink_bias": True}}, "attention_sink_bias"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "lacks .'mask_token_id'.. Add what the draft was trained with"),
        ({"dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2]}}, "`mask_token_id` is 96, .* 96 tokens"),
        ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, -2]}}, "must be .* from -1 .the embedding. on"),
        ({"dflash_config": 3}, "`dflash_config` is 3"),
        ({"block_size": 1}, "`block_size` is 1"),
        ({"is_causal": True, "dflash_config": {**JETSPEC_CONFIG["dflash_config"], "causal_head": False}}, "contradict"),
        ({"dflash_config": {**ZLAB_CONFIG["dflash_config"], "selector_rank": 8, "conv_kernel_size": 2}}, "conv_kernel_size.*DFlash 2"),
        ({"use_markov_head": True}, "use_markov_head"),
        ({"xpress_rank": 256}, "xpress_rank"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"num_attention_heads": 3}, "multiple of `num_key_value_heads`"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(tmp_path, changes, message):
    assert_refused(write_checkpoint(tmp_path / "draft", {**ZLAB_CONFIG, **changes}), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({key: None}, f"lacks .'{key}'") for key in ("aux_hidden_state_layer_ids", "block_size", "draft_vocab_size", "mask_token_id")),
        ({"aux_hidden_state_layer_ids": [-1, 3]}, "`aux_hidden_state_layer_ids` is .-1, 3"),
        ({"sample_from_anchor": "yes"}, "`sample_from_anchor` is 'yes', but must be true or false"),
        ({"projector_type": "domino"}, "projector_type.*Domino"),
        ({"shift_label": True}, "shift_label"),
        ({"markov_rank": "256"}, "`markov_rank` of this DSpark draft is '256', but must be a number"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"speculators_model_type": "dflash2"}, "is of 'dflash2'|of the kind 'dflash2'"),
        ({**speculators_config(windows=[1]), "sliding_window_non_causal": None}, "does not say whether the block is causal"),
        ({"transformer_layer_config": {**SPECULATORS_CONFIG["transformer_layer_config"], "model_type": "llama"}}, "has layers of 'qwen3', not of 'llama'"),
        ({"transformer_layer_config": {**SPECULATORS_CONFIG["transformer_layer_config"], "layer_types": ["sliding_attention"] * 2}}, "no window is on"),
        ({"transformer_layer_config": {**SPECULATORS_CONFIG["transformer_layer_config"], "shared_experts": 2}}, "shared_experts"),
    ],
)  # fmt: skip
def test_what_is_not_understood_of_speculators_is_refused(tmp_path, changes, message):
    assert_refused(write_checkpoint(tmp_path / "draft", {**SPECULATORS_CONFIG, **changes}), message)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("windows", [(), (1,)])
def test_open_spec_config(tmp_path, first, windows):
    """It says the same as the `config.json` of older versions of `speculators`."""
    config = speculators_config(windows, sliding_window_non_causal=True)
    expected = AutoModel.from_pretrained(write_checkpoint(tmp_path / "older", config))
    folder = write_checkpoint(tmp_path / "draft", open_spec_config(config, first))
    assert AutoConfig.from_pretrained(folder).eagle_aux_hidden_state_layer_ids == [1, 3]
    for loader in (AutoModel, DFlashForSpeculation):
        draft = loader.from_pretrained(folder)
        others = dict.fromkeys(("_name_or_path", "speculators_config"))
        ours, theirs = ({**each.config.to_dict(), **others} for each in (draft, expected))
        assert type(draft) is DFlashForSpeculation and ours == theirs and draft.config.verifier == "me/Target"
        assert all(tensor.equal(expected.state_dict()[name]) for name, tensor in draft.state_dict().items())
    with pytest.raises(ValueError, match="draft is a draft, not a target"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"open_spec_config_version": "1.0.0"}, {}, "version '1.0.0' of the Open Spec Config, for the method 'dflash'"),
        ({}, {"method": "eagle3"}, "for the method 'eagle3'"),
        ({"speculative_config": ["dflash"]}, {}, "for the method None"),
        ({}, {"mask_token_id": None}, "lacks .'mask_token_id'"),
        ({}, {"block_size": 4}, "keys that DFlash does not have: .'block_size'"),
        ({}, {"target_layer_start_idx": 2}, "`target_layer_start_idx` is 2, but must be 0 or 1"),
        ({}, {"speculative_tokens": "7"}, "`speculative_tokens` is '7', but must be an integer"),
        ({}, {"speculative_tokens": 0}, "`block_size` is 1"),
        ({}, {"target_layer_ids": [-1]}, "`target_layer_ids` is .-1"),
        ({"speculators_metadata": {"markov_rank": 8, "markov_head_type": "rnn"}}, {}, "type 'rnn'"),
        ({"speculators_metadata": [1]}, {}, "speculators_metadata"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, {}, "rotate whole heads"),
        ({"shared_experts": 2}, {}, "shared_experts"),
    ],
)  # fmt: skip
def test_what_is_not_understood_of_an_open_spec_config_is_refused(tmp_path, changes, settings, message):
    config = {**open_spec_config(SPECULATORS_CONFIG, **settings), **changes}
    assert_refused(write_checkpoint(tmp_path / "draft", config), message)


def test_tensors_of_speculators_must_be_complete(tmp_path):
    mapping = {"d2t": torch.arange(40), "t2d": torch.ones(96, dtype=torch.bool)}
    for config, tensors, message in (
        (speculators_config(draft_vocab_size=40), {}, "d2t"),
        (speculators_config(draft_vocab_size=40), mapping, "`t2d` marks other tokens"),
        (speculators_config(), {"lm_head.weight": torch.zeros(40, 32)}, "lm_head.weight"),
        (speculators_config(), {"markov_head.w1": torch.zeros(4)}, "markov_head.w1"),
        (
            speculators_config(markov_rank=4),
            {},
            "Missing: .'markov_head.markov_w1.weight', 'markov_head.markov_w2.weight'",
        ),
        (
            speculators_config(aux_hidden_state_layer_ids=[1, 2, 3]),
            {},
            r"`fc.weight` .* reads 2 of .* 3 layers .the inputs of \[1, 2, 3\]",
        ),
        (speculators_config(target_hidden_size=64), {}, "fc.weight"),
    ):
        folder = write_checkpoint(tmp_path / "draft", config, **tensors)
        with pytest.raises(ValueError, match=message):
            AutoModel.from_pretrained(folder)
    with pytest.raises(ValueError, match="is a block draft .* Load it by `AutoModel.from_pretrained`"):
        Eagle3ForSpeculation.from_pretrained(write_checkpoint(tmp_path / "draft", SPECULATORS_CONFIG))


def test_the_last_state_of_speculators_is_not_normed(tmp_path):
    """z-lab's is."""
    target = make_target("llama")
    speculators = speculators_config(aux_hidden_state_layer_ids=[1, 4])
    z_lab = {**ZLAB_CONFIG, "dflash_config": {**ZLAB_CONFIG["dflash_config"], "target_layer_ids": [0, 3]}}
    for config, expected in ((speculators, True), (z_lab, False)):
        draft = AutoModel.from_pretrained(write_checkpoint(tmp_path, config))
        assert draft.resolve_aux_layer_ids(target) == [1, 4]
        assert draft.reads_after_last_layer(target) is expected


def test_tensors_that_are_not_understood_are_refused(tmp_path):
    adapter = write_checkpoint(tmp_path / "a", ZLAB_CONFIG, **{"hidden_dim_adapter.proj.weight": torch.zeros(32, 16)})
    with pytest.raises(ValueError, match="Unexpected: .'hidden_dim_adapter.proj.weight'"):
        AutoModel.from_pretrained(adapter)
    head = write_checkpoint(tmp_path / "b", ZLAB_CONFIG, **{"lm_head.weight": torch.zeros(96, 32)})
    with pytest.raises(ValueError, match="has a head of its own"):
        AutoModel.from_pretrained(head)
    with pytest.raises(ValueError, match="is a block draft .* Load it by `AutoModel.from_pretrained`"):
        Eagle3ForSpeculation.from_pretrained(write_checkpoint(tmp_path / "c", ZLAB_CONFIG))
    Eagle3ForSpeculation.from_target(make_target("llama")).save_pretrained(tmp_path / "d")
    with pytest.raises(ValueError, match="is (no|not a) dflash draft"):
        DFlashForSpeculation.from_pretrained(tmp_path / "d")


def test_what_a_configuration_must_say():
    target = make_target("llama")
    for overrides, message in (
        ({"model_type": "llama"}, "has layers of 'qwen3', not of 'llama'"),
        ({"block_size": 1}, "must be at least 2"),
        ({"mask_token_id": -1}, "must be one of the target's 96 tokens"),
        ({"static_tree": [[0]]}, "Leave `static_tree` out"),
        ({"fc_norm": True}, "has no .*fc_norm"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "must say which states it reads"),
    ):
        with pytest.raises(ValueError, match=message):
            DFlashForSpeculation.from_target(target, **overrides)


def test_the_embedding_is_before_the_first_layer():
    """In z-lab's code and transformers' DFlash, `k` is `hidden_states[k + 1]`."""
    draft = DFlashForSpeculation.from_target(make_target("llama"), eagle_aux_hidden_state_layer_ids=[0, 2])
    written = draft.config.to_diff_dict()
    assert written["dflash_config"]["target_layer_ids"] == [-1, 1]
    assert DFlashConfig.from_dict(written).eagle_aux_hidden_state_layer_ids == [0, 2]


@pytest.mark.parametrize(
    ("num_layers", "num_states", "expected"),
    [(36, 5, [1, 9, 17, 25, 33]), (28, 1, [14]), (4, 5, [0, 1, 2]), (6, 3, [1, 2, 3]), (2, 5, [0]), (1, 2, [0])],
)
def test_which_states_a_fresh_draft_reads(num_layers, num_states, expected):
    """Of 36 layers, those of z-lab/Qwen3-4B-DFlash-b16."""
    assert spread_layer_ids(num_layers, num_states) == expected


@pytest.mark.parametrize("family", ["gemma2", "cohere2"])
def test_a_fresh_draft_has_the_factors_of_the_target(family):
    target = make_target(family)
    draft = DFlashForSpeculation.from_target(target)
    config = target.config
    assert draft.config.output_multiplier == getattr(config, "logit_scale", 1.0)
    assert draft.lm_head.weight.equal(target.lm_head.weight)  # which the multiplier comes after
    assert draft.config.final_logit_softcapping == getattr(config, "final_logit_softcapping", None)
