"""
The model card of a draft.

A card is rendered from the files beside it: the draft's configuration, `training.json` (how it was trained) and
`benchmark.jsonl` (what was measured with these weights). It says once what is missing.
"""

import hashlib
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

from ..checkpoints import ENGINES, describe_engines, sglang
from ..checkpoints.engines import check_vllm
from ..environment import public_name
from ..evaluation import BenchmarkResults, BenchmarkRow, format_table
from ..evaluation.plots import plot_names
from ..evaluation.results import TITLES
from ..remote_code.configuration_eagle3 import FLAGS, tree_settings


TEMPLATE = Path(__file__).with_name("card.md.jinja")
# People search for drafts by these tags.
ENGINE_TAGS = ["vllm"]
TAGS = ["eagle3", "speculative-decoding", "draft-model", "assistant-model", "speculators"]
RENDERED = re.compile(r"<!-- rendered by hf-eagle3, digest (\w+) -->\s*$")


def render_card(
    repo_id: str,
    draft: PreTrainedModel,
    *,
    verifier: str | None = None,
    training: dict | None = None,
    benchmark: BenchmarkResults | None = None,
    license: str | None = None,
    license_name: str | None = None,
    license_link: str | None = None,
    adapter_of: str | None = None,
    tags: str | Sequence[str] | None = None,
    image_folder: str = "",
    note: str = "",
) -> ModelCard:
    """
    Returns the card of a draft.

    Args:
        repo_id (`str`): The draft's repo, `<owner>/<name>`.
        draft ([`Eagle3ForSpeculation`]): The draft. Its weights are not read, so it may be on the meta device.
        verifier (`str`, *optional*): Hub id or path of the target. By default the one in the draft's configuration.
        training (`dict`, *optional*): What [`Eagle3Trainer`] saves as `training.json`.
        benchmark ([`BenchmarkResults`], *optional*): What `recipes/benchmark.py --json` wrote.
        license (`str`, *optional*): A license id of the Hub.
        license_name (`str`, *optional*), license_link (`str`, *optional*):
            For the license `"other"`: its name, and an address or the name of a file in the repo.
        adapter_of (`str`, *optional*): The draft, if this repo has a LoRA adapter for it.
        tags (`str` or `Sequence[str]`, *optional*): More tags. Every draft has some.
        image_folder (`str`, *optional*): The folder of the plots, relative to the card. By default they are beside it.
        note (`str`, *optional*): A paragraph below the first one.

    Returns:
        `ModelCard`: Metadata and text. `str(card)` is the README.md.
    """
    verifier = draft.config.verifier if verifier is None else verifier
    is_on_hub = is_hub_id(verifier)
    measured = rows_by_use(benchmark.rows if benchmark else [])
    name, datasets = repo_id.split("/")[-1], (training or {}).get("datasets") or []
    base_model = adapter_of or verifier
    base_model = base_model if is_hub_id(base_model) else None
    data = ModelCardData(
        base_model=base_model,
        # The Hub has no relation for drafts (only adapter, finetune, merge and quantized). "finetune" is its default.
        base_model_relation=None if base_model is None else ("adapter" if adapter_of else "finetune"),
        library_name="peft" if adapter_of else "transformers",
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys([*TAGS, *engine_tags(draft, adapter_of), *tag_list(tags)])),
        datasets=[dataset for dataset in datasets if is_hub_id(dataset)] or None,
        license=license,
        license_name=license_name,
        license_link=license_link,
        model_name=name if measured[0] else None,
        eval_results=eval_results(*measured) or None,
    )
    verifier_link = (
        f"[{verifier}](https://huggingface.co/{verifier})" if is_on_hub else "a model that is not on the Hub"
    )
    arguments = None
    if training is not None:
        recorded = dict(training.get("arguments") or {})
        # Training from packed features turns `padding_free` on. Extracting them takes `packing`.
        has_length = recorded.get("max_length", 1024) is not None
        if "features_dir" in recorded and has_length and recorded.pop("padding_free", False):
            recorded["packing"] = True
        arguments = yaml.safe_dump(recorded, sort_keys=False, allow_unicode=True).strip()
    return from_template(
        TEMPLATE,
        data,
        name=name,
        repo_id=repo_id,
        training=training,
        verifier_link=verifier_link,
        verifier=verifier,
        verifier_path=verifier if is_on_hub else "path/to/target",
        is_on_hub=is_on_hub,
        is_chat=is_for_chats(training),
        sees=bool((training or {}).get("rows_with_images")),
        form=form(draft),
        adapter_of=public_name(adapter_of),
        place_of_draft="".join(f', {name}="{value}"' for name, value in getattr(draft, "loaded_with", {}).items()),
        cannot_serve=reason_against_vllm(draft),
        cannot_export=reason_against(sglang.write, draft),
        engines=describe_engines(draft),
        parallel=', "parallel_drafting": true' if draft.config.is_parallel else "",
        engines_run=", ".join(
            f"{each.name} {each.version}" if each.version[0].isdigit() else f"{each.name} ({each.version})"
            for each in ENGINES
            if each.version is not None
        ),
        training_arguments=arguments,
        image_folder=image_folder,
        note=note,
        tree=tree_settings(draft.generation_config),
        **({} if benchmark is None else benchmark_texts(benchmark, *measured)),
    )


