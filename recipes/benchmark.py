# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
r"""
Compares plain generation, a draft, and transformers' other ways to speed up generation, on the same prompts.

    python recipes/benchmark.py --target Qwen/Qwen3-8B --draft me/Qwen3-8B-speculator.eagle3 \
        --tasks mt_bench humaneval gsm8k --num_prompts 20 --repeats 1 --dtype bfloat16 --json outputs/results.jsonl

Leave out `--num_prompts` and `--repeats` for the papers' full tasks, which take many hours.

`--tasks` takes:

    tasks of the Hub    mt_bench, humaneval, gsm8k, alpaca, cnn_dm, math500, and the groups `paper` and `spec_bench`
    JSON Lines files    with `{"prompt": "..."}` or `{"messages": [...]}` in each line. Messages may have `tools` and
                        `chat_template_kwargs`, and multimodal targets take `images` (paths or URLs)
    folders             of such files
    python              the sources of Python's standard library, which every machine has

A task that cannot be reached is left out and reported.

`--json` keeps the results. After an interruption, the same command continues. `--plots FOLDER` draws the results, and
`--markdown FILE` writes the table.
"""

import hashlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path


if find_spec("datasets") is None:
    raise SystemExit("This script needs more packages: pip install 'hf-eagle3[train]'")

import torch
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel, ProcessorMixin

from hf_eagle3.checkpoints.target import load_on_device
from hf_eagle3.data import ImageReader, num_positions
from hf_eagle3.environment import environment, what_differs
from hf_eagle3.evaluation import (
    METHODS,
    BenchmarkResults,
    BenchmarkRow,
    format_table,
    load_prompts,
    plot_all,
    read_prompts,
    run_benchmark,
)
from hf_eagle3.evaluation.benchmark import IN_BATCHES, check_batches
from hf_eagle3.evaluation.drafts import load_draft, method_of, sampled_digest
from hf_eagle3.evaluation.results import OTHER_DRAFTS, OURS
from hf_eagle3.evaluation.tasks import OFFLINE, expand, task_name
from hf_eagle3.files import write_atomically
from hf_eagle3.remote_code.configuration_eagle3 import DEFAULT_TREE_SETTINGS, tree_settings
from hf_eagle3.remote_code.draft_model_eagle3 import weights_digest
from hf_eagle3.scripts import (
    DTYPES,
    ScriptParser,
    add_device,
    add_place_of_draft,
    add_quantization,
    add_trust_remote_code,
    folder_or_hub_id,
    place_of_draft,
    positive_integer,
    run_script,
)
from hf_eagle3.tokenizer import load_tokenizer, padded_inputs, read_template
from hf_eagle3.training.models import load_processing_class


# Rows of experiments/paper_table.py. As drafts of their own, these run as `eagle3`.
PAPER_ROWS = ("p-eagle", "eagle3-classic")
# Arguments that do not change a measurement.
NOT_MEASURED = ("json", "plots", "markdown", "show_text", "trust_remote_code")


