# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
r"""
Pushes a draft to the Hub in one commit: weights, configuration, the code that ships with it, benchmark and card.

    python recipes/benchmark.py --target Qwen/Qwen3-8B --draft outputs/Qwen3-8B-speculator.eagle3 \
        --tasks paper --num_prompts 20 --repeats 1 --json outputs/results.jsonl
    python recipes/push.py outputs/Qwen3-8B-speculator.eagle3 --repo_id me/Qwen3-8B-speculator.eagle3 --benchmark outputs/results.jsonl

After an interruption run it again: uploaded weights are not sent twice. `--dry_run` writes to a folder what would be pushed.
"""

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.evaluation import BenchmarkResults
from hf_eagle3.hub import check_license, push_draft, repo_name, write_draft
from hf_eagle3.scripts import ScriptParser, add_place_of_draft, folder_or_hub_id, place_of_draft, run_script


def main():
    parser = ScriptParser(description=__doc__)
    parser.add_argument("draft", type=folder_or_hub_id, help="Folder or Hub id, in any format that can be read")
    add_place_of_draft(parser)
    parser.add_argument("--repo_id", help="By default <you>/<target>-speculator.eagle3")
    parser.add_argument("--benchmark", help="File that `recipes/benchmark.py --json` wrote for this draft")
    parser.add_argument("--target", help="Hub id of the target, if the draft names it differently")
    parser.add_argument("--license", help="The Hub's id of a license, such as apache-2.0, llama3.1 or other")
    parser.add_argument("--license_name", help="With --license other: its name")
    parser.add_argument("--license_link", help="With --license other: an address, or the name of a file in the repo")
    parser.add_argument(
        "--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="Dtype of the pushed weights"
    )
    parser.add_argument("--private", action="store_true", help="Make a new repo private")
    parser.add_argument("--revision", help="Branch to push to. It is made if it does not exist")
    parser.add_argument("--create_pr", action="store_true", help="Open a pull request instead of committing")
    parser.add_argument("--commit_message", default="Upload draft")
    parser.add_argument("--overwrite_card", action="store_true", help="Replace a card that was edited by hand")
    parser.add_argument("--dry_run", metavar="FOLDER", help="Write everything to a new folder, and push nothing")
    args = parser.parse_args()
    license = {"license": args.license, "license_name": args.license_name, "license_link": args.license_link}
    check_license(**{key.removeprefix("license_"): value for key, value in license.items()})
    benchmark = BenchmarkResults.read(args.benchmark) if args.benchmark else None

    draft = Eagle3ForSpeculation.from_pretrained(args.draft, dtype=args.dtype, **place_of_draft(args))
    if draft.config.speculators_config is None and (args.target is not None or args.repo_id is None):
        parser.error("this draft's format names no target: run recipes/export.py --to speculators --target first")
    if args.target is not None:
        draft.config.speculators_config.setdefault("verifier", {})["name_or_path"] = args.target
    verifier = (draft.config.speculators_config or {}).get("verifier", {})
    if args.repo_id is None and not verifier.get("name_or_path"):
        parser.error("this draft names no target: pass --target, or the name of its repo as --repo_id")
    name = repo_name(draft.config.verifier)
    if args.dry_run:
        write_draft(draft, args.dry_run, args.repo_id or name, benchmark=benchmark, **license)
        print(f"Wrote to {args.dry_run} what would be pushed.")
        return
    commit = push_draft(
        draft,
        args.repo_id or name,
        benchmark=benchmark,
        **license,
        overwrite_card=args.overwrite_card,
        commit_message=args.commit_message,
        private=args.private or None,
        revision=args.revision,
        create_pr=args.create_pr,
    )
    print(f"Pushed {args.draft}: {commit.commit_url}. To load exactly this: revision={commit.oid!r}")


if __name__ == "__main__":
    run_script(main)
