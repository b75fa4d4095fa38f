"""Making a new draft for a target, changing its vocabulary, and pairing it with a target."""

import weakref
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from .config_checks import ROPE_KEYS
from .remote_code.auto_eagle3 import logger
from .remote_code.configuration_eagle3 import Eagle3Config, default_aux_layer_ids
from .remote_code.draft_model_eagle3 import DraftModel, check_is_model, fingerprint, reads_both_ways, similarity
from .remote_code.target_eagle3 import (
    Borrowed,
    device_of,
    gathered,
    gathered_table,
    is_packed,
    is_sharded,
    look_up,
    table_of,
)


SPECULATIVE_TOKENS = 6  # the length of the chain that engines such as vLLM draft

# A draft can take these rotary scalings of its target, because their parameters do not depend on the head size.
PORTABLE_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Forms of a new draft:
# - EAGLE-3.1 (https://huggingface.co/papers/2605.09992) normalizes the states that a draft reads and passes on.
# - The EAGLE-3 paper's has no such norms. Some engines take only this one.
# - P-EAGLE (https://huggingface.co/papers/2602.01469) drafts all tokens in one pass.
FORMS: dict[str, dict[str, Any]] = {
    "eagle3.1": {},
    "classic": {"fc_norm": False, "norm_output": False, "model_type": "llama"},
    "p-eagle": {"mask_token_id": "pad"},
}


# Fields of a configuration that follow from other arguments of [`from_target`].
NOT_OVERRIDES = {
    "draft_vocab_size": "pass the `draft_token_ids` that a draft can propose, or `draft_vocab_size` to the training arguments",
    "dtype": "a draft has its target's. Call `draft.to(dtype)`",
}


def from_target(
    cls: type[DraftModel],
    target: PreTrainedModel,
    draft_token_ids: Sequence[int] | torch.Tensor | None = None,
    num_hidden_layers: int = 1,
    **overrides: Any,
) -> DraftModel:
    """
    Returns an untrained draft for a loaded target. It takes the target's sizes, rotary embedding, special tokens, dtype
    and rows of `lm_head`.

    Args:
        cls (`type`): The class of the draft.
        target (`PreTrainedModel`): The target.
        draft_token_ids (`Sequence[int]` or `torch.Tensor`, *optional*):
            Target token ids that make up the draft vocabulary. Defaults to all rows of the target's head.
        num_hidden_layers (`int`, *optional*, defaults to `1`): Number of decoder layers.
        overrides (*optional*):
            Fields of [`Eagle3Config`], or of its `transformer_layer_config` (`model_type="qwen3"`,
            `intermediate_size=...`). `fc_norm` and `norm_output` are on by default (EAGLE-3.1).
            `fc_norm=False, norm_output=False` makes the draft of the EAGLE-3 paper. `mask_token_id="pad"`, or any token
            id, makes a parallel draft (P-EAGLE).

    Raises:
        ValueError: if no draft can be made for the target, or an override or a token id does not exist.
    """
    check_is_model(target)
    for name in NOT_OVERRIDES.keys() & overrides:
        raise ValueError(f"`{name}` has no effect here: {NOT_OVERRIDES[name]}.")
    if cls.config_class is Eagle3Config:  # engines know parallel drafts without EAGLE-3.1's norms
        is_parallel = overrides.get("mask_token_id") is not None
        norms = {"fc_norm": not overrides.get("norm_before_fc") and not is_parallel, "norm_output": not is_parallel}
        overrides = norms | overrides
    config = config_for_target(target, num_hidden_layers, cls.config_class, **overrides)
    is_empty = all(parameter.is_meta for parameter in target.parameters())  # made for its sizes alone, or offloaded
    if hasattr(target, "_hf_hook") or not is_empty:
        check_not_offloaded(target)
    table = table_of(target)
    with table.weight.device:
        draft = cls(config).to(dtype=target.dtype)
    draft.borrow_embeddings(target)
    if draft.config.has_own_embed_tokens:
        draft.embed_tokens.weight.data.copy_(look_up(gathered_table(table), torch.arange(draft.config.vocab_size)))
    set_draft_vocabulary(draft, draft_token_ids, target)
    draft.validate_target(target)
    return draft