def parse_arguments():
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--target", type=folder_or_hub_id, required=True, help="Target: a folder or a Hub id")
    parser.add_argument("--draft", type=folder_or_hub_id, help="Draft: a folder or a Hub id")
    add_place_of_draft(parser)
    add_trust_remote_code(parser)
    parser.add_argument(
        "--assistant", type=folder_or_hub_id, help="Small model for the method `assistant`: a folder or a Hub id"
    )
    parser.add_argument(
        "--tasks", "--prompts", nargs="+", default=[OFFLINE], help="Tasks, files or folders: see above"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=[method for method in METHODS if method not in PAPER_ROWS],
        help="By default plain, the methods whose model is given, and prompt-lookup at batch size 1",
    )
    parser.add_argument(
        "--batch_size",
        "--batch_sizes",
        type=positive_integer,
        nargs="+",
        default=[1],
        dest="batch_sizes",
        help="Prompts in a call. By default 1",
    )
    parser.add_argument(
        "--temperatures", nargs="+", type=float, default=[0.0, 1.0], help="By default 0 (greedy) and 1"
    )
    for name, kind in (("top_k", int), ("top_p", float)):
        parser.add_argument(f"--{name}", type=kind, help="For sampling. By default the target's own setting")
    parser.add_argument(
        "--max_new_tokens", type=positive_integer, default=128, help="New tokens per prompt. By default %(default)s"
    )
    parser.add_argument(
        "--num_prompts", type=positive_integer, help="How many prompts of each task, from the first on. By default all"
    )
    parser.add_argument(
        "--repeats", type=positive_integer, default=3, help="How often to measure. By default %(default)s"
    )
    parser.add_argument(
        "--chat_template_path", help="Jinja file that replaces the chat template of the target's tokenizer"
    )
    parser.add_argument("--chat_template_kwargs", type=json.loads, help="Such as '{\"enable_thinking\": false}'")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="Dtype of target and draft. By default each one's own"
    )
    add_quantization(parser)
    add_device(parser)
    for name, default in DEFAULT_TREE_SETTINGS.items():
        choices = ("auto", "static") if name == "tree_policy" else None
        parser.add_argument(f"--{name}", type=type(default), choices=choices, help="Overrides the draft's own setting")
    parser.add_argument("--cache_implementation", help="For all methods that take one, such as `static`")
    parser.add_argument(
        "--compile",
        metavar="MODE",
        choices=("default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        help="Compile the steps with a static cache: `reduce-overhead` on GPUs, else `default`",
    )
    parser.add_argument("--json", help="JSON Lines file to keep the results in")
    parser.add_argument("--plots", metavar="FOLDER", help="Where to save plots")
    parser.add_argument("--markdown", metavar="FILE", help="Where to save the table")
    parser.add_argument("--show_text", action="store_true", help="Also print the text after the first prompt, at T=0")
    args = parser.parse_args()
    if not isinstance(args.chat_template_kwargs, dict | None):
        parser.error(f"--chat_template_kwargs is {args.chat_template_kwargs}, but must be a JSON object")
    if args.draft is None and (drafted := {*OURS, *OTHER_DRAFTS}.intersection(args.methods or ())):
        parser.error(f"--methods has {sorted(drafted)}: pass --draft")
    if args.show_text and args.draft is None:
        parser.error("--show_text is about a draft: pass --draft")
    if args.compile and args.cache_implementation != "static":
        parser.error("--compile needs --cache_implementation static")
    expand(args.tasks)  # before anything is loaded
    return args


def methods_of(args, draft) -> tuple[list[str], dict]:
    """Returns the methods to measure, and the draft by each method that can run it."""
    methods, kind = args.methods, None if draft is None else method_of(draft)
    drafts = {} if draft is None else dict.fromkeys(OURS if kind == "eagle3" else (kind,), draft)
    if methods is None:
        methods = ["plain", "prompt-lookup"] if 1 in args.batch_sizes else ["plain"]
        methods += ["assistant"] if args.assistant else []
        if kind == "eagle3" and args.tree_policy != "static":
            methods += ["eagle3-no-lookup"]
        methods += [] if kind is None else [kind]
    elif drafts and (others := {*OURS, *OTHER_DRAFTS}.intersection(methods) - drafts.keys()):
        raise SystemExit(
            f"--methods has {sorted(others)}, but {args.draft} is a draft for {sorted(drafts)}. Pass these, or leave --methods out."
        )
    return methods, drafts


def reader_of_images(args) -> ImageReader | None:
    """Checks the files with prompts. Returns what reads images, if one has prompts with them and the target sees."""
    names = [name for name in expand(args.tasks) if Path(name).is_file()]
    files = {task_name(name): read_prompts(name, args.num_prompts) for name in names}
    check_batches(files, args.batch_sizes)
    if not any(row.images for rows in files.values() for row in rows):
        return None
    processor = load_processing_class(args.target, with_images=True, trust_remote_code=args.trust_remote_code)
    return ImageReader(processor) if isinstance(processor, ProcessorMixin) else None


def collect_prompts(args, tokenizer, target, images) -> tuple[dict[str, list], dict[str, str]]:
    """Returns the prompts by task, and why other tasks are missing."""
    tasks, missing = {}, {}

    def answer(prompt: list[int]) -> str:
        input_ids = torch.tensor([prompt], device=target.device)
        sequences = target.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=args.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            return_dict_in_generate=False,
        )
        return tokenizer.decode(sequences[0, len(prompt) :], skip_special_tokens=True)

    for name in expand(args.tasks):
        try:
            tasks[task_name(name)] = load_prompts(
                name, tokenizer, args.num_prompts, args.chat_template_kwargs, answer, images
            )
        except (OSError, ValueError) as error:
            if Path(name).is_file():  # the user's own file must not be left out in silence
                raise
            missing[name] = f"{type(error).__name__}: {error}"
            print(f"The task {name} is left out: {error}", file=sys.stderr)
    if not tasks:
        raise SystemExit("There is no task left to measure. Pass other --tasks, or fix the errors above.")
    tokens = (each["input_ids"] if isinstance(each, dict) else each for prompts in tasks.values() for each in prompts)
    longest = max(map(len, tokens))
    if (room := num_positions(target)) is not None and longest + args.max_new_tokens > room:
        raise SystemExit(
            f"The longest prompt has {longest} tokens. With `--max_new_tokens {args.max_new_tokens}` that exceeds the target's table of "
            f"{room} positions. Leave the prompt out, or pass fewer new tokens."
        )
    return tasks, missing


