"""Drafts of each form, as others store them, against a naive forward in plain torch that reads the stored tensors."""

import json
import math

import pytest
import torch
from checkpoints.test_formats import write
from conftest import make_target
from transformers import AutoModel, DynamicCache

from hf_eagle3 import Eagle3ForSpeculation


WIDTH, MLP_WIDTH, HEADS, KV_HEADS, VOCAB_SIZE, DRAFT_VOCAB_SIZE = 32, 48, 4, 2, 96, 32
BASE = {
    **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu"},
    **{"hidden_size": WIDTH, "intermediate_size": MLP_WIDTH, "num_attention_heads": HEADS, "rms_norm_eps": 1e-5},
    **{"num_key_value_heads": KV_HEADS, "vocab_size": VOCAB_SIZE, "draft_vocab_size": DRAFT_VOCAB_SIZE},
    **{"num_hidden_layers": 1, "max_position_embeddings": 512, "rope_theta": 5000.0},
    "eagle_aux_hidden_state_layer_ids": [1, 5, 8],
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 32.0, "original_max_position_embeddings": 64}
LONGROPE = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention"]}

# Changes of the configuration, and what the tensors are made with.
FORMS = {
    "classic": ({}, {}),
    "wide heads": ({"head_dim": 16}, {"head_dim": 16}),
    "biases": ({"attention_bias": True}, {"biases": "qkvo", "mlp_biases": True}),
    "biases of Qwen2": ({}, {"biases": "qkv"}),
    "query norms": ({}, {"query_norms": True}),
    "three layers": ({"num_hidden_layers": 3}, {"num_layers": 3}),
    "wider target": ({"target_hidden_size": 64}, {"target_width": 64, "table": True}),
    "four states": ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5, 8], "num_aux_layers": 4}, {"num_states": 4}),
    "EAGLE-3.1": ({"fc_norm": True, "norm_output": True}, {"fc_norm": True}),
    "norm_before_fc": ({"eagle_config": {"norm_before_fc": True}}, {"input_norm": True}),
    "norm_before_residual": ({"norm_before_residual": True}, {}),
    "whole vocabulary": ({"draft_vocab_size": VOCAB_SIZE}, {"whole": True}),
    "window": (WINDOW, {}),
    "window of Qwen3": ({**WINDOW, "use_sliding_window": True, "max_window_layers": 0}, {"query_norms": True}),
    "one window": (
        {"num_hidden_layers": 2, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
        {"num_layers": 2},
    ),
    "window that is off": ({"sliding_window": 4, "layer_types": ["full_attention"]}, {}),
    "window of the target": ({"sliding_window": 4, "layer_types": ["sliding_attention"] * 12}, {}),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {}),
    "llama3": ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {}),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", **YARN}}, {}),
    "yarn of gpt-oss": ({"rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False}}, {}),
    "yarn of DeepSeek": ({"rope_scaling": {"type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.0}}, {}),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", **LONGROPE, "factor": 8.0}}, {}),
    "part of a head": ({"partial_rotary_factor": 0.5}, {}),
    "part of a head, scaled": ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "partial_rotary_factor": 0.5}}, {}),
    "new keys": ({"rope_theta": None, "rope_parameters": {"rope_type": "llama3", **LLAMA3, "rope_theta": 1e6}}, {}),
}


