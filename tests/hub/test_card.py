"""The card: metadata and text, whole."""

import re
from pathlib import Path

import pytest
import yaml
from conftest import make_target
from huggingface_hub import ModelCard

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.evaluation import BenchmarkResults
from hf_eagle3.hub import render_card
from hf_eagle3.hub.card import is_edited, is_hub_id


EXPECTED = Path(__file__).with_name("expected_card.md")
ENVIRONMENT = {"hf_eagle3": "0.1.0", "transformers": "5.23.0", "torch": "2.13.0", "python": "3.11.7"}
ENVIRONMENT |= {"machine": "a machine, 2 cores", "threads": 2}
TRAINING = {
    **{"draft_weights": None, "datasets": ["me/chats"], "steps": 1200, "epochs": 1.5, "sequences_per_step": 64},
    **{"seconds": 5400.0, "num_processes": 8, "environment": ENVIRONMENT, "has_chat_template": True},
    "command": "accelerate launch recipes/train.py --config training.yaml",
    "arguments": {"model_name_or_path": "big/Model-8B", "learning_rate": 0.001},
    "evaluation": {"acceptance_length": 3.456, "accuracy_0": 0.7, "num_prompts": 16},
}


def measurement(method, temperature, repeat, speedup, accepted=(), **changes):
    """What a benchmark measured once."""
    of = {"task": "gsm8k", "batch_size": 1, "temperature": temperature, "repeat": repeat, "method": method}
    figures = {"new_tokens": 100, "seconds": 2 / speedup, "speedup": speedup, "target_forwards": 40, "num_prompts": 3}
    figures |= {"accepted_lengths": dict(accepted), "drafted_lengths": dict(accepted), "draft_seconds": 0.0}
    figures |= {"plain_steps": 0, "lookup_steps": 0, "differing": [], "peak_memory": None}
    return {**of, **figures, **changes}


EVENLY = {"1": 1, "2": 1, "3": 1, "4": 1}
OF_DRAFT = [
    measurement("eagle3", temperature, repeat, speedup, {"1": 1, "2": 1} if temperature else EVENLY)
    for temperature, repeat, speedup in ((0.0, 0, 2.0), (0.0, 1, 2.5), (1.0, 0, 1.2), (1.0, 1, 1.26))
]
RUN = {"arguments": {"max_new_tokens": 128, "repeats": 2}, "environment": {**ENVIRONMENT, "dtype": "bfloat16"}}
RUN |= {"draft_weights": None, "tree": {"tree_policy": "auto"}}
BENCHMARK = BenchmarkResults(
    RUN, [m for d in OF_DRAFT for m in (measurement("plain", d["temperature"], d["repeat"], 1.0), d)]
)


def card_with(draft, measurements, run=BENCHMARK.run):
    return render_card("me/draft", draft, benchmark=BenchmarkResults(run, measurements))


@pytest.fixture
def draft():
    draft = Eagle3ForSpeculation.from_target(make_target("llama"))
    draft.config.speculators_config["verifier"]["name_or_path"] = "big/Model-8B"
    return draft


def test_the_whole_card(draft):
    records = {"training": TRAINING, "benchmark": BENCHMARK}
    card = render_card("me/Model-8B-speculator.eagle3", draft, **records, license="apache-2.0", tags=["code"])
    assert str(card) == EXPECTED.read_text(encoding="utf-8")
    # What the Hub makes of it.
    data = ModelCard(str(card)).data
    assert (data.base_model, data.base_model_relation) == ("big/Model-8B", "finetune")
    assert data.library_name == "transformers"
    assert (data.pipeline_tag, data.license, data.datasets) == ("text-generation", "apache-2.0", ["me/chats"])
    assert {"eagle3", "speculative-decoding", "assistant-model", "code"} <= set(data.tags)
    results = [(each.dataset_args["temperature"], each.metric_type, each.metric_value) for each in data.eval_results]
    expected = [(0.0, "acceptance_length", 2.5), (0.0, "speedup", 2.25)]
    assert sorted(results) == [*expected, (1.0, "acceptance_length", 1.5), (1.0, "speedup", 1.23)]


def test_what_is_not_measured_says_so_once(draft):
    text = str(render_card("me/Model-8B-speculator.eagle3", draft))
    assert text.count("Not measured yet.") == 1 and "by position" not in text
    assert "Data: not recorded" in text and "How it was trained is not recorded" in text
    assert "No license is stated" in text
    assert "model-index" not in text and "Figures of others" not in text and "have not been trained" not in text


