"""A draft for calls of `generate` that somebody else writes."""

import functools
import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import GenerationMixin, PreTrainedModel


# The drafts of each target for which a `with` is open, the innermost last.
_DRAFTS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()
# A call with one of these goes another way, which is the caller's choice.
OTHER_WAYS = (
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_model",
    "custom_generate",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "synced_gpus",
    "use_mtp",
)


@contextmanager
def assist(target: PreTrainedModel, draft) -> Iterator[None]:
    """
    Within it each call of `target.generate` is assisted by a draft, whoever makes it, in whichever thread: a pipeline,
    an evaluation, a trainer's rollouts. The text is what it would be.

    ```py
    with assist(target, draft):
        results = lm_eval.simple_evaluate(HFLM(pretrained=target), tasks=["gsm8k"])
    ```

    Calls that are decoded in another way (by beams, without a cache, by another assistant), or ask for attentions, are
    left as they are.
    Inside another `assist` of the same target the inner draft is used. Nothing on the target is changed, but for
    transformers' own hooks for hidden states, which stay.

    Args:
        target (`PreTrainedModel`): The target, or an adapted one (`PeftModel`), or a compiled one.
        draft ([`Eagle3ForSpeculation`]): Or any other assistant that brings its own decoding.

    Raises:
        TypeError: if the draft is none, but its name or another model, or the target does not generate.
        ValueError: if the draft is not for this target.
    """
    if not hasattr(draft, "validate_target"):
        raise TypeError(
            f"`assist(target, draft)` takes a draft that is loaded, by `AutoModel.from_pretrained`; this is {type(draft).__name__}."
        )
    model = getattr(target, "_orig_mod", target)  # which `torch.compile` wraps
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(model, GenerationMixin):
        raise TypeError(f"`assist(target, draft)` takes a model that generates; this is {type(target).__name__}.")
    draft.validate_target(model)
    _install()
    entry = object()
    with _LOCK:
        _DRAFTS.setdefault(model, {})[entry] = draft
    try:
        yield
    finally:
        with _LOCK:
            del _DRAFTS[model][entry]


def draft_for(model) -> object | None:
    """The draft that assists a model now."""
    with _LOCK:
        drafts = _DRAFTS.get(model)
        return list(drafts.values())[-1] if drafts else None


def goes_another_way(model, generation_config=None, **kwargs) -> bool:
    """Whether a call of `generate` with these arguments asks for what a draft does not do."""
    # As `generate` does: what a call leaves open, its configuration says, and else the model's.
    configs = [vars(config) for config in (generation_config, model.generation_config) if config is not None]

    def asked(name):
        return next((each[name] for each in (kwargs, *configs) if each.get(name) is not None), None)

    wants_attentions = asked("return_dict_in_generate") and asked("output_attentions")
    keeps_cache = kwargs.get("use_cache", True) and asked("use_cache") is not False
    is_paged = asked("cache_implementation") == "paged"  # continuous batching
    is_other = (asked("num_beams") or 1) > 1 or any(map(asked, OTHER_WAYS))
    return bool(wants_attentions or not keeps_cache or is_paged or is_other)


def _install() -> None:
    """Lets `generate` look for a draft. Installing twice changes nothing."""
    generate = GenerationMixin.generate
    if getattr(generate, "_looks_for_drafts", False):
        return

    signature = inspect.signature(generate)
    _, *names = signature.parameters

    @functools.wraps(generate)
    def generate_with_drafts(self, *args, **kwargs):
        draft = draft_for(self)
        if draft is None:
            return generate(self, *args, **kwargs)
        signature.bind(self, *args, **kwargs)  # raises where `generate` would: an argument that is given twice
        kwargs |= zip(names, args)
        if not goes_another_way(self, **kwargs):
            kwargs["assistant_model"] = draft
        return generate(self, **kwargs)

    generate_with_drafts._looks_for_drafts = True
    GenerationMixin.generate = generate_with_drafts
