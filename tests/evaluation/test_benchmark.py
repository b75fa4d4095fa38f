"""`recipes/benchmark.py` and what it is made of."""

import copy
import json
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import load_script, make_block_draft, make_draft, make_prompt, make_target
from hub.test_card import measurement
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from seeing import gemma3, make, make_image, make_processor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor
from transformers.generation.candidate_generator import MTPCandidateGenerator

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.checkpoints import export
from hf_eagle3.data import ImageReader
from hf_eagle3.evaluation import (
    BenchmarkResults,
    BenchmarkRow,
    benchmark,
    format_table,
    load_prompts,
    memory,
    plot_all,
    run_benchmark,
)
from hf_eagle3.evaluation.benchmark import synchronize, without_padding
from hf_eagle3.evaluation.drafts import sampled_digest
from hf_eagle3.evaluation.plots import plot_acceptance, plot_batch_sizes, subtitle
from hf_eagle3.remote_code import decoding_eagle3
from hf_eagle3.tokenizer import padded_inputs


def test_benchmark_recipe(tmp_path, tokenizer, run_recipe):
    target = make_target("llama")
    make_draft(target, [make_prompt(5)]).save_pretrained(tmp_path / "draft")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "what is 3"}\n{"prompt": "the end"}\n')
    results_file = tmp_path / "results.jsonl"
    arguments = ["--target", tmp_path / "target", "--draft", tmp_path / "draft", "--max_new_tokens", 6]
    arguments += ["--prompts", tmp_path / "prompts.jsonl", "gsm8k", "--json", results_file, "--tree_depth", 3]
    arguments += ["--assistant", tmp_path / "target", "--repeats", 2]
    arguments += ["--methods", "plain", "prompt-lookup", "assistant", "mtp", "eagle3-chain", "eagle3"]
    extra = ["--plots", tmp_path / "plots", "--show_text", "--markdown", tmp_path / "table.md"]
    result = run_recipe("benchmark.py", *arguments, *extra)
    assert result.returncode == 0, result.stderr[-3000:]
    # What cannot be had is said, and the rest goes on.
    assert "The task gsm8k is left out" in result.stderr and "Left out: mtp" in result.stdout
    assert f"not tried again with {results_file}. Choose another file" in result.stdout
    results = BenchmarkResults.read(results_file)
    assert list(results.run["missing_tasks"]) == ["gsm8k"] and list(results.run["left_out"]) == ["mtp"]
    assert results.run["environment"]["torch"] == torch.__version__ and results.run["tree"]["tree_depth"] == 3
    rows = {(row.temperature, row.method): row for row in results.rows}
    methods = {"plain", "prompt-lookup", "assistant", "eagle3-chain", "eagle3"}
    assert set(rows) == {(temperature, method) for temperature in (0.0, 1.0) for method in methods}
    for temperature in (0.0, 1.0):
        for method in ("eagle3", "eagle3-chain"):
            row = rows[temperature, method]
            assert row.num_identical == row.num_prompts == 2 and len(row.speedups) == 2
            assert 1 <= row.acceptance_length <= 4 and max(row.accepted_lengths) <= 4
            assert sum(length * count for length, count in row.accepted_lengths.items()) == 2 * 2 * 5
            assert row.target_forwards == row.accepted_lengths.total() + 2 * 2
            assert 0 < row.draft_share < 1
        plain = rows[temperature, "plain"]
        assert plain.target_forwards == plain.new_tokens == 2 * 2 * 6 and plain.draft_share == 0
    # The assistant is the target itself: all it drafts greedily is taken.
    assert rows[0.0, "assistant"].num_identical == 2 and rows[0.0, "assistant"].acceptance_length > 1.5
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"speedup.png", "acceptance.png"}
    assert "| 0 | eagle3 |" in (tmp_path / "table.md").read_text()
    assert "The first prompt:\n\nwhat is 3\n\nWhat follows at T=0 with the draft:" in result.stdout
    assert "Without the draft the target writes the same." in result.stdout

    # Interrupted in the middle of the last repeat, it measures that again.
    lines = results_file.read_text().splitlines()
    num_last = len(methods)
    results_file.write_text("\n".join(lines[:-2]))
    result = run_recipe("benchmark.py", *arguments)
    assert result.returncode == 0, result.stderr[-3000:]
    again = results_file.read_text().splitlines()
    assert again[1 : len(lines) - num_last] == lines[1:-num_last] and len(again) == len(lines)
    # With nothing missing it says that these are no new figures.
    assert "Nothing was left" not in result.stdout
    result = run_recipe("benchmark.py", *arguments)
    assert "Nothing was left to measure" in result.stdout and results_file.read_text().splitlines() == again
    # Of other arguments it takes no notice, but says so.
    result = run_recipe("benchmark.py", *arguments, "--max_new_tokens", 7)
    assert result.returncode != 0 and "holds a run with other arguments" in result.stderr
    assert results_file.read_text().splitlines() == again
    assert json.loads(again[0])["models"] == dict.fromkeys(("target", "assistant"), sampled_digest(target))
    # Nor of another model in the same folder.
    other = json.loads(again[0])
    other["models"]["target"] = "another"
    results_file.write_text("\n".join([json.dumps(other), *again[1:]]))
    result = run_recipe("benchmark.py", *arguments)
    assert result.returncode != 0 and "holds a run with other models: target was 'another' before" in result.stderr
    results_file.write_text("\n".join(again))
    few = ["--temperatures", 0, "--methods", "plain", "--repeats", 1]
    result = run_recipe("benchmark.py", *arguments[:8], *few, "--json", tmp_path / "short.jsonl")
    assert result.returncode == 0, result.stderr[-3000:]
    # Drafts of others bring no code, and other models are no drafts.
    export(Eagle3ForSpeculation.from_pretrained(tmp_path / "draft"), tmp_path / "sglang", "sglang")
    short = [*arguments[:2], "--prompts", tmp_path / "prompts.jsonl", "--max_new_tokens", 4, "--repeats", 1]
    result = run_recipe(
        "benchmark.py", *short, "--draft", tmp_path / "sglang", "--methods", "plain", "eagle3", "--device_map", "cpu"
    )
    assert "| 0 | eagle3 |" in result.stdout and "The share of trees" in result.stdout
    result = run_recipe("benchmark.py", *short, "--draft", tmp_path / "target")
    assert result.returncode == 1 and "EAGLE-3" in result.stderr
    result = run_recipe("benchmark.py", "--target", "any", "--tasks", "mt_bensh")
    assert result.returncode > 0 and "mt_bensh" in result.stderr and "Traceback" not in result.stderr


