"""Runs llama-server, from a wheel: `run_llama_cpp.py JOB.json RESULT.json`."""

import json
import sys
import time
import urllib.request
from pathlib import Path

import xllamacpp


def main(job_file, result_file):
    job = json.loads(Path(job_file).read_text())
    params = xllamacpp.CommonParams()
    params.model.path = job["target"]
    params.n_ctx, params.n_parallel, params.warmup = 512, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if job.get("draft"):
        draft = params.speculative.draft
        draft.mparams.path = job["draft"]
        draft.n_max, draft.n_min, draft.p_min = job["num_draft_tokens"], 0, 0.0
        draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = job["threads"]
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
    server, found = xllamacpp.Server(params), {"tokens": [], "forwards": [], "seconds": []}
    found["version"] = xllamacpp.__version__
    for prompt in job["prompts"]:
        start = time.perf_counter()
        request = {
            "prompt": prompt,
            "n_predict": job["max_new_tokens"],
            "temperature": 0,
            "samplers": ["temperature"],
            "return_tokens": True,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        body = json.dumps(request).encode()
        address = f"{server.listening_address}/completion"
        with urllib.request.urlopen(
            urllib.request.Request(address, body, {"Content-Type": "application/json"})
        ) as file:
            reply = json.load(file)
        found["seconds"].append(time.perf_counter() - start)
        timings = reply["timings"]
        found["tokens"].append(reply["tokens"])
        found["forwards"].append(timings["predicted_n"] - 1 - timings.get("draft_n_accepted", 0))
    Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
