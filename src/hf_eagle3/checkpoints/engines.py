"""Which engines take a draft. tests/engines runs some of them; the others are known from their source."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..environment import is_path
from ..remote_code.draft_model_eagle3 import DraftModel
from . import llama_cpp, openvino, safeailab, sglang
from .writing import OTHER_ORDER, CannotExpress, draft_features


class Engine(NamedTuple):
    """
    An engine that serves drafts, and the format that it reads. `version` is the one that tests/engines runs. It is `None` if
    they run no engine: of SGLang they run only its models, of others nothing. `check(draft)` raises a `ValueError` if the engine
    cannot express the draft, or would silently ignore a part.
    """

    name: str
    format: str
    version: str | None
    check: Callable[[DraftModel], Any]


def check_vllm(draft: DraftModel) -> None:
    """Raises `CannotExpress`, naming what vLLM would ignore."""
    reasons = []
    if draft.config.is_parallel and draft.config.fc_norm:  # vLLM does not pass the flag to the layers of such drafts
        reasons.append("`fc_norm` in a parallel draft")
    layer = draft.config.transformer_layer_config
    if layer.model_type == "qwen3" and layer.attention_bias:  # vLLM has none in their `o_proj`
        reasons.append("biases in Qwen3 layers")
    if draft_features(draft)[OTHER_ORDER]:
        reasons.append(OTHER_ORDER)
    if reasons:
        raise CannotExpress("speculators", reasons)


ENGINES = (
    Engine("vLLM", "speculators", "0.32.0", check_vllm),
    Engine("SGLang", sglang.NAME, None, sglang.write),
    Engine("llama.cpp", llama_cpp.NAME, "xllamacpp 2026.10.11549", llama_cpp.check),
    Engine("OpenVINO GenAI", openvino.NAME, "2026.4.1", openvino.layout),
    Engine("EAGLE's own code", safeailab.NAME, None, safeailab.write),
)


def describe_engines(draft: DraftModel, format: str = "speculators") -> list[tuple[str, str]]:
    """
    Returns for each engine its name, and whether it takes this draft: as it is, after an export, or why not.

    Args:
        draft ([`Eagle3ForSpeculation`]): The draft.
        format (`str`, *optional*, defaults to `"speculators"`): The format that it was read from.

    Raises:
        ValueError: if it is a draft of another method.
    """
    check_is_eagle3(draft)
    return [(engine.name, describe(engine, draft, format)) for engine in ENGINES]


def check_is_eagle3(draft: DraftModel) -> None:
    """Raises `ValueError` if it is a draft of another method."""
    if draft.config.model_type != "eagle3":
        raise ValueError(
            f"This draft is of {draft.config.model_type}. Only EAGLE-3 drafts have exports, engines and cards."
        )


def describe(engine: Engine, draft: DraftModel, format: str) -> str:
    """Returns whether an engine takes a draft. See [`describe_engines`]."""
    try:
        engine.check(draft)
    except CannotExpress as error:
        return f"cannot take it: {'; '.join(error.reasons)}"
    except ValueError as error:
        return f"cannot take it: {error}"
    run = (
        "the tests do not run the engine"
        if engine.version is None
        else f"tests run similar drafts in version {engine.version}"
    )
    is_complete = format != "speculators" or draft.config.speculators_config is not None
    if engine.format == format and is_complete:
        # From 0.33 on, `vllm serve DRAFT` loads no target from a folder that the draft names.
        is_of_folder = format == "speculators" and is_path(draft.config.verifier)
        # Or all layers of a draft must have caches of one kind (on CPUs, where tests/engines runs this).
        is_mixed = format == "speculators" and len(set(draft.config.transformer_layer_config.layer_types)) > 1
        how = ", in --speculative-config" * is_of_folder + ", with --disable-hybrid-kv-cache-manager" * is_mixed
        return f"takes it as it is{how} ({run})"
    options = {
        "speculators": " --target TARGET",
        llama_cpp.NAME: " --target_gguf TARGET.gguf",
        openvino.NAME: " --python OPENVINO_ENVIRONMENT/bin/python",
    }
    return f"takes it after recipes/export.py --to {engine.format}{options.get(engine.format, '')} ({run})"