def rows_by_use(rows: Sequence[BenchmarkRow]) -> tuple[list[BenchmarkRow], list[BenchmarkRow], list[BenchmarkRow]]:
    """Returns the rows of the draft as it is used, of the draft alone, and of prompt lookup without a draft."""
    drafted = [row for row in rows if row.method == "eagle3"] or [row for row in rows if row.method == "eagle3-chain"]
    # The draft's own acceptance. Lookup takes the easy tokens, so with lookup the draft accepts fewer.
    alone = [row for row in rows if row.method == "eagle3-no-lookup"] or drafted
    return drafted, alone, [row for row in rows if row.method == "prompt-lookup"]


def benchmark_texts(
    benchmark: BenchmarkResults,
    drafted: Sequence[BenchmarkRow],
    alone: Sequence[BenchmarkRow],
    lookups: Sequence[BenchmarkRow],
) -> dict[str, Any]:
    """Returns what the template says about a benchmark."""
    rows = benchmark.rows
    # An interrupted run has fewer than its arguments say.
    repeats = sorted({len(row.speedups) for row in rows})
    return {
        "run": benchmark.run,
        "table": format_table(rows) if rows else None,
        "repeats": " to ".join(dict.fromkeys(map(str, repeats[:1] + repeats[-1:]))),
        "speedups": speedup_lines(drafted, alone, lookups),
        "plots": plot_names(rows),
        "prompts": {row.task: row.num_prompts for row in rows},
        "titles": {} if has_files(benchmark.run["arguments"].get("tasks") or ()) else TITLES,
        "parts": any(
            row.num_identical < row.num_prompts for row in rows if not (row in lookups and row.temperature > 0)
        ),
        "lookups_part": any(row.num_identical < row.num_prompts for row in lookups if row.temperature > 0),
        "num_forwards": sum(row.target_forwards for row in drafted),
        "num_lookups": sum(row.lookup_steps for row in drafted),
        "alone": alone,
        "num_positions": max((len(row.acceptance_by_position) for row in alone), default=0),
    }


def from_template(template: Path, data: ModelCardData, **texts: Any) -> ModelCard:
    """Returns the card that a template renders, with a digest at its end. Raises `ValueError` if a record is not as it was saved."""
    from jinja2 import TemplateError  # here, because transformers does not require it

    try:
        card = ModelCard.from_template(data, template_str=template.read_text(encoding="utf-8"), **texts)
    except (TemplateError, TypeError) as error:
        raise ValueError(
            f"The draft's card cannot be rendered, because a value in its training.json or benchmark.jsonl is missing, or not as it was "
            f"saved: {error}. Restore the file, or remove it."
        ) from error
    card.text = card.text.rstrip("\n") + "\n"
    card.text += f"\n<!-- rendered by hf-eagle3, digest {card_digest(card)} -->\n"
    return card


