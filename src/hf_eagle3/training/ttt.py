"""
Training-time test (EAGLE-3, https://huggingface.co/papers/2503.01840, section 3.2): the draft is trained on its own
hidden states, several drafting steps deep.

Row `t` starts from the target's states at position `t`. At step `s` it reads the token at `t + 1 + s`, sits at rotary
position `t + s`, and predicts the target's distribution at `t + 1 + s`, which is over the token at `t + 2 + s`. It
attends to what it would attend to when drafting after position `t`: the step-0 keys of rows up to `t`, and its own keys
of the later steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class TTTBatch:
    """
    What one unroll needs, for `B` sequences of `L` tokens.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, L)`)
        aux_hidden_states (`torch.FloatTensor` of shape `(B, L, n_aux * H)`): The target's states.
        target_logits (`torch.FloatTensor` of shape `(B, L, draft_vocab_size)`): The target's, on the draft vocabulary.
        target_tokens (`torch.LongTensor` of shape `(B, L)`): The target's most probable tokens, as target ids.
        labels (`torch.LongTensor` of shape `(B, L)`): -100 where the token is not to be learned.
        documents (`torch.LongTensor` of shape `(B, L)`): Number of each token's document; -1 on padding.
        position_ids (`torch.LongTensor` of shape `(B, L)`)
    """

    input_ids: torch.LongTensor
    aux_hidden_states: torch.FloatTensor
    target_logits: torch.FloatTensor
    target_tokens: torch.LongTensor
    labels: torch.LongTensor
    documents: torch.LongTensor
    position_ids: torch.LongTensor


@dataclass
class TTTOutput:
    """
    Args:
        loss_sums (`torch.FloatTensor` of shape `(steps,)`): Each step's loss summed over the rows that count.
        num_rows (`torch.LongTensor` of shape `(steps,)`): How many do.
        num_correct (`torch.LongTensor` of shape `(steps,)`): In how many the draft's best token is the target's.
    """

    loss_sums: torch.FloatTensor
    num_rows: torch.LongTensor
    num_correct: torch.LongTensor


class TTTCache:
    """Stands in for the draft's cache during an unroll: keeps the keys of every step, and attends to them."""

    def __init__(self):
        self.steps: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # layer: [(keys, values) (B, H_kv, L, D)]

    def update(self, keys, values, layer_idx):
        self.steps.setdefault(layer_idx, []).append((keys, values))
        return keys, values

    def attention_forward(self, module, query, key, value, attention_mask, scaling, **kwargs):
        keys, values = zip(*self.steps[module.layer_idx])
        return ttt_attention(query, keys, values, attention_mask, scaling).transpose(1, 2), None


def ttt_attention(query, keys, values, attention_mask, scaling):
    """
    Attention of one step: causally to the keys of step 0, and on the diagonal to those of every later step.

    Args:
        query (`torch.FloatTensor` of shape `(B, H, L, D)`)
        keys, values (sequences of `torch.FloatTensor` of shape `(B, H_kv, L, D)`): One entry a step so far.
        attention_mask (`torch.FloatTensor` of shape `(B, 1, L, L)`): Additive, for step 0.
        scaling (`float`): Factor of the scores.

    Returns:
        `torch.FloatTensor` of shape `(B, H, L, D)`.
    """
    if len(keys) == 1:
        return F.scaled_dot_product_attention(
            query, keys[0], values[0], attention_mask.to(query.dtype), scale=scaling, enable_gqa=True
        )
    groups = query.shape[1] // keys[0].shape[1]
    query = query.unflatten(1, (-1, groups)) * scaling  # (B, H_kv, G, L, D)
    scores = query @ keys[0].unsqueeze(2).transpose(-1, -2) + attention_mask[:, None]  # (B, H_kv, G, L, L)
    own_keys = torch.stack(keys[1:], dim=-2).unsqueeze(2)  # (B, H_kv, 1, L, steps, D)
    own_values = torch.stack(values[1:], dim=-2).unsqueeze(2)
    own_scores = (query.unsqueeze(-2) * own_keys).sum(-1)  # (B, H_kv, G, L, steps)
    weights = torch.cat([scores, own_scores], dim=-1).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights, own_weights = weights.split([scores.shape[-1], own_scores.shape[-1]], dim=-1)
    output = weights @ values[0].unsqueeze(2) + (own_weights.unsqueeze(-1) * own_values).sum(-2)
    return output.flatten(1, 2)


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
    Which of the first `L - 2 - step` rows count at a step: those whose predicted token is to be learned and in their own
    document. Shape `(B, L - 2 - step)`.
    """
    predicted = slice(2 + step, None)
    rows = slice(0, max(labels.shape[1] - 2 - step, 0))
    same_document = documents[:, predicted] == documents[:, rows]
    return (labels[:, predicted] != -100) & same_document & (documents[:, rows] >= 0)


def ttt_logits(draft, batch: TTTBatch, steps: int) -> Iterator[torch.FloatTensor]:
    """Unrolls the draft; yields each step's logits `(B, L, draft_vocab_size)`. Rows near the end have no token left."""
    length = batch.input_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=batch.input_ids.device).tril()
    allowed = causal & (batch.documents[:, :, None] == batch.documents[:, None, :])
    hidden_states = draft.combine_hidden_states(batch.aux_hidden_states)
    mask = torch.zeros(allowed.shape, dtype=hidden_states.dtype, device=allowed.device)
    mask = mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)[:, None]  # (B, 1, L, L)
    cache = TTTCache()
    for step in range(steps):
        # The class's forward: the instance's may be wrapped (autocast, DDP), and the unroll already runs inside it.
        outputs = type(draft).forward(
            draft,
            input_ids=F.pad(batch.input_ids[:, 1 + step :], (0, min(1 + step, length))),
            hidden_states=hidden_states,
            attention_mask=mask,
            position_ids=batch.position_ids + step,
            past_key_values=cache,
        )
        hidden_states = outputs.last_hidden_state
        yield outputs.logits


def ttt_loss(draft, batch: TTTBatch, steps: int) -> TTTOutput:
    """
    Forward KL divergence from the target to the draft, on the draft vocabulary, at every step (EAGLE-3's loss up to the
    target's entropy, which has no gradient).
    """
    target_log_probs = batch.target_logits.float().log_softmax(dim=-1)  # (B, L, V_draft)
    target_probs = target_log_probs.exp()
    negative_entropy = (target_probs * target_log_probs).sum(dim=-1)  # (B, L)
    loss_sums, num_rows, num_correct = [], [], []
    for step, logits in enumerate(ttt_logits(draft, batch, steps)):
        rows = counted_rows(batch.labels, batch.documents, step)
        num = rows.shape[1]
        # Row t of the draft is about the target's row t + 1 + step.
        logits, about = logits[:, :num], slice(1 + step, 1 + step + num)
        divergence = SoftCrossEntropy.apply(logits, target_probs[:, about]) + negative_entropy[:, about]
        best = draft.draft_token_ids[logits.detach().max(dim=-1).indices]
        loss_sums.append((divergence * rows).sum())
        num_rows.append(rows.sum())
        num_correct.append(((best == batch.target_tokens[:, about]) & rows).sum())
    return TTTOutput(torch.stack(loss_sums), torch.stack(num_rows), torch.stack(num_correct))


class SoftCrossEntropy(torch.autograd.Function):
    """
    `-(probs * logits.log_softmax(-1)).sum(-1)` for constant `probs` that sum to one. Its gradient is
    `softmax(logits) - probs`, so that the logits are all there is to keep for it; autograd would keep three such tensors
    a step, and an unroll has seven steps.
    """

    @staticmethod
    def forward(ctx, logits, probs):
        log_normalizer = torch.logsumexp(logits.float(), dim=-1)
        ctx.save_for_backward(logits, probs, log_normalizer)
        return log_normalizer - torch.linalg.vecdot(logits.float(), probs)

    @staticmethod
    def backward(ctx, gradient):
        logits, probs, log_normalizer = ctx.saved_tensors
        difference = (logits.float() - log_normalizer[..., None]).exp_().sub_(probs)
        return difference.mul_(gradient[..., None]).to(logits.dtype), None
