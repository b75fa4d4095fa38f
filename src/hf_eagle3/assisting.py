"""Using a draft in calls of `generate` that other code makes."""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from .remote_code.assistant_eagle3 import hook_method
from .remote_code.auto_eagle3 import logger
from .remote_code.cache_eagle3 import check_cache
from .remote_code.target_eagle3 import check_given_cache


if TYPE_CHECKING:
    from .remote_code.assistant_eagle3 import AssistantMixin

P = ParamSpec("P")
# For each target the drafts of the open contexts, the innermost last.
_DRAFTS: "weakref.WeakKeyDictionary[PreTrainedModel, dict[object, AssistantMixin]]" = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()
# Arguments with which the caller chooses another way of decoding.
OTHER_DECODING = (
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_model",
    "custom_generate",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "synced_gpus",
    "use_mtp",
)


def context_manager(function: Callable[P, Iterator[None]]) -> Callable[P, AbstractContextManager[None]]:
    """`contextlib.contextmanager` for contexts that do nothing alone: warns if one is never entered."""

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[None]:
        entries: list[bool] = []

        @contextmanager
        def context() -> Iterator[None]:
            entries.append(True)
            with contextmanager(function)(*args, **kwargs):
                yield

        made = context()
        weakref.finalize(made, warn_if_unused, function.__name__, entries).atexit = False
        return made

    return make


def warn_if_unused(name: str, entries: list[bool]) -> None:
    """Warns if a context of the function with this name was never entered."""
    if not entries:
        logger.warning(f"`{name}(...)` alone does nothing. Write `with {name}(...):` around the calls.")


@context_manager
def assist(target: PreTrainedModel, draft: "AssistantMixin") -> Iterator[None]:
    """
    Assists every call of `target.generate` inside the context with a draft. It does not matter who makes the call, or in
    which thread: a pipeline, an evaluation, a trainer's rollouts. The text is the same as without the draft.

    ```py
    with assist(target, draft):
        results = lm_eval.simple_evaluate(HFLM(pretrained=target), tasks=["gsm8k"])
    ```

    Calls run without the draft if they ask for attentions or another way of decoding (beams, no cache), or pass a cache that
    cannot roll back tokens. A warning says why. Calls with an `assistant_model` of their own use that one. Contexts of one
    target may be nested: the innermost draft is used. The target is unchanged, except that transformers' hooks for hidden
    states stay on it.

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
            "`Eagle3ForSpeculation.from_pretrained`, or `AutoModel.from_pretrained(..., trust_remote_code=True)`."
        )
    model: Any = getattr(target, "_orig_mod", target)  # unwraps `torch.compile`
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(model, GenerationMixin):
        raise TypeError(f"`assist(target, draft)` takes a model that generates, not {type(target).__name__}.")
    draft.validate_target(model)
    hook_method(GenerationMixin, "generate", "_looks_for_drafts", generate_with_drafts)
    entry = object()
    with _LOCK:
        _DRAFTS.setdefault(model, {})[entry] = draft
    try:
        yield
    finally:
        with _LOCK:
            del _DRAFTS[model][entry]


def draft_for(model: PreTrainedModel) -> "AssistantMixin | None":
    """Returns the draft that assists a model now, or `None`."""
    with _LOCK:
        drafts = _DRAFTS.get(model)
        return list(drafts.values())[-1] if drafts else None


def other_decoding(
    model: PreTrainedModel, draft: "AssistantMixin", generation_config: GenerationConfig | None = None, **kwargs: Any
) -> str | None:
    """What a call of `generate` with these arguments asks for that a draft cannot do, or `None`."""
    # In the order of `generate`: the call's arguments, then its configuration, then the model's.
    configs = [vars(config) for config in (generation_config, model.generation_config) if config is not None]

    def asked(name: str) -> Any:
        return next((each[name] for each in (kwargs, *configs) if each.get(name) is not None), None)

    if asked("return_dict_in_generate") and asked("output_attentions"):
        return "output_attentions"
    if not kwargs.get("use_cache", True) or asked("use_cache") is False:
        return "use_cache=False"
    # Continuous batching, and caches that cannot forget a token.
    if (implementation := asked("cache_implementation")) in ("paged", "quantized", "offloaded_static"):
        return f"cache_implementation={implementation!r}"
    if (asked("num_beams") or 1) > 1:
        return "num_beams"
    given = (name for name in ("cache", "past_key_values") if kwargs.get(name) is not None)  # newer, older
    if (name := next(given, None)) is not None:
        try:
            check_cache(kwargs[name], draft.may_replay(model))
            check_given_cache(model, kwargs[name], kwargs.get("attention_mask"), draft.may_replay(model))
        except ValueError:
            return name
    return next(filter(asked, OTHER_DECODING), None)


def generate_with_drafts(generate: Callable, target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`generate` with the draft that assists the target now, if there is one."""
    draft = draft_for(target)
    if draft is None:
        return generate(target, *args, **kwargs)
    signature = inspect.signature(generate)
    signature.bind(target, *args, **kwargs)  # raises like `generate` if an argument is passed twice
    kwargs |= zip(list(signature.parameters)[1:], args)
    if (asked := other_decoding(target, draft, **kwargs)) is None:
        kwargs["assistant_model"] = draft
    elif asked != "assistant_model":
        logger.warning_once(f"A call of `generate` runs without the draft of `assist`, because of its `{asked}`.")
    return generate(target, **kwargs)
