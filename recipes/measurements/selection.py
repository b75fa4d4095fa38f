# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
"""
Which candidates of a tree are worth verifying? Those that the draft finds the most probable, as it says itself, or by a
small head that learned, for each node that the target came to, which of its children it went on with (contrastive
selection).

    python recipes/measurements/selection.py --target TARGET --drafts DRAFT-1 DRAFT-2 DRAFT-3 --dataset texts.jsonl \
        --prompts prompts.jsonl --json selection.json

Each draft proposes trees of `--candidates` nodes, all of which are verified; of each tree it is then known how much of
it would have been accepted with fewer nodes, whichever they are. So all ways of choosing see the same trees, and have
the same number of nodes to verify. The head learns on pieces of the data set; figures are of the prompts.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from paper_table import texts_of
from scaling import pieces_of
from torch import nn
from transformers import AutoModelForCausalLM, set_seed

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.evaluation import load_prompts
from hf_eagle3.remote_code.tree_eagle3 import grow_tree
from hf_eagle3.tokenizer import load_tokenizer


WAYS = ("the draft's own probability", "a head that learned from siblings")


@dataclass
class Candidates:
    """
    The tree of a step, without its root.

    Args:
        parents (`list[int]`): Of each node, the root being 0.
        log_probs (`torch.FloatTensor` of shape `(N,)`): The draft's, of each node below its parent.
        states (`torch.FloatTensor` of shape `(N, H)`): The draft's, at the parents.
        tokens (`torch.LongTensor` of shape `(N,)`)
        depths (`torch.LongTensor` of shape `(N,)`)
        accepted (`list[int]`): The nodes that the target went through.
    """

    parents: list[int]
    log_probs: torch.FloatTensor
    states: torch.FloatTensor
    tokens: torch.LongTensor
    depths: torch.LongTensor
    accepted: list[int]


class Recorder:
    """Grows trees, and keeps what is known of their nodes; `observe` is told what was accepted."""

    def __init__(self):
        self.steps: list[Candidates] = []
        self.open = None

    def grow_tree(self, root, logits, hidden_states, advance, token_ids, plan, threshold, power, guess):
        states, advanced = {(): hidden_states[0]}, []

        def recorded(tokens, hidden_states, level, visible):
            advanced.extend(tokens[0].tolist())
            logits, hidden_states = advance(tokens, hidden_states, level, visible)
            for seen, state in zip(visible[0], hidden_states[0]):  # what a node sees is its path
                states[tuple(advanced[i] for i in seen.nonzero().flatten().tolist())] = state
            return logits, hidden_states

        tree = grow_tree(root, logits, hidden_states, recorded, token_ids, plan, 0.0, 1.0, guess)
        parents, tokens, paths = tree.parents[0].tolist(), tree.tokens[0].tolist(), [()]
        for node in range(1, len(parents)):
            paths.append((*paths[parents[node]], tokens[node]))
        of_parents = torch.stack([states[paths[parent]] for parent in parents[1:]]).float()
        self.open = Candidates(
            parents[1:], tree.confidences[0], of_parents, tree.tokens[0, 1:], tree.depths[0, 1:], []
        )
        return tree

    def observe(self, accepted):
        if self.open is not None:
            self.open.accepted = accepted.nodes[0][1:]
            for name in (
                "log_probs",
                "states",
                "tokens",
                "depths",
            ):  # not of inference mode: the head learns from them
                setattr(self.open, name, getattr(self.open, name).clone())
            self.steps.append(self.open)
        self.open = None


def collect(target, draft, prompts: list[list[int]], temperature: float, args) -> list[Candidates]:
    """The steps of all prompts."""
    recorder, proposer = Recorder(), draft.proposer

    def recording(call):
        made = proposer(call)
        observe = made.observe

        def observed(accepted):
            recorder.observe(accepted)
            observe(accepted)

        made.observe = observed
        return made

    draft.grow_tree, draft.proposer = recorder.grow_tree, recording
    settings = {"tree_policy": "static", "tree_depth": args.tree_depth, "branching_factor": args.branching_factor}
    draft.generation_config.update(
        **settings, num_assistant_tokens=args.candidates, assistant_confidence_threshold=0.0
    )
    mode = {"do_sample": False}
    if temperature > 0:
        mode = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    set_seed(args.seed)
    for prompt in prompts:
        inputs = torch.tensor([prompt], device=target.device)
        mask = torch.ones_like(inputs)
        target.generate(inputs, attention_mask=mask, assistant_model=draft, max_new_tokens=args.max_new_tokens, **mode)
    del draft.grow_tree, draft.proposer
    return recorder.steps


def accepted_with(steps: list[Candidates], log_probs: list[torch.Tensor], num_nodes: int) -> float:
    """The acceptance length if only the nodes on the most probable paths had been verified."""
    lengths = []
    for step, own in zip(steps, log_probs):
        values = [0.0]
        for parent, value in zip(step.parents, own.tolist()):
            values.append(values[parent] + min(value, 0.0))
        # Parents come first, and a stable sort leaves them before children of the same value.
        kept = set(sorted(range(1, len(values)), key=lambda node: -values[node])[:num_nodes])
        length = 1
        for node in step.accepted:
            if node not in kept:
                break
            length += 1
        lengths.append(length)
    return statistics.mean(lengths)


class SiblingHead(nn.Module):
    """Corrects the draft's log-probability of a node, by its parent's state, its token, its probability and its depth."""

    def __init__(self, hidden_size: int, embedding: torch.Tensor, width: int = 128):
        super().__init__()
        self.register_buffer("embedding", embedding.detach().float(), persistent=False)
        self.norm = nn.LayerNorm(hidden_size)
        self.layers = nn.Sequential(
            nn.Linear(hidden_size + embedding.shape[1] + 2, width), nn.SiLU(), nn.Linear(width, 1)
        )
        nn.init.zeros_(self.layers[-1].weight)  # at first it says what the draft says
        nn.init.zeros_(self.layers[-1].bias)
        self.of_none = nn.Parameter(torch.zeros(()))

    def forward(self, states, tokens, log_probs, depths):
        facts = torch.stack([log_probs, depths.float()], dim=-1)
        inputs = torch.cat([self.norm(states), self.embedding[tokens], facts], dim=-1)
        return log_probs + self.layers(inputs).squeeze(-1)

    def log_probs(self, states, tokens, log_probs, depths, group, num_groups):
        """Log-probabilities of nodes, and of none of each group: siblings share what the draft leaves to none."""
        scores = self(states, tokens, log_probs, depths)
        rest = 1 - torch.zeros(num_groups, device=scores.device).index_add(0, group, log_probs.exp())
        none = rest.clamp(min=1e-4).log() + self.of_none
        totals = none.exp().index_add(0, group, scores.exp()).log()
        return scores - totals[group], none - totals


def grouped(step: Candidates) -> torch.LongTensor:
    """A number for each group of siblings."""
    numbers = {parent: i for i, parent in enumerate(dict.fromkeys(step.parents))}
    return torch.tensor([numbers[parent] for parent in step.parents])


def train_head(head: SiblingHead, steps: list[Candidates], args) -> None:
    """On the children of nodes that the target came to: which of them it went on with, if any."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.epochs):
        for part in torch.randperm(len(steps), generator=generator).split(64):
            losses = []
            for step in (steps[i] for i in part.tolist()):
                group = grouped(step)
                nodes, none = head.log_probs(
                    step.states, step.tokens, step.log_probs.float(), step.depths, group, int(group.max()) + 1
                )
                reached = [0, *step.accepted]
                first_child = {parent: i for i, parent in reversed(list(enumerate(step.parents)))}
                for at, taken in zip(reached, [*step.accepted, None]):
                    if taken is not None:
                        losses.append(-nodes[taken - 1])
                    elif at in first_child:
                        losses.append(-none[group[first_child[at]]])
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()


