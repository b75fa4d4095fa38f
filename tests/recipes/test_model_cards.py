"""The cards in `model_cards/` are what their sources say."""

import yaml
from conftest import ROOT, load_script
from huggingface_hub import ModelCard


model_cards = load_script("recipes/model_cards.py")


def test_cards_and_sources_agree():
    rendered = model_cards.render()
    there = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "model_cards").glob("*.md")}
    assert rendered == there, "Render them again: python recipes/model_cards.py"


def test_every_recipe_has_a_card_and_every_figure_a_source():
    pairings = model_cards.read_pairings()
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert {pairing["recipe"] for pairing in pairings.values()} == recipes
    for pairing in pairings.values():
        for figures in pairing.get("published", ()):
            assert figures["url"].startswith("https://") and figures["date"] and figures["figures"]


def test_cards_that_were_not_measured_hold_no_results():
    for path in (ROOT / "model_cards").glob("*.md"):
        card = ModelCard(path.read_text(encoding="utf-8"))
        assert yaml.safe_load(card.data.to_yaml())["pipeline_tag"] == "text-generation"
        is_recipe = "not been trained yet" in card.text
        assert is_recipe == (card.data.eval_results is None) == (len(card.text.strip().splitlines()) < 25), path.name
