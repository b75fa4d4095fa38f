"""Rollouts of TRL's `GRPOTrainer`, assisted by a draft."""

import copy
import itertools

import pytest
import torch
from conftest import make_block_draft, make_draft, make_prompt, make_target
from datasets import Dataset
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.remote_code.outputs_eagle3 import select_hidden_states
from hf_eagle3.training import assist_rollouts, rollouts
from hf_eagle3.training.rollouts import DraftLearner
from hf_eagle3.training.ttt import draft_loss


PROMPTS = Dataset.from_dict({"prompt": [f"the {i} of {i * 7}" for i in range(16)]})
TIMES = ("runtime", "per_second", "time")


def share_of_vowels(completions, **kwargs):
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


def make_trainer(tmp_path, tokenizer, **settings):
    lengths = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 12, "max_steps": 4}
    lengths |= {"learning_rate": 1e-2, "steps_per_generation": 2}
    quiet = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **quiet, **{**lengths, **settings})
    return GRPOTrainer(make_target("llama"), share_of_vowels, args, PROMPTS, processing_class=copy.deepcopy(tokenizer))


def history(trainer):
    """What was logged, but for what others may measure otherwise."""
    own = ("acceptance_length", "draft_loss")
    return [
        {name: value for name, value in entry.items() if name not in own and not any(t in name for t in TIMES)}
        for entry in trainer.state.log_history
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tokenizer):
    trainer = make_trainer(tmp_path_factory.mktemp("plain"), tokenizer)
    set_seed(5)
    trainer.train()
    return trainer


@pytest.mark.parametrize("learning_rate", [None, 1e-2], ids=["as it is", "follows"])
def test_rollouts_are_what_they_would_be(tmp_path, tokenizer, plain, learning_rate):
    trainer, reported = make_trainer(tmp_path, tokenizer), []
    make_draft(trainer.model, [make_prompt(9)]).save_pretrained(tmp_path / "draft")
    draft = Eagle3ForSpeculation.from_pretrained(tmp_path / "draft").eval()
    before = copy.deepcopy(draft.state_dict())
    callbacks = list(trainer.callback_handler.callbacks)
    num_hooks = len(trainer.model.model._forward_hooks)
    trainer.callback_handler.callbacks[-1].on_log = lambda *args, logs, **kwargs: reported.append(dict(logs))
    with assist_rollouts(trainer, draft, learning_rate):
        set_seed(5)
        trainer.train()
    assert history(trainer) == history(plain) and len(history(plain)) >= 4
    for ours, theirs in itertools.zip_longest(trainer.model.parameters(), plain.model.parameters()):
        assert torch.equal(ours, theirs)
    lengths = [entry["acceptance_length"] for entry in trainer.state.log_history if "acceptance_length" in entry]
    assert len(lengths) == 2 and min(lengths) >= 1  # each rollout is learned from twice
    assert [entry["acceptance_length"] for entry in reported if "acceptance_length" in entry] == lengths
    changed = {name for name, weight in draft.state_dict().items() if not torch.equal(weight, before[name])}
    losses = [entry["draft_loss"] for entry in trainer.state.log_history if "draft_loss" in entry]
    assert (len(changed) > 5, len(losses)) == ((False, 0) if learning_rate is None else (True, 4))
    assert not draft.training and trainer.callback_handler.callbacks == callbacks
    assert len(trainer.model.model._forward_hooks) == num_hooks  # and nothing listens any more
    calls = draft.last_generation
    trainer.model.generate(make_prompt(3), max_new_tokens=2)
    assert draft.last_generation is calls


