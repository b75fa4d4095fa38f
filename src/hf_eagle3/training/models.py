"""Loads and checks the two models of a training: the target and the draft."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import (
    AutoConfig,
    AutoProcessor,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils import logging

from ..checkpoints import target_class
from ..data.images import sees_images
from ..making import FORMS, check_not_offloaded
from ..remote_code.draft_model_eagle3 import DraftModel
from ..remote_code.modeling_eagle3 import Eagle3ForSpeculation
from ..tensor_names import HUB_ARGUMENTS
from ..tokenizer import load_tokenizer, load_with_template, takes_no_template
from .arguments import Eagle3TrainingArguments


logger = logging.get_logger(__name__)


def without_adapter(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Returns the model inside PEFT's wrapper, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def load_target(
    target: str | PreTrainedModel,
    init_kwargs: dict[str, Any] | None,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    trust_remote_code: bool = False,
    with_images: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin | None]:
    """
    Returns the target, its tokenizer, and its processor if it is given or needed. Loads the target if it is a name, and the
    tokenizer or processor if there is none.

    Raises:
        TypeError: if `processing_class` is something else.
        ValueError: if there is nothing to load the tokenizer from, it takes no chat template, `init_kwargs` has no effect, or the name is
            a draft's.
    """
    if not isinstance(processing_class, PreTrainedTokenizerBase | ProcessorMixin | None):
        raise TypeError(
            f"`processing_class` is {processing_class!r:.80}, but must be the target's tokenizer or processor. Pass "
            "`AutoTokenizer.from_pretrained(...)`, or leave it out to load it by the target's name."
        )
    if takes_no_template(processing_class):
        raise ValueError(
            "`processing_class` is a tokenizer of mistral-common, which takes no chat template. Pass "
            "`AutoTokenizer.from_pretrained(..., mistral_format=False)`, or leave it out to load it by the target's name."
        )
    init_kwargs = init_kwargs or {}
    if not isinstance(target, str) and init_kwargs:
        raise ValueError("`target_model_init_kwargs` are for a target that is given by its name. Leave them out.")
    name = target if isinstance(target, str) else target.config._name_or_path
    if processing_class is None and not name:
        raise ValueError(
            "There is no tokenizer, and the target has no name to load it by. Pass the target's tokenizer as `processing_class`."
        )
    init_kwargs = {"trust_remote_code": trust_remote_code, **init_kwargs}
    shared = (*HUB_ARGUMENTS, "code_revision", "trust_remote_code")
    kwargs = {key: value for key, value in init_kwargs.items() if key in shared}
    if isinstance(target, str):
        target = target_class(name, with_images, **kwargs).from_pretrained(name, **{"dtype": "auto", **init_kwargs})
    if processing_class is None:
        processing_class = load_processing_class(name, with_images, **kwargs)
    if not isinstance(processing_class, ProcessorMixin):
        return target, processing_class, None
    tokenizer = processing_class.tokenizer
    if tokenizer.chat_template is None:
        tokenizer.chat_template = processing_class.chat_template
    return target, tokenizer, processing_class


def load_processing_class(
    name: str, with_images: bool = False, **kwargs: Any
) -> PreTrainedTokenizerBase | ProcessorMixin:
    """Returns a target's processor if there are images and the target sees, or else its tokenizer."""
    if with_images and sees_images(AutoConfig.from_pretrained(name, **kwargs)):
        return load_with_template(AutoProcessor, name, **kwargs)
    return load_tokenizer(name, **kwargs)


def draft_to_train(
    model: str | DraftModel | PeftModel | None,
    target_model: PreTrainedModel,
    args: Eagle3TrainingArguments,
    peft_config: PeftConfig | None = None,
) -> DraftModel | PeftModel:
    """
    Returns the draft to train, in float32, or a fresh one if there is none. Half precision would lose small updates, and
    autocast (`bf16=True`) computes in half precision all the same.

    Raises:
        TypeError: if `model` is not a draft.
        ValueError: if arguments contradict each other or the draft, or the draft cannot be trained for this target.
    """
    draft: DraftModel | PeftModel
    if model is not None:
        draft = Eagle3ForSpeculation.from_pretrained(model) if isinstance(model, str) else model
        check_given_draft(draft, model if isinstance(model, str) else "a draft", args)
    elif peft_config is not None:
        raise ValueError(
            "LoRA adapts an existing draft; the adapter of a fresh one would be saved without it. Pass the draft as `model` "
            "(`--draft_name_or_path`), or leave `peft_config` out (`--use_peft`)."
        )
    else:
        draft = fresh_draft(target_model, args)
    check_trainable(draft, target_model, args)
    check_not_offloaded(target_model)
    if model is not None and target_model.config._name_or_path:  # it may have been made for another, such as its base
        draft.pair_with(target_model)
    if not hasattr(draft, "peft_config"):  # PEFT has frozen the rest
        for name in draft.frozen_modules:
            if hasattr(draft, name):
                getattr(draft, name).requires_grad_(False)
    if peft_config is None and not any(parameter.requires_grad for parameter in draft.parameters()):
        raise ValueError(
            "All parameters of the draft are frozen, so it would learn nothing. Call `draft.requires_grad_(True)`, or load its "
            "adapter by `PeftModel.from_pretrained(..., is_trainable=True)`, or merge that into the draft."
        )
    return draft.float()


