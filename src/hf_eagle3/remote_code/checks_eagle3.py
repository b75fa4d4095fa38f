# SPDX-License-Identifier: Apache-2.0
"""Which target a draft is for, and which calls of `generate` EAGLE-3 decoding takes."""

import base64
import inspect
import math

import torch
from transformers.utils import logging

from .cache_eagle3 import check_cache, is_static, is_unused_static
from .outputs_eagle3 import CACHE
from .text_eagle3 import max_length_of


logger = logging.get_logger(__name__)


# Settings of targets for which there are no drafts.
UNREADABLE = {
    "altup_num_inputs": "has several states of each token",  # Gemma 3n
    "cross_attention_layers": "attends to images by layers of their own",  # Mllama
}


def check_pairing(draft, target) -> None:
    """
    Checks that `draft` was made for `target`.

    Raises:
        ValueError: naming both sides, if the target is of another kind, size or vocabulary, or another model of the
            same sizes.
    """
    config, text_config = draft.config, target.config.get_text_config(decoder=True)
    target_name = f"{type(target).__name__} {target.config._name_or_path or '(unnamed)'}"
    draft_name = f"The draft {config._name_or_path or '(unnamed)'}, made for {config.verifier},"
    if target.config.is_encoder_decoder:
        raise ValueError(f"{target_name} is an encoder-decoder; EAGLE-3 drafts for decoder-only models.")
    for name, reason in UNREADABLE.items():
        if getattr(text_config, name, None):
            raise ValueError(f"{target_name} {reason} (`{name}`), which EAGLE-3 drafts cannot read.")
    for label, expected, actual in (
        ("a vocabulary of", config.vocab_size, text_config.vocab_size),
        ("hidden states of size", config.target_hidden_size, text_config.hidden_size),
    ):
        if expected != actual:
            raise ValueError(
                f"{draft_name} needs a target with {label} {expected}, but {target_name} has {label} {actual}. "
                "Pair each draft with the target it was trained for."
            )
    depth = text_config.num_hidden_layers
    layer_ids = draft.resolve_aux_layer_ids(target)
    if not all(0 <= layer_id <= depth for layer_id in layer_ids):
        raise ValueError(
            f"{draft_name} reads the states entering layers {layer_ids}, but {target_name} has layers 0 to "
            f"{depth - 1}. Pair each draft with the target it was trained for."
        )
    weight = target.get_input_embeddings().weight
    if not config.has_own_embed_tokens and weight.shape[-1] != config.hidden_size:
        raise ValueError(
            f"{draft_name} stores no embedding table and needs the target's, with rows of {config.hidden_size}, "
            f"but those of {target_name} have {weight.shape[-1]}."
        )
    # Fine-tuning and quantization hardly turn the table; another model's table is unrelated to it.
    ours = config.verifier_fingerprint if weight.device.type != "meta" else None
    if ours is not None and similarity(ours, fingerprint(weight)) < 0.9:
        raise ValueError(
            f"{draft_name} was trained for another model than {target_name}: the sizes agree, but the "
            "embedding tables are unrelated. Pair each draft with the target it was trained for, or train "
            "one for this target."
        )


def check_draft(draft, target) -> None:
    """
    Raises:
        ValueError: if a draft cannot be used beside the target as they are now.
    """
    devices = target.device, draft.get_output_embeddings().weight.device
    if "meta" not in (kinds := {device.type for device in devices}) and len(kinds) > 1:
        logger.warning_once(
            f"The target is on {devices[0]} and the draft on {devices[1]}: drafting may take so long that it does not pay. "
            "Call `draft.to(target.device)`."
        )
    if devices[1].type == "meta":
        raise ValueError("The draft has no weights: it is on the meta device. Load it by `from_pretrained`.")
    check_dropout("draft", draft)
    if not draft.config.has_own_embed_tokens and target.get_input_embeddings().weight.device.type == "meta":
        raise ValueError(
            f"The embedding of {type(target).__name__}, which the draft reads, is offloaded. Keep it on a device in the "
            "`device_map`, or make the draft with `has_own_embed_tokens=True`."
        )