@pytest.mark.parametrize(
    "num_measured, said",
    [(2, "- One repeat."), (4, "- Medians of 2 inter"), (6, "- Medians of 1 to 2 interleaved repeats,")],
)
def test_an_interrupted_benchmark_says_what_it_measured(draft, num_measured, said):
    assert said in card_with(draft, BENCHMARK.measurements[:num_measured]).text


def test_the_arguments_of_packed_features_can_be_used_again(draft):
    """Training from such features turns `padding_free` on, with which extraction takes no `max_length`."""
    arguments = {"features_dir": "features", "max_length": 512, "padding_free": True}
    card = render_card("me/draft", draft, training={**TRAINING, "arguments": arguments})
    stated = card.text.partition("```yaml\n")[2].partition("```")[0]
    assert yaml.safe_load(stated) == {"features_dir": "features", "max_length": 512, "packing": True}


def test_what_cannot_be_served_says_so():
    draft = Eagle3ForSpeculation.from_target(make_target("qwen3"), model_type="qwen3")
    text = str(render_card("me/draft", draft))
    assert "cannot express this draft: it has Qwen3 layers" in text and "sglang.launch_server" not in text
    # A target that nobody else has.
    assert "a model that is not on the Hub" in text and "base_model" not in text
    assert "vllm serve path/to/target" in text
    draft.config.eagle_aux_hidden_state_layer_ids = [2, 3, 3]
    card = render_card("me/draft", draft)
    assert "### vLLM\n\nThe speculators format cannot express" in card.text and "vllm serve" not in card.text
    assert "vllm" not in card.data.tags


@pytest.mark.parametrize(
    "ids, said",
    [
        (None, "the usual three states of the target ("),
        ([2, 3, 4], "the states of layers [1, 2, 3] of the target, but"),
    ],
)
def test_a_draft_that_names_neither_its_target_nor_its_states(ids, said):
    """Drafts of other projects, as they are without `pair_with`."""
    draft = Eagle3ForSpeculation.from_target(make_target("llama"), eagle_aux_hidden_state_layer_ids=ids)
    draft.config.update({"speculators_config": None, "eagle_aux_hidden_state_layer_ids": ids})
    draft.config.aux_layer_ids_assumed = True
    card = render_card("me/draft", draft, tags="code")
    assert card.text.count("--to speculators --target TARGET") == 2 and "vllm serve" not in card.text
    assert "vllm" not in card.data.tags and card.data.tags[-1] == "code"
    assert f"It reads {said}" in card.text


def test_the_card_of_an_adapter(draft, monkeypatch):
    monkeypatch.setattr(draft, "loaded_with", {"subfolder": "small"}, raising=False)
    card = render_card("me/code-adapter", draft, training=TRAINING, adapter_of="me/Model-8B-speculator.eagle3")
    assert 'from_pretrained("me/Model-8B-speculator.eagle3", subfolder="small", dtype="auto"' in card.text
    assert card.data.library_name == "peft" and card.data.base_model == "me/Model-8B-speculator.eagle3"
    assert card.data.base_model_relation == "adapter"
    assert 'PeftModel.from_pretrained(draft, "me/code-adapter")' in card.text


def test_an_edited_card_is_noticed(draft):
    card = ModelCard(str(render_card("me/draft", draft)))
    assert not is_edited(card)
    assert is_edited(ModelCard(str(card).replace("## Limits", "## Limits and more")))
    assert is_edited(ModelCard(str(card).replace("library_name: transformers", "library_name: vllm")))
    assert is_edited(ModelCard("---\nlicense: mit\n---\nMy own words.\n"))
    assert not is_edited(ModelCard("---\nlicense: mit\n---\n"))
    assert not is_edited(ModelCard(str(card).replace("\n", "\r\n")))  # by git, on Windows
    yaml.safe_load(str(card).split("---\n")[1])


def test_cards_of_other_rows(draft):
    """Chains instead of trees; nothing accepted; no verification at all."""
    chains = [each | {"method": each["method"].replace("eagle3", "eagle3-chain")} for each in BENCHMARK.measurements]
    text = str(card_with(draft, chains))
    assert "2.25x" in text and "| gsm8k | 1 | 0 | 0.75 |" in text and "model-index" in text
    for accepted in ({"1": 4}, {}):
        changes = {"accepted_lengths": accepted, "drafted_lengths": accepted, "batch_size": 2}
        card = card_with(draft, [each | changes for each in OF_DRAFT])
        assert "acceptance.png" not in card.text and "by position" not in card.text
        metrics = [result.metric_type for result in card.data.eval_results]
        assert metrics.count("speedup") == 2 and ("acceptance_length" in metrics) == bool(accepted)


