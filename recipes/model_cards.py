# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
"""
Renders the cards of all targets in `model_cards/pairings.yaml`, or pushes them to an owner's repos and gathers these in a collection.

    python recipes/model_cards.py                   # renders them again from the recipes, the records and pairings.yaml
    python recipes/model_cards.py --push_to my-org  # refreshes the cards of my-org/*-speculator.eagle3, and the collection

`--push_to` refreshes the repos that exist. With `--create` it also makes one for each recipe that has none. Its card says
that there are no weights yet. A card that was edited by hand is left alone.
"""

from pathlib import Path

import yaml
from huggingface_hub import HfApi, ModelCard

from hf_eagle3.environment import ScriptParser, run_script
from hf_eagle3.hub import card_of_records, card_on_hub, refresh_card, render_card, repo_name


RECIPES = Path(__file__).parent
CARDS = RECIPES.parent / "model_cards"
SUFFIX = repo_name("")


def read_pairings(path: Path = CARDS / "pairings.yaml") -> dict[str, dict]:
    """Returns the pairings by target. The quickstart's target has no name, so its pairing has the folder's."""
    pairings = {}
    for pairing in yaml.safe_load(path.read_text(encoding="utf-8")):
        if "recipe" in pairing:
            pairing["settings"] = yaml.safe_load((RECIPES / f"{pairing['recipe']}.yaml").read_text(encoding="utf-8"))
            pairings[pairing["settings"]["model_name_or_path"]] = pairing
        else:
            pairings[pairing["quickstart"]] = pairing
    return pairings


def untrained_card(verifier: str, pairing: dict, owner: str) -> ModelCard:
    """Returns the card of a recipe that has not been run."""
    command = f"accelerate launch recipes/train.py --config recipes/{pairing['recipe']}.yaml"
    dataset = pairing["settings"]["dataset_name"]
    return render_card(
        f"{owner}/{repo_name(verifier)}",
        verifier=verifier,
        training={
            "datasets": [dataset] if not dataset.startswith("outputs/") else [],  # else a folder that was made locally
            "command": pairing.get("command") or command,
        },
        published=pairing.get("published", ()),
        license=pairing["license"],
    )


def render(owner: str = "your-org") -> dict[str, str]:
    """Returns all cards by file name."""
    cards = {}
    for name, pairing in read_pairings().items():
        if (records := pairing.get("records")) is None:
            card = untrained_card(name, pairing, owner)
        else:
            texts = {key: pairing[key] for key in ("license", "note") if key in pairing}
            card = card_of_records(f"{owner}/{repo_name(name)}", CARDS / records, image_folder=f"{records}/", **texts)
        cards[f"{repo_name(name)}.md"] = str(card)
    return cards


def push(owner: str, create: bool, title: str, overwrite_card: bool) -> None:
    api, pairings = HfApi(), read_pairings()
    repos = [model.id for model in api.list_models(author=owner) if model.id.endswith(SUFFIX)]
    for verifier, pairing in pairings.items():
        repo_id = f"{owner}/{repo_name(verifier)}"
        if create and "recipe" in pairing and repo_id not in repos:
            api.create_repo(repo_id)
            untrained_card(verifier, pairing, owner).push_to_hub(repo_id, commit_message="The recipe's card")
            repos.append(repo_id)
            print(f"{repo_id}: made, without weights")
    if not repos:
        raise SystemExit(
            f"{owner} has no repos that end in {SUFFIX}. Push a draft with recipes/push.py, or pass --create."
        )
    collection = api.create_collection(title, namespace=owner, exists_ok=True)
    failed = []
    by_repo = {repo_name(verifier): (verifier, pairing) for verifier, pairing in pairings.items()}
    for repo_id in repos:
        verifier, pairing = by_repo.get(repo_id.split("/")[1], (None, {}))
        try:
            card = card_on_hub(repo_id)
            is_stated = card is not None and card.data.license is not None  # whoever pushed it chose it
            outcome = refresh_card(
                repo_id,
                published=pairing.get("published") or (),
                license=None if is_stated else pairing.get("license"),
                untrained=untrained_card(verifier, pairing, owner) if "recipe" in pairing else None,
                overwrite_card=overwrite_card,
            )
        except (OSError, ValueError, KeyError) as error:  # go on with the others
            failed.append(repo_id)
            print(f"{repo_id}: failed. {error}")
            continue
        api.add_collection_item(collection.slug, item_id=repo_id, item_type="model", exists_ok=True)
        print(f"{repo_id}: {outcome}")
    print(f"They are gathered in {collection.url}")
    if failed:
        raise SystemExit(f"{len(failed)} of {len(repos)} cards could not be refreshed: {', '.join(failed)}.")


def main():
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--push_to", metavar="OWNER", help="User or organization whose cards are refreshed on the Hub")
    parser.add_argument("--create", action="store_true", help="Also make repos for recipes that have none")
    parser.add_argument("--title", default="EAGLE-3 drafts", help="Title of the collection")
    parser.add_argument("--overwrite_card", action="store_true", help="Replace cards that were edited by hand")
    args = parser.parse_args()
    if args.push_to:
        push(args.push_to, args.create, args.title, args.overwrite_card)
        return
    for name, card in render().items():
        (CARDS / name).write_text(card, encoding="utf-8")
        print(f"Wrote {CARDS / name}")


if __name__ == "__main__":
    run_script(main)
