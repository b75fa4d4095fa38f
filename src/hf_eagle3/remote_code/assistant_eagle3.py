# SPDX-License-Identifier: Apache-2.0
"""Assistants with their own decoding, and the hooks by which `generate` asks them."""

import copy
import functools
import inspect
import math
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel, pipelines

from .attention_eagle3 import install_packed_attention
from .auto_eagle3 import logger
from .configuration_eagle3 import DRAFT_KEYS
from .decoding_eagle3 import TreeDecoding
from .outputs_eagle3 import Eagle3GenerationStats
from .target_eagle3 import REPLAYABLE_MODEL_TYPES
from .text_eagle3 import SampleArguments
from .tree_eagle3 import GenerationCall, Proposer


class AssistantMixin:
    """An `assistant_model` of `generate`: its [`proposer`] proposes next tokens, and the target decides."""

    # Has settings of the tree (`tree_depth`, `num_assistant_tokens`, ...), which a call may override.
    generation_config: GenerationConfig | None = None
    # Whether its proposers run once a step, so that a deep tree costs as much as a shallow one.
    drafts_in_one_pass = False

    def proposer(self, call: GenerationCall) -> Proposer:
        """Makes the proposer for one `call` of `generate`."""
        raise NotImplementedError(f"`{type(self).__name__}` must define `proposer(call)`.")

    def validate_target(self, target: PreTrainedModel) -> None:
        """Raises `ValueError` if this is not an assistant for `target`. Called before the target reads the prompt."""

    def resolve_aux_layer_ids(self, target: PreTrainedModel) -> list[int]:
        """Returns the indices of the `hidden_states` of `target` that its proposers read. Index `k` is the state entering layer `k`."""
        return []

    def may_replay(self, target: PreTrainedModel) -> bool:
        """Returns whether recurrent layers of `target` compute the same over several tokens at once as over one after another."""
        config = target.config.get_text_config(decoder=True)
        # Mamba 2 has limits of its time steps, which transformers applies only when it reads several tokens.
        least, most = getattr(config, "time_step_limit", None) or (0.0, math.inf)
        return config.model_type in REPLAYABLE_MODEL_TYPES and least <= 0 and most == math.inf

    @torch.no_grad()
    def assisted_decoding(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: torch.Tensor | None = None,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """
        Decodes for `target.generate(..., assistant_model=self)`, with the arguments and the return value of
        `GenerationMixin._assisted_decoding`. Leaves [`Eagle3GenerationStats`] in `last_generation`. Raises `ValueError` if
        this is not an assistant for `target`, or the call asks for what a tree cannot do.

        Args:
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer: As there.
            inputs_tensor, tokenizer, assistant_tokenizer, model_kwargs: As there.
        """
        self.validate_target(target)
        if synced_gpus:
            raise ValueError(NOT_SYNCED)
        own, targets = getattr(self, "device", target.device).type, target.device.type
        if own != targets and "meta" not in (own, targets):
            logger.warning_once(
                f"The assistant is on {own} and the target on {targets}, so drafting is slow. Move the assistant: "
                "`draft.to(target.device)`."
            )
        arguments = SampleArguments(
            input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
        )
        decoding = TreeDecoding(self, target, arguments)
        _IN_THREAD.stats[self] = _IN_ANY_THREAD[self] = decoding.stats
        return decoding.decode()

    @property
    def last_generation(self) -> Eagle3GenerationStats | None:
        """Statistics of the last `generate` with this assistant in this thread, else in any. `None` if that call did not use it."""
        return _IN_THREAD.stats.get(self, _IN_ANY_THREAD.get(self))

    def forget_generation(self) -> None:
        """Forgets the statistics of the last call in this thread, and in any."""
        for stats in (_IN_THREAD.stats, _IN_ANY_THREAD):
            stats.pop(self, None)


class ThreadStats(threading.local):
    """Statistics of this thread's last call with each assistant."""

    def __init__(self) -> None:
        self.stats: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


# Not on the assistant, because it may be copied and pickled.
_IN_THREAD = ThreadStats()
_IN_ANY_THREAD: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


# Settings that transformers' `GenerationConfig` does not have.
CALL_SETTINGS = ("tree_depth", "branching_factor", "tree_policy", "output_steps")
NOT_SYNCED = (
    "`generate` keeps processes that share the target in step (`synced_gpus`), which a draft does not. If all of them generate from the "
    "same prompts, pass `synced_gpus=False`."
)
NAME_OF_DRAFT = (
    "`assistant_model` is the name {0!r}, not a draft. Load it: hf_eagle3.Eagle3ForSpeculation.from_pretrained({0!r}), or without hf-eagle3 "
    "AutoModel.from_pretrained({0!r}, trust_remote_code=True)."
)


def install_generation_hook() -> None:
    """
    Lets an assistant bring its own decoding. `generate` calls `assistant_model.assisted_decoding(target, ...)`, and warns if it
    decoded without that. Pipelines take the assistant as it is, and pass it on. Other assistants are untouched. Installing twice,
    or from several copies of this file, changes nothing.
    """
    # An older copy of this file may have installed only some of them.
    hook_method(GenerationMixin, "_validate_generation_mode", "_validates_with_assistant", validate_with_assistant)
    hook_method(GenerationMixin, "_assisted_decoding", "_decodes_with_assistant", decode_or_assist)
    for name in ("generate", "generate_batch"):
        hook_method(GenerationMixin, name, "_serves_assistants", generate_with_assistant)
    hook_method(pipelines.base, "load_assistant_model", "_takes_assistants", load_or_take)
    for name in ("ImageTextToTextPipeline", "AnyToAnyPipeline"):
        hook_method(getattr(pipelines, name, None), "forward", "_passes_assistants", forward_with_assistant)
    install_packed_attention()


def hook_method(owner: Any, name: str, mark: str, hook: Callable) -> None:
    """Replaces a method by one that calls `hook(method, self, ...)`, unless it carries the `mark` of such a one."""
    method = getattr(owner, name, None)
    if method is not None and not hasattr(method, mark):
        hooked = functools.wraps(method)(lambda self, *args, **kwargs: hook(method, self, *args, **kwargs))
        setattr(hooked, mark, True)
        setattr(owner, name, hooked)


def load_or_take(load_model: Callable, target: Any, assistant: Any, *args: Any) -> Any:
    """
    `load_assistant_model` of pipelines without its comparison of special tokens, which needs those of the target's
    `config` to be those that a draft was saved with. `generate` checks the pair. It would load the name of a draft as
    another model, or ask whether to trust code.
    """
    if isinstance(assistant, (str, Path)):
        content, _ = PreTrainedConfig.get_config_dict(assistant)
        if DRAFT_KEYS & content.keys():
            raise ValueError(NAME_OF_DRAFT.format(str(assistant)))
    return (assistant, None) if hasattr(assistant, "assisted_decoding") else load_model(target, assistant, *args)


def forward_with_assistant(forward: Callable, pipeline: Any, model_inputs: Any, **kwargs: Any) -> Any:
    """`forward` of pipelines that take an assistant, but do not pass it to `generate`."""
    assistant = getattr(pipeline, "assistant_model", None)
    if hasattr(assistant, "assisted_decoding"):
        kwargs["generate_kwargs"] = {"assistant_model": assistant, **(kwargs.get("generate_kwargs") or {})}
    return forward(pipeline, model_inputs, **kwargs)


def validate_with_assistant(
    validate_mode: Callable,
    target: Any,
    generation_mode: Any,
    generation_config: GenerationConfig,
    generation_mode_kwargs: dict,
) -> Any:
    """`_validate_generation_mode` that lifts the limits of other assistants: [`AssistantMixin.assisted_decoding`] checks the target."""
    assistant: Any = generation_mode_kwargs.get("assistant_model")
    if isinstance(assistant, (str, Path)):
        raise ValueError(NAME_OF_DRAFT.format(str(assistant)))
    if isinstance(assistant, type):
        raise ValueError(f"`assistant_model` is the class {assistant.__name__}, not a draft. Load a draft with it.")
    if not (assistant is None or hasattr(assistant, "config") or hasattr(assistant, "assisted_decoding")):
        raise ValueError(
            f"`assistant_model` is a {type(assistant).__name__}, not a draft. Pass what `from_pretrained` returns (with "
            "`output_loading_info=True` the first of both), without a wrapper."
        )
    if hasattr(assistant, "assisted_decoding"):
        # Transformers would compare vocabularies, but a target may have more tokens than its assistant knows.
        generation_mode_kwargs = {**generation_mode_kwargs, "assistant_model": None}
        # Several sequences a prompt are a batch, which transformers' own assistants do not take.
        generation_config = copy.copy(generation_config)
        generation_config.num_return_sequences = 1
        # Transformers refuses all recurrent targets.
        if target._is_stateful and assistant.may_replay(target):
            target = copy.copy(target)
            target._is_stateful = False
    return validate_mode(target, generation_mode, generation_config, generation_mode_kwargs)


def decode_or_assist(decode: Callable, target: Any, /, *args: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
    """`_assisted_decoding` that calls the assistant's own, if it has one."""
    if hasattr(assistant_model, "assisted_decoding"):
        return assistant_model.assisted_decoding(target, *args, **kwargs)
    return decode(target, *args, assistant_model=assistant_model, **kwargs)


def generate_with_assistant(generate: Callable, target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`generate` or `generate_batch` that takes settings of trees as arguments, and warns if an assistant with its own decoding never decoded."""
    _, *names = inspect.signature(generate).parameters
    arguments = {**dict(zip(names, args)), **kwargs}
    assistant: Any = arguments.get("assistant_model")
    if not hasattr(assistant, "assisted_decoding"):
        return generate(target, *args, **kwargs)
    if settings := {name: arguments.pop(name) for name in CALL_SETTINGS if name in arguments}:
        # `generate` would take them for arguments of the target, and warns of arguments beside a `generation_config`.
        config = copy.copy(arguments.pop("generation_config", None))
        if config is None:
            config = copy.deepcopy(target.generation_config)
            unset = {name: value for name, value in arguments.items() if value is None}
            arguments = unset | config.update(**{name: arguments[name] for name in arguments if name not in unset})
        vars(config).update(settings)
        args, kwargs = (), {**arguments, "generation_config": config}
    # Older code of a saved draft cannot forget. A class is refused later.
    if hasattr(assistant, "forget_generation") and not isinstance(assistant, type):
        assistant.forget_generation()
    before = assistant.last_generation
    output = generate(target, *args, **kwargs)
    if assistant.last_generation is before:
        logger.warning(
            f"`{generate.__name__}` did not use its `assistant_model`, {type(assistant).__name__}. Continuous batching, beam "
            "search, `penalty_alpha`, another `custom_generate`, and an `_assisted_decoding` that is not transformers' own do not "
            "take it. Change that to decode faster, or leave out the assistant."
        )
    return output


install_generation_hook()
