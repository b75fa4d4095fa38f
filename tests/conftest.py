"""Tiny random targets of every family, and drafts that get tokens accepted without training."""

import functools
import gc
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import random
import runpy
import string
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
gc.disable()  # imports and collection make little garbage of much that stays

import accelerate.utils.imports  # noqa: E402
import huggingface_hub.constants  # noqa: E402
import huggingface_hub.hf_api  # noqa: E402
import jinja2  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from forked import run_in_two  # noqa: E402
from huggingface_hub import RepoCard  # noqa: E402
from loopback_hub import VALIDATES_CARDS_HERE, serve_hub  # noqa: E402
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    CONFIG_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.integrations.sdpa_attention import repeat_kv  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask  # noqa: E402
from transformers.utils import hub as transformers_hub  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from hf_eagle3 import Eagle3ForSpeculation  # noqa: E402
from hf_eagle3.baselines import DFlashForSpeculation  # noqa: E402
from hf_eagle3.remote_code.lookup_eagle3 import TextIndex  # noqa: E402
from hf_eagle3.remote_code.policy_eagle3 import Policy  # noqa: E402
from hf_eagle3.remote_code.verify_eagle3 import Verifier  # noqa: E402
from hf_eagle3.training.ttt import TTTBatch, documents_of  # noqa: E402


gc.enable()

# Looked up anew for each trainer, and compiled anew for each card.
accelerate.utils.imports._is_package_available = functools.cache(accelerate.utils.imports._is_package_available)
jinja2.Environment.compile = functools.lru_cache(jinja2.Environment.compile)
for device in (torch.cuda, torch.xpu):
    if not device.is_available():  # it keeps a traceback of each `torch.manual_seed`
        device.manual_seed_all = lambda seed: None


def pytest_collection():
    gc.disable()


def pytest_collection_finish():
    gc.freeze()  # what is imported stays: collections need not look at it again and again
    gc.enable()


ROOT = Path(__file__).parents[1]
RECIPES, EXPERIMENTS = ROOT / "recipes", ROOT / "experiments"
VOCAB_SIZE = 96
WINDOW = 16

BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA4 = {**ALTERNATING, "sliding_window": WINDOW, "global_head_dim": 16, "hidden_size_per_layer_input": 8}
GEMMA4 |= {"vocab_size_per_layer_input": VOCAB_SIZE}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

