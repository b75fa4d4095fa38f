"""The page of `recipes/demo.py`: what is behind it by itself, and where gradio is installed the page, too."""

import os
import re
import sys
from html.parser import HTMLParser

import pytest
import torch
from conftest import load_script, make_baseline, make_byte_tokenizer, make_oracle, make_target, make_tokenizer

from hf_eagle3 import Eagle3Step
from hf_eagle3.drawing import color, decode


demo = load_script("recipes/demo.py")
Comparison, Pieces, encode, text_html = demo.Comparison, demo.Pieces, demo.encode, demo.text_html
PROMPT = "what is up"


@pytest.fixture(scope="module")
def comparison():
    """With a draft that knows what follows, and is unsure of it."""
    target, tokenizer = make_target("llama"), make_tokenizer()
    prompt = encode(tokenizer, PROMPT, is_chat=True)["input_ids"]
    return Comparison(target, make_oracle(target, target.generate(prompt, max_new_tokens=60)), tokenizer)


def test_a_block_draft_is_loaded(tmp_path):
    target = make_target("llama")
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    target = type(target).from_pretrained(tmp_path / "target")
    make_baseline("jetspec", target).save_pretrained(tmp_path / "drafts" / "jetspec")
    names = str(tmp_path / "target"), str(tmp_path / "drafts")
    comparison = Comparison.from_pretrained(*names, device="cpu", subfolder="jetspec")
    plain, drafted = last(comparison.run(PROMPT, max_new_tokens=20))
    assert type(comparison.draft).__name__ == "DFlashForSpeculation" and plain.tokens == drafted.tokens
    assert comparison.draft.last_generation.target_forwards > comparison.draft.last_generation.plain_steps


def last(frames):
    *_, frame = frames
    return frame


class Spans(HTMLParser):
    """The text of a page, as a browser shows it, and the titles of its elements."""

    def __init__(self, page):
        super().__init__()
        self.text, self.titles = "", []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        assert tag in ("div", "b", "span")
        self.titles += [value for name, value in attributes if name == "title"]

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("temperature, policy", [(0.8, "static"), (0.0, "auto")])
def test_both_texts_are_the_same_and_the_draft_is_told(comparison, temperature, policy):
    draft, tokenizer = comparison.draft, comparison.tokenizer
    call = {"temperature": temperature, "max_new_tokens": 40, "seed": 3, "tree_policy": policy, "tree_depth": 4}
    expected, numbers = draft.generation_config.to_dict(), []
    for plain, drafted in comparison.run(PROMPT, **call):  # noqa: B007
        numbers.append((len(plain.tokens), len(drafted.tokens)))
    assert numbers == sorted(numbers) and numbers[-1] == (40, 40)
    assert plain.tokens == drafted.tokens and plain.streamed == plain.returned
    assert comparison.verdict(plain, drafted).startswith("The two texts are identical.")
    assert "".join(drafted.texts) == decode(tokenizer, drafted.tokens) and len(drafted.texts) == 40
    steps, origins = drafted.stats.steps, drafted.stats.origins()
    assert [token for step in steps for token in step.new_tokens[0]] == drafted.tokens and len(origins) == 40
    assert max(depth for source, depth in origins if source != "lookup") <= 4
    assert plain.stats is None and plain.seconds > 0 and drafted.tokens_per_second > 0
    # The draft is as it was before.
    assert draft.generation_config.to_dict() == expected and not comparison.target._forward_pre_hooks
    # Another seed samples another text.
    if temperature > 0:
        other = last(comparison.run(PROMPT, **call | {"seed": 4, "max_new_tokens": 20}))[0]
        assert other.tokens != plain.tokens[:20]

    page, parsed = text_html("With <it>", drafted), Spans(text_html("With <it>", drafted))
    assert parsed.text.startswith("With <it>: 40 tokens, ") and parsed.text.endswith("".join(drafted.texts))
    assert parsed.titles.count("the target's own") == origins.count(("target", 0)) > 0
    assert parsed.titles.count("drafted at depth 1") == page.count(color("draft", 1)) == origins.count(("draft", 1))
    assert ("draft", 1) in origins or policy == "auto"
    assert Spans(text_html("Without", plain)).titles == []


def test_a_target_that_returns_dictionaries(comparison, monkeypatch):
    monkeypatch.setattr(comparison.target.generation_config, "return_dict_in_generate", True)
    plain, drafted = last(comparison.run(PROMPT, max_new_tokens=3))
    assert plain.returned == drafted.returned and len(plain.returned) == 3


def test_texts_that_differ(comparison):
    plain, drafted = last(comparison.run(PROMPT, max_new_tokens=5))
    drafted.returned = drafted.returned[:3] + [90, 91]
    verdict = comparison.verdict(plain, drafted)
    assert "differ from token 4 on" in verdict and "Please report it" in verdict
    comparison.target.to(torch.bfloat16)
    assert "nearly tied" in comparison.verdict(plain, drafted)
    comparison.target.to(torch.float32)


