"""Texts that a target writes with a draft, and the nodes of the trees that were verified on the way."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..remote_code.accept_eagle3 import Accepted
from ..remote_code.assistant_eagle3 import AssistantMixin
from ..remote_code.decoding_eagle3 import TreeDecoding
from ..remote_code.modeling_eagle3 import DraftModel
from ..remote_code.outputs_eagle3 import select_hidden_states
from ..remote_code.tree_eagle3 import DraftTree
from ..training.losses import log_sum_exp
from ..training.models import default_generation


# Less probable nodes are not recorded.
LEAST_PROBABILITY = 0.05


class TreeNodes(NamedTuple):
    """
    The nodes of the trees of a rollout. Parents precede their children.

    Args:
        rows (`torch.LongTensor` of shape `(N,)`): The text that each node would continue.
        roots (`torch.LongTensor` of shape `(N,)`): The position before the root of the node's tree.
        depths (`torch.LongTensor` of shape `(N,)`): The distance from the root.
        parents (`torch.LongTensor` of shape `(N,)`): Places among these nodes; -1 if the parent is the root.
        tokens (`torch.LongTensor` of shape `(N,)`): Target token ids.
        weights (`torch.FloatTensor` of shape `(N,)`): The target's probability of the path; 0 if it went there.
        states (`torch.FloatTensor` of shape `(N, H)`): The input of the target's head.
    """

    rows: torch.Tensor
    roots: torch.Tensor
    depths: torch.Tensor
    parents: torch.Tensor
    tokens: torch.Tensor
    weights: torch.Tensor
    states: torch.Tensor


class RecordingAssistant(AssistantMixin):
    """
    An assistant that records all nodes of a call of `generate`, and what the target predicts there.

    Args:
        draft ([`DraftModel`]): The draft. It proposes a whole tree in every step.
    """

    def __init__(self, draft: DraftModel):
        self.draft, self.num_nodes = draft, 0
        self.steps: list[list[torch.Tensor]] = []
        settings = self.generation_config = copy.deepcopy(draft.generation_config)
        settings.tree_policy, settings.assistant_confidence_threshold = "static", 0.0
        for method in ("proposer", "resolve_aux_layer_ids", "validate_target", "may_replay"):
            setattr(self, method, getattr(draft, method))
        self.decoding_class = RecordedDecoding

    def nodes(self) -> TreeNodes | None:
        """Returns the recorded nodes, or `None` if there are none that are probable enough."""
        return TreeNodes(*map(torch.cat, zip(*self.steps))) if self.num_nodes else None


class RecordedDecoding(TreeDecoding):
    """The [`TreeDecoding`] of a [`RecordingAssistant`]."""

    def __init__(self, assistant: RecordingAssistant, target: PreTrainedModel, *args: Any):
        super().__init__(assistant, target, *args)
        self.assistant, verifier = assistant, self.verifier
        verifier.inputs["output_hidden_states"] = select_hidden_states(
            [*verifier.layer_ids, verifier.config.num_hidden_layers]
        )

    def verify(self, tree: DraftTree) -> tuple[DraftTree, Accepted]:
        tree, accepted = super().verify(tree)
        if tree.num_nodes == 1:
            return tree, accepted
        outputs, rows = self.last_outputs, torch.tensor(self.text.rows)[:, None]
        logits, device = outputs.logits, outputs.logits.device
        tree, states = tree.to(device), outputs.target_outputs.hidden_states[-1][:, -tree.num_nodes :].to(device)
        # The target's probability of each node, at its parent.
        parents, tokens = tree.parents, tree.tokens.clamp(max=logits.shape[-1] - 1)
        log_probs = logits[torch.arange(len(logits), device=device)[:, None], parents, tokens].float()
        log_probs -= log_sum_exp(logits).gather(1, parents)
        log_probs[:, 0] = 0.0
        weights = (tree.ancestors.float() @ log_probs[..., None]).squeeze(2).exp()  # of the path from the root
        positions = outputs.positions.to(device).expand_as(weights)
        kept = weights >= LEAST_PROBABILITY
        kept[:, 0] = False
        kept[[row for row, done in enumerate(accepted.was_finished) if done]] = False
        for row, nodes in enumerate(accepted.nodes):
            weights[row, nodes] = 0.0
        places = torch.full_like(parents, -1)
        places[kept] = torch.arange(int(kept.sum()), device=device) + self.assistant.num_nodes
        self.assistant.num_nodes += int(kept.sum())
        of_rows = (each.to(device).expand_as(kept) for each in (rows, positions[:, :1] - 1))
        whole = (*of_rows, tree.depths, places.gather(1, parents), tree.tokens, weights, states)
        self.assistant.steps.append([each[kept] for each in whole])
        return tree, accepted


@torch.no_grad()
def roll_out(
    target: PreTrainedModel,
    draft: DraftModel,
    prompts: Sequence[torch.Tensor],
    pad_token_id: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> tuple[list[torch.Tensor], TreeNodes | None, list[int]]:
    """
    Continues prompts by `target.generate` with the draft.

    Args:
        target (`PreTrainedModel`), draft ([`DraftModel`]):
            The models. Of the target's `generation_config` only the special tokens count.
        prompts (sequence of `torch.LongTensor` of shape `(L,)`): Token ids.
        pad_token_id (`int`): Pads shorter prompts and texts.
        max_new_tokens (`int`): The length of continuations.
        temperature (`float`): The sampling temperature; 0 for greedy texts.
        seed (`int`): The seed of sampling.

    Returns:
        `tuple`: The texts, of different lengths; the nodes; and the tokens that each verification emitted in each row.
    """
    recorder = RecordingAssistant(draft)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    input_ids = pad_sequence(list(prompts), batch_first=True, padding_value=pad_token_id, padding_side="left")
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=input_ids.device)
    mask = torch.arange(-input_ids.shape[1], 0, device=input_ids.device) >= -lengths[:, None]
    was_training = draft.training
    draft.eval()
    with torch.random.fork_rng(), default_generation(target):
        torch.manual_seed(seed)
        try:
            sequences = target.generate(
                input_ids,
                attention_mask=mask.long(),
                assistant_model=recorder,
                max_new_tokens=max_new_tokens,
                pad_token_id=pad_token_id,
                **sampling,
            )
        finally:
            draft.train(was_training)
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    texts = []
    for prompt, new_tokens in zip(prompts, sequences[:, input_ids.shape[1] :].tolist()):
        length = next((index + 1 for index, token in enumerate(new_tokens) if token in ends), len(new_tokens))
        texts.append(torch.cat([prompt, prompt.new_tensor(new_tokens[:length])]))
    assert recorder.last_generation is not None  # of `generate`
    return texts, recorder.nodes(), recorder.last_generation.accepted_lengths


def joined(groups: Sequence[tuple[list[int], TreeNodes]]) -> TreeNodes | None:
    """Joins the nodes of several calls of [`roll_out`], each with the numbers of its rows among all texts."""
    parts, num_nodes = [], 0
    for rows, nodes in groups:
        numbers = torch.tensor(rows, device=nodes.rows.device)
        parents = torch.where(nodes.parents < 0, -1, nodes.parents + num_nodes)
        parts.append(nodes._replace(rows=numbers[nodes.rows], parents=parents))
        num_nodes += len(nodes.rows)
    return TreeNodes(*map(torch.cat, zip(*parts))) if parts else None


def rollout_batch(
    rows: Sequence[int],
    texts: Sequence[torch.Tensor],
    labels: Sequence[torch.Tensor],
    nodes: TreeNodes | None,
    pad_token_id: int,
) -> dict:
    """
    Collates some texts of a rollout.

    Args:
        rows (sequence of `int`): The numbers of the texts.
        texts, labels (sequences of `torch.LongTensor` of shape `(L,)`): All texts of the rollout.
        nodes (`TreeNodes`, *optional*): All nodes of the rollout.
        pad_token_id (`int`): Pads shorter texts.

    Returns:
        `dict`: `input_ids`, `attention_mask` and `labels`, padded at the right, and `tree_levels`. Each level has
        `tokens`, `parents`, `roots` and `weights` as in [`TreeLevel`], and `states` `(B, M, H)`.
    """

    def pad(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
        return pad_sequence(tensors, batch_first=True, padding_value=value)

    levels: list[dict[str, torch.Tensor]] = []
    batch: dict[str, Any] = {
        "input_ids": pad([texts[row] for row in rows], pad_token_id),
        "attention_mask": pad([torch.ones_like(texts[row]) for row in rows], 0),
        "labels": pad([labels[row] for row in rows], -100),
        "tree_levels": levels,
    }
    if nodes is None:
        return batch
    places = torch.zeros_like(nodes.tokens)
    for depth in range(1, 1 + int(nodes.depths.max())):
        of_rows = [((nodes.depths == depth) & (nodes.rows == row)).nonzero().squeeze(1) for row in rows]
        if not any(map(len, of_rows)):
            break
        for index in of_rows:
            places[index] = torch.arange(len(index), device=index.device)
        index = pad(of_rows, -1)
        is_node, index = index >= 0, index.clamp(min=0)
        parents = nodes.roots[index] if depth == 1 else places[nodes.parents[index].clamp(min=0)]
        level = {"tokens": nodes.tokens[index], "parents": parents, "roots": nodes.roots[index]}
        level = {name: each.masked_fill(~is_node, 0) for name, each in level.items()}
        level |= {"weights": nodes.weights[index].masked_fill(~is_node, 0), "states": nodes.states[index]}
        levels.append(level)
    return batch
