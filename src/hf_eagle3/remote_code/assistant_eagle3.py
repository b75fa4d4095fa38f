# SPDX-License-Identifier: Apache-2.0
"""Assistants that bring their own decoding: what they have in common, and how `generate` comes to ask them."""

import copy
import functools
import inspect
import threading
import weakref
from pathlib import Path

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.utils import logging

from .checks_eagle3 import may_replay
from .decoding_eagle3 import TreeDecoding
from .outputs_eagle3 import Eagle3GenerationStats
from .tree_eagle3 import GenerationCall, Proposer


# A child of transformers' own logger: shown and silenced with it.
logger = logging.get_logger("transformers.eagle3")


class AssistantMixin:
    """
    What makes an object an `assistant_model` of `generate`: it proposes next tokens ([`Proposer`]), the target decides.
    A subclass implements [`proposer`].
    """

    # With settings of the tree (`tree_depth`, `num_assistant_tokens`, ...), which a call may override.
    generation_config: GenerationConfig | None = None
    # Whether its proposers run once a step, so that a deep tree costs as much as a shallow one.
    drafts_in_one_pass = False
    # What decodes a call.
    decoding_class = TreeDecoding

    def proposer(self, call: GenerationCall) -> Proposer:
        """
        A proposer for one call of `generate`.

        Args:
            call ([`GenerationCall`]): The call.
        """
        raise NotImplementedError

    def validate_target(self, target) -> None:
        """
        Called before anything else.

        Args:
            target (`PreTrainedModel`): The target.

        Raises:
            ValueError: if this is no assistant for `target`.
        """

    def resolve_aux_layer_ids(self, target) -> list[int]:
        """
        Which of the target's `hidden_states` its proposers read: id `k` is the state entering layer `k`.

        Args:
            target (`PreTrainedModel`): The target.
        """
        return []

    def may_replay(self, target) -> bool:
        """
        Whether recurrent states of the target read several tokens at once as they read them one by one.

        Args:
            target (`PreTrainedModel`): The target.
        """
        return may_replay(target)

    @torch.no_grad()
    def assisted_decoding(
        self,
        target,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        inputs_tensor=None,
        tokenizer=None,
        assistant_tokenizer=None,
        **model_kwargs,
    ):
        """
        What `target.generate(..., assistant_model=self)` calls, with the arguments and the return value of
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
        decoding = self.decoding_class(
            self, target, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
        )
        calls = _LAST_CALLS.setdefault(self, LastCalls())
        calls.of_thread.stats = calls.of_any = decoding.stats
        return decoding.decode()

    @property
    def last_generation(self) -> Eagle3GenerationStats | None:
        """
        How the last call of `generate` with this assistant went, or goes so far: this thread's, or any thread's if this
        one made none.
        """
        calls = _LAST_CALLS.get(self)
        return calls and getattr(calls.of_thread, "stats", calls.of_any)


class LastCalls:
    """How the last calls with an assistant went: of each thread, and of any."""

    def __init__(self):
        self.of_thread, self.of_any = threading.local(), None


# Kept off the assistant, which may be copied and pickled.
_LAST_CALLS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


# Saved with a draft as `custom_generate/generate.py`. Text, so that it travels with a draft that was loaded as remote
# code.
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
        raise ValueError(
            f"{type(assistant_model).__name__} is no EAGLE-3 draft. Call target.generate(..., assistant_model=draft), not the "
            "other way round."
        )
    return model.generate(*args, **kwargs, assistant_model=assistant_model)
'''


def install_generation_hook() -> None:
    """
    Lets an assistant bring its own decoding: `generate` calls `assistant_model.assisted_decoding(target, ...)` where
    it exists, and `assistant_model.validate_target(target)` before anything else, and says so if it decoded without the
    assistant; other assistants are untouched. Installing twice, or from several copies of this file, changes nothing.
    """
    for name, mark, hook in (  # an older copy may have installed some of them
        ("_validate_generation_mode", "_asks_who_may_replay", asks_what_the_assistant_takes),
        ("_assisted_decoding", "_asks_the_assistant", lets_the_assistant_decode),
        ("generate", "_tells_of_unused_assistants", tells_of_unused_assistants),
    ):
        method = getattr(GenerationMixin, name)
        if not getattr(method, mark, False):
            hooked = functools.wraps(method)(hook(method))
            setattr(hooked, mark, True)
            setattr(GenerationMixin, name, hooked)


def asks_what_the_assistant_takes(validate_mode):
    """`_validate_generation_mode` that asks an assistant about the target, and none of what only others cannot do."""

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant = generation_mode_kwargs.get("assistant_model")
        if isinstance(assistant, (str, Path)):
            name = str(assistant)
            raise ValueError(
                f"`assistant_model` is a name: load it, by AutoModel.from_pretrained({name!r}, trust_remote_code=True)."
            )
        if isinstance(assistant, type):
            raise ValueError(f"`assistant_model` is the class {assistant.__name__}, not a draft.")
        own = getattr(assistant, "validate_target", None)
        if own is not None:
            own(self)
            if not hasattr(assistant, "config"):  # of whose vocabulary transformers would ask
                generation_mode_kwargs = {**generation_mode_kwargs, "assistant_model": None}
            # Several sequences a prompt are a batch, which transformers' own assistants cannot serve.
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1
            if self._is_stateful and getattr(assistant, "may_replay", may_replay)(self):  # the others are refused
                self = copy.copy(self)
                self._is_stateful = False
        return validate_mode(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def lets_the_assistant_decode(assisted_decoding):
    """`_assisted_decoding` that leaves the call to an assistant with a decoding of its own."""

    def _assisted_decoding(self, *args, assistant_model=None, **kwargs):
        own = getattr(assistant_model, "assisted_decoding", None)
        if own is not None:
            return own(self, *args, **kwargs)
        return assisted_decoding(self, *args, assistant_model=assistant_model, **kwargs)

    return _assisted_decoding


def tells_of_unused_assistants(generate):
    """`generate` that warns if an assistant with a decoding of its own was given and never decoded."""
    names = list(inspect.signature(generate).parameters)

    def generate_and_tell(self, *args, **kwargs):
        arguments = {**dict(zip(names[1:], args)), **kwargs}
        assistant = arguments.get("assistant_model")
        if not (hasattr(assistant, "assisted_decoding") and hasattr(assistant, "last_generation")):
            return generate(self, *args, **kwargs)
        before = assistant.last_generation
        output = generate(self, *args, **kwargs)
        if assistant.last_generation is before:
            what = "search with beams, `penalty_alpha` or another mode"
            if arguments.get("custom_generate") is not None:
                what = "`custom_generate`"
            elif not hasattr(type(self)._assisted_decoding, "_asks_the_assistant"):
                what = f"the `_assisted_decoding` of {type(self).__name__} that is not transformers' own"
            logger.warning(
                f"`generate` did not use its `assistant_model`, {type(assistant).__name__}, and decoded by other means: {what}. "
                "Leave that out to be faster, or the assistant."
            )
        return output

    return generate_and_tell
