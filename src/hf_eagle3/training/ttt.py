"""
Training-time test (EAGLE-3, https://huggingface.co/papers/2503.01840, section 3.2): the draft learns from its own hidden
states, several drafting steps deep.

In this file and in the losses a *row* is a position of a sequence, not a sequence of the batch. Row `t` starts from the
target's states at position `t`. At step `s` it reads the token at `t + 1 + s`, has the rotary
position `t + s`, and predicts the target's distribution at `t + 1 + s`, which is over the token at `t + 2 + s`. It
attends to what it would attend to when it drafts after position `t`: to the step-0 keys of rows up to `t`, and to its
own keys of the later steps.

A parallel draft (P-EAGLE, https://huggingface.co/papers/2602.01469) reads its mask at all later steps instead.

The later steps of a row need nothing of other rows. So each step can go on with a share of the rows (`row_share`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..remote_code.draft_model_eagle3 import DraftModel
from ..remote_code.text_eagle3 import take_rows
from .attention import TTTCache, recomputed
from .losses import DraftLoss, acceptance_rates, log_sum_exp, pieces, probabilities


# Acceptance rates are measured in every 64th row, because sorting a vocabulary takes longer than its loss.
ONE_IN = 64
# A sampled softmax always has the tokens that reach this target probability anywhere in the batch.
LEAST_PROBABILITY = 0.01
# Logits of a draft that may be in memory at once: on a CPU, and elsewhere, where each piece costs kernel launches.
MAX_LOGITS_ON_CPU, MAX_LOGITS_ELSEWHERE = 2**25, 2**27


@dataclass
class TTTBatch:
    """The input of one unroll, for `B` sequences of `L` tokens."""

    input_ids: torch.Tensor  # (B, L)
    aux_hidden_states: torch.Tensor  # (B, L, n_aux * H): the target's states
    target_logits: torch.Tensor  # (B, L, draft_vocab_size): the target's logits of the draft's tokens
    target_mass: torch.Tensor  # (B, L): the target's probability of all these tokens
    target_tokens: torch.Tensor  # (B, L): the target's most probable tokens, as target ids
    labels: torch.Tensor  # (B, L): token ids; -100 where the token is not learned
    documents: torch.Tensor  # (B, L): the number of each token's document; -1 on padding
    position_ids: torch.Tensor  # (B, L): positions within the document

    @classmethod
    def of(
        cls,
        inputs: dict[str, torch.Tensor],
        aux_hidden_states: torch.Tensor,
        distributions: Sequence[torch.Tensor],
        labels: torch.Tensor,
    ) -> "TTTBatch":
        """Joins a collated batch with the target's states and [`~TargetStates.distributions`]."""
        input_ids, positions = inputs["input_ids"], inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        logits, mass, tokens = distributions
        return cls(input_ids, aux_hidden_states, logits, mass, tokens, labels, documents_of(inputs), positions)


@dataclass
class TTTOutput:
    """
    Sums over rows, one entry per step, `(steps,)`. If a step has a share of the rows, `loss_sums` estimates the sum over all
    rows. The other fields are sums over the share.
    """

    loss_sums: torch.Tensor  # the loss of the rows that count
    num_rows: torch.Tensor  # rows that count
    num_correct: torch.Tensor  # rows in which the draft's best token is the target's
    num_sampled: torch.Tensor  # rows in which the acceptance rate is measured
    acceptance_sums: torch.Tensor  # the sum of these [`acceptance_rates`]
    num_reached: torch.Tensor  # rows that count at this and all earlier steps and were correct at the earlier ones
    num_accepted: torch.Tensor  # rows among those that are correct at this step, too

    def loss(self, decay: float, num_rows: torch.Tensor | None = None) -> torch.Tensor:
        """
        Returns the sum over steps of the mean loss of `num_rows` `(steps,)`, by default those that count here. Each step has the
        weight of the step before, times `decay`.
        """
        num_rows = self.num_rows if num_rows is None else num_rows
        weights = decay ** torch.arange(len(num_rows), device=num_rows.device)
        return (weights * self.loss_sums / num_rows.clamp(min=1)).sum()