def set_draft_vocabulary(
    draft: DraftModel, draft_token_ids: Sequence[int] | torch.Tensor | None, target: PreTrainedModel
) -> None:
    """
    Replaces a draft's vocabulary, and its `lm_head` with the target's rows for these tokens, times the factor of the target's
    logits. If the target's head has another width, the new `lm_head` is random. Without ids all rows are taken. Raises
    `ValueError` if there are no ids, or the target's head has no row for one of them.
    """
    own, vocab_size = draft.get_output_embeddings(), draft.config.vocab_size
    device, dtype = own.weight.device, own.weight.dtype
    if device.type != "meta":
        check_not_offloaded(target)
    target_head = gathered_head(target)
    num_ids = min(vocab_size, len(target_head))  # a head may have fewer rows than the vocabulary, or more
    ids = range(num_ids) if draft_token_ids is None else draft_token_ids
    token_ids = ascending(ids)
    if len(token_ids) == 0 or token_ids[0] < 0 or token_ids[-1] >= num_ids:
        raise ValueError(
            f"`draft_token_ids` must not be empty, and must be from 0 to {num_ids - 1}, the tokens that the target's head has "
            f"rows for. It has {len(token_ids)} ids{f' from {token_ids[0]} to {token_ids[-1]}' if len(token_ids) else ''}."
        )
    head = type(own)(draft.config.hidden_size, len(token_ids), bias=False, device=device, dtype=dtype)
    if target_head.shape[-1] == draft.config.hidden_size:
        with torch.no_grad():
            head.weight.copy_(target_head[token_ids.to(target_head.device)])
            if not hasattr(draft.config, "output_multiplier"):  # DFlash multiplies its logits
                head.weight *= logit_factor(target)
    else:
        draft._init_weights(head)
    draft.set_output_embeddings(head)
    store_draft_vocabulary(draft, token_ids.to(device))


@torch.no_grad()
def unpack(target: PreTrainedModel) -> None:
    """Lets a hook of the whole target unpack its layers, as compressed-tensors' does at the first forward."""
    if target._forward_pre_hooks and not is_sharded(target):
        target(torch.zeros(1, 1, dtype=torch.long, device=device_of(target.get_input_embeddings())))


@torch.no_grad()
def gathered_head(target: PreTrainedModel) -> torch.Tensor:
    """Returns the whole weight of the target's head."""
    head = target.get_output_embeddings()
    if is_packed(head):
        unpack(target)
    if not is_packed(head):
        return gathered(head.weight.detach())
    columns = torch.eye(head.in_features, dtype=target.dtype, device=device_of(head))
    return (head(columns) - head(torch.zeros_like(columns[:1]))).T  # without a bias


