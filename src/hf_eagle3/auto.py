"""Lets `AutoConfig` and `AutoModel` know the drafts of others, whose `config.json` transformers cannot tell apart."""

import functools
from pathlib import Path

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from .held import HUB_ARGUMENTS, is_block_draft, is_draft, tensor_names, tensor_names_on_hub


def install_auto_hook() -> None:
    """
    `AutoModel.from_pretrained("RedHatAI/Qwen3-8B-speculator.eagle3")` returns an [`Eagle3ForSpeculation`]: drafts of
    `speculators` name no `model_type`, and those of others name the target's, so that transformers would take them for
    such a model and fill it with random weights. A draft is told by the names of its tensors. Nothing else is read of
    other checkpoints, and nothing at all of those with code of their own. Installing twice changes nothing.
    """
    from_pretrained = AutoConfig.from_pretrained.__func__
    if getattr(from_pretrained, "_knows_drafts", False):
        return

    @functools.wraps(from_pretrained)
    def with_drafts(cls, pretrained_model_name_or_path, **kwargs):
        try:
            found = from_pretrained(cls, pretrained_model_name_or_path, **kwargs)
        except OSError:  # there is no configuration
            raise
        except Exception as error:
            # Transformers' configurations refuse what drafts have in many ways; but whether to trust code is the caller's.
            draft = (
                None if "trust_remote_code" in str(error) else draft_config(pretrained_model_name_or_path, **kwargs)
            )
            if draft is None:
                raise
            return draft
        config = found[0] if isinstance(found, tuple) else found
        if not type(config).__module__.startswith("transformers.models."):  # it has code of its own
            return found
        return draft_config(pretrained_model_name_or_path, config.to_dict(), **kwargs) or found

    with_drafts._knows_drafts = True
    AutoConfig.from_pretrained = classmethod(with_drafts)


def may_be_draft(content: dict) -> tuple[bool, bool]:
    """
    Whether a `config.json` may be a draft's, and whether it surely is one's: by which the Hub is asked what the
    checkpoint holds. Those in folders are always looked at.
    """
    architectures = [str(name) for name in content.get("architectures") or []]
    words = ("eagle", "draft", "speculat")
    is_surely = any(word in name.lower() for name in [*content, *architectures] for word in words)
    is_known = bool(architectures) and names_of_transformers().issuperset(architectures)
    return is_surely or not is_known or content.get("num_hidden_layers") == 1, is_surely


@functools.cache
def names_of_transformers() -> frozenset[str]:
    return frozenset(dir(transformers))  # which takes long


def draft_config(name_or_path, content=None, trust_remote_code=None, code_revision=None, gguf_file=None, **kwargs):
    """
    What `AutoConfig.from_pretrained` returns of a draft: an [`Eagle3Config`], or a [`DFlashConfig`] of a block draft that
    brings no code, or whose code is not trusted. `None` if it is none.

    Args:
        name_or_path (`str` or `Path`): Folder or Hub id.
        content (`dict`, *optional*): What transformers made of the `config.json`, if it made anything of it.
        kwargs (*optional*): As `AutoConfig.from_pretrained` takes them.
    """
    if gguf_file is not None:
        return None
    hub_kwargs = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    kind = None if content is None else kind_of_draft(content, name_or_path, hub_kwargs)
    if content is not None and kind is None:
        return None
    content, kwargs = PreTrainedConfig.get_config_dict(name_or_path, **kwargs)
    auto_map = content.get("auto_map") or {}
    if trust_remote_code and "AutoConfig" in auto_map:  # it has code of its own, which said why
        return None
    if (algorithm := content.get("speculators_model_type")) is not None:
        if algorithm not in ("eagle3", "peagle"):
            return None
    elif (kind := kind or kind_of_draft(content, name_or_path, hub_kwargs)) is None:
        return None
    if kind is is_block_draft:
        if content.get("model_type") not in ("qwen3", None):  # layers of another kind (Laguna)
            return None
        from .baselines.dflash import DFlashConfig

        if trust_remote_code and "AutoModel" in auto_map:  # the caller wants the code that it brings
            return None
        return DFlashConfig.from_dict(content, name_or_path=str(name_or_path), **kwargs)

    # Here, so that `import hf_eagle3` is quick.
    from .checkpoints import read
    from .remote_code.configuration_eagle3 import Eagle3Config
    from .remote_code.modeling_eagle3 import Eagle3ForSpeculation

    if algorithm is None:
        content = read(content, name_or_path, **hub_kwargs)[0].to_dict()
    for auto_class in (AutoModel, AutoModelForCausalLM):
        auto_class.register(Eagle3Config, Eagle3ForSpeculation, exist_ok=True)
    return Eagle3Config.from_dict(content, name_or_path=str(name_or_path), **kwargs)


def kind_of_draft(content: dict, name_or_path, hub_kwargs: dict):
    """Which of [`is_draft`] and [`is_block_draft`] holds of a checkpoint's tensors, or `None`."""
    names = tensor_names(name_or_path, **hub_kwargs)
    if names is None and not Path(name_or_path).exists() and not hub_kwargs.get("local_files_only"):
        may_be, is_surely = may_be_draft(content)
        names = tensor_names_on_hub(name_or_path, is_surely, **hub_kwargs) if may_be else None
    return next((kind for kind in (is_draft, is_block_draft) if kind(names or [])), None)
