"""A target without its layers."""

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging


def load_ends(name, revision: str | None = None, num_layers: int = 0, **kwargs) -> PreTrainedModel:
    """
    Loads a target's embedding and head only: all that a draft is compared with, and that training from features needs.

    Args:
        name (`str` or `Path`): Folder or Hub id.
        revision (`str`, *optional*): Branch, tag or commit.
        num_layers (`int`, *optional*, defaults to 0): The first so many layers, too: a fresh draft begins with parts of one.
        kwargs (*optional*): For `from_pretrained`.

    Raises:
        ValueError: if the checkpoint does not hold them in the sizes that its configuration says.
    """
    config = AutoConfig.from_pretrained(name, revision=revision)
    text_config = config.get_text_config(decoder=True)
    shortened = {"num_hidden_layers": num_layers}
    if num_layers > 0 and getattr(text_config, "layer_types", None):
        shortened["layer_types"] = text_config.layer_types[:num_layers]
    if getattr(text_config, "num_kv_shared_layers", None):  # the last ones
        shortened["num_kv_shared_layers"] = 0
    whole = {key: getattr(text_config, key) for key in shortened}
    for key, value in shortened.items():
        setattr(text_config, key, value)
    # Tables that are as wide as there are layers (Gemma's per-layer embeddings) do not fit any more.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # that layers are left out is no news
    try:
        target, info = AutoModelForCausalLM.from_pretrained(
            name, config=config, revision=revision, ignore_mismatched_sizes=True, output_loading_info=True, **kwargs
        )
    finally:
        logging.set_verbosity(verbosity)
    for key, value in whole.items():
        setattr(target.config.get_text_config(decoder=True), key, value)
    ends = {target.get_input_embeddings(), target.get_output_embeddings()}
    names = {f"{path}.weight" for path, module in target.named_modules() if module in ends}
    names |= {path for path, _ in target.named_parameters() if ".self_attn." in path}
    broken = names & {*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}
    if broken:
        raise ValueError(f"{name} lacks {sorted(broken)}, or has them in sizes other than its configuration says.")
    return target
