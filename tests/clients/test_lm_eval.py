"""lm-evaluation-harness with a draft (opt-in: needs `lm_eval`)."""

import json

import pytest
import torch
from conftest import make_draft, make_prompt, make_target

from hf_eagle3 import assist


lm_eval = pytest.importorskip("lm_eval")

TASK = """
task: local_generation
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["zz"], max_gen_toks: 24, do_sample: false}}
metric_list: [{{metric: exact_match}}]
filter_list:
  - {{name: whole, filter: [{{function: take_first}}]}}
  - {{name: again, filter: [{{function: take_first}}]}}
"""


@pytest.fixture
def target(tmp_path, tokenizer):
    """With a task beside it, some of whose answers are the target's."""
    target = make_target("llama")
    tokenizer.eos_token = tokenizer.pad_token
    questions = [f"what is {i} and {i * 7}" for i in range(7)]
    answers = []
    for question in questions[:3]:  # some of them right
        inputs = tokenizer(question, return_tensors="pt")
        text = target.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(text, skip_special_tokens=True))
    rows = [{"question": q, "answer": a} for q, a in zip(questions, [*answers, *["no"] * 4])]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    return target


@pytest.mark.parametrize("template", [[], ["--apply_chat_template"]])
def test_the_recipe(tmp_path, target, tokenizer, run_recipe, template):
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_draft(target, [make_prompt(9)]).save_pretrained(tmp_path / "drafts" / "small")
    arguments = ["--target", tmp_path / "target", "--draft", tmp_path / "drafts", "--draft_subfolder", "small"]
    arguments += ["--include_path", tmp_path, *template]
    result = run_recipe(
        "evaluate.py", *arguments, "--tasks", "local_generation", "--limit", 5, "--json", tmp_path / "out.json"
    )
    assert result.returncode == 0, result.stderr[-3000:]
    summary = json.loads((tmp_path / "out.json").read_text())
    assert summary["same answers"] == "5/5" and summary["results"] == summary["with the draft"]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_results_are_the_target_s(tmp_path, target, tokenizer, batch_size):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    draft = make_draft(target, [make_prompt(9)])
    results = []
    for context in (torch.no_grad(), assist(target, draft)):
        client = HFLM(pretrained=target, tokenizer=tokenizer, batch_size=batch_size, device="cpu")
        with context:
            result = lm_eval.simple_evaluate(
                client, tasks=["local_generation"], task_manager=manager, log_samples=True, bootstrap_iters=0
            )
        samples = result["samples"]["local_generation"]
        results.append(([sample["resps"] for sample in samples], result["results"]["local_generation"]))
    assert results[0] == results[1] and draft.last_generation.new_tokens > 0
    assert 0 < results[0][1]["exact_match,whole"] < 1