def check_dropout(name: str, model) -> None:
    if model.training and _drops_out(model):
        raise ValueError(f"The {name} is in training mode and drops out at random. Call `{name}.eval()` first.")


def similarity(fingerprint: str, other: str) -> float:
    """The cosine of the angle between two [`fingerprint`]s."""
    ours, theirs = (
        torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float16).double()
        for text in (fingerprint, other)
    )
    return torch.cosine_similarity(ours, theirs, dim=0).item()


def fingerprint(embedding: torch.Tensor) -> str:
    """64 entries of an embedding table `(vocab_size, hidden_size)`, encoded: the first four of 16 rows spread over it."""
    rows = torch.linspace(0, embedding.shape[0] - 1, 16).long().to(embedding.device)
    entries = whole(embedding.detach())[rows, :4].flatten().half().cpu()
    return base64.b64encode(entries.numpy().tobytes()).decode()


def is_sharded(target) -> bool:
    """Whether each process holds only a share of some of the target's weights (tensor parallelism, FSDP2)."""
    return any(hasattr(weight, "full_tensor") for weight in target.parameters())  # not all: the embedding may be whole


def whole(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself, where processes hold shares of it: all must ask at once."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def whole_embedding(target) -> torch.nn.Embedding:
    """The target's embedding, gathered where processes hold shares of it."""
    embedding = target.get_input_embeddings()
    if not hasattr(embedding.weight, "full_tensor"):
        return embedding
    return torch.nn.Embedding.from_pretrained(whole(embedding.weight.detach()))


def check_call(target, input_ids, generation_config, model_kwargs, replays):
    """The checks of `GenerationMixin._assisted_decoding`, and those a tree adds."""
    if generation_config.num_beams > 1:  # by `custom_generate`; otherwise transformers ignores the draft
        raise ValueError("EAGLE-3 decoding does not search with beams. Leave out `num_beams` or the draft.")
    if not model_kwargs.get("use_cache", True):
        raise ValueError("EAGLE-3 decoding requires `use_cache=True`.")
    if getattr(generation_config, "assistant_ensemble_weight", None) is not None:
        raise ValueError("`assistant_ensemble_weight` changes the text; EAGLE-3 decoding is lossless. Leave it unset.")
    # Transformers would fetch code from the Hub for it.
    if getattr(generation_config, "dola_layers", None) is not None:
        raise ValueError(
            "`dola_layers` contrasts layers of plain decoding; no assistant does. Leave it or the draft out."
        )
    if generation_config.return_dict_in_generate and generation_config.output_attentions:
        raise ValueError(
            "EAGLE-3 decoding returns no attentions: those of a tree are not those of the text. Leave `output_attentions` or "
            "the draft out."
        )
    if any(type(module).__module__.startswith("torch.ao.nn.quantized.") for module in target.modules()):
        raise ValueError(
            f"{type(target).__name__} is quantized with one scale for all tokens of a forward, so that what it says of a "
            "token depends on the others in the tree. Quantize weights only, or activations token by token (torchao)."
        )
    prepare_inputs = getattr(target.prepare_inputs_for_generation, "__func__", None)
    if prepare_inputs is not type(target).prepare_inputs_for_generation:
        raise ValueError(
            f"{type(target).__name__}.prepare_inputs_for_generation was replaced, as PEFT does for prompt and prefix "
            "tuning, which put tokens before the text that EAGLE-3 decoding does not see. Use another adapter, or leave "
            "`assistant_model` out."
        )
    adapted = (module for module in target.modules() if not getattr(module, "disable_adapters", False))
    hooks = (hook for module in adapted for hook in module._forward_pre_hooks.values())
    # PEFT passes them to each layer by a partial function.
    if any("alora_offsets" in (getattr(hook, "keywords", None) or {}) for hook in hooks):
        raise ValueError(
            "An activated LoRA (aLoRA) adapts the last tokens of each forward, so that what the target says depends on how many "
            "tokens a tree has. Use another adapter, or leave `assistant_model` out."
        )
    # Doge attends to the best of so many tokens, which in transformers are others in a forward over several tokens.
    window = getattr(target.config.get_text_config(decoder=True), "keep_window_size", None)
    if window is not None and generation_config.max_length > window:
        raise ValueError(
            f"{type(target).__name__} says something else of several tokens than of one after another where a text is longer than "
            f"its `keep_window_size` of {window}, and this one may come to {generation_config.max_length}. Leave "
            "`assistant_model` out, or lower `max_new_tokens`."
        )
    check_dropout("target", target)
    if "position_ids" not in inspect.signature(target.forward).parameters:
        raise ValueError(
            f"{type(target).__name__} takes no `position_ids`, so that siblings in a tree cannot share a position. "
            "EAGLE-3 decoding needs a target with explicit positions."
        )
    position_ids = model_kwargs.get("position_ids")
    if position_ids is None:
        raise ValueError(
            f"EAGLE-3 decoding needs `position_ids`, and `generate` makes none for {type(target).__name__}."
        )
    attention_mask = model_kwargs.get("attention_mask")  # newer transformers leave it out where it masks nothing
    if attention_mask is not None and attention_mask.shape[-1] < input_ids.shape[1]:
        raise ValueError(
            f"The prompt has {input_ids.shape[1]} tokens, but its `attention_mask` {attention_mask.shape[-1]}: `token_healing` has "
            "lengthened it. Heal the prompt before the call, or leave `assistant_model` out."
        )
    cache = model_kwargs.get(CACHE)
    if cache is None:
        return
    attention = target.config.get_text_config(decoder=True)._attn_implementation
    if attention not in TAKE_MASKS and is_static(cache):
        raise ValueError(
            f"Attention {attention!r} cannot tell the free slots of a static cache from the text. Use a dynamic cache, or "
            "attn_implementation='sdpa'."
        )
    if not is_unused_static(cache):
        check_cache(cache, replays)
    if any(getattr(layer, "record_past", False) for layer in cache.layers):
        raise ValueError(
            "The cache records its past (`activate_past_recording`), of which EAGLE-3 decoding keeps no more than a step needs. "
            "Pass a cache that does not, or leave `assistant_model` out."
        )
    if attention_mask is not None and cache.get_seq_length() >= attention_mask.shape[-1] and not attention_mask.all():
        raise ValueError(
            f"The cache has all {attention_mask.shape[-1]} tokens of the prompt already. Crop it by one (`cache.crop(-1)`), since "
            "what follows is said at the last."
        )


# Attention that takes any mask.
TAKE_MASKS = ("eager", "sdpa")


def takes_trees(target) -> bool:
    """
    Whether the target can read trees, or chains only: flash and flex attention take no mask of a caller's, and local
    (GPT-Neo) and ALiBi attention tell distances by indices in the cache, at which the nodes of a tree do not stand in
    the order of the text.
    """
    config = target.config.get_text_config(decoder=True)
    if "local" in (getattr(config, "attention_layers", None) or ()) or getattr(config, "alibi", False):
        return False
    if config._attn_implementation in TAKE_MASKS:
        return True
    logger.warning_once(
        f"{config._attn_implementation!r} takes no mask of a tree, so that chains are verified. Trees, of which more is "
        "accepted, need attn_implementation='sdpa' (or target.set_attn_implementation('sdpa'))."
    )
    return False


# Targets with recurrent states that go on from these over several tokens as over one after another (tested). In
# transformers others begin anew (Jamba), or compute something else (Nemotron-H).
MAY_REPLAY = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "kimi_linear",
    "bailing_hybrid",
    "olmo_hybrid",
    "granitemoehybrid",
    "falcon_h1",
)


