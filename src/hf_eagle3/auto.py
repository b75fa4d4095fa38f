"""Makes `AutoConfig` and `AutoModel` recognize drafts of other projects, whose `config.json` names another model."""

import copy
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from .tensor_names import (
    HUB_ARGUMENTS,
    LOCAL,
    is_block_draft,
    is_draft,
    names_in,
    tensor_names_on_hub,
    unlike_qwen3,
    weights_file,
)


if TYPE_CHECKING:
    from .baselines.dflash import DFlashConfig
    from .remote_code.configuration_eagle3 import Eagle3Config


def install_auto_hook() -> None:
    """
    Makes `AutoModel.from_pretrained("RedHatAI/Qwen3-8B-speculator.eagle3")` return an [`Eagle3ForSpeculation`].

    Drafts of `speculators` name no `model_type`. Other drafts name the target's, so transformers would load them as such
    a model with random weights. The hook recognizes a draft by the names of its tensors. It reads nothing else of other
    checkpoints, and nothing at all of checkpoints that bring code. Installing it twice changes nothing.
    """
    from_pretrained = AutoConfig.from_pretrained.__func__
    if getattr(from_pretrained, "_recognizes_drafts", False):
        return

    @functools.wraps(from_pretrained)
    def with_drafts(cls: type, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Any:
        try:
            found = from_pretrained(cls, pretrained_model_name_or_path, **kwargs)
        except OSError:  # there is no configuration
            raise
        except Exception as error:
            if "trust_remote_code" in str(error):  # whether to trust code is the caller's decision
                raise
            from .file_checks import check_is_object  # here, so that `import hf_eagle3` is quick

            check_is_object(pretrained_model_name_or_path, **kwargs)
            # The configuration classes of transformers reject the keys of drafts with many kinds of errors.
            draft = draft_config(pretrained_model_name_or_path, **kwargs)
            if draft is None:
                raise
            return draft
        config = found[0] if isinstance(found, tuple) else found
        if not type(config).__module__.startswith("transformers.models."):  # the checkpoint brings code
            return found
        return draft_config(pretrained_model_name_or_path, config, **kwargs) or found

    setattr(with_drafts, "_recognizes_drafts", True)  # noqa: B010  for type checkers
    AutoConfig.from_pretrained = classmethod(with_drafts)


# Parts of the names of drafts' classes, and of keys in their configurations.
DRAFT_WORDS = ("dflash", "dflare", "draft", "dspark", "eagle", "speculat")


def may_be_draft(content: dict) -> tuple[bool, bool]:
    """
    Whether a `config.json` may be a draft's, and whether it certainly is. Only then are names of tensors fetched from
    the Hub. Checkpoints in folders are always read.
    """
    architectures = architectures_of(content)
    is_certain = any(word in name.lower() for name in [*content, *architectures] for word in DRAFT_WORDS)
    is_known = bool(architectures) and names_of_transformers().issuperset(architectures)
    return is_certain or not is_known or content.get("num_hidden_layers") == 1, is_certain


def architectures_of(content: dict) -> list[str]:
    """Returns the names of classes in a `config.json`."""
    names = content.get("architectures") or []
    return [str(name) for name in (names if isinstance(names, list) else [names])]


@functools.cache
def names_of_transformers() -> frozenset[str]:
    """Returns the public names of transformers. Cached, because `dir` is slow there."""
    return frozenset(dir(transformers))


def draft_config(
    name_or_path: str | Path,
    config: PreTrainedConfig | None = None,
    trust_remote_code: bool | None = None,
    code_revision: str | None = None,
    gguf_file: str | None = None,
    **kwargs: Any,
) -> "Eagle3Config | DFlashConfig | tuple[Eagle3Config | DFlashConfig, dict] | None":
    """
    Returns what `AutoConfig.from_pretrained` returns for a draft: [`Eagle3Config`], or [`DFlashConfig`] for a block draft
    whose own code is not trusted. `None` if the checkpoint is not a draft. `config` is what transformers read, if it could.
    What it could not may be `speculators`', which says what it is. Otherwise the tensors tell. Raises `ValueError` if the draft is
    of an unsupported kind, has no `config.json`, or is broken.
    """
    if gguf_file is not None:
        return None
    hub_kwargs = {name: kwargs[name] for name in (*HUB_ARGUMENTS, "variant") if name in kwargs}
    kind: Callable[[Iterable[str]], bool] | None = None
    names: list[str] = []
    if config is not None:
        kind, names = kind_of_draft(config.to_dict(), name_or_path, hub_kwargs)
        if kind is None:
            if not (trust_remote_code and getattr(config, "auto_map", None)):
                check_is_no_draft(config.to_dict(), names, name_or_path, config)
            return None
    content, kwargs = PreTrainedConfig.get_config_dict(name_or_path, **kwargs)
    auto_map, algorithm = content.get("auto_map") or {}, content.get("speculators_model_type")
    if trust_remote_code and "AutoConfig" in auto_map:  # its own code has failed, and said why
        return None
    if kind is None and algorithm is None:
        from .config_checks import check_method  # here, so that `import hf_eagle3` is quick

        check_method(content, name_or_path)  # transformers would say that it is too old
        kind, names = kind_of_draft(content, name_or_path, hub_kwargs)
        if kind is None:
            check_is_no_draft(content, names, name_or_path)
            return None
    if not content:
        raise ValueError(f"{name_or_path} has the weights of a draft, but no config.json. Download it again.")
    if algorithm in ("dflash", "dspark") or kind is is_block_draft:
        if trust_remote_code and "AutoModel" in auto_map:  # the caller wants the code that it brings
            if config is not None:  # whatever Auto class asks, and not a random model
                config.auto_map = {"AutoModelForCausalLM": auto_map["AutoModel"], **auto_map}
            return None
        return block_draft_config(name_or_path, content, names, **kwargs)
    return eagle3_config(name_or_path, content, hub_kwargs, **kwargs)


def check_is_no_draft(
    content: dict, names: list[str], name_or_path: str | Path, config: PreTrainedConfig | None = None
) -> None:
    """
    Raises `ValueError` if a checkpoint without the tensors of a known kind of draft calls itself a draft, and lacks parts of the
    model that transformers would make of it with random weights. `config` is what transformers read, if it could.
    """
    if not names or not (called := draft_classes(content)):
        return
    held = {part for name in names for part in name.split(".")}
    if lacking := min((sorted(parts - held) for parts in parts_of_model(config)), key=len):
        is_of_code = config is not None and content.get("auto_map")
        advice = "If you trust the code that it brings, pass `trust_remote_code=True`. " if is_of_code else ""
        raise ValueError(
            f"{name_or_path} is a draft of a kind that hf-eagle3 does not know: it is called {called}, and lacks {lacking[:6]} of a "
            f"whole model. {advice}The project that trained it, or an engine such as vLLM, may run it. If it is a whole model, correct "
            "`architectures` in its config.json."
        )


def parts_of_model(config: PreTrainedConfig | None) -> list[set[str]]:
    """
    Returns the names of the modules with weights in the model that transformers makes of a configuration (`q_proj`), whatever they
    are within: as they are called there, and as in checkpoints. If it can make none, that is an embedding.
    """
    if type(config) not in AutoModel._model_mapping:
        return [{"embed_tokens"}]
    import torch  # here, so that `import hf_eagle3` is quick
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = AutoModel.from_config(copy.deepcopy(config), trust_remote_code=False)
    weights = dict(model.named_parameters())
    within = {f"{model.base_model_prefix}.{name}": weight for name, weight in weights.items()}  # a model with a head
    names = (weights, revert_weight_conversion(model, weights), revert_weight_conversion(model, within))
    return [{name.split(".")[-2] for name in each if "." in name} for each in names]


def draft_classes(content: dict) -> list[str]:
    """Returns those of the `architectures` in a `config.json` that are called drafts, and are not classes of transformers."""
    called = [name for name in architectures_of(content) if any(word in name.lower() for word in DRAFT_WORDS)]
    return [name for name in called if name not in names_of_transformers()]


def eagle3_config(
    name_or_path: str | Path, content: dict, hub_kwargs: dict[str, Any], **kwargs: Any
) -> "Eagle3Config | tuple[Eagle3Config, dict]":
    """Returns the configuration of an EAGLE-3 draft of any format. `AutoModel` then loads an [`Eagle3ForSpeculation`]."""
    # Here, so that `import hf_eagle3` is quick.
    from .checkpoints import read
    from .remote_code.configuration_eagle3 import Eagle3Config
    from .remote_code.modeling_eagle3 import Eagle3ForSpeculation

    if content.get("speculators_model_type") is None:
        content = read(content, name_or_path, **hub_kwargs)[0].to_dict()
    for auto_class in (AutoModel, AutoModelForCausalLM):
        auto_class.register(Eagle3Config, Eagle3ForSpeculation, exist_ok=True)
    return Eagle3Config.from_dict(content, name_or_path=str(name_or_path), **kwargs)


def read_config_dict(
    cls: type[PreTrainedConfig], read: Callable[..., tuple[dict, dict]], source: str | Path, /, **kwargs: Any
) -> tuple[dict, dict]:
    """
    Returns what `read`, the `get_config_dict` of transformers, returns for a class of configurations `cls`. That of an EAGLE-3 draft
    of another project comes in our schema. PEFT asks for it, for example, when it saves an adapter. Raises `ValueError` if the
    file holds no object, or the draft is of an unsupported kind or broken.
    """
    from .file_checks import check_is_object

    check_is_object(source, **kwargs)
    content, unused_kwargs = read(source, **kwargs)
    hub_kwargs = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    is_other = content.keys().isdisjoint(("speculators_model_type", "transformer_layer_config"))
    may_be = is_other and content and cls.model_type == "eagle3" and not Path(source).is_file()
    if may_be and kind_of_draft(content, source, hub_kwargs)[0] is is_draft:
        from .checkpoints import read as read_checkpoint

        config, *_ = read_checkpoint(content, source, **hub_kwargs)
        content = {**config.to_dict(), "_name_or_path": str(source)}
    return content, unused_kwargs


def block_draft_config(
    name_or_path: str | Path, content: dict, names: list[str], **kwargs: Any
) -> "DFlashConfig | tuple[DFlashConfig, dict]":
    """Returns a block draft's configuration. Raises `ValueError` if it has other layers than Qwen3's."""
    from .baselines.dflash import DFlashConfig

    # Some take the target's configuration for the draft's. Their layers are Qwen3's all the same.
    is_of_qwen3 = content.get("speculators_model_type") is not None or content.get("model_type") in ("qwen3", None)
    if not is_of_qwen3 and (others := unlike_qwen3(names)):
        raise ValueError(
            f"{name_or_path} is a block draft (DFlash) with layers of {content['model_type']!r}, but only Qwen3's are supported. They "
            f"differ in {others[:6]}. An engine such as vLLM may run it."
        )
    return DFlashConfig.from_dict(content, name_or_path=str(name_or_path), **kwargs)


def kind_of_draft(
    content: dict, name_or_path: str | Path, hub_kwargs: dict[str, Any]
) -> tuple[Callable[[Iterable[str]], bool] | None, list[str]]:
    """
    Returns which of [`is_draft`] and [`is_block_draft`] holds for a checkpoint, or `None`, and the names of its tensors.
    Raises `ValueError` if it is certainly a draft, in a file that is broken.
    """
    path = weights_file(name_or_path, **{**hub_kwargs, **LOCAL})
    names = [] if path is None else names_in(path)
    if path is None and not Path(name_or_path).exists() and not hub_kwargs.get("local_files_only"):
        may_be, is_certain = may_be_draft(content)
        names = tensor_names_on_hub(name_or_path, is_certain, **hub_kwargs) if may_be else []
    if names:
        kind = next((kind for kind in (is_draft, is_block_draft) if kind(names)), None)
        if kind is None and "fc.weight" in names and may_be_draft(content)[1]:
            kind = is_draft  # without its layers: reading it says so
        return kind, names
    if may_be_draft(content)[1]:  # transformers would not say what is broken
        from .file_checks import read_file, read_index

        path = weights_file(name_or_path, **{**hub_kwargs, **LOCAL})  # it may have been fetched since
        if path is not None:
            (read_index if path.suffix == ".json" else read_file)(path)
    return None, []
