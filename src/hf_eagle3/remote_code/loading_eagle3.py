# SPDX-License-Identifier: Apache-2.0
"""Checks of a draft: whether its checkpoint is what was saved, and whether it fits a target."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from .auto_eagle3 import IS_INSTALLED
from .embedding_eagle3 import gathered_table, look_up, table_of
from .target_eagle3 import check_dropout


# Targets with these settings, for which there are no drafts.
UNREADABLE_TARGETS = {
    "altup_num_inputs": "has several states for each token",  # Gemma 3n
    "cross_attention_layers": "attends to images in separate layers",  # Mllama
}


# Checkpoints -------------------------------------------------------------------------------------------------------


def read_config(source: str, **hub_kwargs: Any) -> dict[str, Any] | None:
    """The content of `config.json`, or `None` if there is none."""
    path = cached_file(source, "config.json", _raise_exceptions_for_missing_entries=False, **hub_kwargs)
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def check_loading_info(info: dict[str, Any], source: str | Path) -> None:
    """Raises `ValueError` if transformers found tensors missing, unexpected or of another shape."""
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    mismatched = sorted(str(entry) for entry in info["mismatched_keys"])
    if missing or unexpected or mismatched:
        others = "" if IS_INSTALLED else " If another project saved it, `pip install hf-eagle3` may read it."
        raise ValueError(
            f"{source} does not hold the tensors that its config.json describes. Missing: {missing or 'none'}. Unexpected: "
            f"{unexpected or 'none'}. Of another shape: {mismatched or 'none'}. Check the config's flags (norm_before_fc, "
            f"fc_norm, draft_vocab_size, num_hidden_layers, ...) or download the checkpoint again.{others}"
        )


def check_weights(tensors: dict[str, torch.Tensor], source: str | Path, digest: str | None = None) -> None:
    """Raises `ValueError` if weights and buffers are not finite, or their [`weights_digest`] was another when saved."""
    if any(tensor.is_meta for tensor in tensors.values()):
        return
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ValueError(
            f"{source}: {broken} have values that are NaN or infinite. Download the checkpoint again, or load it in another "
            "`dtype` if it overflows in this one."
        )
    if digest is not None and digest != weights_digest(tensors):
        raise ValueError(
            f"The weights of {source} are not those that were saved with its config.json. Download the checkpoint again, or "
            "remove `weights_digest` from config.json if you changed them on purpose."
        )


def weights_digest(state_dict: dict[str, torch.Tensor]) -> str:
    """SHA-256 of a draft's weights in bfloat16, so that a float32 draft and its bfloat16 copy have the same."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state_dict.items()):
        if tensor.is_floating_point():
            tensor = tensor.bfloat16().view(torch.int16)
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


# Targets -----------------------------------------------------------------------------------------------------------


def check_is_model(target: Any) -> None:
    """Raises `TypeError` if a target is no loaded model, but its name, say."""
    if not hasattr(target, "get_input_embeddings"):
        raise TypeError(
            f"The target must be a loaded model, not {type(target).__name__}. Load it with `AutoModelForCausalLM.from_pretrained`, "
            "and pass it without a wrapper."
        )


