# SPDX-License-Identifier: Apache-2.0
"""What a target can do, which calls of `generate` EAGLE-3 decoding takes, and the target's embedding as a draft reads it."""

import functools
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, GenerationConfig, PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .auto_eagle3 import logger
from .cache_eagle3 import check_cache, is_static, is_unused_static, is_user_defined
from .outputs_eagle3 import CACHE, CAN_SELECT_HIDDEN_STATES, INPUTS_BY_TOKEN
from .text_eagle3 import max_length_of


# These attention implementations take any mask.
MASKED_ATTENTION = ("eager", "sdpa")

# The recurrent layers of these targets compute the same over several tokens at once as over one after another (tested).
# In transformers, others start from an empty state (Jamba) or compute something else (Nemotron-H).
REPLAYABLE_MODEL_TYPES = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "kimi_linear",
    "bailing_hybrid",
    "olmo_hybrid",
    "granitemoehybrid",
    "falcon_h1",
    "bamba",
    "lara_mini",
)

# Modules of these libraries keep nothing about the rows of a batch, except in hooks.
ROW_WISE_MODULES = ("torch.", "transformers.", "peft.", "torchao.", "bitsandbytes.", "optimum.quanto.", "accelerate.")
# These libraries have linear layers and norms, but no attention.
WITHOUT_ATTENTION = ("aqlm.", "awq.", "compressed_tensors.", "eetq.", "gptqmodel.", "hqq.", "liger_kernel.", "quark.")
# Linear layers of these libraries mix tokens only if [`mixes_tokens`] names them. PEFT's hold others.
KNOWN_LAYERS = ("bitsandbytes.", "peft.", "transformers.")
# Code that wraps transformers' methods and does not change what they return, and ours (the last one of a copy).
HARMLESS = ("transformers.", "torch.", "contextlib", "hf_eagle3.", f"{__package__}.")
# Other linear layers that were tried, and do not, or take other inputs.
_TRIED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()

# Weights in other dtypes are packed, or have scales beside them.
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_sharded(target: PreTrainedModel) -> bool:
    """Whether processes hold shares of some of the target's weights (tensor parallelism, FSDP2)."""
    return any(hasattr(weight, "full_tensor") for weight in target.parameters())  # the embedding alone may be whole


def device_of(module: nn.Module) -> torch.device:
    return next(iter((*module.parameters(), *module.buffers())), torch.empty(0)).device


def check_call(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    may_replay: bool,
) -> None:
    """Raises `ValueError` if EAGLE-3 decoding does not take the settings, the target, the prompt or the cache of a call."""
    name, config, mask = type(target).__name__, generation_config, model_kwargs.get("attention_mask")
    window = getattr(target.config.get_text_config(decoder=True), "keep_window_size", None)
    refuse(
        {
            # With `custom_generate`. Otherwise transformers ignores the draft.
            "it searches with beams (`num_beams`)": config.num_beams > 1,
            "it needs `use_cache=True`": not model_kwargs.get("use_cache", True),
            "`assistant_ensemble_weight` changes the text": config.assistant_ensemble_weight is not None,
            # Transformers would fetch code from the Hub for it.
            "`dola_layers` works with no assistant": config.dola_layers is not None,
            "the attentions of a tree (`output_attentions`) are not those of the text": (
                config.return_dict_in_generate and config.output_attentions
            ),
            # Doge attends to the best tokens of a window, and transformers picks others when it reads several at once.
            f"{name} reads texts beyond its `keep_window_size` of {window} differently token by token": (
                window is not None and config.max_length > window
            ),
            f"its prompt has {input_ids.shape[1]} tokens, but the `attention_mask` fewer, as after `token_healing`": (
                mask is not None and mask.shape[-1] < input_ids.shape[1]
            ),
            # `generate` makes them if `forward` has an argument of that name.
            f"{name}.forward takes no `position_ids`, but siblings in a tree share a position (add the argument to a model of your "
            "own)": model_kwargs.get("position_ids") is None,
        }
    )
    check_target(target)
    if model_kwargs.get(CACHE) is not None:
        check_given_cache(target, model_kwargs[CACHE], mask, may_replay)