# Name: (model type, changes to BASE). Windows and chunks of 16 tokens, shorter than the longest prompts of the tests.
FAMILIES = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("qwen3", {}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", MOE),
    "mixtral-window": ("mixtral", {**MOE, "sliding_window": WINDOW}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "norm_topk_prob": True}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-window": ("phi3", {"sliding_window": WINDOW}),
    "gpt_oss": ("gpt_oss", {**MOE, **ALTERNATING, **ROPE, "sliding_window": WINDOW}),
    "gemma2": ("gemma2", {**ALTERNATING, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**ALTERNATING, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gemma4": ("gemma4_text", {**GEMMA4, "num_kv_shared_layers": 0}),
    "gemma4-shared-kv": ("gemma4_text", {**GEMMA4, "num_kv_shared_layers": 2}),
    "llama4": (
        "llama4_text",
        {
            **MOE,
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 0, 1],
            "floor_scale": 8192,
            "attn_scale": 0.5,
            "attn_temperature_tuning": True,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {**MOE, **LATENT, **ROUTED, "q_lora_rank": 16}),
    "glm4_moe": ("glm4_moe", {**MOE, **ROUTED}),
    "olmo3": ("olmo3", {**ALTERNATING, "sliding_window": WINDOW}),
    "cohere2": ("cohere2", {**ALTERNATING, "sliding_window": WINDOW}),
}

# Of these only the text is compared with that of plain `generate`.
MORE_FAMILIES = {
    "afmoe": ("afmoe", {**MOE, **ALTERNATING, "sliding_window": WINDOW, "num_dense_layers": 1}),
    "apertus": ("apertus", {}),
    "cohere": ("cohere", {}),
    "deepseek_v2": ("deepseek_v2", {**MOE, **LATENT, **ROUTED, "q_lora_rank": 16}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5_moe", MOE),
    "exaone4": ("exaone4", {**ALTERNATING, "sliding_window": WINDOW}),
    "gemma": ("gemma", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4_moe_lite": ("glm4_moe_lite", {**MOE, **LATENT, **ROUTED, "q_lora_rank": 16}),
    "gpt_neox": ("gpt_neox", {}),
    "granite": ("granite", {}),
    "granitemoe": ("granitemoe", MOE),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**MOE, "moe_topk": 2}),
    "minimax_m2": ("minimax_m2", MOE),
    "ministral": ("ministral", {**ALTERNATING, "sliding_window": WINDOW}),
    "nemotron": ("nemotron", {}),
    "olmo2": ("olmo2", {}),
    "olmoe": ("olmoe", MOE),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": ("phi", {}),
    "phimoe": ("phimoe", {**MOE, "sliding_window": WINDOW}),
    "qwen2_moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 16}),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {}),
    "solar_open": ("solar_open", {**MOE, **ROUTED}),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
}
# Older transformers (5.17) know fewer.
MORE_FAMILIES = {name: (kind, changes) for name, (kind, changes) in MORE_FAMILIES.items() if kind in CONFIG_MAPPING}

# Smaller weights: these amplify what is rounded otherwise.
DELTA_RULE = {
    "initializer_range": 0.1,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"initializer_range": 0.1, "mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_heads": 8, "mamba_chunk_size": 8}

# With states that are not keys and values: those of convolutions, which can be cropped, and recurrent ones, which
# cannot.
CONVOLUTIONAL = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "inkling": (  # several convolutions in each layer, beside its keys
        "inkling_text",
        {
            **MOE,
            "layer_types": ["hybrid_sliding", "hybrid"] * 2,
            "sliding_window_size": WINDOW,
            "rel_extent": 12,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "logits_mup_width_multiplier": 1.0,
        },
    ),
}
CONVOLUTIONAL = {name: (kind, changes) for name, (kind, changes) in CONVOLUTIONAL.items() if kind in CONFIG_MAPPING}
# Which of equal scores of the index are chosen depends on the shape. With few heads many are exactly 0. So are all of a
# padding token's, whose embedding is 0.
SPARSE = {"q_lora_rank": 16, "index_topk": 16, "index_n_heads": 16, "index_head_dim": 16, "pad_token_id": None}
INDEXED = {
    kind: (kind, {**MOE, **LATENT, **ROUTED, **SPARSE})
    for kind in ("deepseek_v32", "glm_moe_dsa", "axk2")
    if kind in CONFIG_MAPPING
}
RECURRENT = {
    "qwen3_next": ("qwen3_next", {**MOE, **DELTA_RULE, "shared_expert_intermediate_size": 16}),
    "qwen3_5": ("qwen3_5_text", DELTA_RULE),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**MOE, **DELTA_RULE, "shared_expert_intermediate_size": 16}),
    "kimi_linear": ("kimi_linear", {**MOE, **LATENT, **DELTA_RULE, "linear_head_dim": 8, "linear_num_heads": 4}),
    "bailing_hybrid": ("bailing_hybrid", {**MOE, **LATENT, **DELTA_RULE, "n_group": 1, "topk_group": 1}),
    "olmo_hybrid": ("olmo_hybrid", DELTA_RULE),
    "falcon_h1": ("falcon_h1", {**MAMBA, "initializer_range": 0.3, "mamba_d_ssm": 64}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**MOE, **MAMBA, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 16},
    ),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1, 3]}),
    "lara_mini": (
        "lara_mini",
        {
            **DELTA_RULE,
            "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
            "sliding_window": WINDOW,
        },
    ),
}
# Older transformers (5.17) know fewer.
RECURRENT = {name: (kind, changes) for name, (kind, changes) in RECURRENT.items() if kind in CONFIG_MAPPING}


