# /// script
# dependencies = ["hf-eagle3"]
# ///
r"""
Writes a draft in the format of an engine.

    python recipes/export.py me/Qwen3-8B-speculator.eagle3 --to sglang --output_dir outputs/Qwen3-8B-eagle3-sglang

`vllm serve` takes drafts as they are saved. (`--to speculators --target Qwen/Qwen3-8B` converts drafts of other formats.)
Other engines need their own format:

    python recipes/export.py outputs/my-draft --to gguf --target_gguf Qwen3-8B.gguf --output_dir outputs/draft-gguf
    python recipes/export.py outputs/my-draft --to openvino --python openvino/bin/python --output_dir outputs/draft-openvino

`--push_to` pushes the result to a branch of the draft's Hub repo, so that one repo serves all engines. The branch is
named after the format, or by `--revision`:

    python recipes/export.py me/Qwen3-8B-speculator.eagle3 --to sglang --output_dir outputs/Qwen3-8B-eagle3-sglang \
        --push_to me/Qwen3-8B-speculator.eagle3
"""

from contextlib import nullcontext
from pathlib import Path

from huggingface_hub import HfApi

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.checkpoints import WRITABLE, export, load_ends
from hf_eagle3.checkpoints.files import check_new_folder, check_repo, commit_operations, verifier_without_path
from hf_eagle3.scripts import (
    ScriptParser,
    add_place_of_draft,
    add_trust_remote_code,
    folder_or_hub_id,
    place_of_draft,
    run_script,
)


# A new branch begins with the files of the main branch, where a draft is of another format. These are its files.
REPLACED = (
    "config.json",
    "generation_config.json",
    "training.json",
    "*.index.json",
    "*.safetensors",
    "pytorch_model*.bin",
    "*_eagle3.py",
)


def main():
    parser = ScriptParser(description=__doc__)
    parser.add_argument("draft", type=folder_or_hub_id, help="Folder or Hub id, in any format that can be read")
    add_place_of_draft(parser)
    parser.add_argument("--to", required=True, choices=[*WRITABLE, "speculators"], help="Format to write")
    parser.add_argument(
        "--target",
        type=folder_or_hub_id,
        help="The draft's target, if its format does not name it: folder or Hub id, of which all weights are downloaded",
    )
    add_trust_remote_code(parser)
    parser.add_argument("--target_gguf", help="For gguf: the target's GGUF file")
    parser.add_argument(
        "--python", help="For openvino: the interpreter of an environment with optimum-intel and openvino"
    )
    parser.add_argument("--output_dir", required=True, help="A new folder")
    parser.add_argument("--push_to", help="Hub repo to push the folder to")
    parser.add_argument("--revision", help="Branch of that repo. By default the format's name")
    parser.add_argument("--private", action="store_true", help="Make a new repo private")
    args = parser.parse_args()
    for option, form in (("target_gguf", "gguf"), ("python", "openvino")):
        if getattr(args, option) is not None and args.to != form:
            parser.error(f"--{option} is for --to {form}")
    if args.private and args.push_to is None:
        parser.error("--private is for --push_to")
    if args.revision is not None and args.push_to is None:
        parser.error("--revision is for --push_to. To export another revision of the draft, pass --draft_revision")
    check_new_folder(args.output_dir)
    if args.push_to:
        check_repo(args.push_to, None, None)
    draft = Eagle3ForSpeculation.from_pretrained(args.draft, **place_of_draft(args))
    if args.target is not None:
        draft.pair_with(load_ends(args.target, trust_remote_code=args.trust_remote_code))
    if args.to == "speculators":
        if draft.config.speculators_config is None:
            raise SystemExit("vLLM needs the target's name, and this draft's format does not have it. Pass --target.")
        # What is published does not name a folder on this machine.
        with verifier_without_path(draft) if args.push_to else nullcontext():
            draft.save_pretrained(args.output_dir)
    else:
        given = {"gguf": {"target_gguf": args.target_gguf}, "openvino": {"python": args.python}}
        export(draft, args.output_dir, args.to, **given.get(args.to, {}))
    print(f"Wrote {args.draft} in the {args.to} format to {args.output_dir}.")
    if args.push_to:
        api, branch = HfApi(), args.revision or args.to
        repo_id = api.create_repo(args.push_to, private=args.private or None, exist_ok=True).repo_id
        if not branch.startswith("refs/pr"):  # a pull request is no branch that could be made
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        files = commit_operations(Path(args.output_dir), api.list_repo_files(repo_id, revision=branch), REPLACED)
        api.create_commit(repo_id, files, commit_message=f"The draft in the {args.to} format", revision=branch)
        print(f"Pushed it to the branch {branch} of {repo_id}.")


if __name__ == "__main__":
    run_script(main)