def check_target(target: PreTrainedModel) -> None:
    """Raises `ValueError` if the target, as it is now, computes or decodes in a way that EAGLE-3 decoding does not take."""
    name = type(target).__name__
    prepare = types.MethodType(type(target).prepare_inputs_for_generation, target)
    adapted = (module for module in target.modules() if not getattr(module, "disable_adapters", False))
    hooks = (hook for module in adapted for hook in module._forward_pre_hooks.values())
    updates = [each.update for each in vars(cache_utils).values() if is_cache(each)]
    replaced = {module_of(update) for update in updates if not is_of(update, HARMLESS)}
    refuse(
        {
            # Other tokens of a tree would change what it predicts.
            f"{name} has layers that depend on all tokens of a forward: quantized with one scale for them, and not by token (torchao's "
            "`PerRow`, compressed-tensors' `strategy: token`), in NVFP4, or adapted by Lily": mixes_tokens(target),
            f"{name}.prepare_inputs_for_generation was replaced, as PEFT does for prompt and prefix tuning": (
                target.prepare_inputs_for_generation != prepare
            ),
            # PEFT binds an argument to a hook of each layer.
            "an activated LoRA (aLoRA) adapts only the last tokens of each forward": any(
                isinstance(hook, functools.partial) and "alora_offsets" in hook.keywords for hook in hooks
            ),
            f"{name} of transformers before 5.23 reads several tokens with another mask than one": (
                target.config.model_type == "git" and not CAN_SELECT_HIDDEN_STATES
            ),
            f"{name} hears a piece of the sound with each token": target.config.model_type == "voxtral_realtime",
            f"{name} has a `_sample` of its own, or somebody replaced transformers' (it is of `{module_of(target._sample)}`), so its text may "
            "be another one": not is_of(target._sample, HARMLESS),
            f"somebody ({', '.join(sorted(replaced))}) replaced `update` of transformers' caches, which may now store what cannot be "
            "rolled back": bool(replaced),
            # It may count its calls, and a step that writes several tokens makes one.
            f"{name} has an `_update_model_kwargs_for_generation` of its own, which may depend on single tokens": (
                not is_of(target._update_model_kwargs_for_generation, HARMLESS)
            ),
        }
    )
    check_dropout("target", target)


def is_cache(value: Any) -> bool:
    """Whether it is a class of caches, or of their layers."""
    return isinstance(value, type) and issubclass(value, (Cache, cache_utils.CacheLayerMixin))


def mixes_tokens(target: PreTrainedModel) -> bool:
    """
    Whether a linear layer's output for one token depends on the other tokens of the forward: through a shared scale of the
    activations, the weights of experts (Lily), or the precision. transformers' NVFP4 keeps 16 bits of a single token, and 4 of several.
    """
    # compressed-tensors unpacks weights at the first forward. Its scales of tokens and of groups are of one token.
    schemes = [getattr(module, "quantization_scheme", None) for module in target.modules()]
    activations = (getattr(each, f"{kind}_activations", None) for each in schemes for kind in ("input", "output"))
    if any(each is not None and each.strategy == "tensor" and each.dynamic for each in activations):
        return True
    # torchao's weights may be outside of linear layers, and offloaded. Calibrated scales are stored.
    scaled = (weight for weight in target.parameters() if getattr(weight, "act_quant_scale", None) is None)
    settings = [getattr(weight, "act_quant_kwargs", None) for weight in scaled]
    if any(
        type(getattr(each, "granularity", None)).__name__ == "PerTensor"
        or getattr(each, "use_dynamic_per_tensor_scale", False)  # NVFP4
        for each in settings
    ):
        return True
    named = "peft.tuners.lily.", "transformers.integrations.nvfp4"
    return any(
        is_of(type(module), named) or (is_unknown_layer(module) and mixes(module, target.dtype))
        for module in target.modules()
    )


