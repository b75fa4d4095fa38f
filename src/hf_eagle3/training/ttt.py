"""
Training-time test (EAGLE-3, https://huggingface.co/papers/2503.01840, section 3.2): the draft learns from its own hidden
states, several drafting steps deep.

Row `t` starts from the target's states at position `t`. At step `s` it reads the token at `t + 1 + s`, has the rotary
position `t + s`, and predicts the target's distribution at `t + 1 + s`, which is over the token at `t + 2 + s`. It
attends to what it would attend to when it drafts after position `t`: to the step-0 keys of rows up to `t`, and to its
own keys of the later steps.

A parallel draft (P-EAGLE, https://huggingface.co/papers/2602.01469) reads its mask at all later steps instead.

The later steps of a row need nothing of other rows. So each step can go on with a share of the rows (`row_share`). The
rows that are kept are then nodes below the text, as in a tree.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from ..remote_code.modeling_eagle3 import DraftModel, Eagle3Attention
from ..remote_code.text_eagle3 import flat_indices, take_rows
from .losses import DraftLoss, acceptance_rates, log_sum_exp, pieces, probabilities


# Acceptance rates are measured in every 64th row, because sorting a vocabulary takes longer than its loss.
ONE_IN = 64
# A sampled softmax always has the tokens that reach this target probability anywhere in the batch.
LEAST_PROBABILITY = 0.01
# Attention scores of this many queries are in memory at once.
BLOCK_SIZE = 512
# Logits of a draft that may be in memory at once.
MAX_LOGITS = 2**25

try:
    from torch.nn.attention.flex_attention import AuxRequest
except ImportError:
    AuxRequest = None  # type: ignore[assignment, misc]


@dataclass
class TTTBatch:
    """
    The input of one unroll, for `B` sequences of `L` tokens.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, L)`): Token ids.
        aux_hidden_states (`torch.FloatTensor` of shape `(B, L, n_aux * H)`): The target's states.
        target_logits (`torch.FloatTensor` of shape `(B, L, draft_vocab_size)`):
            The target's logits on the draft vocabulary.
        target_mass (`torch.FloatTensor` of shape `(B, L)`): The target's probability of the draft vocabulary.
        target_tokens (`torch.LongTensor` of shape `(B, L)`): The target's most probable tokens, as target ids.
        labels (`torch.LongTensor` of shape `(B, L)`): Token ids; -100 where the token is not learned.
        documents (`torch.LongTensor` of shape `(B, L)`): The number of each token's document; -1 on padding.
        position_ids (`torch.LongTensor` of shape `(B, L)`): Positions within the document.
    """

    input_ids: torch.Tensor
    aux_hidden_states: torch.Tensor
    target_logits: torch.Tensor
    target_mass: torch.Tensor
    target_tokens: torch.Tensor
    labels: torch.Tensor
    documents: torch.Tensor
    position_ids: torch.Tensor

    @classmethod
    def of(
        cls,
        inputs: dict[str, torch.Tensor],
        aux_hidden_states: torch.Tensor,
        distributions: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        labels: torch.Tensor,
    ) -> "TTTBatch":
        """Joins a collated batch with the target's states and [`~TargetStates.distributions`]."""
        input_ids, positions = inputs["input_ids"], inputs.get("position_ids")
        documents = documents_of(input_ids, inputs.get("attention_mask"), positions)
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return cls(input_ids, aux_hidden_states, *distributions, labels, documents, positions)


@dataclass
class TTTOutput:
    """
    Sums over rows, one entry per step.

    Args:
        loss_sums (`torch.FloatTensor` of shape `(steps,)`):
            The loss, summed over the rows that count. If a step has a share of the rows, this estimates the sum over all
            rows. The other fields are sums over the share.
        num_rows (`torch.LongTensor` of shape `(steps,)`): The number of rows that count.
        num_correct (`torch.LongTensor` of shape `(steps,)`): Rows in which the draft's best token is the target's.
        num_sampled (`torch.LongTensor` of shape `(steps,)`): Rows in which the acceptance rate is measured.
        acceptance_sums (`torch.FloatTensor` of shape `(steps,)`): The sum of these [`acceptance_rates`].
        num_reached (`torch.LongTensor` of shape `(steps,)`):
            Rows that count at this and all earlier steps and were correct at the earlier ones.
        num_accepted (`torch.LongTensor` of shape `(steps,)`): Rows among those that are correct at this step, too.
    """

    loss_sums: torch.Tensor
    num_rows: torch.Tensor
    num_correct: torch.Tensor
    num_sampled: torch.Tensor
    acceptance_sums: torch.Tensor
    num_reached: torch.Tensor
    num_accepted: torch.Tensor


class TTTCache:
    """
    The draft's cache during an unroll. It keeps the keys of every step and computes the attention to them.

    Args:
        documents (`torch.LongTensor` of shape `(B, L)`): Tokens attend within their document.
    """

    def __init__(self, documents: torch.Tensor):
        self.documents = documents
        self.steps: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # layer: [(keys, values) (B, H_kv, L, D)]
        self.block_mask = None
        if documents.is_cuda:  # compiling takes longer than many steps, so few lengths are compiled
            self.block_mask = causal_block_mask(documents, padded_length(documents.shape[1]))

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.steps.setdefault(layer_idx, []).append((keys, values))
        return keys, values

    def attention_forward(
        self,
        module: Eagle3Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        keys, values = zip(*self.steps[module.layer_idx])
        if self.block_mask is None:
            output = blockwise_attention(query, keys, values, self.documents, scaling)
        else:
            output = merged_attention(query, keys, values, self.block_mask, scaling, compiled_flex())
        return output.transpose(1, 2), None


class TreeTTTCache:
    """
    The [`TTTCache`] of nodes below a text.

    Args:
        of_text (`TTTCache`): The cache of the text.
    """

    # Of the last [`~TreeTTTCache.descend`].
    parents: torch.Tensor
    roots: torch.Tensor

    def __init__(self, of_text: TTTCache):
        self.of_text = of_text
        # For each layer the keys and values of the nodes and their ancestors, (B, H_kv, M, depth, D).
        self.paths: dict[int, list[torch.Tensor]] = {}

    def descend(self, parents: torch.Tensor, roots: torch.Tensor) -> None:
        """
        Goes down one level.

        Args:
            parents (`torch.LongTensor` of shape `(B, M)`): The place of each node's parent in the level above.
            roots (`torch.LongTensor` of shape `(B, M)`): The row of the text that each node hangs from.
        """
        self.parents, self.roots = parents, roots

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        paths = [keys.unsqueeze(3), values.unsqueeze(3)]
        if (above := self.paths.get(layer_idx)) is not None:
            index = flat_indices(self.parents, above[0].shape)
            shape = (*keys.shape[:3], *above[0].shape[3:])
            theirs = (each.flatten(0, 2).index_select(0, index).view(shape) for each in above)
            paths = [torch.cat(each, dim=3) for each in zip(theirs, paths)]
        self.paths[layer_idx] = paths
        return keys, values

    def attention_forward(
        self,
        module: Eagle3Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        keys, values = self.of_text.steps[module.layer_idx][0]
        own = [each for states in self.paths[module.layer_idx] for each in states.unbind(3)]
        outputs = []
        for nodes in torch.arange(query.shape[2], device=query.device).split(BLOCK_SIZE):
            nodes = slice(int(nodes[0]), int(nodes[-1]) + 1)
            block = (query[:, :, nodes], keys, values, self.of_text.documents, self.roots[:, nodes], scaling)
            own_block = (states[:, :, nodes] for states in own)
            outputs.append(checkpoint(block_attention, *block, *own_block, use_reentrant=False))
        return torch.cat(outputs, dim=2).transpose(1, 2), None


def blockwise_attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    documents: torch.Tensor,
    scaling: float,
    block_size: int = BLOCK_SIZE,
) -> torch.Tensor:
    """
    Computes the attention of one step. Within a document it is causal to the keys of step 0, and diagonal to the keys of
    every later step. Scores of `block_size` queries are in memory at a time, and backward computes them again.

    Args:
        query (`torch.FloatTensor` of shape `(B, H, L, D)`): The queries.
        keys, values (sequences of `torch.FloatTensor` of shape `(B, H_kv, L, D)`): One entry per step so far.
        documents (`torch.LongTensor` of shape `(B, L)`): The number of each token's document.
        scaling (`float`): The factor of the scores.
        block_size (`int`, *optional*, defaults to 512): Queries per block.

    Returns:
        `torch.FloatTensor` of shape `(B, H, L, D)`.
    """
    outputs = []
    for start in range(0, query.shape[2], block_size):
        end = min(start + block_size, query.shape[2])
        rows = torch.arange(start, end, device=query.device).expand(len(query), -1)
        own = [states[:, :, start:end] for states in (*keys[1:], *values[1:])]
        seen = (keys[0][:, :, :end], values[0][:, :, :end], documents[:, :end])
        block = (query[:, :, start:end], *seen, rows, scaling)
        if len(keys) > 1 and query.shape[2] > block_size:
            outputs.append(checkpoint(block_attention, *block, *own, use_reentrant=False))
        else:
            outputs.append(block_attention(*block, *own))
    return torch.cat(outputs, dim=2)


def block_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    documents: torch.Tensor,
    rows: torch.Tensor,
    scaling: float,
    *own: torch.Tensor,
) -> torch.Tensor:
    """
    Computes [`blockwise_attention`] for some `rows` `(B, Q)`. `own` has their keys of the later steps, and then their
    values, each `(B, H_kv, Q, D)`.
    """
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


def merged_attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    block_mask: BlockMask,
    scaling: float,
    attend: Callable,
) -> torch.Tensor:
    """
    Computes [`blockwise_attention`] by flex attention. It merges a causal attention to the keys of step 0 with the
    diagonal terms, each weighted by its share of the sum of exponentials.

    Args:
        block_mask (`BlockMask`): The mask of [`causal_block_mask`].
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


def causal_block_mask(documents: torch.Tensor, length: int | None = None) -> BlockMask:
    """
    Returns the `BlockMask` of causal attention within documents.

    Args:
        documents (`torch.LongTensor` of shape `(B, L)`): The number of each token's document.
        length (`int`, *optional*, defaults to `L`): Pads queries and keys to this length.
    """
    documents = F.pad(documents, (0, (length or documents.shape[1]) - documents.shape[1]), value=-1)
    batch_size, length = documents.shape

    def is_allowed(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    return create_block_mask(is_allowed, batch_size, None, length, length, device=documents.device)


def padded_length(length: int) -> int:
    """Returns the next power of two, at least one block of the kernel (128)."""
    return max(1 << (length - 1).bit_length(), 128)


def attend_by_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: BlockMask,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention `(B, H, L, D)` and the logarithms of its sums of exponentials `(B, H, L)`."""
    arguments: dict[str, Any] = {"block_mask": block_mask, "scale": scaling, "enable_gqa": True}
    if AuxRequest is None:  # before torch 2.9
        return flex_attention(query, key, value, **arguments, return_lse=True)
    output, aux = flex_attention(query, key, value, **arguments, return_aux=AuxRequest(lse=True))
    return output, aux.lse


@functools.cache
def compiled_flex() -> Callable:
    """Returns [`attend_by_flex`], compiled once."""
    return torch.compile(attend_by_flex, dynamic=False)


def documents_of(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Returns the number of each token's document, `(B, L)`. A document begins where positions are 0. Padding has -1.
    """
    documents = torch.zeros_like(input_ids)
    if position_ids is not None:
        documents = (position_ids == 0).cumsum(dim=-1)
    if attention_mask is not None:
        documents = documents.masked_fill(attention_mask == 0, -1)
    return documents


def counted_rows(labels: torch.Tensor, documents: torch.Tensor, step: int) -> torch.Tensor:
    """
    Returns which of the first `L - 2 - step` rows count at a step, `(B, L - 2 - step)`. A row counts if the token that
    it predicts is learned and is in the row's document.
    """
    predicted = slice(2 + step, None)
    rows = slice(0, max(labels.shape[1] - 2 - step, 0))
    same_document = documents[:, predicted] == documents[:, rows]
    return (labels[:, predicted] != -100) & same_document & (documents[:, rows] >= 0)


class UnrollStep(NamedTuple):
    """
    One step of an unroll. Its row `t` predicts the token at `t + 2 + step`.

    Args:
        states (`torch.FloatTensor` of shape `(B, L, H)`):
            The input of the head. The last rows have no token left to predict.
        head (`nn.Module`): The head. It returns logits `(..., draft_vocab_size)`.
        row_losses (`torch.FloatTensor` of shape `(B, L)`, *optional*): Losses to add in the rows that count.
        rows (`torch.LongTensor` of shape `(B, K)`, *optional*):
            The rows that `states` `(B, K, H)` has, if it does not have all.
        row_weights (`torch.FloatTensor` of shape `(B, K)`, *optional*):
            The number of rows that each of `rows` stands for in the loss. By default `L / K`.
    """

    states: torch.Tensor
    head: Callable
    row_losses: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    row_weights: torch.Tensor | None = None


class RowTargets(NamedTuple):
    """
    What the rows of a step predict.

    Args:
        probs (`torch.FloatTensor` of shape `(B, R, draft_vocab_size)`):
            The target's probabilities of the draft's tokens, renormalized to sum to one.
        mass (`torch.FloatTensor` of shape `(B, R)`): Their sum before that, in the target's whole vocabulary.
        entropy (`torch.FloatTensor` of shape `(B, R)`): The entropy of `probs`.
        best (`torch.LongTensor` of shape `(B, R)`): The target's most probable tokens.
        actual (`torch.LongTensor` of shape `(B, R)`): The tokens of the text.
    """

    probs: torch.Tensor
    mass: torch.Tensor
    entropy: torch.Tensor
    best: torch.Tensor
    actual: torch.Tensor


def ttt_unroll(draft: DraftModel, batch: TTTBatch, steps: int, row_share: float = 1.0) -> Iterator[UnrollStep]:
    """
    Unrolls the draft, and yields each step.

    Args:
        draft ([`DraftModel`]): The draft.
        batch (`TTTBatch`): The batch.
        steps (`int`): The number of drafting steps.
        row_share (`float`, *optional*, defaults to 1.0):
            The share of its rows that each step passes on to the next, drawn at random.
    """
    length = batch.input_ids.shape[1]
    hidden_states = draft.combine_hidden_states(batch.aux_hidden_states)
    cache = TTTCache(batch.documents)
    tree_cache: TreeTTTCache | None = None
    rows: torch.Tensor | None = None
    masks = dict.fromkeys(draft.config.transformer_layer_config.layer_types)  # the cache masks
    for step in range(steps):
        tokens, position_ids = F.pad(batch.input_ids[:, 1 + step :], (0, min(1 + step, length))), batch.position_ids
        if step > 0 and row_share < 1:
            kept = some_of(hidden_states, math.ceil(row_share**step * length))
            rows = kept if rows is None else rows.gather(1, kept)
            tree_cache = TreeTTTCache(cache) if tree_cache is None else tree_cache
            tree_cache.descend(kept, rows)
            hidden_states = take_rows(hidden_states, kept)
            tokens, position_ids = tokens.gather(1, rows), position_ids.gather(1, rows)
        if step == 0 and draft.config.is_parallel:
            # Only later steps read the mask, but DDP may expect every parameter in each graph.
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
            cache=cache if tree_cache is None else tree_cache,
        )
        yield UnrollStep(normed, draft.lm_head, rows=rows)


def some_of(states: torch.Tensor, num: int) -> torch.Tensor:
    """Draws `num` rows of `states` `(B, L, H)` at random, and returns them in order, `(B, num)`."""
    return torch.rand(states.shape[:2], device=states.device).topk(num, dim=1).indices.sort(dim=1).values


class SampledVocabulary(NamedTuple):
    """
    A sample of the draft vocabulary that estimates the softmax over all of it (sampled softmax,
    https://huggingface.co/papers/1412.2007).

    Args:
        tokens (`torch.LongTensor` of shape `(S,)`): Places in the draft vocabulary.
        log_weights (`torch.FloatTensor` of shape `(S,)`):
            The logarithm of the number of tokens that each one stands for.
        weight (`torch.FloatTensor` of shape `(S, H)`): The rows of the head for these tokens.
        scale (`Callable`, *optional*): What the draft does to logits of its head.
    """

    tokens: torch.Tensor
    log_weights: torch.Tensor
    weight: torch.Tensor
    scale: Callable | None = None

    @classmethod
    def of(cls, batch: TTTBatch, draft: DraftModel, num_sampled: int) -> "SampledVocabulary":
        """
        Takes all tokens that reach `LEAST_PROBABILITY` anywhere in the batch, and `num_sampled` of the others at random.
        """
        total = log_sum_exp(batch.target_logits)
        parts = pieces(batch.target_logits, total)
        best = torch.stack([(logits - each[..., None]).amax(dim=(0, 1)) for logits, each in parts]).amax(dim=0)
        is_likely = best >= math.log(LEAST_PROBABILITY)
        others = (~is_likely).nonzero().flatten()
        log_weights = torch.zeros_like(best, dtype=torch.float32)
        if len(others) > num_sampled:
            others = others[torch.randperm(len(others), device=others.device)[:num_sampled]]
            log_weights[others] = math.log((~is_likely).sum().item() / num_sampled)
        tokens = torch.cat([is_likely.nonzero().flatten(), others]).sort().values
        return cls(tokens, log_weights[tokens], draft.lm_head.weight[tokens], getattr(draft, "scale_logits", None))

    def of_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the sampled logits `(..., S)` of `logits` `(..., draft_vocab_size)`."""
        return logits[..., self.tokens] + self.log_weights

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Applies the draft's head to states `(..., H)`, and returns the sampled logits `(..., S)`."""
        if self.scale is None:
            return F.linear(states, self.weight, self.log_weights.to(self.weight.dtype))
        logits = self.scale(F.linear(states, self.weight))
        return logits + self.log_weights.to(logits.dtype)


def draft_loss(draft: DraftModel, batch: TTTBatch, steps: int, **kwargs: Any) -> TTTOutput:
    """
    Returns the draft's own `training_loss(batch, steps)`, if it has one, and else [`ttt_loss`] with the other arguments, on
    the steps of its own `unroll(batch, steps)`, if it has one.
    """
    if hasattr(draft, "training_loss"):
        return draft.training_loss(batch, steps)
    unroll = draft.unroll(batch, steps) if hasattr(draft, "unroll") else None
    return ttt_loss(draft, batch, steps, unroll=unroll, **kwargs)


def ttt_loss(
    draft: DraftModel,
    batch: TTTBatch,
    steps: int,
    row_share: float = 1.0,
    num_sampled: int | None = None,
    max_logits: int = MAX_LOGITS,
    unroll: Iterable[UnrollStep] | None = None,
) -> TTTOutput:
    """
    Returns the loss of training-time test.

    Args:
        draft ([`DraftModel`]): The draft.
        batch (`TTTBatch`): The batch.
        steps (`int`): The number of drafting steps.
        row_share (`float`, *optional*, defaults to 1.0): See [`ttt_unroll`].
        num_sampled (`int`, *optional*): See [`SampledVocabulary`]. By default the softmax is over all tokens.
        max_logits (`int`, *optional*): See [`unroll_loss`].
        unroll (`Iterable[UnrollStep]`, *optional*): The steps. By default those of [`ttt_unroll`].
    """
    vocabulary = None if num_sampled is None else SampledVocabulary.of(batch, draft, num_sampled)
    unroll = ttt_unroll(draft, batch, steps, row_share) if unroll is None else unroll

    def row_loss(logits: torch.Tensor, targets: RowTargets) -> torch.Tensor:
        return DraftLoss.apply(logits, targets.probs, targets.entropy)

    return unroll_loss(draft, batch, unroll, row_loss, max_logits, vocabulary)


def unroll_loss(
    draft: DraftModel,
    batch: TTTBatch,
    unroll: Iterable[UnrollStep],
    row_loss: Callable[[torch.Tensor, RowTargets], torch.Tensor],
    max_logits: int = MAX_LOGITS,
    vocabulary: SampledVocabulary | None = None,
) -> TTTOutput:
    """
    Returns the loss of each step and the counts of its metrics.

    Args:
        draft ([`DraftModel`]): The draft.
        batch (`TTTBatch`): The batch.
        unroll (`Iterable[UnrollStep]`): The steps.
        row_loss (`Callable`):
            `row_loss(logits (B, R, draft_vocab_size), targets: RowTargets) -> losses (B, R)`.
        max_logits (`int`, *optional*):
            The number of draft logits that may be in memory. A step with more computes them in pieces, and again in
            backward.
        vocabulary (`SampledVocabulary`, *optional*):
            The tokens to compute logits of, for steps whose head is `draft.lm_head`. By default all.
    """
    target_logits, token_ids = batch.target_logits, draft.draft_token_ids
    if vocabulary is not None:
        target_logits, token_ids = vocabulary.of_logits(target_logits), token_ids[vocabulary.tokens]
    target_probs, entropy = probabilities(target_logits)  # (B, L, V_draft), (B, L)
    all_targets = (target_probs, batch.target_mass, entropy, batch.target_tokens)

    def score(
        head: Callable, states: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, *of_rows: torch.Tensor
    ) -> tuple:
        logits, targets = head(states), RowTargets(*of_rows)
        loss, logits = (row_loss(logits, targets) * weights).sum(), logits.detach()
        unweighted = logits if vocabulary is None else logits - vocabulary.log_weights
        best = token_ids[unweighted.max(dim=-1).indices]
        some = slice(None, None, ONE_IN)
        sampled = rows[:, some]
        rates = acceptance_rates(logits[:, some], targets.probs[:, some], targets.mass[:, some])
        return loss, sampled.sum(), (rates * sampled).sum(), best == targets.best

    outputs, reached = [], torch.ones_like(batch.input_ids, dtype=torch.bool)
    for number, step in enumerate(unroll):
        head = step.head if vocabulary is None else vocabulary.head
        rows, kept, weight, targets = targets_of(batch, all_targets, number, step.rows)
        num, weights = rows.shape[1], rows * (weight if step.row_weights is None else step.row_weights)
        of_rows = step.states[:, :num], rows, weights, *targets
        scores = in_pieces(score, max_logits, target_probs.shape[-1], head, *of_rows)
        if step.row_losses is not None:
            scores.append(((step.row_losses[:, :num] * rows).sum(), 0, 0, rows[:, :0]))
        losses, num_sampled, acceptances, are_correct = zip(*scores)
        correct = torch.cat(are_correct, dim=1)
        now = rows & reached.gather(1, kept)
        accepted = now & correct
        reached = torch.zeros_like(reached).scatter(1, kept, accepted)
        counts = (rows.sum(), (correct & rows).sum(), sum(num_sampled), sum(acceptances), now.sum(), accepted.sum())
        outputs.append((sum(losses), *counts))
    return TTTOutput(*map(torch.stack, zip(*outputs)))


def targets_of(
    batch: TTTBatch, all_targets: tuple[torch.Tensor, ...], step: int, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, float, list[torch.Tensor]]:
    """
    Returns which rows of a step count `(B, R)`, their numbers `(B, R)`, the number of rows that each one stands for, and
    the fields of their [`RowTargets`].

    Args:
        batch (`TTTBatch`): The batch.
        all_targets (`tuple`): `probs`, `mass`, `entropy` and `best` at each of the `L` positions.
        step (`int`): The number of the step.
        kept (`torch.LongTensor` of shape `(B, R)`, *optional*): The rows that the step has, if not all.
    """
    rows, length = counted_rows(batch.labels, batch.documents, step), batch.input_ids.shape[1]
    num = rows.shape[1]
    # The draft's row t predicts what the target predicts in its row t + 1 + step: the token after that row.
    if kept is None:
        targets = [each[:, 1 + step : 1 + step + num] for each in all_targets]
        targets.append(batch.input_ids[:, 2 + step : 2 + step + num])
        return rows, torch.arange(num, device=rows.device).expand(len(rows), -1), 1, targets
    rows = F.pad(rows, (0, length - num)).gather(1, kept)
    predicted = (kept + 1 + step).clamp(max=length - 1)  # rows beyond the text do not count
    targets = [take_rows(each.view(*predicted.shape[:1], length, -1), predicted) for each in all_targets]
    targets[1:] = (each.squeeze(-1) for each in targets[1:])
    targets.append(batch.input_ids.gather(1, (kept + 2 + step).clamp(max=length - 1)))
    return rows, kept, length / rows.shape[1], targets


def in_pieces(score: Callable, max_logits: int, vocab_size: int, head: Callable, *tensors: torch.Tensor) -> list:
    """
    Returns `score(head, *tensors)` for each piece of tensors `(B, R, ...)`. A piece has at most `max_logits` logits. If
    there are several, backward computes them again.
    """
    rows = max(max_logits // (len(tensors[0]) * vocab_size), 1)
    if tensors[0].shape[1] <= rows:
        return [score(head, *tensors)]
    parts = zip(*(tensor.split(rows, dim=1) for tensor in tensors))
    return [checkpoint(score, head, *each, use_reentrant=False) for each in parts]