def check_pairing(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raises `ValueError`, naming both sides, if the draft is for a target of another kind, size, vocabulary or embedding."""
    check_is_model(target)
    if (mismatch := mismatch_of(draft, target)) is not None:
        raise ValueError(
            f"The draft {draft.config.name_or_path or '(unnamed)'}, made for {draft.config.verifier}, does not fit the target "
            f"{type(target).__name__} {target.config.name_or_path or '(unnamed)'}: {mismatch}. Pair each draft with the target "
            "it was trained for."
        )


def mismatch_of(draft: PreTrainedModel, target: PreTrainedModel) -> str | None:
    """Why a draft cannot be for a target, or `None`. See [`check_pairing`]."""
    config, text_config = draft.config, target.config.get_text_config(decoder=True)
    if target.config.is_encoder_decoder:
        return "the target is an encoder-decoder, but EAGLE-3 drafts for decoder-only models"
    for name, reason in UNREADABLE_TARGETS.items():
        if getattr(text_config, name, None):
            return f"the target {reason} (`{name}`), which EAGLE-3 drafts cannot read"
    table = table_of(target)
    known_rows = config.verifier_fingerprint if table.weight.device.type != "meta" else None
    # Added tokens (`resize_token_embeddings`) leave the ids and rows of the others, as the fingerprint shows.
    has_more_tokens = known_rows is not None and text_config.vocab_size > config.vocab_size
    if config.vocab_size != text_config.vocab_size and not has_more_tokens:
        return (
            f"it needs a vocabulary of {config.vocab_size}, but the target has one of {text_config.vocab_size}. If you resized "
            "the target's embeddings (`resize_token_embeddings`), make a draft for it after that"
        )
    if config.target_hidden_size != text_config.hidden_size:
        return f"it needs states of size {config.target_hidden_size}, but the target's have size {text_config.hidden_size}"
    layer_ids, depth = draft.resolve_aux_layer_ids(target), text_config.num_hidden_layers
    if not all(0 <= layer_id <= depth for layer_id in layer_ids):
        return f"it reads the states entering layers {layer_ids}, but the target has layers 0 to {depth - 1}"
    if not config.has_own_embed_tokens and table.weight.shape[-1] != config.hidden_size:
        return (
            f"it reads an embedding table of width {config.hidden_size}, but the target's has {table.weight.shape[-1]}"
        )
    # Fine-tuning and quantization hardly change the table, but those of two models are unrelated.
    num_rows = config.vocab_size if has_more_tokens else None
    if known_rows is not None and similarity(known_rows, fingerprint(table, num_rows)) < 0.9:
        return "it was trained for another model: the sizes agree, but the embedding tables are unrelated"
    return None


def check_draft(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raises `ValueError` if the draft or the target is not ready: offloaded, in training mode, or the draft is on several devices."""
    # Its own embedding table may be on another device than the rest.
    devices = {weight.device for name, weight in draft.named_parameters() if name != "embed_tokens.weight"}
    if len(devices) > 1 or any(weight.is_meta for weight in draft.parameters()):
        places = ", ".join(sorted({str(weight.device) for weight in draft.parameters()}))
        raise ValueError(
            f"The draft's weights are on {places}: they are offloaded, split over devices or not loaded. Load it with "
            "`from_pretrained`, whole on one device (without `device_map='auto'`)."
        )
    check_dropout("draft", draft)
    check_embedding(draft, target)


def check_embedding(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raises `ValueError` if the draft reads the embedding of the target, and that is offloaded."""
    if not draft.config.has_own_embed_tokens and table_of(target).weight.device.type == "meta":
        raise ValueError(
            f"The embedding of {type(target).__name__}, which the draft reads, is offloaded. Keep it on a device in the "
            "`device_map`, or make the draft with `has_own_embed_tokens=True`."
        )


def similarity(fingerprint: str, other: str) -> float:
    """The cosine similarity of two [`fingerprint`]s."""
    ours, theirs = (
        torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float16).double()
        for text in (fingerprint, other)
    )
    return torch.cosine_similarity(ours, theirs, dim=0).item()


def fingerprint(table: torch.nn.Embedding, num_rows: int | None = None) -> str:
    """The first 4 entries of 16 evenly spaced rows of a table `(vocab_size, hidden_size)`, or of its first `num_rows`, in base64."""
    last = (num_rows or len(table.weight)) - 1
    rows = torch.linspace(0, last, 16, dtype=torch.float32, device=table.weight.device).long()
    entries = look_up(gathered_table(table), rows).detach()[:, :4].flatten().half().cpu()
    return base64.b64encode(entries.numpy().tobytes()).decode()
