"""Using a draft in calls of `generate` that other code makes."""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StaticCache
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from .remote_code.assistant_eagle3 import CALL_SETTINGS, NOT_SYNCED, hook_method
from .remote_code.auto_eagle3 import logger
from .remote_code.cache_eagle3 import check_cache
from .remote_code.draft_model_eagle3 import check_embedding
from .remote_code.target_eagle3 import check_dropout, check_given_cache, check_target


if TYPE_CHECKING:
    from .remote_code.assistant_eagle3 import AssistantMixin

# For each target the drafts of the open contexts, the innermost last, and whether `generate` was called in them.
_DRAFTS: "weakref.WeakKeyDictionary[PreTrainedModel, dict[threading.Event, AssistantMixin]]" = (
    weakref.WeakKeyDictionary()
)
_LOCK = threading.Lock()
# Arguments with which the caller chooses another way of decoding.
OTHER_DECODING = (
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "custom_generate",
    "dola_layers",
    "is_assistant",  # transformers' own, of another target or of this one's first layers
    "penalty_alpha",
    "prompt_lookup_num_tokens",
    "use_mtp",
)


@contextmanager
def assist(target: PreTrainedModel, draft: "AssistantMixin") -> Iterator[None]:
    """
    Assists every call of `target.generate` inside the context with a draft. It does not matter who makes the call, or in
    which thread: a pipeline, an evaluation, a trainer's rollouts. The text is the same as without the draft.

    ```py
    with assist(target, draft):
        results = lm_eval.simple_evaluate(HFLM(pretrained=target), tasks=["gsm8k"])
    ```

    Some calls run without the draft, and a warning says why: if they ask for attentions or another way of decoding (beams, no
    cache), if they pass a cache that cannot roll back tokens, or if their target takes no draft at the moment (dropout, prompt
    tuning). Another warning says that no call was seen in the context. Calls with an `assistant_model` of their own use that one.
    Contexts of one target may be nested: the innermost draft is used. The target is unchanged, except that transformers' hooks for
    hidden states stay on it.

    Args:
        target (`PreTrainedModel`): The target. It may be compiled, or adapted (`PeftModel`).
        draft ([`Eagle3ForSpeculation`] or [`AssistantMixin`]): The loaded draft, or another assistant.

    Raises:
        TypeError: if `draft` is a name, or not a draft, or the target cannot generate.
        ValueError: if the draft is not for this target.
    """
    if not hasattr(draft, "validate_target"):
        raise TypeError(
            f"`assist(target, draft)` takes a draft that is loaded, not {type(draft).__name__}. Load it with "
            "`Eagle3ForSpeculation.from_pretrained`."
        )
    model: Any = getattr(target, "_orig_mod", target)  # unwraps `torch.compile`
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(model, GenerationMixin):
        raise TypeError(f"`assist(target, draft)` takes a model that generates, not {type(target).__name__}.")
    draft.validate_target(model)
    hook_method(GenerationMixin, "generate", "_looks_for_drafts", generate_with_drafts)
    was_called = threading.Event()
    with _LOCK:
        _DRAFTS.setdefault(model, {})[was_called] = draft
    try:
        yield
    finally:
        with _LOCK:
            del _DRAFTS[model][was_called]
    if not was_called.is_set():
        logger.warning(
            f"No call of `generate` of this {type(model).__name__} was seen in its `assist` context, so no draft was used. Copies of "
            "the model, `generate_batch`, a `generate` of the model's own, and one that was stored before the context do not look for it."
        )


def draft_for(model: PreTrainedModel) -> "AssistantMixin | None":
    """Returns the draft that assists this call of `generate` of a model, or `None`."""
    with _LOCK:
        if not (drafts := _DRAFTS.get(model)):
            return None
        for was_called in drafts:
            was_called.set()
        return list(drafts.values())[-1]


def other_decoding(
    model: PreTrainedModel, draft: "AssistantMixin", generation_config: GenerationConfig | None = None, **kwargs: Any
) -> str | None:
    """Why a draft cannot assist a call of `generate` with these arguments, or `None`."""
    # In the order of `generate`: the call's arguments, then its configuration, then the model's.
    configs = [vars(config) for config in (generation_config, model.generation_config) if config is not None]

    def asked(name: str) -> Any:
        return next((each[name] for each in (kwargs, *configs) if each.get(name) is not None), None)

    # Continuous batching, and caches that cannot forget a token.
    implementation = asked("cache_implementation") or ""
    others = {
        "output_attentions": asked("return_dict_in_generate") and asked("output_attentions"),
        "use_cache=False": not kwargs.get("use_cache", True) or asked("use_cache") is False,
        f"cache_implementation={implementation!r}": implementation.startswith(("paged", "quantized", "offloaded_")),
        "num_beams": (asked("num_beams") or 1) > 1,
        **{name: asked(name) for name in OTHER_DECODING},
    }
    if (name := next(filter(others.get, others), None)) is not None:
        return f"It asks for `{name}`."
    if is_synced(model, kwargs.get("synced_gpus")):
        return NOT_SYNCED
    names = ("cache", "past_key_values")  # newer, older
    caches = [kwargs[name] for name in names if kwargs.get(name) is not None]
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__}.forward takes no `position_ids`."
    if getattr(model.config.get_text_config(decoder=True), "keep_window_size", None) is not None:
        return f"{type(model).__name__} reads texts beyond its `keep_window_size` differently token by token."
    try:
        check_target(model)
        if isinstance(draft, PreTrainedModel):
            check_dropout("draft", draft)
        if hasattr(draft, "borrow_embeddings"):
            check_embedding(draft, model)
        for cache in caches:
            check_cache(cache, draft.may_replay(model))
        if implementation in ALL_STATIC_CACHE_IMPLEMENTATIONS:  # as `generate` will make it
            caches.append(StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=1))
        for cache in caches:
            check_given_cache(model, cache, kwargs.get("attention_mask"), draft.may_replay(model))
    except ValueError as error:
        return str(error)
    return None


def is_synced(model: PreTrainedModel, synced_gpus: bool | None) -> bool:
    """Whether `generate` keeps processes that hold shares of the model in step. It decides so itself if the caller does not."""
    if synced_gpus is not None:
        return synced_gpus
    is_shared = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    return is_shared and dist.is_initialized() and dist.get_world_size() > 1


def generate_with_drafts(generate: Callable, target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`generate` with the draft that assists the target now, if there is one."""
    draft = draft_for(target)
    if draft is None:
        return generate(target, *args, **kwargs)
    signature = inspect.signature(generate)
    signature.bind(target, *args, **kwargs)  # raises like `generate` if an argument is passed twice
    kwargs |= zip(list(signature.parameters)[1:], args)
    if kwargs.get("assistant_model") is None:
        if (reason := other_decoding(target, draft, **kwargs)) is None:
            kwargs["assistant_model"] = draft
        else:
            logger.warning_once(f"A call of `generate` runs without the draft of `assist`. {reason}")
            kwargs = {name: value for name, value in kwargs.items() if name not in CALL_SETTINGS}
    return generate(target, **kwargs)
