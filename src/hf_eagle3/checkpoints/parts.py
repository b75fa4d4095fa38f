"""The tensors of drafts of other projects, by our names."""

import re
from typing import Any

import torch

from ..file_checks import check_mapping
from ..reading import d2t_of, is_neutral_mapping
from ..tensor_names import QWEN3_LAYER, our_names


# The tensors of a draft outside of its layers, and the parts of a layer.
OUTSIDE = r"(fc|input_norm|fc_norm\.\d+|norm|lm_head|embed_tokens)\.weight|mask_hidden|d2t|t2d"
LAYER_PARTS = {
    *QWEN3_LAYER,
    "hidden_norm.weight",
    *(f"self_attn.qkv_proj.{kind}" for kind in ("weight", "bias")),
    *(f"mlp.gate_up_proj.{kind}" for kind in ("weight", "bias")),
    *(f"self_attn.{name}_proj.bias" for name in "qkvo"),
    *(f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")),
}
# Projections that converters for engines have fused, and the parts that follow each other in them.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Old names of SGLang for the norms of EAGLE-3.1. Their flag was `use_aux_norm`.
OLD_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}
# Tables that are computed, not trained.
COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def by_our_names(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """
    Returns the tensors by our names, and a report of what was `renamed` and `ignored`. Raises `ValueError` if two tensors have
    one name.
    """
    renamed, ignored, ours = {}, [], {}
    for name, new_name in our_names(tensors).items():
        if name.endswith(COMPUTED):
            ignored.append(name)
            continue
        new_name = OLD_NORMS.get(new_name, new_name)
        if new_name != name:
            renamed[name] = new_name
        if new_name in ours:
            raise ValueError(f"two tensors are called {new_name}; one of them is stored as {name}.")
        ours[new_name] = tensors[name]
    return ours, {"renamed": renamed, "ignored": ignored}


def check_parts(tensors: dict[str, torch.Tensor], config: dict) -> None:
    """
    Raises `ValueError` if a draft has other tensors than EAGLE-3's, its layers have other parts than Llama's and Qwen3's, or
    more than the first read tokens.
    """
    layers = {name: tensor for name, tensor in tensors.items() if name.startswith("layers.")}
    if others := sorted(name for name in tensors.keys() - layers.keys() if not re.fullmatch(OUTSIDE, name)):
        raise ValueError(
            f"it holds {others[:6]}, which EAGLE-3 drafts do not have. The project that trained it may run it."
        )
    if others := sorted({name.split(".", 2)[-1] for name in layers} - LAYER_PARTS):
        raise ValueError(
            f"its layers hold {others[:6]}, but only Llama and Qwen3 layers are supported, which have no such tensors. The project "
            "that trained it may run it."
        )
    query = layers.get("layers.1.self_attn.q_proj.weight", layers.get("layers.1.self_attn.qkv_proj.weight"))
    if query is not None and query.shape[-1] == 2 * config["hidden_size"]:
        raise ValueError(
            "each of its layers reads the token beside the state. Supported drafts do this in the first layer only. The project that "
            "trained it may run it."
        )


def complete(tensors: dict[str, torch.Tensor], report: dict[str, Any], config: dict) -> None:
    """
    Brings a draft's tensors into our form, and adds to the report what was `renamed` and `ignored`. Raises `ValueError` if the
    vocabulary mapping contradicts the configuration.
    """
    renamed, ignored = report["renamed"], report["ignored"]
    split_fused(tensors, renamed, config)
    merge_norms(tensors, renamed, ignored)
    for name in [name for name in tensors if name.endswith("self_attn.q_proj.bias")]:
        # Qwen2's attention has three biases, Llama's four.
        zeros = torch.zeros(config["hidden_size"], dtype=tensors[name].dtype)
        tensors.setdefault(name.replace("q_proj", "o_proj"), zeros)
    if "mask_hidden" in tensors:  # some have one dimension less
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    if "lm_head.weight" not in tensors and config.get("tie_word_embeddings") and "embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
        renamed["embed_tokens.weight"] = "lm_head.weight (tied)"
    vocab_size, mapping = config["vocab_size"], "d2t" if "d2t" in tensors else "t2d"
    if mapping == "t2d" and "t2d" in tensors and not is_neutral_mapping("t2d", tensors["t2d"]):
        tensors["d2t"], renamed["t2d"] = d2t_of(tensors["t2d"]), "d2t (computed)"
    held = len(tensors["d2t"]) if "d2t" in tensors else None
    draft_vocab_size = config.get("draft_vocab_size") or held or vocab_size
    if draft_vocab_size == vocab_size and held in (None, vocab_size):
        for name in ("d2t", "t2d"):  # some old files have a mapping without effect
            if name in tensors and is_neutral_mapping(name, tensors[name]):
                del tensors[name]
                ignored.append(name)
    elif held is None:
        raise ValueError(
            f"the draft vocabulary has {draft_vocab_size} of {vocab_size} tokens, but there is no d2t, which names them. If another "
            "file lists their ids (a token map of SGLang, eagle_meta.pt of NeMo Automodel), store them as a tensor `d2t`: each id minus "
            "its index in the list, which begins with 0."
        )
    elif held != draft_vocab_size:
        raise ValueError(f"`draft_vocab_size` is {draft_vocab_size}, but {mapping} maps {held} tokens.")
    else:
        check_mapping(tensors["d2t"])
        tensors["d2t"] = tensors["d2t"].long()
        if "t2d" in tensors:
            tensors["t2d"] = tensors["t2d"].bool()


def split_fused(tensors: dict[str, torch.Tensor], renamed: dict[str, str], config: dict) -> None:
    """
    Splits projections that are fused as in engines and in Phi-3: the rows of one part follow those of the other. Raises
    `ValueError` if the number of rows does not fit the parts, or a part is stored beside them.
    """
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    shares = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "gate_proj": 1, "up_proj": 1}
    for name in list(tensors):
        match = re.fullmatch(rf"(layers\.\d+\.(?:self_attn|mlp))\.({'|'.join(FUSED)})\.(weight|bias)", name)
        if match is None:
            continue
        block, fused, kind = match.groups()
        rows, parts = tensors.pop(name), {f"{block}.{part}.{kind}": shares[part] for part in FUSED[fused]}
        if held := sorted(parts.keys() & tensors.keys()):
            raise ValueError(
                f"it has {name}, and its parts beside it: {held}. Remove those that it was not trained with."
            )
        size, rest = divmod(len(rows), sum(parts.values()))
        if rest:
            of_heads = f" for {heads} heads (`num_attention_heads`) and {kv_heads} of keys and values (`num_key_value_heads`). Correct config.json"
            raise ValueError(
                f"{name} has {len(rows)} rows, which cannot be split into {FUSED[fused]}"
                f"{of_heads if fused == 'qkv_proj' else ' of equal size. Download it again'}."
            )
        split = rows.split([size * share for share in parts.values()])
        tensors |= {part: weight.clone() for part, weight in zip(parts, split, strict=True)}
        renamed[name] = ", ".join(parts)


def merge_norms(tensors: dict[str, torch.Tensor], renamed: dict[str, str], ignored: list[str]) -> None:
    """
    Layers after the first have one norm before their attention. SGLang calls it `hidden_norm`, vLLM and we `input_layernorm`.
    Raises `ValueError` if a layer has both and they differ.
    """
    for name in [name for name in tensors if re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.weight", name)]:
        weight, other = tensors.pop(name), name.replace("hidden_norm", "input_layernorm")
        if other not in tensors:
            tensors[other], renamed[name] = weight, other
            continue
        if not torch.equal(tensors[other], weight):
            raise ValueError(
                f"{name} and {other} differ. SGLang normalizes the input of this layer by the first, vLLM by the second. Remove the "
                "one that the draft was not trained with."
            )
        ignored.append(name)