def test_a_draft_that_follows_learns(tmp_path, tokenizer):
    shorter = {"steps_per_generation": 1, "max_completion_length": 8}
    trainer = make_trainer(tmp_path, tokenizer, max_steps=20, learning_rate=0.0, **shorter)
    torch.manual_seed(0)
    draft = Eagle3ForSpeculation.from_target(trainer.model).eval()
    with assist_rollouts(trainer, draft, 1e-2):
        trainer.train()
    losses = [entry["draft_loss"] for entry in trainer.state.log_history if "draft_loss" in entry]
    assert len(losses) == 20 and sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_a_block_draft_learns_by_the_loss_of_its_evaluation(tmp_path, tokenizer):
    """It draws some of the rows, whose weighted loss stands for all of them."""
    target = make_trainer(tmp_path, tokenizer).model
    learner = DraftLearner(target, make_block_draft("dflash", target), 0.0, 5, 0.8)
    assert not any(weight is learner.draft.lm_head.weight for weight in learner.weights)  # it is the target's
    prompt = make_prompt(200)
    for _ in range(8):
        with learner.listening():
            target(prompt)
    learner.draft.eval()
    hidden = target.model(prompt, output_hidden_states=select_hidden_states(learner.layer_ids))
    result = draft_loss(learner.draft, learner.batch_of({"input_ids": prompt}, hidden), 5)
    expected = (0.8 ** torch.arange(5) * result.loss_sums / result.num_rows).sum().item()
    assert sum(learner.losses) / 8 == pytest.approx(expected, rel=0.2)
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}
    with pytest.raises(ValueError, match="Only drafts with full attention can be trained"):
        DraftLearner(target, make_block_draft("dflash", target, **windows), 1e-3, 5, 0.8)


def test_tokens_of_images_are_not_learned():
    """As in `Eagle3Trainer`."""
    target, prompt = make_target("llama"), make_prompt(6)
    learner = DraftLearner(target, Eagle3ForSpeculation.from_target(target), 1e-3, 2, 0.8)
    outputs = target.model(prompt, output_hidden_states=select_hidden_states(learner.layer_ids))
    kinds = torch.tensor([[0, 1, 1, 0, 0, 0]])
    for name in ("token_type_ids", "mm_token_type_ids"):
        labels = learner.batch_of({"input_ids": prompt, name: kinds}, outputs).labels
        assert torch.equal(labels, prompt.where(kinds == 0, -100))


def test_a_draft_in_half_precision_learns_small_steps(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, max_steps=6)
    draft = Eagle3ForSpeculation.from_target(trainer.model).bfloat16()
    before = {name: weight.clone() for name, weight in draft.named_parameters()}
    with assist_rollouts(trainer, draft, learning_rate=1e-3):
        trainer.train()
    assert all(weight.dtype == torch.bfloat16 and weight.grad is None for weight in draft.parameters())
    # Norms, where bfloat16 has no number between 1 and 1.0078: six steps of 1e-3 at once, none of them by itself.
    norms = [name for name in before if name.endswith("norm.weight")]
    assert any(not torch.equal(before[name], draft.get_parameter(name)) for name in norms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_survives_a_target_that_does_not(caplog, dtype):
    """One such batch would end its training, and the draft could not be loaded again."""
    target = make_target("llama")
    draft = Eagle3ForSpeculation.from_target(target).to(dtype)
    learner, before = DraftLearner(target, draft, 1e-2, 2, 0.8), copy.deepcopy(draft.state_dict())
    with learner.listening():
        with torch.no_grad():
            target.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
        rollouts.logger.warning_once.cache_clear()
        target(make_prompt(9))
        assert "The draft does not learn from batches in which its gradients are not finite" in caplog.text
        assert learner.losses == [] and not draft.training and all(weight.grad is None for weight in learner.weights)
        assert all(torch.equal(weight, before[name]) for name, weight in draft.state_dict().items())
        target.load_state_dict(make_target("llama").state_dict())
        target(make_prompt(9))
    assert len(learner.losses) == 1 and not all(map(torch.equal, draft.state_dict().values(), before.values()))


def test_nothing_is_left_after_an_exception(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer)
    draft = make_draft(trainer.model, [make_prompt(9)])
    callbacks = list(trainer.callback_handler.callbacks)
    with pytest.raises(KeyboardInterrupt), assist_rollouts(trainer, draft, 1e-3):
        raise KeyboardInterrupt
    assert trainer.callback_handler.callbacks == callbacks and not trainer.model.model._forward_pre_hooks
    embeds = trainer.model.get_input_embeddings()(make_prompt(5))
    with assist_rollouts(trainer, draft, 1e-3), pytest.raises(ValueError, match="embeddings in place of `input_ids`"):
        trainer.model(inputs_embeds=embeds)
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        setattr(trainer.args, name, True)
        with pytest.raises(ValueError, match=f"`{name}=True`"), assist_rollouts(trainer, draft):
            pass
        setattr(trainer.args, name, False)
    other = make_draft(make_target("llama", seed=1), [make_prompt(9)])
    with pytest.raises(ValueError, match="trained for another model"), assist_rollouts(trainer, other):
        pass
    assert trainer.callback_handler.callbacks == callbacks
