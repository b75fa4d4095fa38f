"""Pushing a draft to the Hub, with its model card."""

from .card import is_edited, render_card
from .licenses import check_license
from .push import card_on_hub, push_draft, repo_name, write_draft
from .records import BENCHMARK_RECORD, TRAINING_RECORD, read_record, write_records


__all__ = [
    "BENCHMARK_RECORD",
    "TRAINING_RECORD",
    "card_on_hub",
    "check_license",
    "is_edited",
    "push_draft",
    "read_record",
    "render_card",
    "repo_name",
    "write_draft",
    "write_records",
]