def call_arguments(args) -> dict:
    """Returns the arguments of all calls of `generate`."""
    call = {"cache_implementation": args.cache_implementation} if args.cache_implementation else {}
    if args.compile:
        call["compile_config"] = CompileConfig(mode=args.compile)
        call["compile_config"]._compile_all_devices = True  # otherwise accelerators only
    elif args.cache_implementation:
        call["disable_compile"] = True
    return call


def open_results(args, run: dict, missing: dict[str, str]) -> BenchmarkResults:
    """Returns new results, or those in the file, which must have the same arguments, weights and machine."""
    if not args.json or not Path(args.json).exists():
        return BenchmarkResults(run)
    results = BenchmarkResults.read(args.json)
    for name in ("arguments", "draft_weights", "models", "environment", "tree"):
        if difference := what_differs(results.run.get(name), json.loads(json.dumps(run[name]))):
            raise SystemExit(f"{args.json} holds a run with other {name}: {difference}. Choose another file.")
    for name in results.run["prompts"].keys() & run["prompts"].keys():
        if results.run["prompts"][name] != run["prompts"][name]:
            raise SystemExit(f"{args.json} holds a run with other prompts of {name}. Choose another file.")
    results.run["prompts"] |= run["prompts"]
    results.run["missing_tasks"] = {name: why for name, why in missing.items() if name not in results.run["prompts"]}
    return results


def load_models(args, with_images: bool) -> dict:
    """Returns the target and the small model, by their arguments. Without a name the latter is `None`."""
    trust = {"trust_remote_code": args.trust_remote_code}
    target = load_on_device(args.target, args.device, args.dtype, args.bits, with_images, args.device_map, **trust)
    assistant = None
    if args.assistant:
        assistant = AutoModelForCausalLM.from_pretrained(args.assistant, dtype=args.dtype).to(target.device).eval()
    return {"target": target, "assistant": assistant}


def load_measured_draft(args, target: PreTrainedModel):
    """Returns the draft with the settings of its trees, and the digest of its checkpoint's weights."""
    draft = load_draft(args.draft, dtype="auto", **place_of_draft(args))
    weights = weights_digest(draft.state_dict())  # whatever the dtype it runs in
    draft = draft.to(target.device, target.dtype if args.dtype != "auto" else draft.dtype)
    for name in DEFAULT_TREE_SETTINGS:
        if getattr(args, name) is not None:
            setattr(draft.generation_config, name, getattr(args, name))
    return draft, weights


def steps_of(row: BenchmarkRow) -> str:
    """Returns what the steps of one of our drafts did: how many drafted, and how much of their trees was accepted."""
    shares = " ".join(f"{share:.2f}" for share in row.acceptance_by_position)
    if not shares:
        shares = "none was accepted" if row.drafted_lengths else "there was no tree"
    alone = (
        ""
        if row.tree_acceptance_length is None
        else f" (their own acceptance length: {row.tree_acceptance_length:.2f})"
    )
    drafting = f"Drafting took {row.draft_share:.0%} of the time. " if row.draft_share else ""
    return (
        f"Task {row.task}, batch size {row.batch_size}, T={row.temperature:g}, {row.method}: {row.target_forwards} forwards, "
        f"{row.plain_steps} plain and {row.lookup_steps} over looked-up tokens. The others read prompts or verified "
        f"trees. {drafting}The share of trees{alone} with an accepted first, second, ... drafted token: {shares}"
    )


