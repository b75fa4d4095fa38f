"""Runs OpenVINO GenAI: `run_openvino.py JOB.json RESULT.json`."""

import json
import sys
import time
from pathlib import Path

import numpy
import openvino
import openvino_genai


def main(job_file, result_file):
    job = json.loads(Path(job_file).read_text())
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    options = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": job["threads"]}
    given = {}
    if job.get("draft"):
        given["draft_model"] = openvino_genai.draft_model(job["draft"], "CPU", **options)
    pipeline = openvino_genai.LLMPipeline(job["target"], "CPU", scheduler_config=scheduler, **given, **options)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = job["max_new_tokens"], True, False
    for name in ("num_assistant_tokens", "tree_depth", "branching_factor"):
        if job.get("draft") and name in job:
            setattr(config, name, job[name])
    found = {"tokens": [], "forwards": [], "seconds": [], "version": openvino_genai.__version__}
    for prompt in job["prompts"]:
        start = time.perf_counter()
        result = pipeline.generate(openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)), config)
        found["seconds"].append(time.perf_counter() - start)
        found["tokens"].append([int(token) for token in result.tokens[0]])
        metrics = result.extended_perf_metrics  # none without a draft
        of_target = metrics.main_model_metrics if metrics is not None else result.perf_metrics
        found["forwards"].append(len(of_target.raw_metrics.m_durations) - 1)
    Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
