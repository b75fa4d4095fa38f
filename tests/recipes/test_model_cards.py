"""The cards in `model_cards/` are what their sources say."""

import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard


ROOT = Path(__file__).parents[2]


@pytest.fixture
def model_cards(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    import model_cards

    yield model_cards
    sys.modules.pop("model_cards")


def test_cards_and_sources_agree(model_cards):
    rendered = model_cards.render()
    there = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "model_cards").glob("*.md")}
    assert rendered == there, "Render them again: python recipes/model_cards.py"


def test_every_recipe_has_a_card_and_every_figure_a_source(model_cards):
    pairings = model_cards.read_pairings()
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert {pairing["recipe"] for pairing in pairings.values() if "recipe" in pairing} == recipes
    for pairing in pairings.values():
        for figures in pairing.get("published", ()):
            assert figures["url"].startswith("https://") and figures["date"] and figures["figures"]
        if "recipe" in pairing:
            assert pairing["published"]


def test_cards_that_were_not_measured_hold_no_results():
    for path in (ROOT / "model_cards").glob("*.md"):
        card = ModelCard(path.read_text(encoding="utf-8"))
        assert yaml.safe_load(card.data.to_yaml())["pipeline_tag"] == "text-generation"
        assert ("not been trained yet" in card.text) == (card.data.eval_results is None), path.name