def test_the_draft_is_told_apart_from_what_is_looked_up(draft):
    changes = {"accepted_lengths": (accepted := {"1": 2, "2": 2}), "drafted_lengths": accepted, "speedup": 1.1}
    alone = [each | changes | {"method": "eagle3-no-lookup"} for each in OF_DRAFT]
    lookups = [each | {"method": "prompt-lookup", "accepted_lengths": {}, "speedup": 1.7} for each in alone]
    changed = [each | {"lookup_steps": 7 * (each["method"] == "eagle3")} for each in BENCHMARK.measurements]
    names = {result.metric_name for result in card_with(draft, changed).data.eval_results}
    assert "Acceptance length of the draft's trees (pooled)" in names
    assert not any("draft alone" in name for name in names)
    assert any("draft and prompt lookup" in name for name in names)
    changed += alone + lookups
    card = card_with(draft, changed)
    values = [(result.metric_type, result.metric_value) for result in card.data.eval_results]
    alone = [("speedup_draft_alone", 1.1), ("speedup_prompt_lookup_alone", 1.7)]
    assert values == [
        *(("acceptance_length", 1.5), ("speedup", 2.25), *alone),
        *(("acceptance_length", 1.5), ("speedup", 1.23), *alone),
    ]
    said = "2.25x (gsm8k); the draft alone 1.10x; prompt lookup without a draft 1.70x\n"
    assert f"- temperature 0, batch size 1: {said}" in card.text
    second = [each | {"task": "alpaca", "speedup": 1.25} for each in changed]
    two = card_with(draft, changed + second)
    assert "batch size 1: 1.75x, the mean of 2 tasks (1.25x to 2.25x); the draft alone 1.18x; prompt" in two.text
    fewer = [each for each in second if each["method"] != "prompt-lookup"]
    some = card_with(draft, changed + fewer)
    assert "the draft alone 1.18x; prompt lookup without a draft has figures of 1 of these tasks only" in some.text
    once = card_with(draft, [each for each in BENCHMARK.measurements if each["repeat"] == 0])
    assert "(gsm8k); one repeat only\n" in once.text and "(one repeat)" in str(once)
    assert "Of the 160 forwards of `eagle3`, 28 verified tokens that were looked up" in card.text
    assert "was accepted (`eagle3-no-lookup`)." in card.text and "| gsm8k | 1 | 0 | 0.50 |\n" in card.text
    assert "were looked up" not in str(render_card("me/draft", draft, benchmark=BENCHMARK))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_why_texts_part_stands_below_the_table(draft, dtype):
    run = {**BENCHMARK.run, "environment": {**BENCHMARK.run["environment"], "dtype": dtype}}

    def below(measurements):
        text = card_with(draft, measurements, run).text
        return text.partition("| identical to plain generate |")[2].partition("- Prompts: 3 of ")[::2]

    below_table, prompts = below(BENCHMARK.measurements)
    assert "identical" not in below_table and prompts.startswith("GSM8K (`gsm8k`). 128 new tokens")
    below_table, prompts = below([each | {"differing": [1], "task": "mine"} for each in BENCHMARK.measurements])
    assert ("bfloat16 rounds a forward over a tree differently" in below_table) == (dtype == "bfloat16")
    assert "random numbers" not in below_table and prompts.startswith("the task `mine`. 128")
    lookups = [each | {"method": "prompt-lookup", "differing": [1]} for each in BENCHMARK.measurements[-1:]]
    below_table, _ = below([*BENCHMARK.measurements, *lookups])
    assert "draws other random numbers" in below_table and "rounds" not in below_table


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_code_of_a_card(tmp_path, monkeypatch, capsys, tokenizer, is_chat):
    monkeypatch.chdir(tmp_path)
    target = make_target("llama")
    target.save_pretrained("path/to/target")
    tokenizer.save_pretrained("path/to/target")
    draft = Eagle3ForSpeculation.from_target(target)
    draft.save_pretrained("me/draft")
    text = render_card("me/draft", draft, training={**TRAINING, "has_chat_template": is_chat}).text
    code = re.search(r"```python\n(.*?)```", text, re.S)[1]
    assert ("apply_chat_template" in code) == is_chat
    exec(code, {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("changes", [{"evaluation": {"dataset": "mine"}}, {"epochs": "3"}])
def test_a_record_that_was_edited(changes):
    draft = Eagle3ForSpeculation.from_target(make_target("llama"))
    with pytest.raises(ValueError, match="in its training.json or benchmark.jsonl is missing, or not as it was"):
        render_card("me/draft", draft, training={**TRAINING, **changes})


def test_paths_are_no_ids():
    for name in ("../target", "./target", "/home/me/target", "data/train.jsonl", "target", "", None, "a/b/c"):
        assert not is_hub_id(name)
    assert is_hub_id("Qwen/Qwen3-8B")