def documents_of(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """
    Returns the number of each token's document in a collated batch, `(B, L)`. A document begins where positions are 0.
    Padding has -1.
    """
    documents = torch.zeros_like(inputs["input_ids"])
    if (position_ids := inputs.get("position_ids")) is not None:
        documents = (position_ids == 0).cumsum(dim=-1)
    if (attention_mask := inputs.get("attention_mask")) is not None:
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


def num_counted(labels: torch.Tensor, documents: torch.Tensor, steps: int) -> torch.Tensor:
    """Returns how many rows count at each step, `(steps,)`. See [`counted_rows`]."""
    return torch.stack([counted_rows(labels, documents, step).sum() for step in range(steps)])


class UnrollStep(NamedTuple):
    """One step of an unroll. Its row `t` predicts the token at `t + 2 + step`."""

    states: torch.Tensor  # (B, L, H): the input of the head. The last rows have no token left to predict
    head: Callable  # returns logits (..., draft_vocab_size)
    row_losses: torch.Tensor | None = None  # (B, L): losses to add in the rows that count
    rows: torch.Tensor | None = None  # (B, K): the rows that `states` (B, K, H) has, if it does not have all
    row_weights: torch.Tensor | None = None  # (B, K): how many rows each of `rows` stands for. By default L / K


class RowTargets(NamedTuple):
    """What the rows of a step predict."""

    probs: torch.Tensor  # (B, R, draft_vocab_size): the target's probabilities of the draft's tokens, with sum one
    mass: torch.Tensor  # (B, R): their sum before that, in the target's whole vocabulary
    entropy: torch.Tensor  # (B, R): the entropy of `probs`
    best: torch.Tensor  # (B, R): the target's most probable tokens
    actual: torch.Tensor  # (B, R): the tokens of the text


def ttt_unroll(draft: DraftModel, batch: TTTBatch, steps: int, row_share: float = 1.0) -> Iterator[UnrollStep]:
    """
    Unrolls the draft, and yields each step. Each step passes a `row_share` of its rows, drawn at random, on to the next.
    """
    length = batch.input_ids.shape[1]
    hidden_states = draft.combine_hidden_states(batch.aux_hidden_states)
    if draft.config.is_parallel:  # only later steps read the mask, but DDP may expect every parameter in each graph
        hidden_states = hidden_states + 0 * draft.mask_hidden.sum()
    cache = TTTCache(batch.documents)
    rows: torch.Tensor | None = None
    masks = dict.fromkeys(draft.config.transformer_layer_config.layer_types)  # the cache masks
    for step in range(steps):
        tokens = F.pad(batch.input_ids[:, 1 + step :], (0, min(1 + step, length)))
        position_ids = batch.position_ids
        if step > 0 and row_share < 1:
            kept = some_of(hidden_states, math.ceil(row_share**step * length))
            rows = kept if rows is None else rows.gather(1, kept)
            cache.keep(kept, rows)
            hidden_states = take_rows(hidden_states, kept)
            tokens, position_ids = tokens.gather(1, rows), position_ids.gather(1, rows)
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
            cache=cache,
        )
        yield UnrollStep(normed, draft.lm_head, rows=rows)


def some_of(states: torch.Tensor, num: int) -> torch.Tensor:
    """Draws `num` rows of `states` `(B, L, H)` at random, and returns them in order, `(B, num)`."""
    return torch.rand(states.shape[:2], device=states.device).topk(num, dim=1).indices.sort(dim=1).values