def engine_tags(draft: PreTrainedModel, adapter_of: str | None) -> list[str]:
    """Returns tags of the engines that take the draft as it is."""
    is_taken = adapter_of is None and reason_against_vllm(draft) is None
    return list(ENGINE_TAGS) if is_taken else []


def tag_list(tags: str | Sequence[str] | None) -> list[str]:
    """Returns the tags that a caller gave. A text is one tag."""
    return [tags] if isinstance(tags, str) else list(tags or ())


def reason_against_vllm(draft: PreTrainedModel) -> str | None:
    """Returns why vLLM cannot take a draft's files as they are, or `None`."""
    reason = reason_against(check_vllm, draft)
    if reason is None and draft.config.speculators_config is None:
        reason = (
            "vLLM does not take these files, because they do not name the draft's target. `recipes/export.py DRAFT --to speculators "
            "--target TARGET` writes files that do. It is a script of hf-eagle3."
        )
    return reason


def reason_against(check: Callable[[Any], Any], draft: PreTrainedModel) -> str | None:
    """Returns why an engine cannot take a draft, by one of the checks of `hf_eagle3.checkpoints`, or `None`."""
    try:
        check(draft)
    except ValueError as error:
        return str(error)
    return None


def is_hub_id(name: str | None) -> TypeGuard[str]:
    """Returns whether this looks like a repo of the Hub, and is no path."""
    if not name or Path(name).suffix in (".json", ".jsonl", ".parquet", ".txt", ".csv"):
        return False
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)) and not Path(name).exists()


def form(draft: PreTrainedModel) -> str:
    """Returns what the draft is, in one line."""
    config, layer = draft.config, draft.config.transformer_layer_config
    flags = [flag for flag in FLAGS if flag != "has_own_embed_tokens" and getattr(config, flag)]
    num_parameters = sum(weight.numel() for name, weight in draft.named_parameters() if "lora_" not in name)
    kind = {"llama": "Llama", "qwen3": "Qwen3"}[layer.model_type]
    layers = f"{config.num_hidden_layers} {kind} layer" + "s" * (config.num_hidden_layers > 1)
    ids = config.eagle_aux_hidden_state_layer_ids
    if ids is None:
        states = "the usual three states of the target"
    elif config.aux_layer_ids_assumed:
        stored = [layer_id - 1 for layer_id in ids]
        states = (
            f"the states of layers {stored} of the target, but its files do not say whether at their inputs or outputs"
        )
    else:
        states = f"the states that enter layers {ids} of the target"
    return (
        f"{layers} of width {layer.hidden_size}, {num_parameters:,} parameters of its own, a draft vocabulary of "
        f"{config.draft_vocab_size} of {config.vocab_size} tokens. It reads {states}"
        + (f" (`{'`, `'.join(flags)}`)" if flags else "" if config.is_parallel else " (the form of the EAGLE-3 paper)")
        + (", and drafts all tokens in one pass (P-EAGLE)" if config.is_parallel else "")
    )


def of_same_call(row: BenchmarkRow, others: Sequence[BenchmarkRow]) -> BenchmarkRow | None:
    """Returns another method's row of the same task, batch size and temperature, if there is one."""
    same = (other for other in others if other.method != row.method and other.task == row.task)
    return next((o for o in same if (o.batch_size, o.temperature) == (row.batch_size, row.temperature)), None)


def has_files(tasks: Sequence[str]) -> bool:
    """Whether some of the tasks of a benchmark are files or folders, which may have other prompts than their names say."""
    return any("/" in task or "\\" in task or "." in task for task in tasks)


