"""A target without its layers."""

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging


def load_ends(name, revision: str | None = None, **kwargs) -> PreTrainedModel:
    """
    Loads a target's embedding and head only: all that a draft is compared with, and that training from features needs.

    Args:
        name (`str` or `Path`): Folder or Hub id.
        revision (`str`, *optional*): Branch, tag or commit.
        kwargs (*optional*): For `from_pretrained`.

    Raises:
        ValueError: if the checkpoint does not hold them in the sizes that its configuration says.
    """
    config = AutoConfig.from_pretrained(
        name, revision=revision, trust_remote_code=kwargs.get("trust_remote_code", False)
    )
    text_config = config.get_text_config(decoder=True)
    num_layers, text_config.num_hidden_layers = text_config.num_hidden_layers, 0
    # Tables that are as wide as there are layers (Gemma's per-layer embeddings) do not fit any more.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # that all layers are left out is no news
    try:
        target, info = AutoModelForCausalLM.from_pretrained(
            name, config=config, revision=revision, ignore_mismatched_sizes=True, output_loading_info=True, **kwargs
        )
    finally:
        logging.set_verbosity(verbosity)
    target.config.get_text_config(decoder=True).num_hidden_layers = num_layers
    ends = {target.get_input_embeddings(), target.get_output_embeddings()}
    names = {f"{path}.weight" for path, module in target.named_modules() if module in ends}
    broken = names & {*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}
    if broken:
        raise ValueError(f"{name} lacks {sorted(broken)}, or has them in sizes other than its configuration says.")
    return target