def test_batches(tokenizer):
    target = make_target("llama")
    draft = make_draft(target, [make_prompt(5)])
    tasks = {"words": [tokenizer(prompt)["input_ids"] for prompt in ("what is 3", "the end", "a, b")]}
    methods = ["plain", "prompt-lookup", "eagle3"]
    results = run_benchmark(target, tokenizer, draft, tasks, methods, [0.0, 1.0], [1, 2], 6, 2)
    rows = {(row.method, row.batch_size, row.temperature): row for row in results.rows}
    for temperature in (0.0, 1.0):
        assert ("prompt-lookup", 1, temperature) in rows and ("prompt-lookup", 2, temperature) not in rows
        for batch_size in (1, 2):
            row = rows["eagle3", batch_size, temperature]
            assert row.num_identical == row.num_prompts == 3 and len(row.speedups) == 2
            assert sum(length * count for length, count in row.accepted_lengths.items()) <= 2 * 3 * 5
    with pytest.raises(ValueError, match="words has 3 prompts, which do not fill a batch of 4"):
        run_benchmark(target, tokenizer, draft, tasks, methods, batch_sizes=[1, 4])


def test_prompts_that_do_not_fill_a_batch_are_refused_before_models_load(tmp_path, tokenizer, run_recipe):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "what is 3"}\n')
    command = ("--target", tmp_path, "--prompts", tmp_path / "prompts.jsonl", "--batch_sizes", 1, 2)
    result = run_recipe("benchmark.py", *command)
    assert "The task prompts has 1 prompts, which do not fill a batch of 2" in result.stderr