def speedup_lines(
    rows: Sequence[BenchmarkRow], alone: Sequence[BenchmarkRow], lookups: Sequence[BenchmarkRow]
) -> list[str]:
    """Returns a sentence for each temperature and batch size: the mean speed-up over the tasks, and the other methods'."""
    lines = []
    for temperature, batch_size in dict.fromkeys((row.temperature, row.batch_size) for row in rows):
        same = [row for row in rows if (row.temperature, row.batch_size) == (temperature, batch_size)]
        speedups = [row.median_speedup for row in same]
        line = f"temperature {temperature:g}, batch size {batch_size}: {statistics.mean(speedups):.2f}x"
        if len(same) == 1:
            line += f" ({same[0].task})"
        else:
            line += f", the mean of {len(same)} tasks ({min(speedups):.2f}x to {max(speedups):.2f}x)"
        for name, others in (("the draft alone", alone), ("prompt lookup without a draft", lookups)):
            found = [other for row in same if (other := of_same_call(row, others)) is not None]
            if 0 < len(found) < len(same):
                line += f"; {name} has figures of {len(found)} of these tasks only (see the table)"
            elif found:
                line += f"; {name} {statistics.mean(other.median_speedup for other in found):.2f}x"
        lines.append(line + ("; one repeat only" if any(len(row.speedups) == 1 for row in same) else ""))
    return lines


def eval_results(
    rows: Sequence[BenchmarkRow], alone: Sequence[BenchmarkRow], lookups: Sequence[BenchmarkRow]
) -> list[EvalResult]:
    """
    Returns the `model-index`. Each task, batch size and temperature has the speed-up of `rows`, the speed-up and
    acceptance length of the draft `alone`, and the speed-up of transformers' prompt lookup (`lookups`).

    Speed-ups are not in the Hub's `.eval_results/`, which is for scores in leaderboards.
    """
    results = []
    for row in rows:
        common: dict[str, Any] = {
            "task_type": "text-generation",
            "task_name": "Speculative decoding",
            "dataset_type": row.task,
            "dataset_name": row.task,
            # The Hub tells results apart by this.
            "dataset_config": f"temperature {row.temperature:g}, batch size {row.batch_size}",
            "dataset_args": {
                "temperature": row.temperature,
                "batch_size": row.batch_size,
                "num_prompts": row.num_prompts,
            },
        }
        draft, lookup = of_same_call(row, alone) or row, of_same_call(row, lookups)
        repeats = "one repeat" if len(row.speedups) == 1 else f"median of {len(row.speedups)}"
        with_lookup = "draft and prompt lookup" if draft is not row or row.lookup_steps else "draft"
        length = ("Acceptance length of the draft alone (pooled)", draft.acceptance_length)
        if draft is row and row.lookup_steps:  # the draft alone was not measured, but its trees can be told apart
            length = ("Acceptance length of the draft's trees (pooled)", row.tree_acceptance_length)
        metrics = (
            ("acceptance_length", *length),
            ("speedup", f"Speed-up over plain generation, {with_lookup} ({repeats})", row.median_speedup),
            (
                "speedup_draft_alone",
                f"Speed-up over plain generation, draft alone ({repeats})",
                None if draft is row else draft.median_speedup,
            ),
            (
                "speedup_prompt_lookup_alone",
                f"Speed-up over plain generation, prompt lookup without a draft ({repeats})",
                None if lookup is None else lookup.median_speedup,
            ),
        )
        results += [
            EvalResult(**common, metric_type=kind, metric_name=name, metric_value=round(value, 2))
            for kind, name, value in metrics
            if value is not None
        ]
    return results


def is_for_chats(training: dict | None) -> bool:
    """Returns whether users can ask in chats: the target has a chat template of its own."""
    return bool((training or {}).get("has_chat_template"))


def card_digest(card: ModelCard) -> str:
    """Returns a digest of metadata and text, without the digest in the text. It changes when somebody edits the card."""
    content = str(card.data.to_dict()) + RENDERED.sub("", card.text.replace("\r\n", "\n")).strip()
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def is_edited(card: ModelCard) -> bool:
    """
    Returns whether somebody wrote or changed this card by hand. A card without text, and with no metadata but a
    license, counts as unwritten.

    Args:
        card (`ModelCard`): The card.
    """
    if not card.text.strip() and set(card.data.to_dict()) <= {"license"}:
        return False
    found = RENDERED.search(card.text)
    return found is None or found[1] != card_digest(card)
