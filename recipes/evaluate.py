# /// script
# dependencies = ["hf-eagle3", "lm_eval[hf]"]
# ///
r"""
Evaluates a target on tasks of lm-evaluation-harness, with and without a draft, and prints the time of each. In float32 the results
are the same.

    python recipes/evaluate.py --target meta-llama/Llama-3.1-8B-Instruct --draft RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3 \
        --tasks gsm8k --limit 100 --apply_chat_template

Only tasks that generate text become faster, not multiple choice. `--apply_chat_template` is for chat models: their drafts were trained
on conversations.
"""

import json
import time
from contextlib import nullcontext
from importlib.util import find_spec

from hf_eagle3 import assist
from hf_eagle3.checkpoints.target import load_on_device
from hf_eagle3.environment import environment
from hf_eagle3.evaluation.drafts import load_draft
from hf_eagle3.files import write_atomically
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
from hf_eagle3.tokenizer import load_tokenizer


def evaluate(target, tokenizer, context, args, limit: int | None) -> tuple[dict, dict, float]:
    """Returns the metrics of each task, the target's answers by task and question, and seconds."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    client = HFLM(pretrained=target, tokenizer=tokenizer, batch_size=args.batch_size, device=str(target.device))
    manager = TaskManager(include_path=args.include_path)
    start = time.perf_counter()
    with context:
        results = lm_eval.simple_evaluate(
            client,
            tasks=args.tasks,
            limit=limit,
            apply_chat_template=args.apply_chat_template,
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0,
        )
    seconds = time.perf_counter() - start
    # There is a sample for each filter of a task (gsm8k has two), but only one answer to a question.
    answers = {
        (task, each["doc_id"]): each["resps"] for task, samples in results["samples"].items() for each in samples
    }
    return results["results"], answers, seconds


def main():
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--target", type=folder_or_hub_id, required=True, help="Folder or Hub id")
    parser.add_argument("--draft", type=folder_or_hub_id, required=True, help="Folder or Hub id")
    add_place_of_draft(parser)
    add_trust_remote_code(parser)
    parser.add_argument("--tasks", nargs="+", required=True, help="Tasks of lm_eval, or of `--include_path`")
    parser.add_argument("--include_path", help="Folder of tasks of your own, as lm_eval takes it")
    parser.add_argument("--limit", type=positive_integer, help="How many questions of each task, from the first on")
    parser.add_argument(
        "--apply_chat_template", action="store_true", help="Ask in the target's chat template. For chat models"
    )
    parser.add_argument(
        "--batch_size", type=positive_integer, default=1, help="By default %(default)s, which gains most"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="Dtype of target and draft. By default the target's own"
    )
    add_quantization(parser)
    add_device(parser)
    parser.add_argument("--json", help="JSON file to write the results to")
    args = parser.parse_args()

    if find_spec("lm_eval") is None:
        parser.error("this needs lm-evaluation-harness: pip install 'lm_eval[hf]'")
    trust = {"trust_remote_code": args.trust_remote_code}
    tokenizer = load_tokenizer(args.target, **trust)
    if args.apply_chat_template and tokenizer.chat_template is None:
        parser.error(f"{args.target} has no chat template. Leave out --apply_chat_template")
    target = load_on_device(args.target, args.device, args.dtype, args.bits, device_map=args.device_map, **trust)
    draft = load_draft(args.draft, dtype=target.dtype, **place_of_draft(args)).to(target.device)
    for context in (nullcontext(), assist(target, draft)):  # download the data, and warm up
        evaluate(target, tokenizer, context, args, limit=1)
    plain, answers, plain_seconds = evaluate(target, tokenizer, nullcontext(), args, args.limit)
    assisted, same, seconds = evaluate(target, tokenizer, assist(target, draft), args, args.limit)
    num_same = sum(same[question] == answer for question, answer in answers.items())
    summary = {
        "results": plain,
        "with the draft": assisted,
        "same answers": f"{num_same}/{len(answers)}",
        "seconds": round(plain_seconds, 1),
        "seconds with the draft": round(seconds, 1),
        "speed-up": round(plain_seconds / seconds, 2),
        "environment": environment(target.device),
    }
    print(json.dumps(summary, indent=2, default=str))
    if args.json:
        write_atomically(args.json, json.dumps(summary, indent=2, default=str) + "\n")


if __name__ == "__main__":
    run_script(main)
