# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
r"""
Replaces the answers of a data set with the target's own, which its draft will have to predict.

With the target in this process, or one in a process per GPU:

    accelerate launch recipes/regenerate.py --model_name_or_path Qwen/Qwen3-8B --dtype bfloat16 \
        --dataset_name HuggingFaceH4/ultrachat_200k --dataset_train_split train_sft --output_dir outputs/ultrachat-qwen3-8b

With an OpenAI-compatible server (vLLM, SGLang), which is faster:

    python recipes/regenerate.py --model_name_or_path Qwen/Qwen3-8B --base_url http://localhost:8000/v1 --concurrency 128 \
        --dataset_name HuggingFaceH4/ultrachat_200k --dataset_train_split train_sft --output_dir outputs/ultrachat-qwen3-8b

Each of the assistant's turns is replaced, and later answers see the new earlier ones. Prompts that are texts are continued, without
a chat template. Rows with only a `text` are cut into prompts of `--prompt_tokens`, so that prompts and answers together are as long
as the text. Rows may have images if the target takes them. New rows keep the images, or their paths.

Finished rows are written at once. After an interruption the same command continues, and tries failed rows again. Then train
on the folder with `recipes/train.py --dataset_name outputs/ultrachat-qwen3-8b ...`, or push it with `--push_to_hub me/ultrachat-qwen3-8b`.
"""

import asyncio
import logging
import sys
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib.util import find_spec


if find_spec("trl") is None:
    raise SystemExit("This script needs more packages: pip install 'hf-eagle3[train]'")

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env
from huggingface_hub.utils import validate_repo_id
from train import TargetConfig, TrainScriptArguments, load_configured_data, load_configured_target
from transformers import ProcessorMixin
from trl import DatasetMixtureConfig

from hf_eagle3.data import ImageReader, check_chat_template, plain_rows, rows_of, shows_images
from hf_eagle3.data.answers import Output, push_dataset
from hf_eagle3.data.regeneration import beginnings, has_texts, learners_of, regenerate_locally
from hf_eagle3.data.rows import read_template_kwargs
from hf_eagle3.data.server import regenerate_by_server
from hf_eagle3.data.values import RowError
from hf_eagle3.environment import warn_of_slow_bfloat16
from hf_eagle3.evaluation.drafts import load_draft
from hf_eagle3.scripts import place_of_draft, run_script
from hf_eagle3.tokenizer import load_tokenizer, read_template
from hf_eagle3.training.arguments import check_integers, check_shares
from hf_eagle3.training.models import load_processing_class
from hf_eagle3.training.parser import Eagle3Parser


logger = logging.getLogger(__name__)

MOST_WAITED = timedelta(days=7)  # for the slowest process
# Arguments that only training uses.
WITHOUT = ("features_dir", "dataset_test_split", "use_peft", "lora_", "use_rslora", "use_dora", "ignore_bias_buffers")


@dataclass
class RegenerationScriptArguments(TrainScriptArguments):
    """Arguments of data and draft."""

    draft_name_or_path: str | None = field(
        default=None,
        metadata={"help": "An earlier draft of the target, which makes a target in this process answer faster."},
    )


