"""What the draft proposes, against a reference that keeps no cache."""

import random
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB_SIZE, make_target
from simulated_graph import SIMULATION

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.remote_code.drafter_eagle3 import Drafter
from hf_eagle3.remote_code.policy_eagle3 import Calibration
from hf_eagle3.remote_code.tree_eagle3 import GenerationCall, Plan


WHOLE, POWER = Plan("draft", depth=4, num_nodes=9, branching_factor=3), 1.5


class Row:
    """What one row of a batch has accepted."""

    def __init__(self, first_position):
        self.tokens, self.states, self.first_position = [], [], first_position

    def confidence(self, draft, target, path):
        """Log-probability of the last of some tokens after the text, by forwards over all that stands before it."""
        tokens = torch.tensor([self.tokens])
        hidden_states = draft.combine_hidden_states(torch.stack(self.states)[None])
        if draft.config.is_parallel:  # masks stand for all tokens of the path but the last
            table = target.get_input_embeddings()
            masks = draft.mask_inputs(len(path) - 1, table)
            text = draft.embed(tokens, table), hidden_states
            embeddings, hidden_states = (torch.cat(parts, dim=1) for parts in zip(text, masks))
            positions = self.first_position + torch.arange(embeddings.shape[1])[None]
            outputs = draft(inputs_embeds=embeddings, hidden_states=hidden_states, position_ids=positions)
            return (POWER * outputs.logits[0, -1]).log_softmax(dim=-1)[path[-1]]
        for token in path:
            positions = self.first_position + torch.arange(tokens.shape[1])[None]
            embeddings = draft.embed(tokens, target.get_input_embeddings())
            outputs = draft(inputs_embeds=embeddings, hidden_states=hidden_states, position_ids=positions)
            tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)
            hidden_states = torch.cat([hidden_states, outputs.last_hidden_state[:, -1:]], dim=1)
        return (POWER * outputs.logits[0, -1]).log_softmax(dim=-1)[path[-1]]

    def confidences(self, draft, target, tokens, parents):
        for node in range(1, len(tokens)):
            path, at = [], node
            while at > 0:
                path, at = [tokens[at], *path], parents[at]
            yield self.confidence(draft, target, path)


@pytest.mark.parametrize(
    ("mask_token_id", "batch_size", "layer_types"),
    [
        (None, 1, ["full_attention"]),
        (None, 3, ["sliding_attention", "full_attention"]),
        (5, 3, ["full_attention"]),
        (5, 1, ["sliding_attention", "full_attention"]),
    ],
    ids=["level by level", "level by level, batch", "in one pass, batch", "in one pass"],
)
@torch.no_grad()
def test_confidences_of_a_tree(layer_types, batch_size, mask_token_id, monkeypatch):
    """However many tokens a row accepts in a step, whichever rows stay, and whether or not each step is drafted."""
    monkeypatch.setattr(Drafter, "MOST_PAIRS", 40 * batch_size)  # prompts are read in pieces
    random_, target = random.Random(batch_size), make_target("llama")
    torch.manual_seed(0)
    draft = Eagle3ForSpeculation.from_target(
        target,
        model_type="qwen3",
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        use_sliding_window=True,
        sliding_window=6,
        mask_token_id=mask_token_id,
    ).eval()
    calls = (
        GenerationCall(target, target.get_input_embeddings(), WHOLE, 0.0, Calibration(POWER), capacity)
        for capacity in (None, 90)
    )
    growing = Drafter(draft, next(calls))
    monkeypatch.setattr("hf_eagle3.remote_code.drafter_eagle3.captures_graphs", lambda device: True)
    for name, value in SIMULATION.items():
        monkeypatch.setattr(name, value)
    fixed = Drafter(draft, next(calls))
    assert fixed.is_captured and not growing.is_captured
    rows, num_drafted = [Row(random_.randint(0, 3)) for _ in range(batch_size)], 0
    for step in range(10):
        counts = [random_.randint(1, 12 if step == 0 else 5) for _ in rows]
        if step > 0 and len(rows) > 1 and step % 3 == 0:
            counts[0] = 0
        width = max(counts)
        tokens, states = (
            torch.randint(VOCAB_SIZE, (len(rows), width)),
            torch.randn(len(rows), width, draft.fc.in_features),
        )
        positions = torch.zeros(len(rows), width, dtype=torch.long)
        for b, (row, count) in enumerate(zip(rows, counts)):
            first = row.first_position + len(row.tokens)
            row.tokens += tokens[b, width - count :].tolist()
            row.states += list(states[b, width - count :])
            states[b, : width - count] = torch.nan  # padding, which nothing reads
            positions[b, width - count :] = torch.arange(first, first + count)
        accepted = SimpleNamespace(tokens=tokens, states=states, positions=positions, counts=counts)
        for drafter in (growing, fixed):
            drafter.observe(accepted)
        if step % 3 == 0 and step > 0:  # decoded plainly
            continue
        if step == 7 and batch_size > 1:
            growing.select([0, 2])
            fixed.select([0, 2])
            rows = [rows[0], rows[2]]
        roots = torch.tensor([[row.tokens[-1]] for row in rows])
        tree, same = growing.propose(WHOLE, roots), fixed.propose(WHOLE, roots)
        assert tree.tokens.tolist() == same.tokens.tolist() and tree.parents.tolist() == same.parents.tolist()
        assert tree.tokens[:, :1].tolist() == roots.tolist() and tree.num_nodes == 10
        for b, row in enumerate(rows):
            expected = row.confidences(draft, target, tree.tokens[b].tolist(), tree.parents[b].tolist())
            expected = torch.stack(list(expected))
            for confidences in (tree.confidences[b], same.confidences[b]):
                torch.testing.assert_close(confidences, expected, atol=1e-4, rtol=1e-4)
        num_drafted += 1
    assert num_drafted == 7