def test_a_tokenizer_without_tokens_and_a_target_that_returns_dictionaries(tokenizer):
    tokenizer, target = copy.deepcopy(tokenizer), make_target("llama")
    tokenizer.pad_token = tokenizer.eos_token = None
    target.generation_config.return_dict_in_generate = True
    draft, tasks = make_draft(target, [make_prompt(5)]), {"task": [[5, 6], [7, 8, 9]]}
    plain, ours = run_benchmark(target, tokenizer, draft, tasks, ["plain", "eagle3"], [0.0], [2], 4, 1).rows
    assert plain.num_prompts == ours.num_identical == 2


def test_multi_token_prediction(tmp_path, tokenizer, monkeypatch):
    """With the layer in the target's checkpoint."""
    # GLM-4.5-Air's depth: the layer's name has it.
    target = make_target("glm4_moe", num_hidden_layers=46, num_mtp_layers=1, num_experts=2, num_local_experts=2)
    target.save_pretrained(tmp_path / "target")
    weights = load_file(tmp_path / "target" / "model.safetensors")
    layer = {name.replace(".45.", ".46."): weights[name].clone() for name in weights if ".layers.45." in name}
    layer |= {f"model.layers.46.{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    layer["model.layers.46.eh_proj.weight"] = torch.eye(32).repeat(1, 2)
    save_file(weights | layer, tmp_path / "target" / "model.safetensors", {"format": "pt"})
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval()
    lengths, get_candidates = [], MTPCandidateGenerator.get_candidates

    def noting_get_candidates(self, input_ids, *args, **kwargs):
        candidates, logits = get_candidates(self, input_ids, *args, **kwargs)
        lengths.append(candidates.shape[1] - input_ids.shape[1])
        return candidates, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noting_get_candidates)
    tasks = {"words": [tokenizer("what is 3")["input_ids"]]}
    results = run_benchmark(target, tokenizer, None, tasks, ["plain", "mtp"], [0.0], max_new_tokens=4, repeats=1)
    assert not results.run["left_out"] and sum(lengths) >= 2
    assert [(row.method, row.num_identical) for row in results.rows] == [("plain", 1), ("mtp", 1)]


ACCEPTED = {"1": 1, "4": 1, "2": 2}


def results_of(*speedups, task="words", **changes):
    """Results of plain generation and of a draft with these speed-ups."""
    measurements = []
    for repeat, speedup in enumerate(speedups):
        for method, ratio, accepted in (("plain", 1.0, {}), ("eagle3", speedup, ACCEPTED)):
            of = {"task": task, "seconds": 10 / ratio, **changes}
            measurements.append(measurement(method, 0.0, repeat, ratio, accepted, **of))
    return BenchmarkResults({"environment": {}}, measurements)


@pytest.mark.parametrize(("sizes", "said"), [([1, 4], "Measured at batch size 1 only"), ([4], "Not measured without")])
def test_methods_that_take_no_batches_are_named(capsys, sizes, said):
    results = results_of(2.0, batch_size=4)
    results.run |= {"tree": {}, "missing_tasks": {}, "left_out": {}}
    args = SimpleNamespace(target="t", repeats=1, max_new_tokens=8, methods=["plain", "assistant"], json=None)
    args.batch_sizes = sizes
    load_script("recipes/benchmark.py").print_report(args, results, torch.float32)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(said) and last.endswith(": assistant.")