def make_target(family: str, seed: int = 0, **changes):
    """A random target in fp32. Weights are large, so that its text is neither constant nor full of near ties."""
    model_type, family_changes = (FAMILIES | MORE_FAMILIES | CONVOLUTIONAL | INDEXED | RECURRENT)[family]
    config = AutoConfig.for_model(model_type, **{**BASE, **family_changes, **changes})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def save_with_code(target, folder):
    """Saves a Llama with classes of its own, which run only with `trust_remote_code`."""
    target.save_pretrained(folder)
    (folder / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    auto_map = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mine", "auto_map": auto_map}))


def make_gpt2(**changes):
    """A random target that looks positions up in a table."""
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 6, "n_positions": 128, "vocab_size": VOCAB_SIZE}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    others = {"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model("gpt2", **{**sizes, **dropout, **others, **changes})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def causal_only(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs):
    """As flash attention: causal from the right, with padding by a mask of two dimensions or none; no tree."""
    assert attention_mask is None or attention_mask.dim() == 2
    causal_only.seen.append(query.shape[2])
    key, value = (repeat_kv(states, module.num_key_value_groups) for states in (key, value))
    num_queries, num_keys = query.shape[2], key.shape[2]
    distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    allowed = (distance >= 0) & (distance < (sliding_window or num_keys + 1))
    if attention_mask is not None:
        allowed = allowed & attention_mask[:, None, None, -num_keys:].bool()
    allowed = allowed | (distance == 0)  # rows of padding
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=scaling)
    return output.transpose(1, 2), None


causal_only.seen = []  # how many queries each forward of a layer had
AttentionInterface.register("causal_only", causal_only)
AttentionMaskInterface.register("causal_only", flash_attention_mask)


def each_once(*choices):
    """
    Parameters of a test: as many cases as the longest of `choices` has, so that each value is in one of them. Any of them
    may meet any other one in `fuzz.py`.
    """
    return list(zip(*(itertools.islice(itertools.cycle(values), max(map(len, choices))) for values in choices)))


def make_prompt(length: int, seed: int = 0, batch_size: int = 1) -> torch.LongTensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (batch_size, length), generator=generator)


SAID = {}  # by targets, prompts and lengths


def tokens_said(target, prompt, max_new_tokens: int) -> torch.LongTensor:
    """What a target says. Most tests make the same few targets, so it is remembered by their weights."""
    weights = hashlib.blake2b(digest_size=16)
    for weight in target.state_dict().values():
        weights.update(weight.detach().flatten().view(torch.uint8).numpy())
    settings = target.config.to_json_string(), target.config._attn_implementation, max_new_tokens
    key = type(target), weights.digest(), *settings, *prompt[0].tolist()
    if key not in SAID:
        SAID[key] = target.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False)[0, prompt.shape[1] :]
    return SAID[key]


def make_draft(target, prompts, num_tokens: int = 6, max_new_tokens: int = 24, seed: int = 0, **overrides):
    """
    An untrained draft that proposes only the tokens the target says most often: some get accepted. Its trees are shallow,
    since hardly any deeper node is. `make_oracle` makes drafts that draw deep ones.
    """
    said = torch.cat([tokens_said(target, prompt, max_new_tokens) for prompt in prompts])
    tokens, counts = said.unique(return_counts=True)
    torch.manual_seed(seed)
    draft = Eagle3ForSpeculation.from_target(
        target, draft_token_ids=tokens[counts.argsort(descending=True)[:num_tokens]], **overrides
    )
    # Not what is fastest here, but the same each time.
    draft.generation_config.update(tree_policy="static", tree_depth=4)
    return draft.eval()


def files_in(folder: Path) -> dict[str, bytes]:
    """The contents of all files in a folder, by their names relative to it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@contextmanager
def default_dtype(dtype):
    """New tensors have another dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_batch(lengths, seed: int = 0) -> dict[str, torch.LongTensor]:
    """Prompts of several lengths, padded on the left."""
    prompts = [make_prompt(length, seed + row) for row, length in enumerate(lengths)]
    padded = [torch.nn.functional.pad(prompt, (max(lengths) - prompt.shape[1], 0)) for prompt in prompts]
    mask = [torch.arange(max(lengths))[None] >= max(lengths) - length for length in lengths]
    return {"input_ids": torch.cat(padded), "attention_mask": torch.cat(mask).long()}


def generate(target, inputs, seed: int = 0, **settings):
    """What a target makes of a prompt or a batch: 18 greedy tokens, unless the settings say otherwise."""
    torch.manual_seed(seed)
    prompt, batch = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    return target.generate(*prompt, **batch, **{"max_new_tokens": 18, "do_sample": False, **settings})


def assert_same_text(target, draft, inputs, seed: int = 0, ours=None, **settings):
    """
    A draft changes neither the text nor what is sampled next. The settings `ours` are of the call with the draft alone, whose
    statistics are returned.
    """
    expected = generate(target, inputs, seed, **settings)
    state = torch.get_rng_state()
    actual = generate(target, inputs, seed, assistant_model=draft, **settings, **(ours or {}))
    actual, expected = (getattr(output, "sequences", output) for output in (actual, expected))
    assert actual.tolist() == expected.tolist() and torch.equal(torch.get_rng_state(), state)
    return draft.last_generation


