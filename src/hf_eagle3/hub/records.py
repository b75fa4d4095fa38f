"""The records beside a draft's weights: how it was trained, and what was measured with it."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import RepositoryNotFoundError
from transformers.utils import logging

from ..environment import is_missing_folder
from ..evaluation import BenchmarkResults, plot_all
from ..file_checks import read_json
from ..files import write_atomically
from ..remote_code.draft_model_eagle3 import weights_digest
from ..remote_code.modeling_eagle3 import Eagle3ForSpeculation
from ..tensor_names import find


logger = logging.get_logger(__name__)

TRAINING_RECORD = "training.json"
BENCHMARK_RECORD = "benchmark.jsonl"


def records_of(
    draft: Eagle3ForSpeculation,
    training: dict | None,
    benchmark: BenchmarkResults | None,
    token: bool | str | None = None,
) -> tuple[dict | None, BenchmarkResults | None]:
    """
    Returns the training record and the benchmark of a draft: those that are passed, or else those beside the draft that are
    about its weights. Raises `ValueError` if one that is passed is about other weights.
    """
    source = draft.config._name_or_path
    given: dict[str, Any] = {TRAINING_RECORD: training, BENCHMARK_RECORD: benchmark}
    found = dict(given)
    for name, record in given.items():
        if record is None and source:
            found[name] = record_beside(source, name, token=token, **getattr(draft, "loaded_with", {}))
    if not any(found.values()):
        return None, None
    digest = weights_digest(draft.state_dict())
    for name, record in found.items():
        if record is None or weights_of(record) == digest:
            continue
        if given[name] is not None:
            raise ValueError(
                f"The {Path(name).stem} record is about other weights. Measure this draft (`recipes/benchmark.py --json`)."
            )
        logger.warning(f"{name} of {source} is about other weights than this draft's, and is left out.")
        found[name] = None
    return found[TRAINING_RECORD], found[BENCHMARK_RECORD]


def record_beside(source: str, name: str, **hub_kwargs: Any) -> dict | BenchmarkResults | None:
    """Returns a record from the folder or repo that a draft was loaded from, or `None`, also if the folder is gone."""
    if is_missing_folder(source):
        return None
    try:
        path = find(source, name, **hub_kwargs)
    except OSError as error:
        if isinstance(error.__cause__, RepositoryNotFoundError):
            return None
        raise
    return None if path is None else read_record(path)


def weights_of(record: dict | BenchmarkResults | None) -> str | None:
    """Returns the digest of the weights that a record is about."""
    run = record.run if isinstance(record, BenchmarkResults) else record or {}
    return run.get("draft_weights")


def read_record(path: Path) -> dict | BenchmarkResults | None:
    """
    Reads a record of training or of a benchmark. Returns `None` if there is no such file.

    Args:
        path (`Path`): The file. A name that ends in `.jsonl` has [`BenchmarkResults`].
    """
    if not path.is_file():
        return None
    if path.suffix == ".jsonl":
        return BenchmarkResults.read(path)
    return read_json(path)


def write_records(folder: Path, training: dict | None, benchmark: BenchmarkResults | None) -> None:
    """
    Writes a draft's records, and the plots of its benchmark, beside its weights.

    Args:
        folder (`Path`): The draft's folder.
        training (`dict`, *optional*): How it was trained.
        benchmark ([`BenchmarkResults`], *optional*): What was measured with it.
    """
    if training is not None:
        write_atomically(folder / TRAINING_RECORD, json.dumps(training, indent=2) + "\n")
    if benchmark is not None:
        benchmark.write(folder / BENCHMARK_RECORD)
        plot_all(benchmark, folder)