def test_rows_and_table():
    results = results_of(4.0, 1.5, 3.0)
    results.measurements[-1]["differing"] = [2]
    plain, row = results.rows
    assert (plain.acceptance_length, plain.acceptance_by_position) == (None, [])
    assert row.acceptance_length == 2.25 and row.acceptance_by_position == [0.75, 0.25, 0.25]
    assert format_table(results.rows).splitlines()[2:] == [
        "| 0 | plain | 10 | 1.00 | - | - |",
        "| 0 | eagle3 | 30 | 3.00 (1.50-4.00) | 2.25 | 2/3 |",
    ]
    results.measurements += results_of(2.0, task="other", batch_size=4, peak_memory=12.0).measurements
    header, *_, last = format_table(results.rows).splitlines()
    assert header.startswith("| task | batch size | T |") and header.endswith("| peak memory, MiB |")
    assert last == "| other | 4 | 0 | eagle3 | 20 | 2.00 | 2.25 | 3/3 | 12 |"
    slow = BenchmarkRow("plain", 0.0, tokens_per_second=[1.44])  # a large model on a small machine
    assert format_table([slow]).splitlines()[-1] == "| 0 | plain | 1.4 | 1.00 | - | - |"
    # Other methods do not tell verification forwards apart.
    numbers = {"new_tokens": 30, "target_forwards": 20}
    assert BenchmarkRow("prompt-lookup", 0.0, **numbers).acceptance_length == 1.5
    assert BenchmarkRow("prompt-lookup", 0.0, batch_size=2, **numbers).acceptance_length is None


def test_what_was_looked_up_or_written_plainly_was_not_drafted():
    results = results_of(2.0, 2.0)
    for each in results.measurements[1::2]:
        each |= {"drafted_lengths": {"2": 2}, "lookup_steps": 1, "plain_steps": 1}
    row = results.rows[1]
    assert row.acceptance_length == 2.25 and row.lookup_steps == row.plain_steps == 2
    assert row.acceptance_by_position == [1]


def test_the_draft_alone_looks_nothing_up_and_chains_have_one_child(tokenizer, monkeypatch):
    target, tasks = make_target("llama"), {"a": [make_prompt(9)[0].tolist()]}
    draft = make_draft(target, [make_prompt(9)])
    settings, read = [], decoding_eagle3.tree_settings

    def noting_settings(*args):
        settings.append(tuple(read(*args)[name] for name in ("prompt_lookup_num_tokens", "branching_factor")))
        return read(*args)

    monkeypatch.setattr(decoding_eagle3, "tree_settings", noting_settings)
    methods = ["plain", "eagle3-chain", "eagle3-no-lookup", "eagle3"]
    rows = run_benchmark(target, tokenizer, draft, tasks, methods, [0.0], [1], 6, 1).rows
    assert [row.method for row in rows] == methods and all(row.num_identical == 1 for row in rows[1:])
    assert settings == 2 * [(0, 1), (0, 8), (24, 8)]  # of the warm-up, too


def test_settings_and_seeds_of_calls(tokenizer, monkeypatch):
    """`top_k` is for samples, arguments of all calls are in each, and no repeat draws what another one has drawn."""
    target, tasks = make_target("llama"), {"a": [[5, 6], [7, 8, 9], [3, 4]]}
    draft, generate, set_seed = make_draft(target, [make_prompt(9)]), target.generate, benchmark.set_seed
    calls, seeds = [], []

    def noting_generate(**kwargs):
        calls.append(kwargs)
        return generate(**kwargs)

    def noting_seed(seed):
        seeds.append(seed)
        set_seed(seed)

    monkeypatch.setattr(target, "generate", noting_generate)
    monkeypatch.setattr(benchmark, "set_seed", noting_seed)
    monkeypatch.setattr(benchmark, "warm_up", lambda *args: {})
    settings = {"sampling": {"top_k": 7}, "call": {"cache_implementation": "static"}}
    rows = run_benchmark(target, tokenizer, draft, tasks, ["plain", "eagle3"], [0.0, 1.0], [1], 4, 2, **settings).rows
    assert all(row.num_identical == 3 for row in rows if row.method == "eagle3") and len(rows) == 4
    assert [(each["do_sample"], each.get("top_k")) for each in calls] == 12 * [(False, None)] + 12 * [(True, 7)]
    assert all(each["cache_implementation"] == "static" for each in calls)
    assert seeds == 2 * [seed for seed in range(6) for _ in range(2)]  # for each temperature and method