def is_unknown_layer(module: nn.Module) -> bool:
    """Whether a module is a linear layer that may compute something else than torch's."""
    if not hasattr(module, "in_features") or is_of(type(module), KNOWN_LAYERS):
        return False
    # Weights in other classes compute by themselves. A packed one has other names.
    is_plain = type(module) is nn.Linear and type(getattr(module, "weight", None)) is nn.Parameter
    return not is_plain or not is_of(module.forward, ("torch.", "accelerate."))


def mixes(layer: Any, dtype: torch.dtype) -> bool:
    """Whether a linear layer computes something else of a token if another one is a million times larger. Each is tried once."""
    is_offloaded = any(each.is_meta for each in layer.parameters())  # its weights are elsewhere
    if is_offloaded or layer in _TRIED:
        return False
    for each in (dtype, torch.float32):  # a layer may be kept in the latter
        try:
            token = torch.linspace(-0.01, 0.01, layer.in_features, dtype=each, device=device_of(layer))
            with torch.no_grad():
                tokens = torch.stack([token, 1e6 * token])[None]
                alone, beside = (layer.forward(tokens[:, :count])[0, 0].float() for count in (1, 2))
            if (beside - alone).norm() > 0.05 * alone.norm():  # more than rounding
                return True
            break
        except torch.OutOfMemoryError:  # says nothing about the layer
            raise
        except Exception:  # it takes other inputs, or processes hold shares of it
            pass
    _TRIED.add(layer)
    return False


def check_given_cache(target: PreTrainedModel, cache: Cache, mask: torch.Tensor | None, may_replay: bool) -> None:
    """Raises `ValueError` if EAGLE-3 decoding does not take the cache of a call, given the prompt's `attention_mask`."""
    if not is_unused_static(cache):
        check_cache(cache, may_replay)
    attention = target.config.get_text_config(decoder=True)._attn_implementation
    refuse(
        {
            f"attention {attention!r} cannot tell the free slots of a static cache from the text": (
                attention not in MASKED_ATTENTION and is_static(cache)
            ),
            "its cache records the past (`activate_past_recording`)": any(
                getattr(layer, "record_past", False) for layer in cache.layers
            ),
            "its cache holds the whole prompt, but the target must read the last token (`cache.crop(-1)`)": (
                mask is not None and cache.get_seq_length() >= mask.shape[-1] and not mask.all()
            ),
        }
    )


def refuse(obstacles: dict[str, bool]) -> None:
    """Raises `ValueError` with those that are there."""
    if found := [obstacle for obstacle, is_there in obstacles.items() if is_there]:
        raise ValueError(
            f"EAGLE-3 decoding does not take this call: {', and '.join(found)}. Change that if you can, or leave out the draft."
        )


def check_dropout(name: str, model: PreTrainedModel) -> None:
    """Raises `ValueError` if the model drops out. New modules of PEFT may do so in a model that is not in training mode."""
    training = [module for module in model.modules() if module.training]
    holders = [*training, model.config.get_text_config(decoder=True)] if model.training else training
    rates = [rate for each in holders for field, rate in vars(each).items() if "drop" in field or "jitter" in field]
    rates += [module.p for module in training if isinstance(module, nn.Dropout)]
    if any(isinstance(rate, float) and rate > 0 for rate in rates):
        raise ValueError(
            f"The {name} is in training mode and drops out at random. Call `{name}.eval()`, or set its dropout to 0."
        )


def takes_trees(target: PreTrainedModel) -> bool:
    """
    Whether the target can read trees, and not only chains. Flash and flex attention take no mask from a caller. Local
    (GPT-Neo) and ALiBi attention measure distances by indices in the cache, where the nodes of a tree are not in the
    order of the text. GIT caches images that have no tokens in the text, and widens only masks of its own for them.
    """
    config = target.config.get_text_config(decoder=True)
    if "local" in (getattr(config, "attention_layers", None) or ()) or getattr(config, "alibi", False):
        return False
    if hasattr(config, "num_image_with_embedding"):
        return False
    if config._attn_implementation in MASKED_ATTENTION:
        return True
    logger.warning_once(
        f"Attention {config._attn_implementation!r} takes no mask of a tree, so the draft proposes chains. More tokens are "
        "accepted from trees: use attn_implementation='sdpa' (or target.set_attn_implementation('sdpa'))."
    )
    return False