@torch.no_grad()
def by_head(head: SiblingHead, steps: list[Candidates]) -> list[torch.Tensor]:
    values = []
    for step in steps:
        group = grouped(step)
        arguments = step.states, step.tokens, step.log_probs.float(), step.depths, group, int(group.max()) + 1
        values.append(head.log_probs(*arguments)[0])
    return values


def table(results: list[dict], budgets: list[int]) -> str:
    names = ["T", "chosen by", *(f"{budget} nodes" for budget in budgets)]
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    for temperature in sorted({result["T"] for result in results}):
        for way in WAYS:
            cells = []
            for budget in map(str, budgets):
                values = [result["lengths"][way][budget] for result in results if result["T"] == temperature]
                cells.append(f"{statistics.mean(values):.3f} ({min(values):.3f}-{max(values):.3f})")
            lines.append(f"| {temperature:g} | {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Folder or Hub id")
    parser.add_argument("--drafts", nargs="+", required=True, help="Of several seeds")
    parser.add_argument(
        "--dataset", required=True, help='JSON Lines file of {"text": "..."}, or Hub id: what the head learns on'
    )
    parser.add_argument("--prompts", required=True, help="See recipes/benchmark.py")
    parser.add_argument("--json", required=True, help="Where the figures go")
    parser.add_argument("--candidates", type=int, default=64, help="Nodes of each tree")
    parser.add_argument("--budgets", nargs="+", type=int, default=[4, 8, 16, 24], help="Nodes to choose")
    parser.add_argument("--tree_depth", type=int, default=6)
    parser.add_argument("--branching_factor", type=int, default=8)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--pieces", type=int, default=160, help="Pieces of the data set to learn on")
    parser.add_argument("--prompt_tokens", type=int, default=64, help="Their length")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--num_prompts", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    target = AutoModelForCausalLM.from_pretrained(args.target).float()
    tokenizer = load_tokenizer(args.target)
    pieces = pieces_of(texts_of(args.dataset), tokenizer, args.pieces, args.prompt_tokens, args.seed)
    pieces = [tokenizer(piece["prompt"])["input_ids"] for piece in pieces]
    prompts = load_prompts(args.prompts, tokenizer, args.num_prompts)
    results = []
    for name in args.drafts:
        draft = Eagle3ForSpeculation.from_pretrained(name).float().eval()
        for temperature in args.temperatures:
            learned_from = collect(target, draft, pieces, temperature, args)
            steps = collect(target, draft, prompts, temperature, args)
            set_seed(args.seed)
            head = SiblingHead(draft.config.hidden_size, target.get_input_embeddings().weight)
            train_head(head, learned_from, args)
            log_probs = ([s.log_probs for s in steps], by_head(head, steps))
            lengths = {
                way: {str(budget): accepted_with(steps, own, budget) for budget in args.budgets}
                for way, own in zip(WAYS, log_probs)
            }
            results.append(
                {"draft": name, "T": temperature, "steps": [len(learned_from), len(steps)], "lengths": lengths}
            )
            Path(args.json).write_text(json.dumps(results, indent=2) + "\n")
            print(results[-1], flush=True)
    print(table(results, args.budgets))


if __name__ == "__main__":
    main()
