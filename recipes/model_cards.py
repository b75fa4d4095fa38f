# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
"""
Renders the cards in `model_cards/` again, from its `pairings.yaml`, the recipes and the records there.

    python recipes/model_cards.py
"""

from pathlib import Path

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers import GenerationConfig

from hf_eagle3 import Eagle3Config, Eagle3ForSpeculation
from hf_eagle3.evaluation.results import markdown_table
from hf_eagle3.hub import BENCHMARK_RECORD, TRAINING_RECORD, read_record, render_card, repo_name
from hf_eagle3.hub.card import ENGINE_TAGS, TAGS, from_template
from hf_eagle3.scripts import ScriptParser, run_script


RECIPES = Path(__file__).parent
CARDS = RECIPES.parent / "model_cards"


def read_pairings(path: Path = CARDS / "pairings.yaml") -> dict[str, dict]:
    """Returns the pairings by target, each with the settings of its recipe."""
    pairings = yaml.safe_load(path.read_text(encoding="utf-8"))
    for pairing in pairings:
        pairing["settings"] = yaml.safe_load((RECIPES / f"{pairing['recipe']}.yaml").read_text(encoding="utf-8"))
    return {pairing["settings"]["model_name_or_path"]: pairing for pairing in pairings}


def figures_of_others(published: list[dict]) -> str:
    """Returns what others published for the same target, as a Markdown table."""
    rows = []
    for each in published:
        figures = ", ".join(f"{task} {value:.2f}" for task, value in each["figures"].items())
        source = f"[{each['source']}]({each['url']}), {each['date']}"
        rows.append([f"{each['draft']} ({each['by']})", each["conditions"], each["metric"], figures, source])
    return markdown_table(["draft", "conditions", "metric", "figures", "source"], rows)


def untrained_card(verifier: str, pairing: dict) -> ModelCard:
    """Returns the card of a recipe that has not been run."""
    command = f"accelerate launch recipes/train.py --config recipes/{pairing['recipe']}.yaml"
    return from_template(
        CARDS / "recipe_card.md.jinja",
        ModelCardData(
            base_model=verifier,
            base_model_relation="finetune",
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=[*TAGS, *ENGINE_TAGS],
            datasets=[pairing["settings"]["dataset_name"]],
            license=pairing["license"],
        ),
        name=repo_name(verifier),
        verifier=verifier,
        command=pairing.get("command", command),
        published=figures_of_others(pairing["published"]),
    )


def card_of_records(verifier: str, pairing: dict) -> ModelCard:
    """Returns the card of a draft that was trained and measured. Only its configurations and records are here, not its weights."""
    folder = CARDS / pairing["records"]
    with torch.device("meta"):
        draft = Eagle3ForSpeculation(Eagle3Config.from_pretrained(folder))
    draft.generation_config = GenerationConfig.from_pretrained(folder)
    return render_card(
        f"your-org/{repo_name(verifier)}",
        draft,
        training=read_record(folder / TRAINING_RECORD),
        benchmark=read_record(folder / BENCHMARK_RECORD),
        license=pairing["license"],
        image_folder=f"{folder.name}/",
        note=pairing.get("note", ""),
    )


def render() -> dict[str, str]:
    """Returns all cards by file name."""
    pairings = read_pairings().items()
    return {
        f"{repo_name(name)}.md": str((card_of_records if "records" in pairing else untrained_card)(name, pairing))
        for name, pairing in pairings
    }


def main():
    ScriptParser(description=__doc__).parse_args()
    for name, card in render().items():
        (CARDS / name).write_text(card, encoding="utf-8")
        print(f"Wrote {CARDS / name}")


if __name__ == "__main__":
    run_script(main)
