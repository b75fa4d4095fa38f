"""
What Arrow changes in a row: it gives each dictionary in a column the keys of all rows, with `None` where a row has no such key, and reads
texts of JSON as dates. Only a column of type `Json`, which is stored as a text, has the values of the data alone (`"default": null` in the
schema of a tool).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, Features, IterableDataset, Json, List, Value

from .messages import CONVERSATIONS


# Columns that may hold dictionaries.
READ_FROM_JSON = ("tools", "functions", "documents", "chat_template_kwargs")  # also as texts
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


def with_json(features: Features, is_stream: bool = False) -> Features:
    """
    Returns features for loading JSON anew, so that it stays as it is: of type `Json` where a key has no other value than `null` in any
    row, or Arrow takes texts for dates. In a stream Arrow may do so later, or turn integers into floats, wherever there are more than texts.
    """
    changed = {
        name: feature
        for name, feature in features.items()
        if name in STRUCTURED and (_is_changed(feature) or (is_stream and _has_more_than_texts(feature)))
    }
    json_of = {name: List(Json()) if isinstance(feature, List) else Json() for name, feature in changed.items()}
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


def _has_more_than_texts(feature: Any) -> bool:
    """Whether the dictionaries in a column have other values than texts, such as tool calls."""
    feature = feature.feature if isinstance(feature, List) else feature
    return isinstance(feature, dict) and any(each != Value("string") for each in feature.values())


def _is_changed(feature: Any) -> bool:
    """Whether a column has dates, which JSON does not have, or dictionaries with a key, at any depth, whose values are all `null`."""
    if isinstance(feature, dict):
        return any(each == Value("null") or _is_changed(each) for each in feature.values())
    if isinstance(feature, Value):
        return feature.dtype.startswith("timestamp")
    return isinstance(feature, List) and _is_changed(feature.feature)