def check_given_draft(draft: Any, name: str, args: Eagle3TrainingArguments) -> None:
    """
    Raises `TypeError` if the object with this name is not a draft, or `ValueError` if it is compiled, has an adapter inside, or the
    arguments are those of a fresh draft.
    """
    if hasattr(draft, "_orig_mod"):
        raise ValueError(
            "Checkpoints of a compiled draft would not load. Pass the draft before `torch.compile`, and `torch_compile=True`."
        )
    if not hasattr(draft, "validate_target") or isinstance(draft, type):
        kind = f"the class {draft.__name__}" if isinstance(draft, type) else type(draft).__name__
        raise TypeError(
            f"`model` is {kind}, but must be the draft, its name, or `None`. The target is `target_model`."
        )
    if hasattr(draft, "peft_config") and not isinstance(draft, PeftModel):
        # Transformers puts an adapter into its base model. PEFT would put `peft_config`'s in its place, or nothing would learn.
        raise ValueError(
            f"`model` ({name}) is a draft into which transformers loaded an adapter. To train it further, pass "
            "`PeftModel.from_pretrained(draft, adapter, is_trainable=True)` without `peft_config`. Or merge it first: "
            "`PeftModel.from_pretrained(draft, adapter).merge_and_unload().save_pretrained(...)`, and pass that."
        )
    if args.model_init_kwargs or args.draft_form != type(args).draft_form:
        raise ValueError(
            "`model_init_kwargs` and `draft_form` are for a fresh draft (`model=None`). Leave them or `model` out."
        )
    if args.draft_vocab_size not in (None, draft.config.draft_vocab_size):
        raise ValueError(
            f"`draft_vocab_size` is {args.draft_vocab_size}, but the draft has a vocabulary of "
            f"{draft.config.draft_vocab_size}. Leave one of `model` and `draft_vocab_size` out."
        )


def fresh_draft(target_model: PreTrainedModel, args: Eagle3TrainingArguments) -> Eagle3ForSpeculation:
    """Returns an untrained draft of the form that the arguments name."""
    torch.manual_seed(args.seed)
    assert not isinstance(args.model_init_kwargs, str)  # the arguments check it
    form, kwargs = FORMS[args.draft_form], args.model_init_kwargs or {}
    changed = {name: kwargs[name] for name in form if kwargs.get(name, form[name]) != form[name]}
    if args.draft_form == "classic" and changed:
        logger.warning(
            f"`model_init_kwargs` has {changed}, so the draft is not quite of the form 'classic' ({form}). Engines that take this "
            "form may refuse it. Leave these out for an exact one."
        )
    return Eagle3ForSpeculation.from_target(target_model, **(form | kwargs))


def check_trainable(
    model: DraftModel | PeftModel, target_model: PreTrainedModel, args: Eagle3TrainingArguments
) -> None:
    """Raises `ValueError` if the draft is for another target, or cannot be trained with these arguments."""
    model.validate_target(target_model)
    if model.reads_after_last_layer(target_model):
        raise ValueError(
            "The draft reads the target's last state before the final norm. Train a draft that reads states entering layers."
        )
    check_layers(model)
    check_vocabulary(model, target_model)
    check_steps(model, args.ttt_steps)
    plain: dict[str, Any] = {"ttt_row_share": 1.0} if hasattr(model, "unroll") else {}
    # Such a loss is over the whole vocabulary.
    if hasattr(model, "row_loss"):
        plain["sampled_vocab_size"] = None
    if changed := [name for name, value in plain.items() if getattr(args, name) != value]:
        raise ValueError(
            f"{', '.join(changed)} would have no effect on the training of a {type(model).__name__}. Leave it out."
        )
    model.config.to_json_string()  # what cannot be saved should fail now


def check_layers(model: DraftModel | PeftModel) -> None:
    """Raises `ValueError` if the draft has layers that training does not compute."""
    if set(model.config.transformer_layer_config.layer_types) != {"full_attention"}:
        raise ValueError(
            "Only drafts with full attention can be trained; this one has layers "
            f"{model.config.transformer_layer_config.layer_types}, and training-time test would ignore their window."
        )


def check_vocabulary(model: DraftModel | PeftModel, target_model: PreTrainedModel) -> None:
    """
    Raises `ValueError` if the target has tokens that the draft does not know. Such a pair decodes, but labels need both alike.
    """
    num_tokens = target_model.config.get_text_config(decoder=True).vocab_size
    if num_tokens != model.config.vocab_size:
        raise ValueError(
            f"The draft was made for a target with {model.config.vocab_size} tokens, and this one has {num_tokens}: its "
            "embeddings were resized. Train with the target as it was, or make a draft for this one with `from_target`."
        )


def check_steps(model: DraftModel | PeftModel, steps: int) -> None:
    """Raises `ValueError` if the draft cannot be trained `steps` steps deep. The unroll may reach them only late (`ttt_warmup`)."""
    # An EAGLE-3 draft has no such limit.
    most = getattr(model, "most_steps", None)
    if most is not None and steps > most:
        raise ValueError(
            f"A {model.config.model_type} draft is trained at most {most} steps deep, not {steps}. Pass `ttt_steps={most}`."
        )


@contextmanager
def default_generation(target: PreTrainedModel) -> Iterator[None]:
    """
    Lets the target generate by transformers' defaults for a while. Beams, penalties, stop strings and the like in its
    `generation_config` are for its users. Only its special tokens count here.
    """
    model = without_adapter(target)
    own = model.generation_config
    tokens = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**tokens)
    try:
        yield
    finally:
        model.generation_config = own