def may_replay(target) -> bool:
    """Whether recurrent states of the target read several tokens at once as they read them one by one."""
    config = target.config.get_text_config(decoder=True)
    # Mamba 2's time steps, which transformers limits for several tokens only.
    least, most = getattr(config, "time_step_limit", None) or (0.0, math.inf)
    return config.model_type in MAY_REPLAY and least <= 0 and most == math.inf


def depends_on_length(target, input_ids, cache, model_kwargs, stopping_criteria) -> bool:
    """Whether what the target says of a row changes, within this call, with the length of the longest row of the batch."""
    config = target.config.get_text_config(decoder=True)
    newest = text_positions(model_kwargs)[:, -1]
    begin, num_new = int(newest.min()), max_length_of(stopping_criteria) - input_ids.shape[1]
    last = int(newest.max()) + 1 + num_new  # positions may be the caller's
    if last > (position_table(config) or math.inf):  # a row that is ahead would come to its end
        return True
    for rope_type, length in rotary_switches(config):
        if last >= length and (begin < length or rope_type != "longrope"):
            return True
    # Llama 4 scales queries by their index in the cache, anew every so many tokens.
    return (
        getattr(config, "attn_temperature_tuning", False)
        and cache.length + num_new + 1 >= (cache.length // config.floor_scale + 1) * config.floor_scale
    )


# Libraries whose modules keep nothing about the rows of a batch, unless by hooks.
ROW_WISE_MODULES = ("torch.", "transformers.", "peft.", "torchao.", "bitsandbytes.")


def may_select_rows(target, cache, model_kwargs, per_token) -> bool:
    """
    Whether the target may go on with some rows of the batch only: nobody sees its cache (a `TreeCache`), it was not
    compiled, perhaps for this size of batch, and neither its modules nor its arguments are suspected of an entry for
    each row, but for the arguments named in `per_token`.
    """
    if cache.is_static or cache.is_chain or getattr(cache.cache, "_is_user_defined", False):
        return False
    if target.config.get_text_config(decoder=True) is not target.config:  # images, and positions kept on the model
        return False
    known = (*per_token, CACHE, "output_hidden_states")
    others = [value for name, value in model_kwargs.items() if name not in known]
    if not all(value is None or isinstance(value, (bool, int, float, str)) for value in others):
        return False
    if target._compiled_call_impl is not None or hasattr(target.forward, "_torchdynamo_orig_callable"):
        return False
    of_all_modules = torch.nn.modules.module
    hooks = [*of_all_modules._global_forward_hooks.values(), *of_all_modules._global_forward_pre_hooks.values()]
    for module in target.modules():
        is_patched = "forward" in vars(module) and not hasattr(module, "_hf_hook")  # which is accelerate's
        if is_patched or not type(module).__module__.startswith(ROW_WISE_MODULES):
            return False
        # PEFT gives each row an adapter of its own by hooks, and others may change what a layer says of a row.
        hooks += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return all(getattr(hook, "__module__", "").startswith(("transformers.", "hf_eagle3.")) for hook in hooks)


def position_table(config) -> int | None:
    """How many positions a target knows that looks them up in a table; `None` if it rotates by them."""
    return None if getattr(config, "rope_parameters", None) else getattr(config, "max_position_embeddings", None)


def rotary_switches(config) -> list[tuple[str, int]]:
    """
    Kinds and lengths of rotary scalings that change all frequencies of a forward when its largest position comes to
    that length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    switches = []
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        rope_type = parameters.get("rope_type", "default")
        if rope_type == "longrope":
            length = parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings
            switches.append((rope_type, length))
        elif "dynamic" in rope_type:
            switches.append((rope_type, config.max_position_embeddings))
    return switches


def _drops_out(model) -> bool:
    holders = [model.config.get_text_config(decoder=True), *model.modules()]
    rates = [rate for each in holders for name, rate in vars(each).items() if "drop" in name or "jitter" in name]
    rates += [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def text_positions(model_kwargs) -> torch.LongTensor:
    """Positions `(B, L)` in the text, of position ids that may have more dimensions than that one."""
    position_ids = model_kwargs["position_ids"]
    return position_ids if position_ids.dim() == 2 else position_ids[0]