def depends_on_length(
    target: PreTrainedModel, input_ids: torch.Tensor, cache: Any, model_kwargs: dict[str, Any], criteria: Iterable
) -> bool:
    """Whether the length of the longest row may change, within this call, what the target predicts for the others."""
    config = target.config.get_text_config(decoder=True)
    newest = text_positions(model_kwargs)[:, -1]
    begin, num_new = int(newest.min()), max_length_of(criteria) - input_ids.shape[1]
    last = int(newest.max()) + 1 + num_new  # the caller may have chosen the positions
    for kind, length in position_limits(config):  # a row that is ahead would reach a table's end
        if last >= length + (kind == "table") and (begin < length or kind != "longrope"):
            return True
    # Llama 4 scales queries by their index in the cache. The factor changes every `floor_scale` tokens.
    return (
        getattr(config, "attn_temperature_tuning", False)
        and cache.length + num_new + 1 >= (cache.length // config.floor_scale + 1) * config.floor_scale
    )


def may_select_rows(target: PreTrainedModel, cache: Any, model_kwargs: dict[str, Any]) -> bool:
    """
    Whether the target can go on with some rows of the batch only. That needs a cache that nobody else sees, a target
    that was not compiled (perhaps for this batch size), and modules and arguments without an entry for each row, except
    those with an entry for each token, whose rows are selected, too.
    """
    if cache.is_static or cache.is_chain or is_user_defined(cache.cache):
        return False
    if target.config.get_text_config(decoder=True) is not target.config:  # has images, and positions kept on the model
        return False
    known = (*INPUTS_BY_TOKEN, CACHE, "output_hidden_states")
    others = [value for name, value in model_kwargs.items() if name not in known]
    if not all(value is None or isinstance(value, (bool, int, float, str)) for value in others):
        return False
    return not is_compiled(target) and has_plain_modules(target, ROW_WISE_MODULES)


def is_compiled(target: PreTrainedModel) -> bool:
    """Whether the caller compiled the target."""
    return target._compiled_call_impl is not None or hasattr(target.forward, "_torchdynamo_orig_callable")


def has_plain_modules(model: PreTrainedModel, known: tuple[str, ...]) -> bool:
    """Whether all modules are of the `known` libraries, and have no `forward` and no hooks of others."""
    for_all = nn.modules.module
    hooks = [*for_all._global_forward_hooks.values(), *for_all._global_forward_pre_hooks.values()]
    for module in model.modules():
        if not (is_of(type(module), known) and is_of(module.forward, known)):
            return False
        # PEFT gives each row its own adapter in a hook. Hooks of others may do anything to a row.
        hooks += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return all(is_of(hook, HARMLESS) for hook in hooks)


def has_own_code(target: PreTrainedModel) -> bool:
    """Whether code that is not of known libraries computes the target: a class, a `forward`, or attention that somebody replaced."""
    name = target.config.get_text_config(decoder=True)._attn_implementation
    attention: Any = ALL_ATTENTION_FUNCTIONS.get(name, nn.Module)
    # Ours, perhaps of another copy.
    while getattr(getattr(attention, "func", None), "__name__", None) == "packed_attention":
        attention = attention.args[0]
    code = (each for module in target.modules() for each in (type(module), module.forward))
    return not all(
        is_of(each, (*ROW_WISE_MODULES, *WITHOUT_ATTENTION, *HARMLESS))
        for each in (*code, attention, F.scaled_dot_product_attention)
    )


def is_of(code: Any, libraries: tuple[str, ...]) -> bool:
    """Whether a class or a function, and what it wraps, is of these libraries. `functools.wraps` copies `__module__`."""
    wrapped = getattr(code, "__wrapped__", None)
    return module_of(code).startswith(libraries) and (wrapped is None or is_of(wrapped, libraries))


def module_of(code: Any) -> str:
    """Returns the name of the module that a class or a function is of."""
    while isinstance(code, functools.partial):  # as accelerate's hooks
        code = code.func
    if not hasattr(code, "__globals__") and not isinstance(code, (type, types.BuiltinFunctionType)):
        code = type(code)  # an object that can be called
    return getattr(code, "__globals__", {}).get("__name__") or getattr(code, "__module__", None) or ""


def position_limits(config: PreTrainedConfig) -> list[tuple[str, int]]:
    """
    Positions that a tree must not cross, as `(kind, length)`. With "longrope" or "dynamic" scaling, a forward that reaches
    `length` changes all rotary frequencies. For a target that looks positions up, `length` is the size of its `"table"`.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    table = None if rope else getattr(config, "max_position_embeddings", None)
    limits = [] if table is None else [("table", table)]
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        rope_type = parameters.get("rope_type", "default")
        if rope_type == "longrope":
            length = parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings
            limits.append((rope_type, length))
        elif "dynamic" in rope_type:
            limits.append((rope_type, config.max_position_embeddings))
    return limits


def text_positions(model_kwargs: dict[str, Any]) -> torch.Tensor:
    """The positions `(B, L)` in the text. Targets with images have more kinds of positions, after these."""
    position_ids = model_kwargs["position_ids"]
    return position_ids if position_ids.dim() == 2 else position_ids[0]


# The embedding: without a factor, unpacked, and gathered from all processes -------------------------------------------


def table_of(target: PreTrainedModel) -> nn.Embedding:
    """The target's input embedding, for [`look_up`]."""
    embedding = target.get_input_embeddings()
    num_rows = target.config.get_text_config(decoder=True).vocab_size
    return PackedTable(embedding, num_rows) if is_packed(embedding) else embedding


def look_up(table: nn.Embedding, input_ids: torch.Tensor) -> torch.Tensor:
    """Rows of an embedding table, without the factor of some targets (Gemma)."""
    input_ids = input_ids.to(table.weight.device)
    return table(input_ids) if isinstance(table, PackedTable) else nn.functional.embedding(input_ids, table.weight)


def gathered_table(table: nn.Embedding) -> nn.Embedding:
    """An embedding with its whole weight. If processes hold shares of it, all of them must call this together."""
    if not hasattr(table.weight, "full_tensor"):
        return table
    return nn.Embedding.from_pretrained(gathered(table.weight.detach()))


def gathered(weight: torch.Tensor) -> torch.Tensor:
    """The whole weight. If processes hold shares of it, all of them must call this together."""
    if hasattr(weight, "full_tensor"):
        weight = weight.full_tensor()
    is_plain = type(weight) in (torch.Tensor, nn.Parameter) or not weight.is_floating_point()
    return weight if is_plain else weight.dequantize()  # torchao's cannot be copied


def is_packed(module: nn.Module) -> bool:
    """Whether an embedding or a head stores no floating-point weight, so that only the module itself can unpack it."""
    # PEFT's wrappers show the weight of what they wrap. Others compute one each time.
    is_stored = "weight" in dict(module.named_parameters(recurse=False)) or type(module).__module__.startswith("peft.")
    return not is_stored or module.weight.dtype not in FLOATS


class PackedTable(nn.Embedding):
    """A packed embedding without the factor of some targets (Gemma). Its `weight` has its size, dtype and device, but no values."""

    def __init__(self, embedding: nn.Module, num_rows: int):
        row = unscaled(embedding, torch.zeros(1, dtype=torch.long, device=device_of(embedding)))
        super().__init__(num_rows, row.shape[-1], _weight=row.expand(num_rows, -1), _freeze=True)
        self._embedding = [embedding]  # no submodule

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return unscaled(self._embedding[0], input)


def unscaled(embedding: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    return embedding(input_ids).detach() / getattr(embedding, "scalar_embed_scale", 1.0)


class Borrowed(list):
    """Modules of a target that a draft uses. Copies of the draft share them, and pickles have none."""

    def __deepcopy__(self, memo: dict) -> "Borrowed":
        return self

    def __reduce__(self) -> tuple:
        return Borrowed, ()
