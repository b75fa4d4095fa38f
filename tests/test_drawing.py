"""Trees of steps, drawn for a terminal and as SVG."""

from xml.etree import ElementTree

from conftest import make_byte_tokenizer, make_tokenizer

from hf_eagle3 import Eagle3Step
from hf_eagle3.drawing import color, describe_step, tree_svg, tree_text


def tokens_of(tokenizer, text: str) -> list[int]:
    return tokenizer.convert_tokens_to_ids(list(text))


def test_a_tree():
    tokenizer = make_tokenizer()
    tokens = [*tokens_of(tokenizer, "x ab\n"), 2]  # the last is </s>
    step = Eagle3Step("draft", [7], [tokens], [[0, 0, 0, 1, 1, 3]], [[1, 3]], [[tokens[1], tokens[3], 2]])
    assert describe_step(step) == "5 tokens drafted, 2 accepted, 3 written"
    assert tree_text(step, tokenizer) == (
        "x\n├─ ␣ ✓\n│  ├─ b ✓\n│  │  ├─ </s>\n│  │  └─ </s> (the target's own)\n│  └─ ↵\n└─ a"
    )
    drawn = ElementTree.fromstring(tree_svg(step, tokenizer))
    space = "{http://www.w3.org/2000/svg}"
    groups = [(group.get("class"), group.find(f"{space}text").text) for group in drawn.iter(f"{space}g")]
    kinds = ["root", "accepted", "rejected", "accepted", "rejected", "rejected", "target"]
    assert groups == list(zip(kinds, ["x", "␣", "a", "b", "↵", "</s>", "</s>"]))
    assert len(drawn.findall(f"{space}path")) == 6
    places = {(box.get("x"), box.get("y")) for box in drawn.iter(f"{space}rect")}
    assert len(places) == 7 and max(float(x) for x, _ in places) < float(drawn.get("width"))
    fills = [box.get("fill") for box in drawn.iter(f"{space}rect")]
    assert fills[1] == color("draft", 1) and fills[3] == color("draft", 2) and fills[2] == "#ffffff"
    titles = [group.find(f"{space}title").text for group in drawn.iter(f"{space}g")]
    assert titles[:3] == [
        "x (the root: already written)",
        "␣ (drafted at depth 1, accepted)",
        "a (drafted at depth 1, rejected)",
    ]

    # What was looked up is a chain, which may have been wrong from the start; or nothing was checked at all.
    looked_up = Eagle3Step("lookup", [0], [tokens[:3]], [[0, 0, 1]], [[]], [[5]])
    assert describe_step(looked_up) == "2 tokens looked up, 0 accepted, 1 written"
    assert tree_text(looked_up, tokenizer).splitlines()[1:] == ["├─ ␣", "│  └─ a", "└─ c (the target's own)"]
    plain = Eagle3Step("target", [0], [tokens[:1]], [[0]], [[]], [[5]])
    assert "nothing was checked" in describe_step(plain)
    assert tree_text(plain, tokenizer).splitlines() == ["x", "└─ c (the target's own)"]


def test_a_character_may_stay_incomplete():
    tokenizer = make_byte_tokenizer()
    tokens = tokenizer("é <").input_ids
    step = Eagle3Step("draft", [0], [[tokens[0], tokens[1], tokens[3]]], [[0, 0, 0]], [[1]], [[tokens[1]]])
    assert tree_text(step, tokenizer).splitlines()[2] == "└─ <"


def test_colors_tell_origins_apart():
    origins = [("target", 0), ("lookup", 1), *(("draft", depth) for depth in range(1, 9))]
    assert len({color(*origin) for origin in origins}) == 10
