"""
Reading a draft of any format, and mending what others leave out. It does not ship with drafts, which are as we saved them.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from logging import LogRecord
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from .file_checks import check_files, read_json
from .remote_code.auto_eagle3 import logger
from .remote_code.configuration_eagle3 import default_aux_layer_ids
from .remote_code.draft_model_eagle3 import DraftModel, check_loading_info
from .tensor_names import find, our_names


# The target's, with which `speculators` trains. Some converters store them.
OF_TARGET = {"verifier_lm_head.weight", "verifier_norm.weight"}


def read_draft(
    cls: type[DraftModel],
    read: Callable[..., tuple[DraftModel, dict[str, Any]]],
    path: str | Path | None,
    args: tuple,
    kwargs: dict[str, Any],
    hub_kwargs: dict[str, Any],
    may_be_adapter: bool = True,
) -> tuple[DraftModel, dict[str, Any], dict[str, Any] | None]:
    """
    Reads a draft of any format, of this class `cls`.

    `read(path, *args, **kwargs)` is `from_pretrained` of transformers. `path` is a folder or Hub id, or `None` if there are no
    files. It `may_be_adapter`, which names its draft.

    Returns the draft; transformers' report, with the `format` and what was `renamed`, `ignored` and `assumed` if it is in another
    format; and the content of its `config.json` if it is in ours. For errors see [`~draft_model_eagle3.DraftModel.from_pretrained`].
    """
    source, variant, of_adapter = str(path), kwargs.get("variant"), dict(kwargs.get("adapter_kwargs") or {})
    adapter = of_adapter.pop("_adapter_model_path", None)  # the Auto classes pass it on
    report: dict[str, Any] = {}
    config, method = kwargs.get("config"), cls.config_class.model_type
    if getattr(config, "model_type", method) != method:  # it may also be a path
        raise ValueError(
            f"`config` is of the class {type(config).__name__}, but must be of {cls.config_class.__name__}. Leave it out to read the draft's own."
        )
    needs_config = config is None
    content = None if path is None else check_files(source, variant, needs_config, of_adapter, **hub_kwargs)
    if path is not None and content is None and needs_config:
        if not may_be_adapter:
            raise ValueError(f"{source} is an adapter, too.")
        return read_adapter(cls, read, source, args, kwargs, hub_kwargs, of_adapter)
    if content is not None and hub_kwargs.get("force_download"):  # the checks have just downloaded all files
        hub_kwargs, kwargs = ({**each, "force_download": False} for each in (hub_kwargs, kwargs))
    if content is not None and not cls.config_class.recognizes(content, source):
        from . import checkpoints  # here, because that module imports this one

        if kwargs.get("state_dict") is not None:  # as transformers says
            raise ValueError(
                f"`state_dict` cannot be passed together with the name of a draft, {source}. Pass `None` as its name."
            )
        config, tensors, report = checkpoints.read(content, source, variant=variant, **hub_kwargs)
        path, kwargs = None, {**checkpoints.with_config(config, kwargs), "state_dict": tensors}
    draft, info = read_and_mend(partial(read, path, *args), kwargs, source, content, **hub_kwargs)
    check_loading_info(info, source)
    check_draft_vocabulary(draft, source)
    if report:
        draft.name_or_path = draft.config.name_or_path = source
        logger.info(f"{source} was read as a checkpoint of the {report['format']} format: {report}")
        if adapter is not None:  # transformers loads it beside a name only, and got none
            load_adapter(draft, adapter, of_adapter)
    return draft, {**info, **report}, None if report else content


def read_adapter(
    cls: type[DraftModel],
    read: Callable[..., tuple[DraftModel, dict[str, Any]]],
    source: str,
    args: tuple,
    kwargs: dict[str, Any],
    hub_kwargs: dict[str, Any],
    of_adapter: dict[str, Any],
) -> tuple[DraftModel, dict[str, Any], dict[str, Any] | None]:
    """
    Reads the draft of any format that an adapter names, and loads the adapter `source` into it. See [`read_draft`]. Raises
    `ValueError` or `OSError` if the draft is not where the adapter says.
    """
    of_adapter = {**hub_kwargs, **of_adapter}  # as in transformers, these are the adapter's
    base = read_json(str(find(source, "adapter_config.json", **of_adapter)))["base_model_name_or_path"]
    others = {"adapter_kwargs", "revision", "subfolder"}
    kwargs, hub_kwargs = ({name: each[name] for name in each.keys() - others} for each in (kwargs, hub_kwargs))
    try:
        draft, info, content = read_draft(cls, read, base, args, kwargs, hub_kwargs, may_be_adapter=False)
    except (OSError, ValueError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(
            f"{source} is an adapter of the draft {base}, which cannot be loaded. If it is elsewhere (a `subfolder`, a `revision`), load it "
            f"from there, and pass both to `PeftModel.from_pretrained`. {error}"
        ) from error
    load_adapter(draft, source, of_adapter)
    return draft, info, content


def load_adapter(draft: DraftModel, source: str, hub_kwargs: dict[str, Any]) -> None:
    """Loads an adapter into a draft. Raises `ValueError` if its tensors are not those that its configuration describes."""
    check_loading_info(draft.load_adapter(source, adapter_kwargs=hub_kwargs).to_dict(), source)


def read_and_mend(
    read: Callable[..., tuple[DraftModel, dict[str, Any]]],
    kwargs: dict[str, Any],
    source: str,
    content: dict[str, Any] | None,
    **hub_kwargs: Any,
) -> tuple[DraftModel, dict[str, Any]]:
    """
    Reads a draft by transformers' means, and mends what others leave out: a head, a `t2d`, the order of the tokens, our names
    of tensors, and whether a table is stored.

    `read` is `from_pretrained` of transformers, with the arguments `kwargs`. It also returns its report of missing and
    unexpected tensors, which leaves here without what was mended. `content` is that of the `config.json` of the folder or Hub id
    `source`, or `None` if there is none.
    """
    method, auto_map = ((content or {}).get(name) for name in ("speculators_model_type", "auto_map"))
    is_ours = content is not None and ("weights_digest" in content or "_eagle3.Eagle3Config" in str(auto_map))
    is_of_speculators = method in ("eagle3", "peagle") and not is_ours
    with without_load_report():
        draft, info = read(**kwargs)
        names = our_names(info["unexpected_keys"])
        # The schema of speculators does not say whether a table is stored.
        has_table = "embed_tokens.weight" in names.values()
        wanted = info["missing_keys"] | {"embed_tokens.weight"}
        renamed = {f"^{re.escape(name)}$": new for name, new in names.items() if name != new and new in wanted}
        is_changed = is_of_speculators and rotate_whole_heads(draft, source)
        if has_table or renamed or is_changed:
            draft.config.has_own_embed_tokens |= has_table
            # transformers would take the caller's, which it has put there, for that of quantized weights.
            draft.config.__dict__.pop("quantization_config", None)
            if (stored := (content or {}).get("quantization_config")) is not None:
                draft.config.quantization_config = stored
            kwargs = {name: kwargs[name] for name in kwargs.keys() - fields_among(kwargs, draft.config)}
            key_mapping = renamed or kwargs.get("key_mapping")
            draft, info = read(**{**kwargs, "config": draft.config, "key_mapping": key_mapping})
    if "lm_head.weight" in info["missing_keys"]:  # the draft gets its target's when it meets it
        from .making import resize_head

        info["missing_keys"].remove("lm_head.weight")
        resize_head(draft.get_output_embeddings(), 0)
    if content is None:
        return draft, info
    check_num_states(draft, info, source)
    if not is_ours:
        info["unexpected_keys"].difference_update(OF_TARGET)
        sort_tokens(draft, info)
        warn_of_layer_order(draft, source)
    mend_mapping(draft, info, source, variant=kwargs.get("variant"), **hub_kwargs)
    if is_of_speculators:
        warn_of_output_ids(draft)
        name, flag = "norm_before_residual", draft.config.norm_before_residual
        if content.get(name) is None and not flag and name not in kwargs:
            logger.warning_once(
                f"The config.json of {source} has no `{name}`. We take false, as the class of speculators does, but vLLM takes "
                f"true. If few tokens are accepted, load it with `{name}=True`."
            )
    return draft, info


def rotate_whole_heads(draft: "DraftModel", source: str) -> bool:
    """
    Lets a draft that `speculators` trained rotate whole heads, whatever part its target rotates. Returns whether that changes it.
    `speculators` copied the key, but transformers' layers, with which it trains, heed it only in scaled rotary embeddings.
    """
    rope = draft.config.transformer_layer_config.rope_parameters
    if rope["rope_type"] != "default" or (factor := rope.pop("partial_rotary_factor", None) or 1) == 1:
        return False
    logger.warning_once(
        f"The config.json of {source} has a `partial_rotary_factor` of {factor}. We rotate whole heads, because speculators trained them "
        "so, but vLLM rotates that part. Before you serve this draft, save it again: that removes the key."
    )
    return True


def fields_among(kwargs: dict[str, Any], config: Any) -> set[str]:
    """Returns the names of those arguments of `from_pretrained` that transformers takes for fields of the configuration."""
    loading = {"dtype", "torch_dtype", "quantization_config"}
    return {name for name in kwargs.keys() - loading if hasattr(config, name)}


def sort_tokens(draft: DraftModel, info: dict[str, Any]) -> None:
    """
    Sorts a loaded draft's tokens by their ids, with the rows of its head. Model-Optimizer writes them in order of
    frequency, and converters copy that. Some write ids into `d2t` instead of offsets. A mapping with doubles or unknown
    ids is left to [`check_draft_vocabulary`].
    """
    if draft.d2t is None or draft.d2t.is_meta or "d2t" in info["missing_keys"]:
        return
    head, known = draft.get_output_embeddings().weight, torch.arange(draft.config.vocab_size, device=draft.d2t.device)
    as_offsets, as_ids, is_marked = draft.draft_token_ids, draft.d2t, "t2d" not in info["missing_keys"]
    marked = known[draft.t2d] if is_marked else known

    def are_valid(token_ids: torch.Tensor, among: torch.Tensor) -> bool:
        return len(token_ids.unique()) == len(token_ids) and bool(torch.isin(token_ids, among).all())

    may_be_ids = is_marked or bool(as_offsets.max() > known[-1] and (as_ids.diff() > 0).all())
    if may_be_ids and not are_valid(as_offsets, marked) and are_valid(as_ids, marked):
        token_ids = as_ids
    elif are_valid(as_offsets, known):
        token_ids = as_offsets
    else:
        return
    order, places = token_ids.argsort(), torch.arange(len(token_ids), device=token_ids.device)
    is_sorted, is_quantized = order.equal(places), not head.is_floating_point()
    if is_quantized and not is_sorted:  # a quantized head has scales, too
        return
    draft.d2t = token_ids[order] - places
    if is_sorted:
        return
    for name, weight in draft.named_parameters():
        # An empty head will be the target's.
        if name.endswith(("lm_head.weight", "markov_w2.weight")) and len(weight) > 0:
            weight.data = weight.data[order]


def warn_of_layer_order(draft: DraftModel, source: str | Path) -> None:
    """Warns if a draft names layers of its target twice, or in another order than the target computes them."""
    ids = draft.config.eagle_aux_hidden_state_layer_ids or []
    if ids == sorted(set(ids)):
        return
    how, advice = "out of order", f"load it with `eagle_aux_hidden_state_layer_ids={sorted(ids)}`"
    if len(set(ids)) < len(ids):
        how, advice = "twice", "correct the wrong one in its config.json"
    logger.warning_once(
        f"The draft {source} lists layers of its target {how}: it reads the inputs of {ids}. We read them as they are listed, but vLLM and SGLang read each "
        f"once, in the order of the layers. If few tokens are accepted, {advice}."
    )


def check_num_states(draft: DraftModel, info: dict[str, Any], source: str | Path) -> None:
    """
    Raises `ValueError` if `fc` reads another number of the target's states than the configuration names. Some trainers also
    name the last layer, whose state is only a reference in training.
    """
    ids, size = draft.config.eagle_aux_hidden_state_layer_ids, draft.config.target_hidden_size
    stored = next((shape for name, shape, _ in info["mismatched_keys"] if name == "fc.weight"), None)
    if ids is None or stored is None or stored[-1] % size or stored[-1] == len(ids) * size:
        return
    num_states = stored[-1] // size
    advice = (
        f"If training used the last layers only as a reference, load it with `eagle_aux_hidden_state_layer_ids={ids[:num_states]}`."
        if num_states < len(ids)
        else "Correct its config.json."
    )
    raise ValueError(
        f"`fc.weight` of {source} reads {num_states} of its target's states ({stored[-1]} values, of {size} each), but config.json names "
        f"{len(ids)} layers (the inputs of {ids}). {advice}"
    )


def warn_of_output_ids(draft: DraftModel) -> None:
    """Warns if a draft of the speculators format has the usual ids of outputs of layers, which a converter may have kept."""
    ids = draft.config.eagle_aux_hidden_state_layer_ids or [0]
    depth = ids[-1] + 4  # of a target for which they would be the usual ones
    usual = default_aux_layer_ids(depth)
    if ids == [layer_id - 1 for layer_id in usual]:
        logger.warning_once(
            f"The draft {draft.config.name_or_path or '(unnamed)'} reads the states that enter layers {ids} of its target, as its "
            f"format says. But for a target of {depth} layers these look like the ids of layers whose outputs it was trained on, "
            f"kept by a converter. If few tokens are accepted, load it with `eagle_aux_hidden_state_layer_ids={usual}`."
        )


@contextmanager
def without_load_report() -> Iterator[None]:
    """
    Hides transformers' report of missing and unexpected tensors. We mend them, or refuse them by name. Errors of conversions
    (quantized weights) are only in the report.
    """

    def is_no_report(record: LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage() or "CONVERSION" in record.getMessage()

    transformers_logger = logging.get_logger("transformers.modeling_utils")
    transformers_logger.addFilter(is_no_report)
    try:
        yield
    finally:
        transformers_logger.removeFilter(is_no_report)


def d2t_of(t2d: torch.Tensor) -> torch.Tensor:
    """Returns the `d2t` that belongs to a `t2d`, if the rows of the head are in the order of their tokens, as usual."""
    token_ids = t2d.bool().nonzero().flatten()
    return token_ids - torch.arange(len(token_ids), device=token_ids.device)


def mend_mapping(draft: DraftModel, info: dict[str, Any], source: str | Path, **kwargs: Any) -> None:
    """
    Completes the vocabulary mapping of a loaded draft as other readers do. It derives a `t2d` or `d2t` that is not stored, and
    ignores a mapping without effect beside the whole vocabulary. What it mends leaves `info`, transformers' report of missing
    and unexpected tensors. Raises `ValueError` if there is only a `t2d`, and it marks more or fewer tokens than the draft has.
    """
    if draft.d2t is not None and "t2d" in info["missing_keys"] and "d2t" not in info["missing_keys"]:
        if not draft.d2t.is_meta:
            ids = torch.arange(draft.config.vocab_size, device=draft.d2t.device)
            draft.t2d = torch.isin(ids, draft.draft_token_ids)
        info["missing_keys"].remove("t2d")
    if draft.t2d is not None and "d2t" in info["missing_keys"] and "t2d" not in info["missing_keys"]:
        if not draft.t2d.is_meta:
            draft.d2t = d2t_of(draft.t2d)
            if len(draft.d2t) != draft.config.draft_vocab_size:
                raise ValueError(
                    f"{source} has no `d2t`, and its `t2d` marks {len(draft.d2t)} tokens, but `draft_vocab_size` is "
                    f"{draft.config.draft_vocab_size}. Download the checkpoint again."
                )
        info["missing_keys"].remove("d2t")
    if draft.d2t is None and (held := info["unexpected_keys"] & {"d2t", "t2d"}):
        from .checkpoints.files import read_tensors  # here, because that module imports this one

        tensors = read_tensors(source, **kwargs)
        for name in held:
            if name in tensors and is_neutral_mapping(name, tensors[name]):
                info["unexpected_keys"].remove(name)


def is_neutral_mapping(name: str, mapping: torch.Tensor) -> bool:
    """Whether a `d2t` (of offsets, or of ids) or a `t2d` maps each token to itself."""
    if name == "t2d":
        return bool(mapping.all())
    return not mapping.any() or torch.equal(mapping.long(), torch.arange(len(mapping), device=mapping.device))


def check_draft_vocabulary(draft: DraftModel, source: str | Path) -> None:
    """Raises `ValueError` if `d2t` and `t2d` do not describe one part of the target's vocabulary."""
    if draft.d2t is None or draft.t2d is None or draft.d2t.is_meta:
        return
    token_ids = draft.draft_token_ids
    if (token_ids.diff() <= 0).any() or token_ids[0] < 0 or token_ids[-1] >= draft.config.vocab_size:
        raise ValueError(
            f"{source}: `d2t` does not map to ascending ids below {draft.config.vocab_size}. Download the checkpoint again."
        )
    if not torch.equal(draft.t2d.nonzero().flatten(), token_ids):
        raise ValueError(f"{source}: `t2d` marks other tokens than `d2t` maps to. Download the checkpoint again.")
