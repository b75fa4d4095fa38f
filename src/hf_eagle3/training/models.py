"""The two models of a training: the target, and the draft."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, ProcessorMixin

from ..held import HUB_ARGUMENTS
from ..making import FORMS
from ..remote_code.modeling_eagle3 import Eagle3ForSpeculation
from ..tokenizer import check_is_target, load_tokenizer
from .arguments import Eagle3TrainingArguments


def load_target(
    target: str | PreTrainedModel,
    init_kwargs: dict[str, Any] | None,
    processing_class=None,
    trust_remote_code: bool = False,
):
    """
    The target, and its tokenizer as `processing_class`, both loaded if they are not given. Of a processor its tokenizer.

    Raises:
        ValueError: if it is not known what to load, or it is a draft.
    """
    init_kwargs = init_kwargs or {}
    if not isinstance(target, str) and init_kwargs:
        raise ValueError("`target_model_init_kwargs` are for a target that is given by its name.")
    name = target if isinstance(target, str) else target.config._name_or_path
    if processing_class is None and not name:
        raise ValueError("`Eagle3Trainer` needs the target's tokenizer as `processing_class`.")
    init_kwargs = {"trust_remote_code": trust_remote_code, **init_kwargs}
    shared = (*HUB_ARGUMENTS, "code_revision", "trust_remote_code")
    kwargs = {key: value for key, value in init_kwargs.items() if key in shared}
    if isinstance(target, str):
        check_is_target(name, **kwargs)
        target = AutoModelForCausalLM.from_pretrained(name, **{"dtype": "auto", **init_kwargs})
    if processing_class is None:
        processing_class = load_tokenizer(name, **kwargs)
    if isinstance(processing_class, ProcessorMixin):
        tokenizer = processing_class.tokenizer
        if tokenizer.chat_template is None:
            tokenizer.chat_template = processing_class.chat_template
        processing_class = tokenizer
    return target, processing_class


def draft_to_train(model, target_model, args: Eagle3TrainingArguments, peft_config=None):
    """
    `model`, or a fresh draft, in float32: half precision swallows small updates, and autocast (`bf16=True`) computes
    in it all the same.

    Raises:
        TypeError: if `model` is no draft.
        ValueError: if arguments contradict each other or the draft, or it cannot be trained for this target.
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "Checkpoints of a compiled draft would not load. Pass the draft as it was, and `torch_compile=True`."
        )
    if isinstance(model, str):
        model = Eagle3ForSpeculation.from_pretrained(model)
    if model is not None and not hasattr(model, "validate_target"):
        raise TypeError(
            "`model` must be the draft, its name, or `None` for a fresh one, and the target is `target_model`; `model` is "
            f"{type(model).__name__}."
        )
    if model is None and peft_config is not None:
        raise ValueError(
            "LoRA adapts a draft that there is; an adapter of a fresh one would be saved without it. Pass the draft as `model` "
            "(`--draft_name_or_path`), or leave `peft_config` out (`--use_peft`)."
        )
    if model is None:
        torch.manual_seed(args.seed)
        settings = FORMS[args.draft_form] | (args.model_init_kwargs or {})
        model = Eagle3ForSpeculation.from_target(target_model, **settings)
    elif args.model_init_kwargs or args.draft_form != type(args).draft_form:
        raise ValueError(
            "`model_init_kwargs` and `draft_form` are for the draft that `model=None` makes. Leave them or `model` out."
        )
    elif args.draft_vocab_size not in (None, model.config.draft_vocab_size):
        raise ValueError(
            f"`draft_vocab_size` is {args.draft_vocab_size}, but the draft has a vocabulary of "
            f"{model.config.draft_vocab_size}. Leave one of `model` and `draft_vocab_size` out."
        )
    model.validate_target(target_model)
    if model.reads_after_last_layer(target_model):
        raise ValueError(
            "The draft reads the state after the target's last layer, before the final norm, which training does not collect. "
            "Train one that reads states entering layers."
        )
    if set(model.config.transformer_layer_config.layer_types) != {"full_attention"}:
        raise ValueError(
            "`Eagle3Trainer` trains drafts with full attention; this one has layers "
            f"{model.config.transformer_layer_config.layer_types}, whose window training-time test would ignore."
        )
    if not hasattr(model, "peft_config"):
        for name in model.frozen_modules:
            if hasattr(model, name):
                getattr(model, name).requires_grad_(False)
    return model.float()


@contextmanager
def default_generation(target: PreTrainedModel) -> Iterator[None]:
    """
    Within it the target generates by transformers' defaults: what else its `generation_config` says (beams, penalties, stop
    strings, dictionaries) is for its users, but for the tokens at which texts end.
    """
    model = target.get_base_model() if hasattr(target, "get_base_model") else target  # of PEFT's
    own = model.generation_config
    tokens = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**tokens)
    try:
        yield
    finally:
        model.generation_config = own