class SampledVocabulary(NamedTuple):
    """
    A sample of the draft vocabulary that estimates the softmax over all of it (sampled softmax,
    https://huggingface.co/papers/1412.2007).
    """

    tokens: torch.Tensor  # (S,): places in the draft vocabulary
    log_weights: torch.Tensor  # (S,): the logarithm of the number of tokens that each one stands for
    head: Callable  # returns logits (..., S) of these tokens, with the log weights, given states (..., H)

    @classmethod
    def of(cls, batch: TTTBatch, draft: DraftModel, sampled_vocab_size: int) -> "SampledVocabulary":
        """
        Takes all tokens that reach `LEAST_PROBABILITY` anywhere in the batch, and of the others `sampled_vocab_size`, or up to a
        quarter more, at random.
        """
        total = log_sum_exp(batch.target_logits)
        parts = pieces(batch.target_logits, total)
        best = torch.stack([(logits - each[..., None]).amax(dim=(0, 1)) for logits, each in parts]).amax(dim=0)
        is_likely = best >= math.log(LEAST_PROBABILITY)
        num_likely = int(is_likely.sum())  # the only sync of an unroll
        num_others = len(best) - num_likely
        # In all, whole groups: a CPU compiles kernels for each new size in bfloat16.
        group = max(sampled_vocab_size // 4, 1)
        num_drawn = min(sampled_vocab_size + -(num_likely + sampled_vocab_size) % group, num_others)
        order = torch.rand(len(best), device=best.device) + is_likely
        tokens = order.topk(num_likely + num_drawn).indices.sort().values
        log_weights = torch.zeros_like(best, dtype=torch.float32)
        if num_drawn < num_others:
            log_weights = log_weights.masked_fill(~is_likely, math.log(num_others / num_drawn))
        log_weights = log_weights[tokens]
        has_own = hasattr(draft, "trained_head")
        if not has_own and not hasattr(draft.lm_head, "base_layer"):
            weight = draft.lm_head.weight.index_select(0, tokens)
            return cls(tokens, log_weights, partial(F.linear, weight=weight, bias=log_weights.to(weight.dtype)))
        logits_of = draft.trained_head(tokens) if has_own else selected_outputs(draft.lm_head, tokens)
        return cls(tokens, log_weights, lambda states: (logits := logits_of(states)) + log_weights.to(logits.dtype))

    def of_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the sampled logits `(..., S)` of `logits` `(..., draft_vocab_size)`."""
        return logits[..., self.tokens] + self.log_weights


def selected_outputs(layer: torch.nn.Linear, places: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that computes the outputs at some `places` `(S,)` of a linear layer without bias."""
    if hasattr(layer, "base_layer"):  # an adapter of PEFT, of which `weight` has nothing
        return lambda states: layer(states).index_select(-1, places)
    return partial(F.linear, weight=layer.weight.index_select(0, places))


def draft_loss(draft: DraftModel, batch: TTTBatch, steps: int, **kwargs: Any) -> TTTOutput:
    """
    Returns the loss of a draft that may have its own `unroll` and `row_loss` ([`~baseline.BaselineDraft`]). Without a `row_loss` it
    is [`ttt_loss`] with the other arguments.
    """
    if hasattr(draft, "row_loss"):
        return unroll_loss(draft, batch, draft.unroll(batch, steps), draft.row_loss)
    unroll = draft.unroll(batch, steps) if hasattr(draft, "unroll") else None
    return ttt_loss(draft, batch, steps, unroll=unroll, **kwargs)


def ttt_loss(
    draft: DraftModel,
    batch: TTTBatch,
    steps: int,
    row_share: float = 1.0,
    sampled_vocab_size: int | None = None,
    max_logits: int | None = None,
    unroll: Iterable[UnrollStep] | None = None,
) -> TTTOutput:
    """
    Returns the loss of training-time test. By default the steps are those of [`ttt_unroll`], and the softmax is over all
    tokens, not over `sampled_vocab_size` besides the likely ones ([`SampledVocabulary`]). For `max_logits` see [`unroll_loss`].
    """
    vocabulary = None if sampled_vocab_size is None else SampledVocabulary.of(batch, draft, sampled_vocab_size)
    unroll = ttt_unroll(draft, batch, steps, row_share) if unroll is None else unroll

    def row_loss(logits: torch.Tensor, targets: RowTargets) -> torch.Tensor:
        return DraftLoss.apply(logits, targets.probs, targets.entropy)

    return unroll_loss(draft, batch, unroll, row_loss, max_logits, vocabulary)


def unroll_loss(
    draft: DraftModel,
    batch: TTTBatch,
    unroll: Iterable[UnrollStep],
    row_loss: Callable[[torch.Tensor, RowTargets], torch.Tensor],
    max_logits: int | None = None,
    vocabulary: SampledVocabulary | None = None,
) -> TTTOutput:
    """
    Returns the loss of each step and the counts of its metrics. `row_loss` returns losses `(B, R)`, given the draft's logits
    `(B, R, draft_vocab_size)`. At most `max_logits` of them are in memory, by default as many as suit the device. A step with more
    computes them in pieces, and again in backward. Steps whose head is `draft.lm_head` may have a `vocabulary`: the only tokens to
    compute logits of.
    """
    target_logits, token_ids, head = batch.target_logits, draft.draft_token_ids, None
    if vocabulary is not None:
        target_logits, head = vocabulary.of_logits(target_logits), vocabulary.head
        token_ids = token_ids[vocabulary.tokens]
    target_probs, entropy = probabilities(target_logits)  # (B, L, V_draft), (B, L)
    next_tokens = F.pad(batch.input_ids[:, 1:], (0, 1))
    all_targets = RowTargets(target_probs, batch.target_mass, entropy, batch.target_tokens, next_tokens)
    if max_logits is None:
        max_logits = MAX_LOGITS_ON_CPU if target_probs.device.type == "cpu" else MAX_LOGITS_ELSEWHERE
    # A multiple of `ONE_IN`, so that pieces do not change which rows are sampled.
    rows_of_piece = max(max_logits // target_probs[:, 0].numel() // ONE_IN, 1) * ONE_IN

    def score(head: Callable, states: torch.Tensor, weights: torch.Tensor, *targets: torch.Tensor) -> tuple:
        """Returns the loss of some rows, the tokens that the draft proposes there, and the logits of every 64th row."""
        logits = head(states)
        loss, logits = (row_loss(logits, RowTargets(*targets)) * weights).sum(), logits.detach()
        unweighted = logits if vocabulary is None else logits - vocabulary.log_weights
        return loss, token_ids[unweighted.max(dim=-1).indices], logits[:, ::ONE_IN].clone()

    losses, counts, samples = [], [], []
    reached = torch.ones_like(batch.input_ids, dtype=torch.bool)  # the rows whose earlier tokens were all accepted
    for number, step in enumerate(unroll):  # each predicts one token further ahead
        rows, is_counted, weights, targets = rows_of_step(batch, all_targets, number, step)
        states = step.states[:, : rows.shape[1]]
        loss, proposed, logits = in_pieces(score, rows_of_piece, head or step.head, states, weights, *targets)
        if step.row_losses is not None:
            loss = loss + (step.row_losses[:, : rows.shape[1]] * is_counted).sum()
        losses.append(loss)

        is_correct = proposed == targets.best
        is_reached = is_counted & reached.gather(1, rows)
        is_accepted = is_reached & is_correct
        reached = torch.zeros_like(reached).scatter(1, rows, is_accepted)
        counts.append([each.sum() for each in (is_counted, is_correct & is_counted, is_reached, is_accepted)])
        samples.append((logits, *(each[:, ::ONE_IN] for each in (targets.probs, targets.mass, is_counted))))
    num_rows, num_correct, num_reached, num_accepted = map(torch.stack, zip(*counts))
    num_sampled, acceptance_sums = sampled_acceptance(samples)
    return TTTOutput(
        torch.stack(losses), num_rows, num_correct, num_sampled, acceptance_sums, num_reached, num_accepted
    )


def rows_of_step(
    batch: TTTBatch, all_targets: RowTargets, number: int, step: UnrollStep
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, RowTargets]:
    """
    Returns the `R` rows of a step that have a token left to predict, which of them count, the weights of their losses, all
    `(B, R)`, and what they predict. `all_targets` is what the target predicts at each of the `L` positions.
    """
    is_counted, length = counted_rows(batch.labels, batch.documents, number), batch.input_ids.shape[1]
    num, ahead = is_counted.shape[1], 1 + number
    # The draft's row t predicts what the target predicts in its row t + 1 + s: the token after that row.
    if step.rows is None:
        rows, weight = torch.arange(num, device=is_counted.device).expand(len(is_counted), -1), 1.0
        targets = RowTargets._make(each[:, ahead : ahead + num] for each in all_targets)
    else:
        rows, weight = step.rows, length / step.rows.shape[1]  # each stands for several
        is_counted = F.pad(is_counted, (0, length - num)).gather(1, rows)
        predicted = (rows + ahead).clamp(max=length - 1)  # rows beyond the text do not count
        probs, *others = all_targets
        targets = RowTargets._make([take_rows(probs, predicted), *(each.gather(1, predicted) for each in others)])
    return rows, is_counted, is_counted * (weight if step.row_weights is None else step.row_weights), targets


def sampled_acceptance(samples: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns how many sampled rows of each step count, and the sums of their [`acceptance_rates`], both `(steps,)`. The samples
    of a step are the draft's logits, the target's probabilities with their mass, and which rows count.
    """
    # All steps at once, because the rates of a few rows take many kernels.
    logits, probs, mass, is_counted = (torch.cat(each, dim=1) for each in zip(*samples))
    rates = acceptance_rates(logits, probs, mass) * is_counted
    num_rows = [logits.shape[1] for logits, *_ in samples]

    def sums(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([of_step.sum() for of_step in values.split(num_rows, dim=1)])

    return sums(is_counted), sums(rates)


def in_pieces(score: Callable, rows: int, head: Callable, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """
    Returns `score(head, *tensors)`, a sum and tensors `(B, R, ...)`, of tensors `(B, R, ...)`. Computes it for at most so many
    `rows` at once. If there are several such pieces, backward computes them again.
    """
    if tensors[0].shape[1] <= rows:
        return score(head, *tensors)
    parts = zip(*(tensor.split(rows, dim=1) for tensor in tensors))
    sums, *others = zip(*(recomputed(score, head, *each) for each in parts))  # no head draws random numbers
    return sum(sums), *(torch.cat(each, dim=1) for each in others)
