"""Draws the tree of a decoding step, for a terminal or as SVG: where each token came from, and what the target accepted."""

from dataclasses import dataclass, field
from html import escape

from transformers import PreTrainedTokenizerBase

from .remote_code.outputs_eagle3 import Eagle3Step


TARGET_COLOR, LOOKUP_COLOR = "#e5e7eb", "hsl(40 95% 75%)"
NUM_DEPTHS = 8  # depths with a color of their own; deeper tokens have the last one
COLUMN, LINE, BOX = 124, 28, (100, 20)  # pixels


def describe_step(step: Eagle3Step, row: int = 0) -> str:
    """
    Returns one line about a step: how many tokens were checked, accepted and written.

    Args:
        step ([`Eagle3Step`]): The step.
        row (`int`, *optional*, defaults to `0`): The row of the batch, as an index into `step.rows`.
    """
    num_checked, num_accepted = len(step.tokens[row]) - 1, len(step.accepted[row])
    if num_checked == 0:
        return "a plain step: nothing was checked"
    verb = "looked up" if step.source == "lookup" else "drafted"
    return f"{num_checked} tokens {verb}, {num_accepted} accepted, {len(step.new_tokens[row])} written"


def tree_text(step: Eagle3Step, tokenizer: PreTrainedTokenizerBase, row: int = 0) -> str:
    """
    Returns the tree of a step as lines of text. Accepted nodes have a tick.

    Args:
        step ([`Eagle3Step`]): The step.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        row (`int`, *optional*, defaults to `0`): The row of the batch, as an index into `step.rows`.
    """
    nodes, marks = nodes_of(step, tokenizer, row), {"accepted": " ✓", "target": " (the target's own)"}
    lines, stack = [], [(0, "", "")]  # a node, what stands before it, and what stands before its children
    while stack:
        index, head, indent = stack.pop()
        node = nodes[index]
        lines.append(f"{head}{node.text}{marks.get(node.kind, '')}")
        for child in reversed(node.children):
            is_last = child == node.children[-1]
            stack.append((child, indent + ("└─ " if is_last else "├─ "), indent + ("   " if is_last else "│  ")))
    return "\n".join(lines)


def tree_svg(step: Eagle3Step, tokenizer: PreTrainedTokenizerBase, row: int = 0) -> str:
    """
    Returns the tree of a step as SVG, from left to right. Accepted nodes have the color of their origin, and rejected nodes are grey.

    Args:
        step ([`Eagle3Step`]): The step.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        row (`int`, *optional*, defaults to `0`): The row of the batch, as an index into `step.rows`.
    """
    nodes = nodes_of(step, tokenizer, row)
    lines = lines_of(nodes)
    width, height = (1 + max(node.depth for node in nodes)) * COLUMN, round(1 + max(lines)) * LINE
    edges, boxes = [], []
    for node, line in zip(nodes, lines):
        x, y = node.depth * COLUMN + 4, (line + 0.5) * LINE
        if node.parent is not None:
            is_written = node.kind != "rejected"
            start, end = x - COLUMN + BOX[0], (lines[node.parent] + 0.5) * LINE
            middle = (start + x) / 2
            edges.append(
                f'<path d="M {start} {end} C {middle} {end}, {middle} {y}, {x} {y}" fill="none" '
                f'stroke="{"#374151" if is_written else "#d1d5db"}" stroke-width="{2.5 if is_written else 1}"/>'
            )
        boxes.append(box(node, step.source, x, y))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace" font-size="12" '
        f'style="background:#ffffff;border-radius:6px">{"".join(edges)}{"".join(boxes)}</svg>'
    )


@dataclass
class Node:
    """A node of a drawn tree."""

    text: str  # its token
    parent: int | None  # the root has none
    depth: int  # distance from the root
    kind: str  # "root", "accepted", "rejected", or "target": the token that the target wrote after the accepted ones
    children: list[int] = field(default_factory=list)


def nodes_of(step: Eagle3Step, tokenizer: PreTrainedTokenizerBase, row: int) -> list[Node]:
    """Returns the nodes of a step's tree, with the target's own token below the accepted ones. Parents precede their children."""
    tokens, parents, accepted = list(step.tokens[row]), list(step.parents[row]), step.accepted[row]
    kinds = ["root", *("accepted" if node in accepted else "rejected" for node in range(1, len(tokens)))]
    if len(step.new_tokens[row]) > len(accepted):
        tokens.append(step.new_tokens[row][-1])
        parents.append(accepted[-1] if accepted else 0)
        kinds.append("target")
    nodes: list[Node] = []
    paths: list[list[int]] = []  # the tokens from the root to each node
    for index, (token, parent, kind) in enumerate(zip(tokens, parents, kinds)):
        before = paths[parent] if index > 0 else []
        paths.append([*before, token])
        # A token's spaces may depend on the tokens before it.
        known, text = decode(tokenizer, before), decode(tokenizer, paths[-1])
        text = text[len(known) :] if text.startswith(known) else decode(tokenizer, [token])
        nodes.append(Node(visible(text), parent if index > 0 else None, len(before), kind))
        if index > 0:
            nodes[parent].children.append(index)
    return nodes


def lines_of(nodes: list[Node]) -> list[float]:
    """Returns the line that each node is drawn on. Leaves have lines of their own; parents are midway between their children."""
    lines, stack, num_leaves = [0.0] * len(nodes), [0], 0
    while stack:
        index = stack.pop()
        if not nodes[index].children:
            lines[index], num_leaves = float(num_leaves), num_leaves + 1
        stack += reversed(nodes[index].children)
    for index in reversed(range(len(nodes))):
        if children := nodes[index].children:
            lines[index] = (lines[children[0]] + lines[children[-1]]) / 2
    return lines


def box(node: Node, source: str, x: float, y: float) -> str:
    """Returns the SVG of a node whose left edge is at `x` and whose middle is at `y`. `source` is the step's."""
    origin = ("target", 0) if node.kind == "target" else (source, node.depth)
    title = {"root": "the root: already written", "target": "the target's own"}.get(
        node.kind, f"{describe_origin(*origin)}, {node.kind}"
    )
    fill = color(*origin) if node.kind in ("accepted", "target") else "#ffffff"
    line, text = ("#d1d5db", "#6b7280") if node.kind == "rejected" else ("#374151", "#111111")
    label = node.text if len(node.text) <= 12 else node.text[:11] + "…"
    return (
        f'<g class="{node.kind}"><title>{escape(f"{node.text} ({title})", quote=False)}</title>'
        f'<rect x="{x}" y="{y - BOX[1] / 2}" width="{BOX[0]}" height="{BOX[1]}" rx="5" fill="{fill}" stroke="{line}"/>'
        f'<text x="{x + BOX[0] / 2}" y="{y + 4}" text-anchor="middle" fill="{text}">{escape(label)}</text></g>'
    )


def color(source: str, depth: int) -> str:
    """Returns the background of a token of this origin. Text on it is black."""
    if source == "draft":
        return f"hsl({100 + 30 * min(depth, NUM_DEPTHS)} 75% 80%)"
    return LOOKUP_COLOR if source == "lookup" else TARGET_COLOR


def describe_origin(source: str, depth: int) -> str:
    """Returns an entry of [`Eagle3GenerationStats.origins`] in words."""
    words = {"draft": f"drafted at depth {depth}", "lookup": f"looked up, number {depth}"}
    return words.get(source, "the target's own")


def decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """Returns the text of tokens, special tokens included."""
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def visible(text: str) -> str:
    """Returns a text with signs for spaces and ends of lines."""
    text = text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
