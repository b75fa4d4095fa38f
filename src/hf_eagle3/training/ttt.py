"""
Training-time test (EAGLE-3, https://huggingface.co/papers/2503.01840, section 3.2): the draft is trained on its own
hidden states, several drafting steps deep.

Row `t` starts from the target's states at position `t`. At step `s` it reads the token at `t + 1 + s`, sits at rotary
position `t + s`, and predicts the target's distribution at `t + 1 + s`, which is over the token at `t + 2 + s`. It
attends to what it would attend to when drafting after position `t`: the step-0 keys of rows up to `t`, and its own
keys of the later steps.

A parallel draft (P-EAGLE, https://huggingface.co/papers/2602.01469) reads its mask at all later steps instead.

Beside the text, step `s` may go down a level of trees that were drafted in rollouts ([`TreeLevel`]): there it reads the
tokens of nodes, and attends to the step-0 keys up to the root's row, those of the nodes above, and its own.

Rows need nothing of each other's later steps, so that each step can go on with some of them only (`row_share`): a text is
then a tree of which the rows that are kept are the nodes.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from ..remote_code.ragged_eagle3 import flat_indices, take_rows
from .losses import DraftLoss, LossType, acceptance_rates, log_sum_exp, pieces, probabilities


# Acceptance rates are computed in one of so many rows: sorting a vocabulary takes longer than its loss.
ONE_IN = 64
# Tokens to which the target gives less than that everywhere in a batch may be left out of a sampled softmax.
LEAST_PROBABILITY = 0.01
# Scores of so many queries stand in memory at once.
BLOCK_SIZE = 512

try:
    from torch.nn.attention.flex_attention import AuxRequest
except ImportError:
    AuxRequest = None


class TreeLevel(NamedTuple):
    """
    Nodes at one depth of trees that were drafted in rollouts; below row `t` hang those of which the root is the token at `t + 1`.

    Args:
        tokens (`torch.LongTensor` of shape `(B, M)`)
        parents (`torch.LongTensor` of shape `(B, M)`): Places in the level above; of the first level, rows of the text.
        roots (`torch.LongTensor` of shape `(B, M)`): Rows of the text.
        weights (`torch.FloatTensor` of shape `(B, M)`): What their losses count; 0 where there is no node.
        target_logits (`torch.FloatTensor` of shape `(B, M, draft_vocab_size)`): The target's, on the draft vocabulary.
        target_mass (`torch.FloatTensor` of shape `(B, M)`): The target's probability of the draft vocabulary.
    """

    tokens: torch.LongTensor
    parents: torch.LongTensor
    roots: torch.LongTensor
    weights: torch.FloatTensor
    target_logits: torch.FloatTensor
    target_mass: torch.FloatTensor


@dataclass
class TTTBatch:
    """
    What one unroll needs, for `B` sequences of `L` tokens.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, L)`)
        aux_hidden_states (`torch.FloatTensor` of shape `(B, L, n_aux * H)`): The target's states.
        target_logits (`torch.FloatTensor` of shape `(B, L, draft_vocab_size)`): The target's, on the draft vocabulary.
        target_mass (`torch.FloatTensor` of shape `(B, L)`): The target's probability of the draft vocabulary.
        target_tokens (`torch.LongTensor` of shape `(B, L)`): The target's most probable tokens, as target ids.
        labels (`torch.LongTensor` of shape `(B, L)`): -100 where the token is not to be learned.
        documents (`torch.LongTensor` of shape `(B, L)`): Number of each token's document; -1 on padding.
        position_ids (`torch.LongTensor` of shape `(B, L)`)
        tree_levels (sequence of `TreeLevel`, *optional*): Of trees that were drafted, from the first level on.
    """

    input_ids: torch.LongTensor
    aux_hidden_states: torch.FloatTensor
    target_logits: torch.FloatTensor
    target_mass: torch.FloatTensor
    target_tokens: torch.LongTensor
    labels: torch.LongTensor
    documents: torch.LongTensor
    position_ids: torch.LongTensor
    tree_levels: Sequence[TreeLevel] = ()

    @classmethod
    def of(cls, inputs, aux_hidden_states, distributions, labels, tree_levels=()) -> "TTTBatch":
        """Of a collated batch, and what the target says about it ([`~TargetStates.distributions`])."""
        input_ids, positions = inputs["input_ids"], inputs.get("position_ids")
        documents = documents_of(input_ids, inputs.get("attention_mask"), positions)
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return cls(input_ids, aux_hidden_states, *distributions, labels, documents, positions, tree_levels)


@dataclass
class TTTOutput:
    """
    Sums over rows, one entry a step.

    Args:
        loss_sums (`torch.FloatTensor` of shape `(steps,)`):
            The loss of the rows that count, and of nodes of trees. Where a step has some of the rows, what all would lose,
            estimated by these; all else is of these.
        num_rows (`torch.LongTensor` of shape `(steps,)`): How many do.
        num_correct (`torch.LongTensor` of shape `(steps,)`): In how many the draft's best token is the target's.
        num_sampled (`torch.LongTensor` of shape `(steps,)`): Of how many acceptance rates are computed.
        acceptance_sums (`torch.FloatTensor` of shape `(steps,)`): These, by [`acceptance_rates`].
        num_reached (`torch.LongTensor` of shape `(steps,)`):
            How many count at this and all earlier steps, and were correct at the earlier ones.
        num_accepted (`torch.LongTensor` of shape `(steps,)`): How many of those are correct at this step, too.
    """

    loss_sums: torch.FloatTensor
    num_rows: torch.LongTensor
    num_correct: torch.LongTensor
    num_sampled: torch.LongTensor
    acceptance_sums: torch.FloatTensor
    num_reached: torch.LongTensor
    num_accepted: torch.LongTensor


class TTTCache:
    """
    Stands in for the draft's cache during an unroll: keeps the keys of every step, and attends to them.

    Args:
        documents (`torch.LongTensor` of shape `(B, L)`): Tokens attend within their document.
    """

    def __init__(self, documents: torch.LongTensor):
        self.documents = documents
        self.steps: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # layer: [(keys, values) (B, H_kv, L, D)]
        self.block_mask = None
        if documents.is_cuda:  # each length is compiled, which takes longer than many steps: few lengths
            self.block_mask = causal_block_mask(documents, padded_length(documents.shape[1]))

    def update(self, keys, values, layer_idx):
        self.steps.setdefault(layer_idx, []).append((keys, values))
        return keys, values

    def attention_forward(self, module, query, key, value, attention_mask, scaling, **kwargs):
        keys, values = zip(*self.steps[module.layer_idx])
        if self.block_mask is None:
            output = blockwise_attention(query, keys, values, self.documents, scaling)
        else:
            output = merged_attention(query, keys, values, self.block_mask, scaling, compiled_flex())
        return output.transpose(1, 2), None


class TreeTTTCache:
    """
    [`TTTCache`] of the nodes of trees.

    Args:
        of_text (`TTTCache`): That of the text.
    """

    def __init__(self, of_text: TTTCache):
        self.of_text, self.parents, self.roots = of_text, None, None
        # Of each layer the keys and values of nodes and those above them (B, H_kv, M, depth, D).
        self.paths: dict[int, list[torch.Tensor]] = {}

    def descend(self, parents: torch.LongTensor, roots: torch.LongTensor):
        """Goes on with nodes that have these parents and roots, as in [`TreeLevel`]."""
        self.parents, self.roots = parents, roots

    def update(self, keys, values, layer_idx):
        paths = [keys.unsqueeze(3), values.unsqueeze(3)]
        if (above := self.paths.get(layer_idx)) is not None:
            index = flat_indices(self.parents, above[0].shape)
            shape = (*keys.shape[:3], *above[0].shape[3:])
            above = (each.flatten(0, 2).index_select(0, index).view(shape) for each in above)
            paths = [torch.cat(each, dim=3) for each in zip(above, paths)]
        self.paths[layer_idx] = paths
        return keys, values

    def attention_forward(self, module, query, key, value, attention_mask, scaling, **kwargs):
        keys, values = self.of_text.steps[module.layer_idx][0]
        own = [each for states in self.paths[module.layer_idx] for each in states.unbind(3)]
        outputs = []
        for nodes in torch.arange(query.shape[2], device=query.device).split(BLOCK_SIZE):
            nodes = slice(int(nodes[0]), int(nodes[-1]) + 1)
            block = (query[:, :, nodes], keys, values, self.of_text.documents, self.roots[:, nodes], scaling)
            block += tuple(states[:, :, nodes] for states in own)
            outputs.append(checkpoint(block_attention, *block, use_reentrant=False))
        return torch.cat(outputs, dim=2).transpose(1, 2), None


def blockwise_attention(query, keys, values, documents, scaling, block_size=BLOCK_SIZE):
    """
    Attention of one step: within the document, causally to the keys of step 0, and on the diagonal to those of every
    later step. Scores stand in memory for `block_size` queries at a time; backward computes them again.

    Args:
        query (`torch.FloatTensor` of shape `(B, H, L, D)`)
        keys, values (sequences of `torch.FloatTensor` of shape `(B, H_kv, L, D)`): One entry a step so far.
        documents (`torch.LongTensor` of shape `(B, L)`)
        scaling (`float`): Factor of the scores.
        block_size (`int`)

    Returns:
        `torch.FloatTensor` of shape `(B, H, L, D)`.
    """
    outputs = []
    for start in range(0, query.shape[2], block_size):
        end = min(start + block_size, query.shape[2])
        rows = torch.arange(start, end, device=query.device).expand(len(query), -1)
        own = [states[:, :, start:end] for states in (*keys[1:], *values[1:])]
        seen = (keys[0][:, :, :end], values[0][:, :, :end], documents[:, :end])
        block = (query[:, :, start:end], *seen, rows, scaling, *own)
        if len(keys) > 1 and query.shape[2] > block_size:
            outputs.append(checkpoint(block_attention, *block, use_reentrant=False))
        else:
            outputs.append(block_attention(*block))
    return torch.cat(outputs, dim=2)


def block_attention(query, keys, values, documents, rows, scaling, *own):
    """[`blockwise_attention`] of some `rows` `(B, Q)`; `own` are their later keys and then their later values."""
    num_keys, groups = keys.shape[2], query.shape[1] // keys.shape[1]
    allowed = documents.gather(1, rows)[..., None] == documents[:, None]
    allowed &= rows[..., None] >= torch.arange(num_keys, device=query.device)  # (B, Q, K)
    mask = torch.zeros(allowed.shape, dtype=query.dtype, device=query.device)
    mask = mask.masked_fill_(~allowed, torch.finfo(query.dtype).min)[:, None]
    if not own:
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=scaling, enable_gqa=True)
    own_keys, own_values = (
        torch.stack(half, dim=-2).unsqueeze(2) for half in (own[: len(own) // 2], own[len(own) // 2 :])
    )
    query = query.unflatten(1, (-1, groups)) * scaling  # (B, H_kv, G, Q, D)
    scores = query @ keys.unsqueeze(2).transpose(-1, -2) + mask[:, None]  # (B, H_kv, G, Q, K)
    own_scores = (query.unsqueeze(-2) * own_keys).sum(-1)  # (B, H_kv, G, Q, steps)
    weights = torch.cat([scores, own_scores], dim=-1).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights, own_weights = weights.split([num_keys, own_scores.shape[-1]], dim=-1)
    output = weights @ values.unsqueeze(2) + (own_weights.unsqueeze(-1) * own_values).sum(-2)
    return output.flatten(1, 2)


def merged_attention(query, keys, values, block_mask, scaling, attend):
    """
    [`blockwise_attention`] by flex attention: one causal attention to the keys of step 0, and the diagonal terms,
    weighed by their shares of the sum of exponentials.

    Args:
        block_mask (`BlockMask`): Of [`causal_block_mask`].
        attend (`Callable`): [`attend_by_flex`], compiled or not.
    """
    length = query.shape[2]
    padding = 0, 0, 0, block_mask.shape[-1] - length
    padded = (F.pad(states, padding) for states in (query, keys[0], values[0]))
    output, log_sum = (each[:, :, :length] for each in attend(*padded, block_mask, scaling))
    if len(keys) == 1:
        return output
    grouped = query.unflatten(1, (keys[0].shape[1], -1)) * scaling  # (B, H_kv, G, L, D)
    scores = torch.stack([(grouped * key.unsqueeze(2)).sum(-1) for key in keys[1:]], dim=-1).flatten(1, 2).float()
    log_sums = torch.cat([log_sum.unsqueeze(-1), scores], dim=-1)  # (B, H, L, steps)
    weights = log_sums.softmax(dim=-1).to(output.dtype)
    output = output * weights[..., :1]
    groups = query.shape[1] // keys[0].shape[1]
    for step, value in enumerate(values[1:], start=1):
        output = output + weights[..., step : step + 1] * value.repeat_interleave(groups, dim=1)
    return output


def causal_block_mask(documents: torch.LongTensor, length: int | None = None):
    """
    The `BlockMask` of causal attention within `documents` `(B, L)`.

    Args:
        documents (`torch.LongTensor` of shape `(B, L)`)
        length (`int`, *optional*, defaults to `L`): Pads queries and keys to that length.
    """
    documents = F.pad(documents, (0, (length or documents.shape[1]) - documents.shape[1]), value=-1)
    batch_size, length = documents.shape

    def is_allowed(batch, head, query, key):
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    return create_block_mask(is_allowed, batch_size, None, length, length, device=documents.device)


def padded_length(length: int) -> int:
    """The next power of two, from one block of the kernel's on."""
    return max(1 << (length - 1).bit_length(), 128)


def attend_by_flex(query, key, value, block_mask, scaling):
    """Attention `(B, H, L, D)` and the logarithms of its sums of exponentials `(B, H, L)`."""
    arguments = {"block_mask": block_mask, "scale": scaling, "enable_gqa": True}
    if AuxRequest is None:  # before torch 2.9
        return flex_attention(query, key, value, **arguments, return_lse=True)
    output, aux = flex_attention(query, key, value, **arguments, return_aux=AuxRequest(lse=True))
    return output, aux.lse


@functools.cache
def compiled_flex():
    return torch.compile(attend_by_flex, dynamic=False)


def documents_of(input_ids, attention_mask=None, position_ids=None) -> torch.LongTensor:
    """Numbers the documents of a batch `(B, L)`: positions start again at 0 in each, and padding is -1."""
    documents = torch.zeros_like(input_ids)
    if position_ids is not None:
        documents = (position_ids == 0).cumsum(dim=-1)
    if attention_mask is not None:
        documents = documents.masked_fill(attention_mask == 0, -1)
    return documents


def counted_rows(labels, documents, step: int) -> torch.BoolTensor:
    """
    Which of the first `L - 2 - step` rows count at a step: those whose predicted token is to be learned and in their
    own document. Shape `(B, L - 2 - step)`.
    """
    predicted = slice(2 + step, None)
    rows = slice(0, max(labels.shape[1] - 2 - step, 0))
    same_document = documents[:, predicted] == documents[:, rows]
    return (labels[:, predicted] != -100) & same_document & (documents[:, rows] >= 0)


class UnrollStep(NamedTuple):
    """
    A step of an unroll, of which row `t` predicts the token at `t + 2 + step`.

    Args:
        states (`torch.FloatTensor` of shape `(B, L, H)`): What its head reads. Rows near the end have no token left.
        head (`nn.Module`): Its head, which returns logits `(..., draft_vocab_size)`.
        row_losses (`torch.FloatTensor` of shape `(B, L)`, *optional*): What rows lose besides, that count.
        nodes (`tuple[torch.FloatTensor, TreeLevel]`, *optional*): What the head reads of nodes `(B, M, H)`, and these.
        rows (`torch.LongTensor` of shape `(B, K)`, *optional*):
            Which rows `states` `(B, K, H)` has, where it does not have all.
    """

    states: torch.FloatTensor
    head: Callable
    row_losses: torch.FloatTensor | None = None
    nodes: tuple[torch.FloatTensor, TreeLevel] | None = None
    rows: torch.LongTensor | None = None


class RowTargets(NamedTuple):
    """
    What rows of a step are about.

    Args:
        probs (`torch.FloatTensor` of shape `(B, R, draft_vocab_size)`): The target's, of the draft's tokens, renormalized.
        mass (`torch.FloatTensor` of shape `(B, R)`): What these sum to in the target's whole vocabulary.
        entropy (`torch.FloatTensor` of shape `(B, R)`): The entropy of `probs`.
        best (`torch.LongTensor` of shape `(B, R)`): The target's most probable tokens.
        actual (`torch.LongTensor` of shape `(B, R)`): The tokens of the text.
    """

    probs: torch.FloatTensor
    mass: torch.FloatTensor
    entropy: torch.FloatTensor
    best: torch.LongTensor
    actual: torch.LongTensor


def ttt_unroll(draft, batch: TTTBatch, steps: int, row_share: float = 1.0) -> Iterator[UnrollStep]:
    """
    Unrolls the draft.

    Args:
        row_share (`float`, *optional*, defaults to 1.0):
            The share of each step's rows that the next one goes on with, drawn at random.
    """
    length = batch.input_ids.shape[1]
    hidden_states = draft.combine_hidden_states(batch.aux_hidden_states)
    cache = TTTCache(batch.documents)
    tree_cache, above = TreeTTTCache(cache), None
    text_cache, rows = cache, None
    masks = dict.fromkeys(draft.config.transformer_layer_config.layer_types)  # the cache knows who sees whom
    for step in range(steps):
        nodes = None
        if 0 < step <= len(batch.tree_levels):
            level = batch.tree_levels[step - 1]
            tree_cache.descend(level.parents, level.roots)
            above = hidden_states if step == 1 else above
            normed_nodes, above = draft.step(
                inputs_embeds=draft.embed(level.tokens),
                hidden_states=take_rows(above, level.parents),
                attention_mask=masks,
                position_ids=batch.position_ids.gather(1, level.roots) + step,
                cache=tree_cache,
            )
            nodes = normed_nodes, level
        tokens, position_ids = F.pad(batch.input_ids[:, 1 + step :], (0, min(1 + step, length))), batch.position_ids
        if step > 0 and row_share < 1:
            kept = some_of(hidden_states, math.ceil(row_share**step * length))
            rows = kept if rows is None else rows.gather(1, kept)
            text_cache = TreeTTTCache(cache) if step == 1 else text_cache
            text_cache.descend(kept, rows)
            hidden_states = take_rows(hidden_states, kept)
            tokens, position_ids = tokens.gather(1, rows), position_ids.gather(1, rows)
        if step == 0 and draft.config.is_parallel:
            # Read from the second step on, but DDP may expect that all parameters are in each graph.
            hidden_states = hidden_states + 0 * draft.mask_hidden.sum()
        if step > 0 and draft.config.is_parallel:
            mask_inputs = draft.mask_inputs(hidden_states.shape[1])
            inputs_embeds, hidden_states = (each.expand_as(hidden_states) for each in mask_inputs)
        else:
            inputs_embeds = draft.embed(tokens)
        normed, hidden_states = draft.step(
            inputs_embeds=inputs_embeds,
            hidden_states=hidden_states,
            attention_mask=masks,
            position_ids=position_ids + step,
            cache=text_cache,
        )
        yield UnrollStep(normed, draft.lm_head, nodes=nodes, rows=rows)


def some_of(states: torch.Tensor, num: int) -> torch.LongTensor:
    """`num` of the rows of `states` `(B, L, H)`, at random and in their order: `(B, num)`."""
    return torch.rand(states.shape[:2], device=states.device).topk(num, dim=1).indices.sort(dim=1).values


class SampledVocabulary(NamedTuple):
    """
    Some tokens of the draft vocabulary, by which the softmax over all of them is estimated (sampled softmax,
    https://huggingface.co/papers/1412.2007).

    Args:
        tokens (`torch.LongTensor` of shape `(S,)`): Places in the draft vocabulary.
        log_weights (`torch.FloatTensor` of shape `(S,)`): The logarithm of how many tokens each one stands for.
        weight (`torch.FloatTensor` of shape `(S, H)`): Their rows of the head.
    """

    tokens: torch.LongTensor
    log_weights: torch.FloatTensor
    weight: torch.FloatTensor

    @classmethod
    def of(cls, batch: TTTBatch, head: torch.nn.Linear, num_sampled: int) -> "SampledVocabulary":
        """All tokens that the target somewhere gives `LEAST_PROBABILITY`, and `num_sampled` of the others at random."""
        everywhere = [batch.target_logits, *(level.target_logits for level in batch.tree_levels)]
        best = [
            (logits - total[..., None]).amax(dim=(0, 1))
            for each in everywhere
            if each.numel() > 0  # a level may have no nodes
            for logits, total in pieces(each, log_sum_exp(each))
        ]
        best = torch.stack(best).amax(dim=0)
        is_likely = best >= math.log(LEAST_PROBABILITY)
        others = (~is_likely).nonzero().flatten()
        log_weights = torch.zeros_like(best, dtype=torch.float32)
        if len(others) > num_sampled:
            others = others[torch.randperm(len(others), device=others.device)[:num_sampled]]
            log_weights[others] = math.log((~is_likely).sum().item() / num_sampled)
        tokens = torch.cat([is_likely.nonzero().flatten(), others]).sort().values
        return cls(tokens, log_weights[tokens], head.weight[tokens])

    def of_logits(self, logits: torch.FloatTensor) -> torch.FloatTensor:
        """Logits `(..., S)` of the softmax that stands for that of `logits` `(..., draft_vocab_size)`."""
        return logits[..., self.tokens] + self.log_weights

    def head(self, states: torch.FloatTensor) -> torch.FloatTensor:
        """The draft's head, with such logits `(..., S)`."""
        return F.linear(states, self.weight, self.log_weights.to(self.weight.dtype))


def draft_loss(draft, batch: TTTBatch, steps: int, loss_type: LossType = "kl", **kwargs) -> TTTOutput:
    """The loss of a draft's own kind: its `training_loss(batch, steps)`, or else that of [`ttt_loss`], which takes the rest."""
    own = getattr(draft, "training_loss", None)
    return ttt_loss(draft, batch, steps, loss_type, **kwargs) if own is None else own(batch, steps)


def ttt_loss(
    draft,
    batch: TTTBatch,
    steps: int,
    loss_type: LossType = "kl",
    row_share: float = 1.0,
    num_sampled: int | None = None,
    max_logits: int = 2**25,
) -> TTTOutput:
    """
    The loss of training-time test.

    Args:
        loss_type (`str`, *optional*, defaults to `"kl"`): See [`DraftLoss`].
        row_share (`float`, *optional*, defaults to 1.0): See [`ttt_unroll`].
        num_sampled (`int`, *optional*): See [`SampledVocabulary`]. By default the softmax is that over all tokens.
        max_logits (`int`, *optional*): See [`unroll_loss`].
    """
    vocabulary = None if num_sampled is None else SampledVocabulary.of(batch, draft.lm_head, num_sampled)

    def row_loss(logits, targets):
        return DraftLoss.apply(logits, targets.probs, targets.mass, targets.entropy, loss_type)

    return unroll_loss(draft, batch, ttt_unroll(draft, batch, steps, row_share), row_loss, max_logits, vocabulary)


def unroll_loss(
    draft,
    batch: TTTBatch,
    unroll: Iterable[UnrollStep],
    row_loss: Callable,
    max_logits: int = 2**25,
    vocabulary: SampledVocabulary | None = None,
) -> TTTOutput:
    """
    The loss of each step, and what it says about drafting.

    Args:
        unroll (`Iterable[UnrollStep]`): The steps.
        row_loss (`Callable`):
            `row_loss(logits (B, R, draft_vocab_size), targets: RowTargets) -> losses (B, R)`.
        max_logits (`int`, *optional*):
            How many of the draft's logits may stand in memory: where a step has more, they are computed in pieces, and
            again in backward.
        vocabulary (`SampledVocabulary`, *optional*):
            In place of the whole one, for steps whose head is `draft.lm_head`.
    """
    target_logits, token_ids = batch.target_logits, draft.draft_token_ids
    if vocabulary is not None:
        target_logits, token_ids = vocabulary.of_logits(target_logits), token_ids[vocabulary.tokens]
    target_probs, entropy = probabilities(target_logits)  # (B, L, V_draft), (B, L)
    batch_size, length, vocab_size = target_probs.shape
    piece = max(max_logits // (batch_size * vocab_size), 1)

    def score(head, states, rows, *targets):
        logits, targets = head(states), RowTargets(*targets)
        loss, logits = (row_loss(logits, targets) * rows).sum(), logits.detach()
        unweighted = logits if vocabulary is None else logits - vocabulary.log_weights
        best = token_ids[unweighted.max(dim=-1).indices]
        some = slice(None, None, ONE_IN)
        sampled = rows[:, some]
        rates = acceptance_rates(logits[:, some], targets.probs[:, some], targets.mass[:, some])
        return loss, sampled.sum(), (rates * sampled).sum(), best == targets.best

    def score_nodes(head, states, weights, *targets):
        return (row_loss(head(states), RowTargets(*targets, best=None, actual=None)) * weights).sum()

    def by_piece(score, head, *tensors):
        if tensors[0].shape[1] <= piece:
            return [score(head, *tensors)]
        pieces = zip(*(tensor.split(piece, dim=1) for tensor in tensors))
        return [checkpoint(score, head, *each, use_reentrant=False) for each in pieces]

    outputs, reached = [], torch.ones_like(batch.input_ids, dtype=torch.bool)
    for step, (states, head, row_losses, nodes, kept) in enumerate(unroll):
        head = head if vocabulary is None else vocabulary.head
        rows = counted_rows(batch.labels, batch.documents, step)
        num, all_targets = rows.shape[1], (target_probs, batch.target_mass, entropy, batch.target_tokens)
        # Row t of the draft is about the target's row t + 1 + step, which is about the token after it.
        if kept is None:
            targets = [each[:, 1 + step : 1 + step + num] for each in all_targets]
            targets.append(batch.input_ids[:, 2 + step : 2 + step + num])
            kept = torch.arange(num, device=rows.device).expand(len(rows), -1)
            weight = 1
        else:
            rows = F.pad(rows, (0, length - num)).gather(1, kept)
            about = (kept + 1 + step).clamp(max=length - 1)  # those beyond the text do not count
            targets = [take_rows(each.view(*about.shape[:1], length, -1), about) for each in all_targets]
            targets[1:] = (each.squeeze(-1) for each in targets[1:])
            targets.append(batch.input_ids.gather(1, (kept + 2 + step).clamp(max=length - 1)))
            num, weight = rows.shape[1], length / rows.shape[1]
        scores = by_piece(score, head, states[:, :num], rows, *targets)
        scores = [(weight * loss, *others) for loss, *others in scores]
        if row_losses is not None:
            scores.append(((row_losses[:, :num] * rows).sum(), 0, 0, rows[:, :0]))
        if nodes is not None:
            node_states, level = nodes
            node_logits = level.target_logits if vocabulary is None else vocabulary.of_logits(level.target_logits)
            node_probs, node_entropy = probabilities(node_logits)
            lost = by_piece(score_nodes, head, node_states, level.weights, node_probs, level.target_mass, node_entropy)
            scores.append((sum(lost), 0, 0, rows[:, :0]))
        losses, num_sampled, acceptances, correct = zip(*scores)
        correct = torch.cat(correct, dim=1)
        now = rows & reached.gather(1, kept)
        accepted = now & correct
        reached = torch.zeros_like(reached).scatter(1, kept, accepted)
        counts = (rows.sum(), (correct & rows).sum(), sum(num_sampled), sum(acceptances), now.sum(), accepted.sum())
        outputs.append((sum(losses), *counts))
    return TTTOutput(*map(torch.stack, zip(*outputs)))
