"""Runs vLLM: `run_vllm.py JOB.json RESULT.json`. With `"server"` in the job, an OpenAI client asks its HTTP server."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path


os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
COUNTER = "vllm:spec_decode_num_drafts"


def speculation_of(job):
    if not job.get("draft"):
        return None
    settings = {
        "method": job.get("method", "eagle3"),
        "model": job["draft"],
        "num_speculative_tokens": job["num_draft_tokens"],
    }
    return settings | {"parallel_drafting": True} if job.get("is_parallel") else settings


def in_process(job):
    from vllm import LLM, SamplingParams, TokensPrompt, __version__

    settings = {
        "dtype": job.get("dtype", "float32"),
        "max_model_len": 512,
        "enforce_eager": True,
        "disable_log_stats": False,
    }
    settings |= {"max_num_seqs": 1, "enable_prefix_caching": False, **job.get("settings", {})}
    if job.get("bare"):  # the draft's folder says what its target is
        llm = LLM(job["draft"], **settings)
    else:
        llm = LLM(job["target"], speculative_config=speculation_of(job), **settings)

    def num_drafts():
        return sum(metric.value for metric in llm.get_metrics() if metric.name == COUNTER)

    found = {"tokens": [], "forwards": [], "seconds": [], "version": __version__}
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], ignore_eos=True)
    for prompt in job["prompts"]:
        before, start = num_drafts(), time.perf_counter()
        (output,) = llm.generate(TokensPrompt(prompt_token_ids=prompt), sampling, use_tqdm=False)
        found["seconds"].append(time.perf_counter() - start)
        found["tokens"].append(list(output.outputs[0].token_ids))
        found["forwards"].append(num_drafts() - before)
    return found


def by_http(job):
    import requests
    from openai import OpenAI

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", job["target"]]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512"]
    command += ["--enforce-eager", "--max-num-seqs", "1", "--no-enable-prefix-caching"]
    command += ["--speculative-config", json.dumps(speculation_of(job)), "--served-model-name", "target"]
    server = subprocess.Popen(command, stdout=sys.stderr)
    address = f"http://127.0.0.1:{port}"

    def num_drafts():
        lines = requests.get(f"{address}/metrics", timeout=10).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{COUNTER}_total"))

    try:
        for _ in range(900):  # seconds, or more
            if server.poll() is not None:
                raise RuntimeError("The server has ended.")
            try:
                requests.get(f"{address}/health", timeout=1).raise_for_status()
                break
            except requests.RequestException:
                time.sleep(1)
        client, found = OpenAI(base_url=f"{address}/v1", api_key="none"), {"tokens": [], "forwards": []}
        for prompt in job["prompts"]:
            before = num_drafts()
            reply = client.completions.create(
                model="target",
                prompt=prompt,
                max_tokens=job["max_new_tokens"],
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            found["tokens"].append(reply.choices[0].token_ids)
            found["forwards"].append(num_drafts() - before)
        return found
    finally:
        server.terminate()
        server.wait()


def main(job_file, result_file):
    job = json.loads(Path(job_file).read_text())
    found = by_http(job) if job.get("server") else in_process(job)
    Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