def test_synchronize_waits_for_the_device_it_gets(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.accelerator, "synchronize", calls.append)
    for device in map(torch.device, ("cpu", "cuda:1", "xpu")):
        synchronize(device)
    assert calls == [torch.device("cuda:1"), torch.device("xpu")]


def test_peak_memory():
    cpu = torch.device("cpu")
    if not memory.reset_peak_memory(cpu):
        pytest.skip("the system does not count")
    before = memory.peak_memory(cpu)
    block = torch.ones(100 * 2**18)  # 100 MiB
    del block
    assert 90 < memory.peak_memory(cpu) - before < 150
    assert memory.reset_peak_memory(cpu) and memory.peak_memory(cpu) < before + 50


def test_memory_that_nobody_counts(tokenizer, monkeypatch, tmp_path):
    target = make_target("llama")
    call = {"methods": ["plain"], "max_new_tokens": 3, "repeats": 1}
    results = run_benchmark(target, tokenizer, None, {"task": [[1, 2]]}, **call)
    if memory.reset_peak_memory(target.device):
        assert all(row.peak_memory > 50 for row in results.rows) and "peak memory, MiB" in format_table(results.rows)
    monkeypatch.setattr(memory, "PROCESS", tmp_path / "none")
    results = run_benchmark(target, tokenizer, None, {"task": [[1, 2]]}, **call)
    assert all(row.peak_memory is None for row in results.rows) and "peak memory" not in format_table(results.rows)


def test_plots(tmp_path):
    results = results_of(2.0, 2.1)
    results.measurements += results_of(1.5, 1.6, batch_size=4).measurements
    assert [path.name for path in plot_all(results, tmp_path)] == ["speedup.png", "acceptance.png", "batch_size.png"]
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())
    results.run |= {"arguments": {"target": "me/Model"}, "environment": {"dtype": "bfloat16", "machine": "a machine"}}
    assert subtitle(results) == "me/Model, bfloat16, a machine, medians and ranges of 2 repeats"
    (axis,) = plot_acceptance(results.rows).axes
    # A line for each batch size, and tokens are whole.
    labels = axis.get_legend_handles_labels()[1]
    assert [label.split(", ")[2] for label in labels] == ["batch size 1", "batch size 4"]
    assert all(tick == int(tick) for tick in axis.get_xticks())
    (axis,) = plot_batch_sizes(results.rows).axes
    assert list(axis.get_xticks()) == [1, 4]