# fmt: off
def make_tensors(
    head_dim=8, num_layers=1, num_states=3, target_width=WIDTH, biases="", mlp_biases=False, query_norms=False,
    fc_norm=False, input_norm=False, table=False, whole=False,
):
    # fmt: on
    torch.manual_seed(0)
    sizes = {"q": HEADS * head_dim, "k": KV_HEADS * head_dim, "v": KV_HEADS * head_dim, "o": WIDTH}
    mlp = {"gate": (MLP_WIDTH, WIDTH), "up": (MLP_WIDTH, WIDTH), "down": (WIDTH, MLP_WIDTH)}
    shapes = {"fc.weight": (WIDTH, num_states * target_width), "norm.weight": (WIDTH,)}
    shapes["lm_head.weight"] = (VOCAB_SIZE if whole else DRAFT_VOCAB_SIZE, WIDTH)
    for i in range(num_layers):
        layer = f"layers.{i}."
        for part, size in sizes.items():
            width = HEADS * head_dim if part == "o" else WIDTH * (1 + (i == 0))
            shapes[f"{layer}self_attn.{part}_proj.weight"] = (size, width)
        shapes |= {f"{layer}self_attn.{part}_proj.bias": (sizes[part],) for part in biases}
        shapes |= {f"{layer}mlp.{part}_proj.weight": shape for part, shape in mlp.items()}
        shapes |= {f"{layer}mlp.{part}_proj.bias": shape[:1] for part, shape in mlp.items() if mlp_biases}
        shapes |= {f"{layer}self_attn.{part}_norm.weight": (head_dim,) for part in "qk" if query_norms}
        norms = ("input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if i == 0 else []))
        shapes |= {f"{layer}{norm}.weight": (WIDTH,) for norm in norms}
    shapes |= {f"fc_norm.{i}.weight": (target_width,) for i in range(num_states) if fc_norm}
    shapes |= {"input_norm.weight": (num_states * target_width,)} if input_norm else {}
    shapes |= {"embed_tokens.weight": (VOCAB_SIZE, WIDTH)} if table else {}
    tensors = {name: 0.2 * torch.randn(shape) + ("norm" in name) for name, shape in shapes.items()}
    if not whole:
        token_ids = torch.arange(1, VOCAB_SIZE, 3)
        tensors["d2t"] = token_ids - torch.arange(DRAFT_VOCAB_SIZE)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB_SIZE), token_ids)
    return tensors