def ascending(token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """
    Returns token ids in ascending order, each once. Raises `ValueError` if they are a number of tokens or a mask (`t2d`).
    """
    ids = torch.as_tensor(token_ids)
    if ids.dim() == 0 or (ids.dtype.is_floating_point or ids.dtype == torch.bool) and ids.numel() > 0:
        raise ValueError(
            f"`draft_token_ids` must be a list of token ids, not {f'the number {ids.item()}' if ids.dim() == 0 else ids.dtype}. "
            "Of a mask take `mask.nonzero()`."
        )
    return ids.long().flatten().unique()


def logit_factor(target: PreTrainedModel) -> float:
    """Returns by what a target multiplies its head's output (Cohere's `logit_scale`, Granite's `logits_scaling`)."""
    config = target.config.get_text_config(decoder=True)
    return float(getattr(config, "logit_scale", None) or 1) / float(getattr(config, "logits_scaling", None) or 1)


def trim_draft_vocabulary(draft: DraftModel, draft_token_ids: Sequence[int] | torch.Tensor) -> None:
    """
    Removes tokens from a draft's vocabulary. The others keep their trained rows of `lm_head`, and so their logits. The idea is
    FR-Spec's (https://huggingface.co/papers/2502.14856, section 3): a small head takes less time, and a target seldom writes
    rare tokens. Raises `ValueError` if there are no ids, or the draft's vocabulary lacks one of them.
    """
    token_ids = ascending(draft_token_ids)
    known = draft.draft_token_ids
    token_ids = token_ids.to(known.device)
    kept = torch.isin(known, token_ids).nonzero().flatten()
    if len(token_ids) == 0 or len(kept) < len(token_ids):
        unknown = token_ids[~torch.isin(token_ids, known)].tolist()
        raise ValueError(
            f"`draft_token_ids` must be tokens of the draft's vocabulary, and at least one. It has {len(token_ids)} ids, and the "
            f"vocabulary of {len(known)} tokens lacks {len(unknown)} of them (the first are {unknown[:3]})."
        )
    # Medusa has several heads, and DSpark a correction of its own.
    heads: Any = [each for name, each in draft.named_modules() if name.endswith(("lm_head", "markov_w2"))]
    for head in heads:
        if head.out_features > 0:  # else the target's head serves
            rows = head.weight.detach()[kept]
            resize_head(head, len(kept))
            with torch.no_grad():
                head.weight.copy_(rows)
    store_draft_vocabulary(draft, token_ids)


def resize_head(head: nn.Linear, num_rows: int) -> None:
    """Gives a head another number of rows, with uninitialized weights."""
    weight = head.weight.new_empty(num_rows, head.in_features)
    head.weight = nn.Parameter(weight, requires_grad=head.weight.requires_grad)
    head.out_features = num_rows


def store_draft_vocabulary(draft: DraftModel, token_ids: torch.Tensor) -> None:
    """Stores the vocabulary in a draft's configuration and buffers. The ids ascend."""
    draft.config.draft_vocab_size = len(token_ids)
    for name in ("d2t", "t2d"):
        draft.__dict__.pop(name, None)
        draft._buffers.pop(name, None)
    if len(token_ids) < draft.config.vocab_size:
        ids = torch.arange(draft.config.vocab_size, device=token_ids.device)
        draft.register_buffer("d2t", token_ids - ids[: len(token_ids)])
        draft.register_buffer("t2d", torch.isin(ids, token_ids))
    else:
        draft.d2t = draft.t2d = None


def meet_target(draft: DraftModel, target: PreTrainedModel) -> None:
    """Warns if the table of a draft is not the target's, and gives it a head if it stores none. Unpacks it if it is packed."""
    if hasattr(draft, "ct_decompress_hook"):  # of compressed-tensors, before a `forward` that decoding does not call
        draft._forward_pre_hooks[draft.ct_decompress_hook.id](draft, ())
    warn_of_unrelated_table(draft, target)
    if draft.get_output_embeddings().out_features == 0 or draft._borrowed_head:
        borrow_head(draft, target)


def warn_of_unrelated_table(draft: DraftModel, target: PreTrainedModel) -> None:
    """Warns if a draft that does not know its target stores an embedding table that is unrelated to the target's."""
    if not draft.config.has_own_embed_tokens or draft.config.verifier_fingerprint is not None:
        return
    own, table = draft.embed_tokens, table_of(target)
    is_comparable = own.weight.shape[-1] == table.weight.shape[-1]
    if not is_comparable or own.weight.is_meta or table.weight.is_meta:
        return
    if similarity(fingerprint(own), fingerprint(table, len(own.weight))) < 0.9:
        logger.warning_once(
            f"The draft {draft.config.name_or_path or '(unnamed)'} stores an embedding table that is unrelated to that of "
            f"{type(target).__name__} {target.config.name_or_path or '(unnamed)'}. It was made for another model, or saved with "
            "random numbers, as some exporters did. If few tokens are accepted, use the target's table: `del draft.embed_tokens; "
            "draft.config.has_own_embed_tokens = False`."
        )


def borrow_head(draft: DraftModel, target: PreTrainedModel) -> None:
    """
    Copies the target's head for the draft vocabulary into a draft that stores none, unless it did so before. Raises
    `ValueError` if the head has another width, too few rows, or is offloaded.
    """
    own, head = draft.get_output_embeddings(), target.get_output_embeddings()
    is_own = not draft._borrowed_head or own.weight._version != draft._borrowed_version  # or was trained since
    if own.out_features > 0 and (is_own or draft._borrowed_head[0]() is head):
        return
    weight, token_ids = gathered_head(target), draft.draft_token_ids
    if weight.is_meta or weight.shape[-1] != own.in_features or len(weight) <= token_ids[-1]:
        raise ValueError(
            f"The draft {draft.config.name_or_path or '(unnamed)'} stores no head. It needs the target's, with "
            f"{own.in_features} columns and rows for tokens up to {int(token_ids[-1])}, but that of "
            f"{type(target).__name__} is {tuple(weight.shape)} in {weight.dtype} on {weight.device}. Load the target with "
            "its head on a device."
        )
    # A copy, because a draft may be trained, cast and moved without its target.
    with torch.inference_mode(False), torch.no_grad():
        resize_head(own, draft.config.draft_vocab_size)
        own.weight.copy_(weight[token_ids.to(weight.device)])
    draft._borrowed_head, draft._borrowed_version = Borrowed([weakref.ref(head)]), own.weight._version


def pair_with(draft: DraftModel, target: PreTrainedModel) -> None:
    """
    Stores in a draft's configuration which target it is for. Some formats do not say it, and vLLM requires it. How tokens
    are proposed stays as it is, if the draft says it. Raises what [`~Eagle3ForSpeculation.validate_target`] raises.
    """
    draft.validate_target(target)
    draft.config.eagle_aux_hidden_state_layer_ids = draft.resolve_aux_layer_ids(target)
    draft.config.aux_layer_ids_assumed = False
    num_tokens = target.config.get_text_config(decoder=True).vocab_size
    if num_tokens == draft.config.vocab_size:  # if tokens were added, the draft has a fingerprint that fits
        draft.config.verifier_fingerprint = fingerprint(table_of(target))
    new = speculators_config_for(target, draft.config.speculators_model_type)
    draft.config.speculators_config = new | (draft.config.speculators_config or {}) | {"verifier": new["verifier"]}


def check_not_offloaded(target: PreTrainedModel) -> None:
    """Raises `ValueError` if the target's embeddings or head are offloaded, so that their weights cannot be read."""
    for name, module in (("embeddings", target.get_input_embeddings()), ("head", target.get_output_embeddings())):
        if any(parameter.is_meta for parameter in module.parameters()):
            raise ValueError(
                f"The weights of the {name} of {type(target).__name__} are offloaded. Keep embeddings and head on a device in the "
                "`device_map`. The layers between may be offloaded."
            )


def config_for_target(
    target: PreTrainedModel, num_hidden_layers: int, config_class: type[Eagle3Config] = Eagle3Config, **overrides: Any
) -> Eagle3Config:
    """Returns the configuration of a new draft. Raises `ValueError` like [`from_target`]."""
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    if target.config.is_encoder_decoder or embedding is None or head is None or not target.can_generate():
        raise ValueError(
            f"{type(target).__name__} cannot be an EAGLE-3 target: it must be a decoder-only language model with embeddings."
        )
    if reads_both_ways(target):
        raise ValueError(
            f"{type(target).__name__} cannot be an EAGLE-3 target: it sees later tokens, because `is_decoder` is false in its "
            "configuration. If it was trained as a causal language model, load it with `is_decoder=True`."
        )
    text_config = target.config.get_text_config(decoder=True)
    names = {field.name for field in fields(config_class)} - {"transformer_layer_config"}
    own = {name: overrides.pop(name) for name in list(overrides) if name in names}
    table = table_of(target)
    width = table.weight.shape[-1]  # may be less than that of the target's layers (OPT-350m)
    layer_config = {**layer_config_for(text_config, num_hidden_layers), "hidden_size": width, **overrides}
    known = AutoConfig.for_model(layer_config["model_type"]).to_dict()
    if unknown := sorted(set(overrides) - set(known)):
        raise ValueError(
            f"Unknown overrides {unknown}: neither {config_class.__name__} nor the {layer_config['model_type']} layer "
            "configuration has such a field."
        )
    if layer_config["hidden_size"] != width:
        raise ValueError(
            f"`hidden_size` is {layer_config['hidden_size']}, but must be {width}, the width of the embeddings "
            f"that the draft takes from {type(target).__name__}. Leave it out."
        )
    # The default ids have a repetition with six layers ([2, 3, 3]), and with fewer they begin with the embedding, which
    # the formats of some engines cannot name.
    depth = text_config.num_hidden_layers
    layer_ids = [1, depth // 2, depth - 1] if 4 <= depth <= 6 else default_aux_layer_ids(depth)
    special = target.generation_config or text_config
    tokens = {name: getattr(special, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if own.get("mask_token_id") == "pad":
        pad = tokens["pad_token_id"]
        own["mask_token_id"] = pad if pad is not None and 0 <= pad < text_config.vocab_size else 0
    algorithm = "eagle3" if own.get("mask_token_id") is None else "peagle"
    defaults = {
        "transformer_layer_config": layer_config,
        "draft_vocab_size": text_config.vocab_size,
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "target_hidden_size": text_config.hidden_size,
        "verifier_fingerprint": None if table.weight.is_meta else fingerprint(table),
        "speculators_config": speculators_config_for(target, algorithm),
    }
    return config_class(**defaults | tokens | own)


def speculators_config_for(target: PreTrainedModel, algorithm: str) -> dict[str, Any]:
    """Returns the `speculators_config` that vLLM requires: how to propose tokens, and for which target."""
    name = target.config._name_or_path
    if name and Path(name).is_dir():  # a relative path would look like a Hub id elsewhere
        name = str(Path(name).absolute())
    greedy = {"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{**greedy, "accept_tolerance": 0.0, "verifier_accept_k": 1}],
        "verifier": {"name_or_path": name, "architectures": [architecture_of(target)]},
    }


def architecture_of(target: PreTrainedModel) -> str:
    """
    Returns the name of a model's class in transformers, or of its own class if it has code of its own. Looks through
    wrappers (PEFT, `torch.compile`, DDP) and subclasses (FSDP, or a user's).
    """
    while True:
        if hasattr(target, "get_base_model"):  # PEFT
            target = target.get_base_model()
        elif isinstance(inner := target._modules.get("_orig_mod", target._modules.get("module")), PreTrainedModel):
            target = inner
        else:
            break
    homes = ("transformers.models.", "transformers_modules.")
    known = (each.__name__ for each in type(target).__mro__ if each.__module__.startswith(homes))
    return next(known, type(target).__name__)


def layer_config_for(text_config: PreTrainedConfig, num_hidden_layers: int) -> dict[str, Any]:
    """Returns the configuration of Llama layers with the target's width."""
    stored = text_config.to_dict()

    def get(name: str) -> Any:
        # Attributes that differ by layer raise an error (Gemma 4). Their common value is stored.
        return stored[name] if name in stored else getattr(text_config, name, None)

    num_heads, intermediate_size = get("num_attention_heads"), get("intermediate_size")
    if isinstance(intermediate_size, list):  # one per layer (Gemma 3n)
        intermediate_size = max(intermediate_size)
    if not num_heads:
        raise ValueError(
            f"No draft can be made for a target of type {text_config.model_type!r}: it has no attention (`num_attention_heads`). "
            "Without attention a target cannot drop rejected tokens."
        )
    head_dim = None if get("kv_lora_rank") is not None else get("head_dim")  # with MLA it means something else
    rope = get("rope_parameters") or {}
    rope = rope.get("full_attention", rope) or {}  # one set per layer type (Gemma 3), or none (BEAM)
    if rope.get("rope_type", "default") in PORTABLE_ROPE_TYPES:
        # New drafts rotate whole heads, by one position a token.
        rope = {key: value for key, value in rope.items() if key in ROPE_KEYS - {"partial_rotary_factor"}}
    else:
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    return {
        "model_type": "llama",
        "vocab_size": text_config.vocab_size,
        "hidden_size": text_config.hidden_size,
        "intermediate_size": intermediate_size or 4 * text_config.hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("num_key_value_heads") or num_heads,
        "head_dim": head_dim or text_config.hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": get("max_position_embeddings") or 2048,
        "rms_norm_eps": get("rms_norm_eps") or 1e-6,
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