def test_results_files(tmp_path):
    results = results_of(2.0, 3.0, task="a\u2028b\u0085")  # line separators that JSON leaves alone
    results.write(tmp_path / "results.jsonl")
    assert BenchmarkResults.read(tmp_path / "results.jsonl") == results
    (tmp_path / "other.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match="holds no results"):
        BenchmarkResults.read(tmp_path / "other.jsonl")
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    (tmp_path / "broken.jsonl").write_text("\n".join([lines[0], "{", *lines[1:]]))
    with pytest.raises(ValueError, match="line 2, is not JSON"):
        BenchmarkResults.read(tmp_path / "broken.jsonl")


@pytest.mark.parametrize(
    "option, value, reason",
    [
        *((f"--{name}", 0, ".*positive_integer value: '0'") for name in ("repeats", "num_prompts", "max_new_tokens")),
        ("--batch_size", 0, ".*positive_integer value: '0'"),
        ("--dtype", "half", "invalid choice: 'half'"),
        ("--compile", "fast", "invalid choice: 'fast'"),
        ("--target", "", "the name of a model is empty"),
    ],
)
def test_arguments_that_are_refused(run_recipe, option, value, reason):
    result = run_recipe("benchmark.py", "--target", "me/model", "--cache_implementation", "static", option, value)
    assert result.returncode == 2 and re.search(f"argument {option}.*: {reason}", result.stderr)


def test_methods_that_cannot_be(tokenizer):
    target, tasks = make_target("llama"), {"words": [[1, 2, 3]]}
    of_block, assisted = {"assistant": make_block_draft("dflash", target)}, {"methods": ["plain", "assistant"]}
    for draft, kwargs, reason in (
        (None, {"methods": ["plain", "medusa"]}, "medusa"),
        (None, {"methods": ["eagle3"]}, "include 'plain'"),
        (target, {}, "LlamaForCausalLM is not an EAGLE-3 draft"),
        (None, assisted, "'assistant' needs a model"),
        (None, assisted | of_block, "transformers' own, and DFlashForSpeculation is a draft of hf-eagle3"),
    ):
        with pytest.raises(ValueError, match=reason):
            run_benchmark(target, tokenizer, draft, tasks, **kwargs)


def test_an_adapted_draft(tokenizer):
    target = make_target("llama")
    draft = get_peft_model(make_draft(target, [make_prompt(5)]), LoraConfig(target_modules=["q_proj"])).eval()
    tasks = {"words": [tokenizer("what is 3")["input_ids"]]}
    plain, ours = run_benchmark(target, tokenizer, draft, tasks, ["plain", "eagle3"], [0.0], [1], 8, 1).rows
    assert ours.num_identical == 1 and ours.draft_share > 0


@pytest.mark.parametrize(
    ("tokens", "ends", "expected"),
    [
        ([5, 6, 0, 0], {7}, [5, 6]),
        ([5, 7, 0], {7}, [5, 7]),
        ([5, 0, 0, 0], {0}, [5, 0]),  # padded by what ended it
        ([5, 0, 6], {7}, [5, 0, 6]),
        ([0, 0], {0}, [0]),
        ([5, 7, 0, 0], {7, 0}, [5, 7]),  # padded by another end than its own
    ],
)
def test_padding_is_no_text(tokens, ends, expected):
    assert without_padding(tokens, 0, ends) == expected


def test_rows_that_end_earlier_count_as_they_are(tokenizer, verified):
    """In a batch, whose rows are padded to the longest, and leave it as they do when nothing is measured."""
    target = make_target("llama")
    prompts = [tokenizer(prompt)["input_ids"] for prompt in ("some", "the end")]

    def new_tokens(prompt):
        return target.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, len(prompt) :].tolist()

    target.generation_config.eos_token_id = new_tokens(prompts[0])[3]
    num_tokens = sum(len(new_tokens(prompt)) for prompt in prompts)
    draft = make_draft(target, [make_prompt(5)])
    results = run_benchmark(target, tokenizer, draft, {"a": prompts}, ["plain", "eagle3"], [0.0], [2], 10, 1)
    assert {len(tree.tokens) for tree in verified} == {1, 2}
    assert [row.new_tokens for row in results.rows] == [num_tokens, num_tokens] and num_tokens < 20
    assert results.rows[1].num_identical == 2