def frequencies(config, dim):
    """The angle of each pair of entries at position 1, and a factor of all entries, by the papers' formulas."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = rope.get("rope_theta") or config["rope_theta"]
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    length = rope.get("original_max_position_embeddings")
    if kind == "linear":
        return [angle / factor for angle in plain], 1.0
    if kind == "longrope":
        angles = [angle / each for angle, each in zip(plain, rope["short_factor"], strict=True)]
        return angles, math.sqrt(1 + math.log(factor) / math.log(length))
    if kind == "llama3":
        angles = []
        for angle in plain:
            turns = length * angle / (2 * math.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            share = min(max((turns - low) / (high - low), 0), 1)
            angles.append(share * angle + (1 - share) * angle / factor)
        return angles, 1.0
    if kind == "yarn":
        first, last = (dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1))
        if rope.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        shares = [min(max((i - first) / (last - first), 0), 1) for i in range(dim // 2)]
        scale, all_dims = (
            1 + 0.1 * rope.get(key, default) * math.log(factor)
            for key, default in (("mscale", 1), ("mscale_all_dim", 0))
        )
        angles = [(1 - share) * angle + share * angle / factor for angle, share in zip(plain, shares, strict=True)]
        return angles, scale / all_dims
    return plain, 1.0


class PlainDraft:
    """Reads tensors by their names in speculators' format, computes in double precision, and attends row by row."""

    def __init__(self, config, tensors):
        self.config = {**config, **config.get("eagle_config", {})}
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.dim = len(tensors["layers.0.self_attn.q_proj.weight"]) // HEADS
        self.num_layers = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
        rope = {**config, **(config.get("rope_scaling") or {})}
        angles, self.scale = frequencies(config, int(self.dim * rope.get("partial_rotary_factor", 1)))
        self.angles = torch.tensor(angles, dtype=torch.double)
        self.read = [[] for _ in range(self.num_layers)]  # position, key and value of the rows

    def linear(self, name, states):
        bias = self.tensors.get(f"{name}.bias", 0)
        return states @ self.tensors[f"{name}.weight"].T + bias

    def norm(self, name, states):
        variance = states.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return states / variance.sqrt() * self.tensors[f"{name}.weight"]

    def rotate(self, heads, position):
        cos, sin = (self.scale * f(position * self.angles) for f in (torch.cos, torch.sin))
        first, second, rest = heads.split([len(cos), len(cos), self.dim - 2 * len(cos)], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def window(self, i):
        layer_types = self.config.get("layer_types") or []
        is_own = len(layer_types) == self.num_layers and layer_types[i] == "sliding_attention"
        return self.config["sliding_window"] if is_own else math.inf

    def attention(self, i, states, position):
        name = f"layers.{i}.self_attn"
        query, key, value = (self.linear(f"{name}.{part}_proj", states).view(-1, self.dim) for part in "qkv")
        if f"{name}.q_norm.weight" in self.tensors:
            query, key = self.norm(f"{name}.q_norm", query), self.norm(f"{name}.k_norm", key)
        self.read[i].append((position, self.rotate(key, position), value))
        seen = [(key, value) for place, key, value in self.read[i] if position - place < self.window(i)]
        outputs = []
        for head, row in enumerate(self.rotate(query, position)):
            group = head * KV_HEADS // HEADS
            weights = torch.stack([row @ key[group] for key, _ in seen]).div(math.sqrt(self.dim)).softmax(0)
            outputs.append(sum(weight * value[group] for weight, (_, value) in zip(weights, seen, strict=True)))
        return self.linear(f"{name}.o_proj", torch.cat(outputs))

    def layer(self, i, embeds, states, position):
        name, residual = f"layers.{i}", states
        if i == 0:
            states = self.norm(f"{name}.hidden_norm", states)
            residual = states if self.config.get("norm_before_residual") else residual
            states = torch.cat([self.norm(f"{name}.input_layernorm", embeds), states])
        else:
            states = self.norm(f"{name}.input_layernorm", states)
        states = residual + self.attention(i, states, position)
        normed = self.norm(f"{name}.post_attention_layernorm", states)
        gate, up = (self.linear(f"{name}.mlp.{part}_proj", normed) for part in ("gate", "up"))
        return states + self.linear(f"{name}.mlp.down_proj", gate * gate.sigmoid() * up)

    def fuse(self, aux):
        if self.config.get("norm_before_fc"):
            aux = self.norm("input_norm", aux)
        if self.config.get("fc_norm"):
            aux = torch.cat([self.norm(f"fc_norm.{i}", each) for i, each in enumerate(aux.chunk(len(aux) // WIDTH))])
        return self.linear("fc", aux)

    def __call__(self, embeds, states, position):
        """One row: the logits, and the state of the next drafting step."""
        for i in range(self.num_layers):
            states = self.layer(i, embeds, states, position)
        normed = self.norm("norm", states)
        return self.linear("lm_head", normed), normed if self.config.get("norm_output") else states


@torch.no_grad()
def assert_computes(draft, config, tensors):
    """A text of eight rows, and three drafting steps behind it."""
    generator = torch.Generator().manual_seed(1)
    aux = torch.randn(8, tensors["fc.weight"].shape[1], generator=generator)
    embeds = torch.randn(11, WIDTH, generator=generator)
    plain, cache = PlainDraft(config, tensors), DynamicCache(config=draft.config.transformer_layer_config)
    output = draft.eval()(
        inputs_embeds=embeds[None, :8], hidden_states=draft.combine_hidden_states(aux[None]), cache=cache
    )
    for position, row in enumerate(aux.double()):
        logits, states = plain(embeds[position].double(), plain.fuse(row), position)
        torch.testing.assert_close(output.logits[0, position].double(), logits, atol=2e-5, rtol=2e-5)
    for position in (8, 9, 10):
        last = output.last_hidden_state[:, -1:]
        output = draft(inputs_embeds=embeds[None, position : position + 1], hidden_states=last, cache=cache)
        logits, states = plain(embeds[position].double(), states, position)
        torch.testing.assert_close(output.logits[0, 0].double(), logits, atol=2e-5, rtol=2e-5)


@pytest.fixture(scope="module")
def targets():
    return {width: make_target("llama", num_hidden_layers=12, hidden_size=width) for width in (WIDTH, 64)}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_and_what_is_saved_of_it(tmp_path, targets, form):
    """It is the same draft again for `AutoModel` with the code that it brings."""
    changes, options = FORMS[form]
    config, tensors = {**BASE, **changes}, make_tensors(**options)
    folder = write(tmp_path / "draft", config, tensors)
    draft, info = Eagle3ForSpeculation.from_pretrained(folder, output_loading_info=True)
    assert ("partial_rotary_factor" in info["assumed"]) == form.startswith("part of a head")  # no trainer we know does
    assert_computes(draft, config, tensors)
    draft.pair_with(targets[options.get("target_width", WIDTH)])
    draft.save_pretrained(tmp_path / "saved")
    assert_computes(AutoModel.from_pretrained(tmp_path / "saved", trust_remote_code=True), config, tensors)
    layer = json.loads((tmp_path / "saved" / "config.json").read_text())["transformer_layer_config"]
    windows = config.get("layer_types") if len(config.get("layer_types", ())) == config["num_hidden_layers"] else None
    assert layer["layer_types"] == (windows or ["full_attention"] * config["num_hidden_layers"])  # which vLLM reads
    assert "sliding_attention" not in layer["layer_types"] or layer["sliding_window"] == config["sliding_window"]


def fuse(tensors):
    """As SGLang holds them."""
    tensors = dict(tensors)
    for name in [name for name in tensors if ".q_proj." in name or ".gate_proj." in name]:
        parts, fused = (("q", "k", "v"), "qkv") if ".q_proj." in name else (("gate", "up"), "gate_up")
        rows = [tensors.pop(name.replace(f"{parts[0]}_proj", f"{part}_proj")) for part in parts]
        tensors[name.replace(f"{parts[0]}_proj", f"{fused}_proj")] = torch.cat(rows)
    return tensors


@pytest.mark.parametrize(
    "form, prefix, layer",
    [
        ("wide heads", "", "layers.0."),
        ("biases", "", "midlayer."),
        ("biases of Qwen2", "model.", "layers.0."),
        ("query norms", "", "midlayer."),
        ("three layers", "", "layers.0."),
    ],
)
def test_projections_that_are_fused(tmp_path, form, prefix, layer):
    config, tensors = {**BASE, **FORMS[form][0]}, make_tensors(**FORMS[form][1])
    stored = {prefix + name.replace("layers.0.", layer): weight for name, weight in fuse(tensors).items()}
    folder = write(tmp_path / "draft", config, stored)
    for loader in (Eagle3ForSpeculation, AutoModel):
        assert_computes(loader.from_pretrained(folder), config, tensors)


def test_projections_that_cannot_be_split(tmp_path):
    fused = fuse(make_tensors())
    beside = {**fused, "layers.0.self_attn.v_proj.weight": torch.ones(16, 64)}
    with pytest.raises(ValueError, match=r"has layers.0.self_attn.qkv_proj.weight, and its parts beside it: .*v_proj"):
        Eagle3ForSpeculation.from_pretrained(write(tmp_path / "beside", BASE, beside))
    other = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}
    with pytest.raises(ValueError, match="qkv_proj.weight has 64 rows, which cannot be split .* 4 heads"):
        Eagle3ForSpeculation.from_pretrained(write(tmp_path / "other", other, fused))


def with_old_names(tensors):
    """As SGLang takes them."""
    names = {f"fc_norm.{i}.weight": f"aux_norm_{name}.weight" for i, name in enumerate(("low", "mid", "high"))}
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("flags", [{}, {"use_aux_norm": True}, {"use_aux_norm": True, "fc_norm": False}])
def test_old_names_of_norms(tmp_path, flags):
    config, tensors = {**BASE, "fc_norm": True}, make_tensors(fc_norm=True)
    folder = write(tmp_path / "draft", {**BASE, **flags}, with_old_names(tensors))
    for loader in (Eagle3ForSpeculation, AutoModel):
        assert_computes(loader.from_pretrained(folder), config, tensors)