def test_what_goes_wrong(comparison):
    target, draft, tokenizer = comparison.target, comparison.draft, comparison.tokenizer
    for call in ({"tree_depth": 0}, {"tree_dept": 3}):
        with pytest.raises(ValueError, match="tree_depth"):
            last(comparison.run(PROMPT, **call))
    with pytest.raises(ValueError, match="no prompt"):
        last(comparison.run("", is_chat=False))
    assert last(comparison.run(PROMPT, max_new_tokens=4))[1].returned is not None
    with pytest.raises(ValueError, match="needs states of size 32"):
        Comparison(make_target("llama", hidden_size=64), draft, tokenizer)
    with pytest.raises(ValueError, match="no prompt"):
        encode(tokenizer, "", is_chat=False)
    assert decode(tokenizer, encode(tokenizer, "a", True)["input_ids"][0]) == "U:a|A:"
    assert target.training is False


def test_a_run_that_is_closed_ends(comparison):
    frames = comparison.run(PROMPT, max_new_tokens=400)
    plain, _ = next(frames)
    frames.close()
    assert last(comparison.run(PROMPT, max_new_tokens=4))[1].returned is not None  # behind it, on the same thread
    assert plain.returned is None and len(plain.tokens) < 400 and not comparison.target._forward_pre_hooks


def test_characters_of_several_tokens():
    tokenizer = make_byte_tokenizer()
    tokens, pieces = tokenizer("é <€x").input_ids, Pieces(tokenizer)
    texts = ["", "é", " ", "<", "", "", "€", "x"]
    for length in (1, 2, 5, 6, 8):
        assert pieces.read(tokens[:length]) == texts[:length]


def test_the_legend_has_all_colors():
    origins = [("target", 0), ("lookup", 1), *(("draft", depth) for depth in range(1, 9))]
    assert all(color(*origin) in demo.legend_html() for origin in origins)


def test_the_drawing_of_a_step():
    tokens = make_tokenizer().convert_tokens_to_ids(list("xab"))
    step = Eagle3Step("draft", [7], [tokens], [[0, 0, 1]], [[1]], [tokens[1:]])
    drawn = demo.step_html([step, step], 2, make_tokenizer())
    assert "Step 2 of 2: 2 tokens drafted, 1 accepted, 2 written" in drawn and 'class="accepted"' in drawn


@pytest.fixture
def page(comparison):
    """The page, served on this machine."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'gradio>=6'")
    app = demo.make_app(comparison)
    _, url, _ = app.launch(prevent_thread_lock=True, quiet=True)
    yield url
    app.close()


def test_the_page(page, comparison):
    from gradio_client import Client

    client = Client(page, verbose=False)
    inputs = [PROMPT, True, 0.0, 30, 0, "static", 4, 16, 4]
    frames = list(client.submit(*inputs, api_name="/compare"))
    plain, drafted, verdict, *_, tree = frames[-1]
    text = decode(comparison.tokenizer, last(comparison.run(PROMPT, max_new_tokens=30))[0].tokens)
    assert len(frames) > 2 and Spans(plain).text.endswith(text) and Spans(drafted).text.endswith(text)
    assert "identical" in verdict and "drafted at depth 2" in drafted
    assert re.search(r"Step \d+ of \d+: 16 tokens drafted", tree) and 'class="accepted"' in tree
    with pytest.raises(Exception, match="no prompt"):
        client.predict("", False, *inputs[2:], api_name="/compare")


def test_without_gradio(comparison, monkeypatch, run_recipe):
    monkeypatch.setitem(sys.modules, "gradio", None)
    result = run_recipe("demo.py", "--target", "nothing", "--draft", "nothing")
    assert result.returncode == 1 and "pip install 'gradio>=6'" in result.stderr
    with pytest.raises(ModuleNotFoundError, match="pip install 'gradio>=6'"):
        demo.make_app(comparison)


@pytest.mark.skipif(
    "HF_EAGLE3_BROWSER" not in os.environ,
    reason="needs a browser: HF_EAGLE3_BROWSER=/usr/bin/chromium, and pip install playwright",
)
def test_in_a_browser(page, comparison):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=os.environ["HF_EAGLE3_BROWSER"], args=["--no-sandbox"])
        view = browser.new_page()
        view.goto(page)
        view.get_by_label("Prompt").fill(PROMPT)
        view.get_by_role("button", name="Run").click()
        view.get_by_text("The two texts are identical.").wait_for()
        shown = view.locator("#with span[title]")
        _, drafted = last(comparison.run(PROMPT))
        assert shown.count() == len(drafted.tokens)
        assert shown.first.get_attribute("title") == "the target's own"
        colours = {span.evaluate("each => getComputedStyle(each).backgroundColor") for span in shown.all()}
        assert len(colours) > 2
        # The slider chooses the step.
        view.get_by_label("number input for Step").fill("1")
        view.locator("#tree").get_by_text("Step 1 of").wait_for()
        assert view.locator("#tree svg g.root").is_visible()
        browser.close()
