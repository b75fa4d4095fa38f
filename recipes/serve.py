# /// script
# dependencies = ["hf-eagle3", "transformers[serving]"]
# ///
r"""
Runs `transformers serve` with a draft: chat completions, completions and responses in OpenAI's format.

    python recipes/serve.py --target Qwen/Qwen3-8B --draft RedHatAI/Qwen3-8B-speculator.eagle3 --port 8000
    curl localhost:8000/v1/chat/completions -H "Content-Type: application/json" \
        -d '{"model": "Qwen/Qwen3-8B", "messages": [{"role": "user", "content": "Hello"}]}'

It answers one request at a time. For many at once use an engine with continuous batching, such as vLLM, which loads the
same draft.

The target must be of one of transformers' own classes. `--trust_remote_code` is for the code of its tokenizer.
"""

import time

from transformers.cli.serve import Serve
from transformers.utils.logging import log_levels

from hf_eagle3 import assist
from hf_eagle3.evaluation.drafts import load_draft
from hf_eagle3.scripts import (
    DTYPES,
    ScriptParser,
    add_place_of_draft,
    add_quantization,
    add_trust_remote_code,
    folder_or_hub_id,
    place_of_draft,
    run_script,
)


def main():
    parser = ScriptParser(description=__doc__)
    parser.add_argument(
        "--target", type=folder_or_hub_id, required=True, help="Folder or Hub id. Requests use it as the model's name"
    )
    parser.add_argument("--draft", type=folder_or_hub_id, required=True, help="Folder or Hub id")
    add_place_of_draft(parser)
    add_trust_remote_code(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="Dtype of both")
    add_quantization(parser)
    parser.add_argument("--device", default="auto", help="Device of both: cpu, cuda:0, ...")
    parser.add_argument("--host", default="localhost", help="By default %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="By default %(default)s")
    parser.add_argument(
        "--log_level", type=str.lower, choices=list(log_levels), default="warning", help="By default %(default)s"
    )
    args = parser.parse_args()

    draft = load_draft(args.draft, dtype=args.dtype, **place_of_draft(args))
    server = Serve(
        force_model=args.target,
        dtype=args.dtype,
        quantization=args.bits and f"bnb-{args.bits}bit",
        device=args.device,
        trust_remote_code=args.trust_remote_code,
        host=args.host,
        port=args.port,
        log_level=args.log_level,
        non_blocking=True,
    )
    while server._thread.is_alive() and not server.server.started:
        time.sleep(0.1)
    if not server.server.started:
        raise SystemExit(
            "The server did not start, for the reason above. If the port is in use, pass another `--port`."
        )
    (loaded,) = server._model_manager.loaded_models.values()  # it has no public attribute for its model
    try:
        with assist(loaded.model, draft.to(loaded.model.device)):
            print(f"Serving {args.target} with {args.draft} on {args.host}:{args.port}", flush=True)
            server._thread.join()
    except BaseException:
        server.kill_server()
        raise


if __name__ == "__main__":
    run_script(main)
