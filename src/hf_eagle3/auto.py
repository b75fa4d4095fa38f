"""Lets `AutoConfig` and `AutoModel` know the drafts of others, whose `config.json` transformers cannot tell apart."""

import functools

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig


def install_auto_hook() -> None:
    """
    `AutoModel.from_pretrained("RedHatAI/Qwen3-8B-speculator.eagle3")` returns an [`Eagle3ForSpeculation`]: drafts of
    `speculators` name no `model_type`, and those of SafeAILab/EAGLE and SpecForge name the target's. Nothing is read
    of other checkpoints but the configuration that transformers made of them. Installing twice changes nothing.
    """
    from_pretrained = AutoConfig.from_pretrained.__func__
    if getattr(from_pretrained, "_knows_drafts", False):
        return

    @functools.wraps(from_pretrained)
    def with_drafts(cls, pretrained_model_name_or_path, **kwargs):
        try:
            found = from_pretrained(cls, pretrained_model_name_or_path, **kwargs)
        except ValueError as error:
            if "`model_type`" not in str(error):
                raise
            draft = draft_config(pretrained_model_name_or_path, **kwargs)
            if draft is None:
                raise
            return draft
        config = found[0] if isinstance(found, tuple) else found
        return (is_flat(config) and draft_config(pretrained_model_name_or_path, **kwargs)) or found

    with_drafts._knows_drafts = True
    AutoConfig.from_pretrained = classmethod(with_drafts)


def is_flat(config: PreTrainedConfig) -> bool:
    """Whether what transformers took for a Llama configuration is an EAGLE-3 draft's."""
    if not type(config).__module__.startswith("transformers.models."):
        return False  # it has code of its own
    names = ("architectures", "draft_vocab_size", "eagle_config")
    content = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    if not content.keys() & {"draft_vocab_size", "eagle_config"}:
        return False
    from .checkpoints import FORMATS  # here, so that `import hf_eagle3` is quick

    return any(module.matches(content) for module in FORMATS.values())


def draft_config(name_or_path, trust_remote_code=None, code_revision=None, **kwargs):
    """What `AutoConfig.from_pretrained` returns of a draft: an [`Eagle3Config`], and `None` if it is none."""
    from .checkpoints import read
    from .remote_code.configuration_eagle3 import Eagle3Config
    from .remote_code.draft_eagle3 import HUB_ARGUMENTS
    from .remote_code.modeling_eagle3 import Eagle3ForSpeculation

    hub_kwargs = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    content, kwargs = PreTrainedConfig.get_config_dict(name_or_path, **kwargs)
    if content.get("speculators_model_type") is None:
        if "model_type" not in content:
            return None
        content = read(content, name_or_path, **hub_kwargs)[0].to_dict()
    elif content["speculators_model_type"] not in ("eagle3", "peagle"):
        return None
    for auto_class in (AutoModel, AutoModelForCausalLM):
        auto_class.register(Eagle3Config, Eagle3ForSpeculation, exist_ok=True)
    return Eagle3Config.from_dict(content, name_or_path=str(name_or_path), **kwargs)
