"""
The `None`s of a row: Arrow gives each dictionary in a column the keys of all rows, with `None` where a row has no such key. Only a
column of type `Json`, which is stored as a text, has the `None`s of the data alone (`"default": null` in the schema of a tool).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, Features, IterableDataset, Json, List, Value

from .messages import CONVERSATIONS


# Columns that may hold dictionaries.
READ_FROM_JSON = ("tools", "functions", "chat_template_kwargs")  # also as texts
STRUCTURED = (*CONVERSATIONS, "prompt", "completion", *READ_FROM_JSON)


def without_added_nulls(row: Mapping[str, Any], features: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a row without the `None`s that Arrow adds to its dictionaries. `features` are the types of its columns."""
    named = {name: row[name] for name in STRUCTURED if row.get(name) is not None}
    return {**row, **{name: without_nulls(value, (features or {}).get(name)) for name, value in named.items()}}


def without_nulls(value: Any, feature: Any = None) -> Any:
    """Returns a value of a column without the `None`s in its dictionaries, unless its `feature` is `Json`."""
    if isinstance(feature, Json):
        return value
    if isinstance(value, dict):
        features = feature if isinstance(feature, dict) else {}
        return {key: without_nulls(each, features.get(key)) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [without_nulls(each, inner) for each in value]
    return value


def with_json(features: Features) -> Features:
    """
    Returns features for loading JSON anew, so that its `null`s stay: of type `Json` where a key has no other value in any row.
    """
    with_nulls = {
        name: feature for name, feature in features.items() if name in STRUCTURED and _has_key_of_nulls(feature)
    }
    json_of = {name: List(Json()) if isinstance(feature, List) else Json() for name, feature in with_nulls.items()}
    return Features({**features, **json_of})


def aligned(parts: Sequence[Dataset | IterableDataset]) -> list[Dataset | IterableDataset] | None:
    """
    Returns data sets that can be concatenated: columns whose dictionaries have other keys in some of them are of type `Json`. `None` if
    there are no such columns, or the types of a stream are unknown. Columns of texts stay, because `Json` would change texts that are
    JSON.
    """
    if any(part.features is None for part in parts):
        return None
    types = {name: [part.features[name] for part in parts if name in part.features] for name in STRUCTURED}
    with_texts = {name for name, each in types.items() if any(isinstance(one, Value) for one in each)}
    others = types.keys() - (with_texts - {*READ_FROM_JSON})
    json_of = {name: Json() for name in others if len(set(map(repr, types[name]))) > 1}
    if not json_of:
        return None
    return [
        part.map(
            without_added_nulls,
            fn_kwargs={"features": part.features},
            features=Features({name: json_of.get(name, feature) for name, feature in part.features.items()}),
        )
        for part in parts
    ]


def _has_key_of_nulls(feature: Any) -> bool:
    """Whether dictionaries in a column have a key, at any depth, whose values are all `null`."""
    if isinstance(feature, dict):
        return any(each == Value("null") or _has_key_of_nulls(each) for each in feature.values())
    return isinstance(feature, List) and _has_key_of_nulls(feature.feature)