def assert_not_loaded(folder, reason, error=ValueError, **kwargs):
    """Neither our class nor `AutoModel` takes a checkpoint."""
    for loader in (Eagle3ForSpeculation, AutoModel):
        with pytest.raises(error, match=reason):
            loader.from_pretrained(folder, **kwargs)


@pytest.fixture
def said():
    """What was said by transformers' loggers."""

    class Handler(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    texts, handler = [], Handler()
    type(transformers_logging.get_logger()).warning_once.cache_clear()
    transformers_logging.add_handler(handler)
    yield texts
    transformers_logging.remove_handler(handler)


@pytest.fixture(scope="session")
def target():
    return make_target("llama")


@pytest.fixture(scope="session")
def draft(target):
    return make_draft(target, [make_prompt(5), make_prompt(40)])


class Oracle:
    """Knows a text and is unsure of it: it favours each next token by a random amount."""

    def favour(self, outputs, predicted):
        """Favours the tokens at positions `(B, Q)`, which the rows of logits predict."""
        predicted = predicted + self.padding[self.rows]
        known = self.text[self.rows].gather(1, predicted.clamp(max=self.text.shape[1] - 1))
        favour = torch.rand(known.shape, generator=self.generator) * 30
        outputs.logits = outputs.logits.scatter_add(-1, known[..., None], favour[..., None].to(outputs.logits.dtype))
        return outputs

    def find_rows(self, positions, inputs_embeds):
        """Which rows of the text these are, by the token they say last. Rows leave the batch when they are finished."""
        num_rows = len(inputs_embeds)
        if num_rows > len(self.rows):  # a call begins
            self.rows = list(range(len(self.text)))
        if num_rows == len(self.rows):
            return
        candidates, self.rows = list(self.rows), []
        for i in range(num_rows):
            most = len(candidates) - (num_rows - i)  # which may have left
            said = [
                self.text[row, min(positions[i] + 1 + self.padding[row], self.text.shape[1] - 1)] for row in candidates
            ]
            agrees = [torch.equal(self.table[token], inputs_embeds[i]) for token in said[: most + 1]]
            index = agrees.index(True) if any(agrees) else most
            self.rows.append(candidates[index])
            candidates = candidates[index + 1 :]


class OracleDraft(Oracle, Eagle3ForSpeculation):
    def forward(self, *args, position_ids, inputs_embeds, **kwargs):
        outputs = super().forward(*args, position_ids=position_ids, inputs_embeds=inputs_embeds, **kwargs)
        self.find_rows(position_ids[:, -1:], inputs_embeds[:, -1])
        return self.favour(outputs, position_ids[:, -outputs.logits.shape[1] :] + 2)


class OracleBlockDraft(Oracle, DFlashForSpeculation):
    def forward(self, *args, position_ids, inputs_embeds, logits_to_keep, **kwargs):
        outputs = super().forward(
            *args, position_ids=position_ids, inputs_embeds=inputs_embeds, logits_to_keep=logits_to_keep, **kwargs
        )
        self.find_rows(position_ids[:, :1] - 1, inputs_embeds[:, 0])
        return self.favour(outputs, position_ids[:, logits_to_keep] + self.config.sample_from_anchor)


@pytest.fixture
def verified(monkeypatch):
    """The trees that targets verified, roots alone among them."""
    trees, verify = [], Verifier.verify

    def noting(self, tree, text):
        trees.append(tree)
        return verify(self, tree, text)

    monkeypatch.setattr(Verifier, "verify", noting)
    return trees


@pytest.fixture
def warned():
    """What is said by the logger of drafts."""
    said, logger = [], logging.getLogger("transformers.eagle3")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def make_oracle(target, text, seed=0, padding=0, method="eagle3"):
    """
    A draft for `target` that has seen `text` of shape `(batch_size, length)`, so that whole branches are accepted.
    Rows begin with `padding` tokens of padding, `(batch_size, 1)`. Of EAGLE-3, or of a block draft's method.
    """
    torch.manual_seed(seed)
    is_block = method in BLOCK_DRAFTS
    draft = make_block_draft(method, target) if is_block else Eagle3ForSpeculation.from_target(target).eval()
    draft.generation_config.tree_policy = "static"
    draft.__class__ = OracleBlockDraft if is_block else OracleDraft
    draft.text, draft.generator, draft.rows = text, torch.Generator().manual_seed(seed), []
    draft.padding = torch.as_tensor(padding).expand(len(text), 1)
    draft.table = target.get_input_embeddings().weight.detach()
    return draft


def oracle_of(target, inputs, seed: int = 0, method: str = "eagle3", text=None, **settings):
    """A draft that has seen what a target makes of a prompt or a batch, or another `text`: see [`make_oracle`]."""
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    padding = 0 if mask is None else (1 - mask).sum(dim=1, keepdim=True)
    text = generate(target, inputs, seed, **settings) if text is None else text
    state = torch.get_rng_state()
    oracle = make_oracle(target, text, seed, padding, method)
    oracle.state = state  # of the generator, after the text
    return oracle


def assert_gives_its_text(oracle, target, inputs, seed: int = 0, ours=None, **settings):
    """[`assert_same_text`] for a draft that [`oracle_of`] made of the same call, which is not repeated."""
    actual = generate(target, inputs, seed, assistant_model=oracle, **settings, **(ours or {}))
    assert actual.tolist() == oracle.text.tolist() and torch.equal(torch.get_rng_state(), oracle.state)
    return oracle.last_generation


def assert_an_oracle_gives_the_text(target, inputs, seed: int = 0, method: str = "eagle3", ours=None, **settings):
    """[`assert_same_text`] for the draft of [`oracle_of`], which is returned."""
    oracle = oracle_of(target, inputs, seed, method, **settings)
    assert_gives_its_text(oracle, target, inputs, seed, ours, **settings)
    return oracle


# Drafts of a whole block, by what of their network differs.
BLOCK_DRAFTS = {"dflash": {}, "jetspec": {"is_causal": True}, "dspark": {"sample_from_anchor": True, "markov_rank": 4}}


def make_block_draft(method, target, **overrides):
    sizes = {"num_hidden_layers": 2, "block_size": 6, "mask_token_id": 3}
    return DFlashForSpeculation.from_target(target, **sizes, **BLOCK_DRAFTS[method], **overrides).eval()


def make_baseline(method, target, **overrides):
    """A draft of another method, with random weights: see `hf_eagle3.baselines`."""
    from hf_eagle3.baselines import BASELINES

    torch.manual_seed(0)
    if method == "p-eagle":
        draft = Eagle3ForSpeculation.from_target(target, mask_token_id="pad", **overrides)
    elif method == "eagle-2":
        draft = BASELINES["eagle"].draft_class.from_target(target, static_tree=None, **overrides)
    elif method in BLOCK_DRAFTS:
        draft = make_block_draft(method, target, **overrides)
    else:
        draft = BASELINES[method].make_draft(target, **overrides)
    for parameter in draft.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    return draft.eval()


@torch.no_grad()
def features_of(target, draft, input_ids):
    """A training batch of one document a row."""
    from hf_eagle3.training.target_states import TargetStates

    aux, last = TargetStates(target, draft.resolve_aux_layer_ids(target))({"input_ids": input_ids})
    logits = target.lm_head(last)
    return TTTBatch(
        input_ids=input_ids,
        aux_hidden_states=aux,
        target_logits=logits[..., draft.draft_token_ids],
        target_mass=logits.softmax(-1)[..., draft.draft_token_ids].sum(-1),
        target_tokens=logits.argmax(-1),
        labels=input_ids,
        documents=documents_of({"input_ids": input_ids}),
        position_ids=torch.arange(input_ids.shape[1]).expand_as(input_ids),
    )


@contextmanager
def lookups_of(text, seed: int = 0, wrong: int = 3):
    """
    Looks up, in about every second step that may do so, a random number of tokens: those of `text`
    `(batch_size, length)`, some of them replaced by a `wrong` one. The rows of a batch are told apart by their texts.
    """
    random_ = random.Random(seed)

    def num_to_look_up(self, num_rows, lookup):
        return random_.randint(0, lookup.num_tokens) if random_.random() < 0.5 else 0

    def next_tokens(self, num_tokens):
        alike = (known for known in text.tolist() if known[: len(self.tokens)] == self.tokens)
        known = next(alike, self.tokens)  # after a near tie none is alike: the test that compares the texts decides
        following = known[len(self.tokens) :][:num_tokens] + [0] * num_tokens
        return [token if random_.random() < 0.9 else wrong for token in following[:num_tokens]]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Policy, "num_to_look_up", num_to_look_up)
        patches.setattr(TextIndex, "next_tokens", next_tokens)
        yield


CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}A:"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}"
    "{% else %}U:{{ message['content'] }}|{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def make_tokenizer():
    """One token a character, in a vocabulary of the tiny targets' size."""
    characters = string.ascii_lowercase + string.digits + " AU:|.,\n"
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{c: i + 3 for i, c in enumerate(characters)}}
    vocabulary |= {f"<unused{i}>": i for i in range(len(vocabulary), VOCAB_SIZE)}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    model.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    model.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", pad_token="<pad>", bos_token="<s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_byte_tokenizer():
    """One token a byte, so that some characters take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model)


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@contextmanager
def chat_server(reply):
    """An OpenAI-compatible server; `reply(payload, number)` gives a text, a message, with its `finish_reason` if that is not
    "stop", the bytes of a whole body, or an HTTP status to fail with, alone or with a dictionary of headers."""
    requests, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                requests.append((self.path, payload))
                number = len(requests)
            answer = reply(payload, number)
            answer, headers = answer if isinstance(answer, tuple) else (answer, {})
            status, body = 200, {}
            if isinstance(answer, int):
                status, body = answer, {"error": "no"}
            else:
                message = dict(answer) if isinstance(answer, dict) else {"role": "assistant", "content": answer}
                reason = message.pop("finish_reason", "stop")
                choice = {"index": 0, "message": message, "finish_reason": reason}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                body = {
                    "id": "1",
                    "created": 0,
                    "model": "m",
                    "system_fingerprint": "",
                    "choices": [choice],
                    "usage": usage,
                }
            content = answer if isinstance(answer, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The client of this process talks to a Hub on this machine, with a cache of its own."""
    with serve_hub() as hub:
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_TOKEN_PATH": str(tmp_path / "token"),
        }.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
        monkeypatch.setattr(transformers_hub, "_hf_api", None)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        if not VALIDATES_CARDS_HERE:
            monkeypatch.setattr(RepoCard, "validate", lambda card, **kwargs: None)
        hub.repos["big/Model-8B"] = {"main": [{}]}  # the target
        yield hub


