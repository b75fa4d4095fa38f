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
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from .auto_eagle3 import logger
from .decoding_eagle3 import TreeDecoding
from .outputs_eagle3 import Eagle3GenerationStats
from .target_eagle3 import REPLAYABLE_MODEL_TYPES
from .text_eagle3 import SampleArguments
from .tree_eagle3 import GenerationCall, Proposer


class AssistantMixin:
    """
    Makes an object an `assistant_model` of `generate`: it proposes next tokens ([`Proposer`]), and the target decides. A
    subclass implements [`proposer`].
    """

    # Has settings of the tree (`tree_depth`, `num_assistant_tokens`, ...), which a call may override.
    generation_config: GenerationConfig | None = None
    # Whether its proposers run once a step, so that a deep tree costs as much as a shallow one.
    drafts_in_one_pass = False

    def proposer(self, call: GenerationCall) -> Proposer:
        """
        Makes the proposer for one call of `generate`.

        Args:
            call ([`GenerationCall`]): The call.
        """
        raise NotImplementedError

    def validate_target(self, target: PreTrainedModel) -> None:
        """
        Checks the target, before anything else happens.

        Args:
            target (`PreTrainedModel`): The target.

        Raises:
            ValueError: if this is no assistant for `target`.
        """

    def resolve_aux_layer_ids(self, target: PreTrainedModel) -> list[int]:
        """
        The indices of the target's `hidden_states` that its proposers read. Index `k` is the state entering layer `k`.

        Args:
            target (`PreTrainedModel`): The target.
        """
        return []

    def may_replay(self, target: PreTrainedModel) -> bool:
        """
        Whether the target's recurrent layers compute the same over several tokens at once as over one after another.

        Args:
            target (`PreTrainedModel`): The target.
        """
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
        `GenerationMixin._assisted_decoding`. Leaves [`Eagle3GenerationStats`] in `last_generation`.

        Args:
            target (`PreTrainedModel`): The target.
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer: As there.
            inputs_tensor, tokenizer, assistant_tokenizer, model_kwargs: As there.

        Raises:
            ValueError: if this is no assistant for `target`, or the call asks for what a tree cannot do.
        """
        self.validate_target(target)
        if synced_gpus:
            raise ValueError("EAGLE-3 decoding does not support `synced_gpus=True` (ZeRO-3 and FSDP sharded targets).")
        arguments = SampleArguments(
            input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
        )
        decoding = TreeDecoding(self, target, arguments)
        last = _LAST_STATS.setdefault(self, LastStats())
        last.in_thread.stats = last.in_any_thread = decoding.stats
        return decoding.decode()

    @property
    def last_generation(self) -> Eagle3GenerationStats | None:
        """Statistics of this thread's last call of `generate` with this assistant, or of any thread's if it made none."""
        last = _LAST_STATS.get(self)
        return last and (last.in_thread.stats or last.in_any_thread)


class ThreadStats(threading.local):
    stats: Eagle3GenerationStats | None = None


class LastStats:
    """Statistics of the last calls with one assistant."""

    def __init__(self) -> None:
        self.in_thread = ThreadStats()
        self.in_any_thread: Eagle3GenerationStats | None = None


# Not on the assistant, because it may be copied and pickled.
_LAST_STATS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


# Saved with a draft as `custom_generate/generate.py`. A text, so that a draft that was loaded as remote code has it, too.
CUSTOM_GENERATE = '''"""
What `target.generate(..., custom_generate="<this repo>", assistant_model=draft, trust_remote_code=True)` calls.
"""

from transformers import AutoModel


def generate(*args, model, assistant_model=None, **kwargs):
    """`assistant_model` is a draft, or the folder or Hub id of one."""
    if assistant_model is None:
        raise ValueError("A draft does not generate by itself. Call target.generate(..., assistant_model=draft).")
    if isinstance(assistant_model, str):
        assistant_model = AutoModel.from_pretrained(assistant_model, dtype=model.dtype, trust_remote_code=True)
        assistant_model = assistant_model.to(model.device)
    if not hasattr(assistant_model, "assisted_decoding"):
        name = type(assistant_model).__name__
        raise ValueError(f"{name} is no EAGLE-3 draft. Call target.generate(..., assistant_model=draft), not the reverse.")
    return model.generate(*args, **kwargs, assistant_model=assistant_model)
'''


def install_generation_hook() -> None:
    """
    Lets an assistant bring its own decoding. `generate` calls `assistant_model.validate_target(target)` before anything
    else and then `assistant_model.assisted_decoding(target, ...)`, and warns if it decoded without that. Other assistants
    are untouched. Installing twice, or from several copies of this file, changes nothing.
    """
    for name, mark, hook in (  # an older copy of this file may have installed only some of them
        ("_validate_generation_mode", "_validates_with_assistant", with_assistant_validation),
        ("_assisted_decoding", "_decodes_with_assistant", with_assistant_decoding),
        ("generate", "_warns_of_unused_assistant", with_warning_of_unused_assistant),
    ):
        method = getattr(GenerationMixin, name)
        if not hasattr(method, mark):
            hooked = functools.wraps(method)(hook(method))
            setattr(hooked, mark, True)
            setattr(GenerationMixin, name, hooked)


def decodes(assistant: Any) -> bool:
    """Whether an assistant has its own decoding: an [`AssistantMixin`] of any copy of this code, or a wrapper of one."""
    return hasattr(assistant, "assisted_decoding")


def with_assistant_validation(validate_mode: Callable) -> Callable:
    """`_validate_generation_mode` that lets an assistant check the target, and lifts the limits of other assistants."""

    def _validate_generation_mode(
        self: PreTrainedModel, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: dict
    ) -> Any:
        assistant: Any = generation_mode_kwargs.get("assistant_model")
        if isinstance(assistant, (str, Path)):
            raise ValueError(
                f"`assistant_model` is the name {str(assistant)!r}, not a draft. Load it with "
                f"AutoModel.from_pretrained({str(assistant)!r}, trust_remote_code=True)."
            )
        if isinstance(assistant, type):
            raise ValueError(
                f"`assistant_model` is the class {assistant.__name__}, not a draft. Load a draft with it."
            )
        if decodes(assistant):
            assistant.validate_target(self)
            if not hasattr(assistant, "config"):  # transformers would compare vocabularies
                generation_mode_kwargs = {**generation_mode_kwargs, "assistant_model": None}
            # Several sequences a prompt are a batch, which transformers' own assistants do not take.
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1
            # Transformers refuses all recurrent targets.
            if self._is_stateful and assistant.may_replay(self):
                self = copy.copy(self)
                self._is_stateful = False
        return validate_mode(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def with_assistant_decoding(assisted_decoding: Callable) -> Callable:
    """`_assisted_decoding` that calls the assistant's own, if it has one."""

    def _assisted_decoding(self: PreTrainedModel, *args: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
        if decodes(assistant_model):
            return assistant_model.assisted_decoding(self, *args, **kwargs)
        return assisted_decoding(self, *args, assistant_model=assistant_model, **kwargs)

    return _assisted_decoding


def with_warning_of_unused_assistant(generate: Callable) -> Callable:
    """`generate` that warns if an assistant with its own decoding never decoded."""
    names = list(inspect.signature(generate).parameters)

    def generate_or_warn(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names[1:], args)), **kwargs}
        assistant: Any = arguments.get("assistant_model")
        if not decodes(assistant):
            return generate(self, *args, **kwargs)
        before = assistant.last_generation
        output = generate(self, *args, **kwargs)
        if assistant.last_generation is before:
            reason = "search with beams, `penalty_alpha` and other modes do not take it"
            if arguments.get("custom_generate") is not None:
                reason = "`custom_generate` does not call it"
            elif not hasattr(type(self)._assisted_decoding, "_decodes_with_assistant"):
                reason = f"the `_assisted_decoding` of {type(self).__name__} is not transformers' own"
            logger.warning(
                f"`generate` did not use its `assistant_model`, {type(assistant).__name__}: {reason}. Change that to decode "
                "faster, or leave out the assistant."
            )
        return output

    return generate_or_warn