def test_the_bar_reaches_its_end(tokenizer, monkeypatch):
    """Some methods are not for batches, one is left out, and half is measured already."""
    bars = []

    class Bar(benchmark.tqdm):
        def close(self):
            bars.append((self.n, self.total))
            super().close()

    monkeypatch.setattr(benchmark, "tqdm", Bar)
    tasks = {"words": [tokenizer(prompt)["input_ids"] for prompt in ("what is 3", "the end", "a, b")]}
    arguments = (make_target("llama"), tokenizer, None, tasks, ["plain", "prompt-lookup", "mtp"], [0.0], [1, 2], 4)
    results = run_benchmark(*arguments, repeats=1)
    assert list(results.run["left_out"]) == ["mtp"]
    run_benchmark(*arguments, repeats=2, results=results)
    assert set(bars) == {(11, 11), (22, 22)}  # each bar closes more than once


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_target(tmp_path, tokenizer, monkeypatch, run_recipe, bits):
    pytest.importorskip("bitsandbytes")
    target = make_target("llama", hidden_size=64, intermediate_size=128, head_dim=16)
    make_draft(target, [make_prompt(5)]).save_pretrained(tmp_path / "draft")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "what is 3"}')
    models = ("--target", tmp_path / "target", "--draft", tmp_path / "draft", f"--load_in_{bits}bit")
    arguments = ("--prompts", tmp_path / "prompts.jsonl", "--max_new_tokens", 6, "--repeats", 1, "--device", "cpu")
    arguments += ("--methods", "plain", "eagle3", "--json", tmp_path / "results.jsonl")
    result = run_recipe("benchmark.py", *models, *arguments)
    assert result.returncode == 0, result.stderr[-3000:]
    results = BenchmarkResults.read(tmp_path / "results.jsonl")
    assert results.run["arguments"]["bits"] == bits
    assert results.run["environment"]["dtype"].endswith(f" with a target of {bits} bits")
    # Its tensors are others.
    assert results.run["models"]["target"] != sampled_digest(target)
    result = run_recipe("benchmark.py", *models, *arguments, f"--load_in_{12 - bits}bit")
    assert result.returncode == 2 and "not allowed with argument" in result.stderr

    def serve(quantization, **others):
        raise ValueError(f"quantized as {quantization}")

    monkeypatch.setattr("transformers.cli.serve.Serve", serve)
    assert f"quantized as bnb-{bits}bit" in run_recipe("serve.py", *models).stderr


def test_prompts_with_images(tmp_path, run_recipe):
    target, _ = make(gemma3, 0)
    target.save_pretrained(tmp_path / "target")
    make_processor(gemma3).save_pretrained(tmp_path / "target")
    target = AutoModelForImageTextToText.from_pretrained(tmp_path / "target")
    make_draft(target, [make_prompt(5)]).save_pretrained(tmp_path / "draft")
    rows = [{"messages": [{"role": "user", "content": "what"}]}]
    for seed in range(2):
        make_image(seed).save(tmp_path / f"{seed}.png")
        rows.append({**rows[0], "images": [str(tmp_path / f"{seed}.png")]})
    (tmp_path / "seen.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--target", tmp_path / "target", "--draft", tmp_path / "draft", "--prompts", tmp_path / "seen.jsonl"]
    arguments += ["--max_new_tokens", 6, "--repeats", 1, "--methods", "plain", "eagle3", "--batch_size", 1, 3]
    arguments += ["--temperatures", 1]
    result = run_recipe("benchmark.py", *arguments, "--json", tmp_path / "results.jsonl")
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [row for row in BenchmarkResults.read(tmp_path / "results.jsonl").rows if row.method == "eagle3"]
    assert len(rows) == 2 and all(row.num_identical == row.num_prompts == 3 for row in rows)

    processor = AutoProcessor.from_pretrained(tmp_path / "target")
    prompts = load_prompts(str(tmp_path / "seen.jsonl"), processor.tokenizer, images=ImageReader(processor))
    batch = padded_inputs(target, processor.tokenizer, prompts, ImageReader(processor))
    assert batch["pixel_values"].shape[0] == 2  # the first prompt has no image
    with torch.no_grad():
        of_images = target(**batch).logits[1:, -1]
    assert not torch.allclose(*of_images)  # of two pictures, under the same words