def fsdp2_config(folder) -> Path:
    """The configuration file of `recipes/`, for two processes on CPUs."""
    config = (RECIPES / "accelerate_configs" / "fsdp2.yaml").read_text()
    path = folder / "fsdp2.yaml"
    path.write_text(config.replace("num_processes: 8", "num_processes: 2") + "use_cpu: true\n")
    return path


# Runs the script after it with its model sharded.
FSDP_ON_CPU = Path(__file__).with_name("fsdp_on_cpu.py")


def run_in_two_processes(kind: str, folder, *command) -> subprocess.CompletedProcess:
    """A script and its arguments, by `"ddp"` or with its model sharded by `"fsdp2"`: forked, quicker than by the programs."""
    if kind == "ddp":
        return run_in_two(*command)
    return run_in_two(FSDP_ON_CPU, *command, config=fsdp2_config(folder))


def load_script(path: str | Path):
    """A script of this repository as a module: `load_script("recipes/demo.py")`."""
    path = ROOT / path
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(path.parent)  # as for any script
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def run_script(monkeypatch, capsys):
    """
    `run_script("recipes/train.py", "--max_steps", 3)` returns what `subprocess.run` would, but runs it in this process,
    in which everything is imported already. Errors that the script does not turn into a message are raised.
    """

    def run(script: str | Path, *arguments) -> subprocess.CompletedProcess:
        path = ROOT / script
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        monkeypatch.syspath_prepend(path.parent)  # as for any script
        capsys.readouterr()
        code = None
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as error:
            code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
        return subprocess.CompletedProcess(sys.argv, code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def run_recipe(run_script):
    """`run_script` for a script in `recipes/`: `run_recipe("train.py", "--max_steps", 3)`."""
    return lambda script, *arguments: run_script(RECIPES / script, *arguments)


@pytest.fixture
def run_experiment(run_script):
    """`run_script` for a script in `experiments/`: `run_experiment("paper_table.py", "--minutes", 1)`."""
    return lambda script, *arguments: run_script(EXPERIMENTS / script, *arguments)