def print_report(args, results: BenchmarkResults, dtype: torch.dtype) -> None:
    """Prints the table, and what explains its figures."""
    rows, run = results.rows, results.run
    several = f"medians of {args.repeats} interleaved repeats (range in parentheses)"
    print(f"{args.target}, {several if args.repeats > 1 else 'one repeat'}\n\n{format_table(rows)}\n")
    differ = any(row.method in (*OTHER_DRAFTS, *OURS) and row.num_identical < row.num_prompts for row in rows)
    if differ and dtype == torch.float32:
        print(
            "In float32 texts differ only where the scores of two tokens agree to about six digits. Please report it if several texts "
            "differ."
        )
    elif differ:
        print(
            f"In {run['environment']['dtype']} a forward over several tokens rounds differently than one over a single token. So texts "
            "may differ once two tokens are nearly tied. experiments/low_precision.py checks that, and --dtype float32 "
            "(--no-bf16 of quickstart.py) rounds much less."
        )
    if drafted := [row for row in rows if row.accepted_lengths]:
        print(*map(steps_of, drafted), sep="\n")
        print(
            "The acceptance length in the table is of all decoding steps. Under the tree policy `auto`, plain steps count as "
            "1, and looked-up tokens count. Training's eval_acceptance_length has a whole tree in every step, as with "
            "--tree_policy static."
        )
    print(f"{args.max_new_tokens} new tokens; tree {run['tree']}; {run['environment']}")
    for name, reason in {**run["missing_tasks"], **run["left_out"]}.items():
        print(f"Left out: {name}. {reason}")
    if args.json and run["left_out"]:
        print(f"Methods that are left out are not tried again with {args.json}. Choose another file for that.")
    if (alone := [name for name in args.methods if name not in IN_BATCHES]) and max(args.batch_sizes) > 1:
        measured = "Measured at batch size 1 only" if 1 in args.batch_sizes else "Not measured without batch size 1"
        print(f"{measured}, because transformers takes one sequence at a time: {', '.join(alone)}.")


def print_text(args, target, tokenizer, draft, prompt, images) -> None:
    """Prints what the target writes after a prompt, with the draft and without it."""
    inputs = padded_inputs(target, tokenizer, [prompt], images)
    call = {"max_new_tokens": args.max_new_tokens, "pad_token_id": tokenizer.pad_token_id, **call_arguments(args)}
    call |= {"do_sample": False, "return_dict_in_generate": False}
    drafted, plain = (target.generate(**inputs, **call, assistant_model=each)[0] for each in (draft, None))
    length = inputs["input_ids"].shape[1]
    shown, text, other = (
        tokenizer.decode(tokens, skip_special_tokens=True)
        for tokens in (plain[:length], drafted[length:], plain[length:])
    )
    print(f"\nThe first prompt:\n\n{shown}\n\nWhat follows at T=0 with the draft:\n\n{text}\n")
    print(
        "Without the draft the target writes the same." if drafted.equal(plain) else f"Without the draft:\n\n{other}"
    )


def main():
    args = parse_arguments()
    tokenizer = load_tokenizer(args.target, trust_remote_code=args.trust_remote_code)
    if args.chat_template_path is not None:
        tokenizer.chat_template = read_template(args.chat_template_path)
    images = reader_of_images(args)
    loaded = load_models(args, with_images=images is not None)
    target, draft, tree, weights = loaded["target"], None, {}, None
    facts = {**environment(target.device), "dtype": str(target.dtype).removeprefix("torch.")}
    if args.bits:
        facts["dtype"] += f" with a target of {args.bits} bits"
    if args.draft:
        draft, weights = load_measured_draft(args, target)
        tree = tree_settings(draft.generation_config)
    args.methods, drafts = methods_of(args, draft)
    tasks, missing = collect_prompts(args, tokenizer, target, images)
    run = {
        "draft_weights": weights,
        "models": {name: sampled_digest(model) for name, model in loaded.items() if model is not None},
        "arguments": {name: value for name, value in vars(args).items() if name not in NOT_MEASURED},
        "environment": facts,
        "tree": tree,
        "prompts": {name: hashlib.sha256(repr(prompts).encode()).hexdigest() for name, prompts in tasks.items()},
        "missing_tasks": missing,
    }
    results = open_results(args, run, missing)
    num_known = len(results.measurements)
    sampling = {name: getattr(args, name) for name in ("top_k", "top_p") if getattr(args, name) is not None}
    run_benchmark(
        target,
        tokenizer,
        None,
        tasks,
        args.methods,
        args.temperatures,
        args.batch_sizes,
        args.max_new_tokens,
        args.repeats,
        sampling=sampling,
        call=call_arguments(args),
        assistant=loaded["assistant"],
        drafts=drafts,
        results=results,
        save=(lambda results: results.write(args.json)) if args.json else (lambda results: None),
        images=images,
    )
    if num_known == len(results.measurements):
        print(
            f"Nothing was left to measure. These are the results in {args.json}. For new figures choose another file."
        )
    print_report(args, results, target.dtype)
    if args.markdown:
        write_atomically(args.markdown, format_table(results.rows) + "\n")
        print(f"Wrote {args.markdown}")
    if args.plots:
        print(f"Wrote {', '.join(map(str, plot_all(results, args.plots)))}")
    if args.show_text:
        print_text(args, target, tokenizer, draft, next(iter(tasks.values()))[0], images)


if __name__ == "__main__":
    run_script(main)
