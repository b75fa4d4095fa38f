"""Which engines take a draft: what tests/engines has run, and what is known of the others."""

from collections.abc import Callable
from typing import NamedTuple

from . import llama_cpp, openvino, safeailab, sglang
from .writing import CannotExpress


class Engine(NamedTuple):
    """
    What serves drafts.

    Args:
        name (`str`): Of the engine.
        format (`str`): What it reads.
        version (`str`, *optional*): That tests/engines runs. `None`: names, shapes and keys are tested, no more.
        check: Raises `ValueError` where it cannot express a draft, or would leave something out without a word.
    """

    name: str
    format: str
    version: str | None
    check: Callable


def check_vllm(draft) -> None:
    if draft.config.is_parallel and draft.config.fc_norm:  # vLLM does not hand the flag to the layers of such drafts
        raise CannotExpress("speculators", ["`fc_norm` in a parallel draft"])


ENGINES = (
    Engine("vLLM", "speculators", "0.32.0", check_vllm),
    Engine("SGLang", sglang.NAME, None, sglang.write),
    Engine("llama.cpp", llama_cpp.NAME, "xllamacpp 2026.10.11549", llama_cpp.check),
    Engine("OpenVINO GenAI", openvino.NAME, "2026.4.1", openvino.check),
    Engine("EAGLE's own code", safeailab.NAME, None, safeailab.write),
)


def describe_engines(draft, format: str = "speculators") -> list[tuple[str, str]]:
    """
    For each engine whether it takes this very draft: as it is, by which export, or why not.

    Args:
        draft ([`Eagle3ForSpeculation`]): The draft.
        format (`str`, *optional*): That it was read from.
    """
    check_is_eagle3(draft)
    return [(engine.name, describe(engine, draft, format)) for engine in ENGINES]


def check_is_eagle3(draft) -> None:
    """
    Raises:
        ValueError: if it is the draft of another method.
    """
    if draft.config.model_type != "eagle3":
        raise ValueError(
            f"This draft is of {draft.config.model_type}, to compare with; engines and cards are for EAGLE-3's."
        )


def describe(engine: Engine, draft, format: str) -> str:
    try:
        engine.check(draft)
    except CannotExpress as error:
        return f"cannot take it: {'; '.join(error.reasons)}"
    except ValueError as error:
        return f"cannot take it: {error}"
    run = "the tests do not run it" if engine.version is None else f"the tests run others in {engine.version}"
    is_complete = format != "speculators" or draft.config.speculators_config is not None
    if engine.format == format and is_complete:
        return f"takes it as it is ({run})"
    options = {
        "speculators": " --target TARGET",
        llama_cpp.NAME: " --target_gguf TARGET.gguf",
        openvino.NAME: " --python OPENVINO_ENVIRONMENT/bin/python",
    }
    return f"takes it after recipes/export.py --to {engine.format}{options.get(engine.format, '')} ({run})"