@dataclass
class RegenerationArguments:
    """Arguments of this script."""

    output_dir: str = field(metadata={"help": "Folder for the new data, in JSON Lines files."})
    max_new_tokens: int = field(default=2048, metadata={"help": "Longer answers are cut here."})
    temperature: float | None = field(
        default=None, metadata={"help": "By default the target's own setting. 0 is greedy."}
    )
    top_p: float | None = field(default=None, metadata={"help": "By default the target's own setting."})
    chat_template_path: str | None = field(
        default=None, metadata={"help": "Jinja file that replaces the chat template of the target's tokenizer."}
    )
    prompt_tokens: int = field(
        default=32, metadata={"help": "Length of the prompts that are cut from rows with only a text."}
    )
    batch_size: int = field(default=16, metadata={"help": "Conversations at a time in each process."})
    chat_template_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "JSON for the chat template, such as '{\"enable_thinking\": false}'. A row's own take precedence."
        },
    )
    drop_cut_answers: bool = field(
        default=False,
        metadata={
            "help": "Leave out rows with an answer that was cut at `--max_new_tokens` (finish_reason `length`). They are "
            "counted either way."
        },
    )
    base_url: str | None = field(default=None, metadata={"help": "Server to ask, instead of loading the target."})
    served_model_name: str | None = field(
        default=None, metadata={"help": "The model's name on the server. By default `--model_name_or_path`."}
    )
    api_key: str | None = field(default=None, metadata={"help": "The server's key, if it asks for one."})
    concurrency: int = field(default=64, metadata={"help": "Conversations sent to the server at a time."})
    max_retries: int = field(default=5, metadata={"help": "How often to send a failed request again."})
    timeout: float = field(default=600.0, metadata={"help": "Seconds to wait for a server's answer."})
    push_to_hub: str | None = field(
        default=None, metadata={"help": "Data set on the Hub, `<owner>/<name>`, to push all rows to at the end."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code from the target's repo."})
    private: bool = field(default=False, metadata={"help": "Make a new data set private."})

    def __post_init__(self):
        check_integers(self, max_new_tokens=1, prompt_tokens=1, batch_size=1, concurrency=1, max_retries=0)
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"`temperature` must not be negative, got {self.temperature}.")
        if self.top_p is not None:
            check_shares(self, "top_p", above_zero=True)


def prompts_to_answer(script_args, args, target_config, mixture):
    """
    Returns the data set of prompts, the tokenizer or processor (`None` if there is a server, and the tokenizer is not found), and
    whether the prompts are pieces of texts.
    """
    dataset = rows_of(load_configured_data(script_args, mixture), script_args.dataset_train_split)
    dataset = plain_rows(dataset, script_args.dataset_train_split)
    is_continued = has_texts(dataset)
    if is_continued and shows_images(dataset):
        raise ValueError(
            "Rows with a `text` and images cannot be cut into prompts. Pass `messages`, or a `prompt` for each image."
        )
    name = target_config.model_name_or_path
    kwargs = {"revision": target_config.model_revision, "trust_remote_code": args.trust_remote_code}
    if args.base_url is not None:
        if is_continued:
            raise ValueError(
                "A server answers messages, but this data has texts. Leave `--base_url` out, so that the target continues them."
            )
        try:
            return dataset, load_tokenizer(name, **kwargs), False
        except Exception as error:  # of many types. The server needs none
            if PartialState().is_main_process:
                logger.warning(
                    f"Answers are not checked against the chat template of {name}, because its tokenizer cannot be loaded: {error}"
                )
            return dataset, None, False
    processing_class = load_processing_class(name, shows_images(dataset), **kwargs)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    tokenizer.chat_template = tokenizer.chat_template or processing_class.chat_template
    if args.chat_template_path is not None:
        tokenizer.chat_template = read_template(args.chat_template_path)
    first = next(iter(dataset), {})
    if any(isinstance(first.get(name), list) for name in ("messages", "conversations", "prompt")):
        check_chat_template(tokenizer)
    if is_continued:
        dataset = beginnings(dataset, tokenizer, args.prompt_tokens, args.max_new_tokens)
    return dataset, processing_class, is_continued


def ask_server(args, model, tokenizer, pending, output, sampling) -> int:
    """Answers with the server. Returns how many rows failed."""
    if tokenizer is not None and tokenizer.chat_template is not None:
        output.learners = learners_of(tokenizer)
    sampling = {**sampling, "max_tokens": sampling["max_new_tokens"]}
    del sampling["max_new_tokens"]
    model = args.served_model_name or model
    limits = (args.concurrency, args.max_retries, args.timeout, args.api_key)
    try:
        return asyncio.run(regenerate_by_server(args.base_url, model, pending, output, *limits, **sampling))
    except ConnectionError as error:
        raise SystemExit(str(error)) from None


def ask_target(script_args, args, target_config, device, processing_class, pending, output, sampling) -> int:
    """Loads the target, and an earlier draft if there is one, and answers with them. Returns how many rows failed."""
    if "temperature" in sampling:
        sampling = {**sampling, "do_sample": sampling["temperature"] > 0}
        if not sampling["do_sample"]:
            del sampling["temperature"]
    images, tokenizer = None, processing_class
    if isinstance(processing_class, ProcessorMixin):
        images, tokenizer = ImageReader(processing_class), processing_class.tokenizer
    target = load_configured_target(
        target_config, trust_remote_code=args.trust_remote_code, with_images=images is not None
    )
    if target_config.device_map is None:
        target = target.to(device)
    warn_of_slow_bfloat16(target, target.device, logger)
    draft = None
    if script_args.draft_name_or_path is not None:
        draft = load_draft(script_args.draft_name_or_path, dtype=target.dtype, **place_of_draft(script_args))
        draft = draft.to(target.device)
    return regenerate_locally(target.eval(), tokenizer, pending, output, args.batch_size, draft, images, **sampling)


def check_who_answers(script_args, args, target_config) -> None:
    """Raises `ValueError` if arguments do not fit the server, or the target in this process, that answers."""
    if args.base_url is not None and args.chat_template_path is not None:
        raise ValueError(
            "`--chat_template_path` would do nothing, because the server (`--base_url`) renders the conversations. Leave it out, and "
            "start the server with the template (`--chat-template` of vLLM and SGLang)."
        )
    if args.base_url is not None and script_args.draft_name_or_path is not None:
        raise ValueError(
            "`--draft_name_or_path` would do nothing, because the server (`--base_url`) answers. Leave it out, and start the server with "
            "the draft (`--speculative-config` of vLLM)."
        )
    if args.base_url is None and (target_config.tp_plan is not None or target_config.fsdp_size is not None):
        raise ValueError(
            "`--tp_plan` and `--fsdp_size` share one batch between processes, but each process answers its own rows. Spread the "
            "target over GPUs with `--device_map auto` in one process, or use a server (`--base_url`)."
        )


def main():
    dataclass_types = (RegenerationScriptArguments, RegenerationArguments, TargetConfig, DatasetMixtureConfig)
    parser = Eagle3Parser(dataclass_types, WITHOUT, description=__doc__)
    script_args, args, target_config, mixture = parser.parse_args_and_config()
    # Without this, processes on CPUs would not know of each other.
    is_cpu = not torch.accelerator.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    state = PartialState(cpu=is_cpu, timeout=MOST_WAITED)
    try:
        template_kwargs = read_template_kwargs({"chat_template_kwargs": args.chat_template_kwargs})
    except RowError as error:
        raise ValueError(f"`--chat_template_kwargs`: {error}.") from None
    check_who_answers(script_args, args, target_config)
    if args.push_to_hub is not None:
        validate_repo_id(args.push_to_hub)
    dataset, processing_class, is_continued = prompts_to_answer(script_args, args, target_config, mixture)
    precision = {name: True for name in ("load_in_4bit", "load_in_8bit") if getattr(target_config, name)}
    sampling = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "top_p": args.top_p}
    settings = {
        "model": target_config.model_name_or_path,
        "revision": target_config.model_revision,
        "mixture": [asdict(each) for each in mixture.datasets],
        **({} if mixture.test_split_size is None else {"test_split_size": mixture.test_split_size}),
        "dataset": script_args.dataset_name,
        "config": script_args.dataset_config,
        "split": script_args.dataset_train_split,
        **({"prompt_tokens": args.prompt_tokens, "whole_texts": True} if is_continued else {}),
        **({} if args.chat_template_path is None else {"chat_template_path": args.chat_template_path}),
        **({"chat_template_kwargs": template_kwargs} if template_kwargs else {}),
        **({"drop_cut_answers": True} if args.drop_cut_answers else {}),
        **(precision if args.base_url is None else {}),
        **sampling,
    }
    with state.main_process_first():
        output = Output(args.output_dir, settings, state.process_index, args.drop_cut_answers)
    num_done, num_failed = len(output.done), 0
    sampling = {name: value for name, value in sampling.items() if value is not None}
    pending = output.pending(dataset, state.process_index, state.num_processes, template_kwargs)
    try:
        if args.base_url is not None:
            model = target_config.model_name_or_path
            num_failed = ask_server(args, model, processing_class, pending, output, sampling)
        else:
            num_failed = ask_target(
                script_args, args, target_config, state.device, processing_class, pending, output, sampling
            )
    except KeyboardInterrupt:
        raise SystemExit(
            f"Interrupted. {args.output_dir} has {len(output.done)} rows. The same command continues from there."
        ) from None
    print(
        f"{len(output.done) - num_done} rows written to {args.output_dir}, {num_done} were there, {num_failed} failed, "
        f"{len(output.left_out)} were left out."
    )
    if report := output.report():
        print(report, file=sys.stderr)
    # A process that ends by an error ends the others. So none does before all have finished.
    everywhere = gather_object([(num_failed, len(output.done))])
    if any(num_failed for num_failed, _ in everywhere):
        raise SystemExit(1)
    if not any(num_done for _, num_done in everywhere):
        raise SystemExit("No row could be answered, for the reasons above, so there is nothing to train on.")
    if args.push_to_hub is not None and state.is_main_process:
        try:
            print(f"Pushed to {push_dataset(args.output_dir, args.push_to_hub, args.private or None).commit_url}.")
        except Exception as error:  # of many types: of the Hub, and of its HTTP client
            raise SystemExit(
                f"The rows are in {args.output_dir}, but were not pushed: {error!r}. The same command pushes them."
            ) from error


if __name__ == "__main__":
    run_script(main)
