# /// script
# dependencies = ["hf-eagle3[demo]"]
# ///
"""
Opens a page that shows what a draft does: the same prompt without and with it, where each token came from, and the tree
of each step.

    python recipes/demo.py --target Qwen/Qwen3-8B --draft RedHatAI/Qwen3-8B-speculator.eagle3

`--push_to me/eagle3-demo` makes it a Space on the Hub instead. The environment variables `GRADIO_SERVER_NAME` and
`GRADIO_SERVER_PORT` say where the page is served.
"""

import argparse

from hf_eagle3.demo import Comparison, import_gradio, make_app, push_space
from hf_eagle3.environment import folder_or_hub_id


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=folder_or_hub_id, required=True, help="Folder or Hub id")
    parser.add_argument("--draft", type=folder_or_hub_id, required=True, help="Folder or Hub id")
    parser.add_argument("--dtype", default="auto", help="Dtype of target and draft; float32 for identical texts")
    parser.add_argument("--device", help="By default a GPU, if there is one")
    parser.add_argument("--push_to", metavar="OWNER/NAME", help="Make it a Space on the Hub, and open nothing")
    parser.add_argument("--private", action="store_true", help="Make the Space private, if it is not there yet")
    parser.add_argument("--package", default="hf-eagle3[demo]", help="What the Space installs, if not this: a git URL")
    args = parser.parse_args()
    if args.push_to:
        commit = push_space(args.push_to, args.target, args.draft, args.package, args.private or None)
        print(f"Pushed: {commit.commit_url}")
        return
    import_gradio()  # which may be missing, before models are loaded
    make_app(Comparison.from_pretrained(args.target, args.draft, args.dtype, args.device)).launch()


if __name__ == "__main__":
    try:
        main()
    except (ModuleNotFoundError, OSError, ValueError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
