"""Output lengths learnt offline: a small regression tree per model, and the predictor using it.

A tree splits by prompt length and by the client's limit (``max_tokens``; none counts as unlimited);
each leaf has a mean. ``training`` makes the trees; this module has their document format, and the
predictor.

Files are the shell's work (``files/length_model_file.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hetero_gateway.core.lengths.predictors import LengthFeatures

FORMAT = "hetero-gateway length model"
VERSION = 1
# For all requests, and for models that the file does not name.
ANY_MODEL = ""
FEATURES = ("prompt_tokens", "max_tokens")
# Online, a leaf starts with the weight of at most 200 requests, so that it follows changes since
# the training, and remembers about the last thousand (as ``predictors`` does).
_MOST_PRIOR_REQUESTS, _MEMORY_REQUESTS = 200.0, 1000.0
_MAX_DEPTH = 64
_MAX_TOKENS = 1e9


@dataclass(frozen=True, slots=True)
class Leaf:
    """The mean output tokens of this many requests."""

    tokens: float
    requests: int


@dataclass(frozen=True, slots=True)
class Split:
    """``below`` if ``by`` (one of FEATURES) is at most ``at`` tokens, else ``above``."""

    by: str
    at: float
    below: Node
    above: Node


Node = Leaf | Split


@dataclass(frozen=True, slots=True)
class LengthModel:
    """One tree per model name; ANY_MODEL is always present."""

    trees: Mapping[str, Node]


def leaf_count(node: Node) -> int:
    """The number of leaves of a tree."""
    return 1 if isinstance(node, Leaf) else leaf_count(node.below) + leaf_count(node.above)


# Predicting


class _FlatTree:
    """A tree as lists of plain numbers, whose leaves learn.

    A node that splits by -1 is a leaf.
    """

    __slots__ = ("above", "at", "by", "tokens", "weight")

    def __init__(self, tree: Node) -> None:
        self.by: list[int] = []
        self.at: list[float] = []
        self.above: list[int] = []
        self.tokens: list[float] = []
        self.weight: list[float] = []
        self._add(tree)

    def _add(self, node: Node) -> None:
        if isinstance(node, Leaf):
            weight = min(float(node.requests), _MOST_PRIOR_REQUESTS)
            self._append(-1, 0.0, node.tokens, weight)
            return
        position = len(self.by)
        self._append(FEATURES.index(node.by), node.at, 0.0, 0.0)
        self._add(node.below)  # always the next node
        self.above[position] = len(self.by)
        self._add(node.above)

    def _append(self, by: int, at: float, tokens: float, weight: float) -> None:
        self.by.append(by)
        self.at.append(at)
        self.above.append(0)
        self.tokens.append(tokens)
        self.weight.append(weight)

    def leaf(self, features: LengthFeatures) -> int:
        """The position of a request's leaf."""
        by, at, above = self.by, self.at, self.above
        limit = features.max_output_tokens
        values = (features.prompt_tokens, math.inf if limit is None else limit)
        node = 0
        while (feature := by[node]) >= 0:
            node = node + 1 if values[feature] <= at[node] else above[node]
        return node


class TrainedPredictor:
    """A trained model that keeps learning: each leaf's mean follows the requests finished in it.

    Args:
        model: the trained model; not changed.
        online: False keeps the means as trained.
    """

    def __init__(self, model: LengthModel, *, online: bool = True) -> None:
        self._trees = {name: _FlatTree(tree) for name, tree in model.trees.items()}
        self._any = self._trees[ANY_MODEL]
        self._online = online

    def predict(self, features: LengthFeatures) -> float:
        tree = self._trees.get(features.model, self._any)
        return tree.tokens[tree.leaf(features)]

    def observe(self, features: LengthFeatures, output_tokens: float) -> None:
        if not self._online:
            return
        tree = self._trees.get(features.model, self._any)
        leaf = tree.leaf(features)
        weight = tree.weight[leaf] = min(tree.weight[leaf] + 1, _MEMORY_REQUESTS)
        mean = tree.tokens[leaf]
        tree.tokens[leaf] = max(1.0, mean + (output_tokens - mean) / weight)


# The document


def to_document(model: LengthModel) -> dict[str, Any]:
    """Convert a model to JSON-ready values."""
    trees = {name: asdict(tree) for name, tree in model.trees.items()}
    return {"format": FORMAT, "version": VERSION, "models": trees}


def from_document(document: Any) -> LengthModel:
    """Read a model from a document. Raises ValueError, which names the key at fault."""
    fields = _mapping(document, "document", {"format", "version", "models"}, frozenset({"about"}))
    if fields["format"] != FORMAT:
        raise ValueError(f"format: must be {FORMAT!r}")
    if fields["version"] != VERSION:
        raise ValueError(
            f"version: {fields['version']!r} is not known here; only {VERSION} is: fit it anew"
        )
    models = fields["models"]
    if not isinstance(models, dict) or ANY_MODEL not in models:
        raise ValueError('models: must be a mapping with a tree for "", all models')
    return LengthModel({name: _parse_node(tree, f"models.{name}") for name, tree in models.items()})


def _parse_node(data: Any, where: str, depth: int = 0) -> Node:
    if depth > _MAX_DEPTH:
        raise ValueError(f"{where}: more than {_MAX_DEPTH} splits deep")
    if isinstance(data, dict) and "tokens" in data:
        leaf = _mapping(data, where, {"tokens", "requests"})
        tokens = _number(leaf["tokens"], f"{where}.tokens", at_least=1.0)
        requests = _number(leaf["requests"], f"{where}.requests", at_least=0.0)
        return Leaf(tokens, int(requests))
    split = _mapping(data, where, {"by", "at", "below", "above"})
    if split["by"] not in FEATURES:
        raise ValueError(f"{where}.by: must be one of {', '.join(FEATURES)}")
    at = _number(split["at"], f"{where}.at", at_least=0.0)
    below = _parse_node(split["below"], f"{where}.below", depth + 1)
    above = _parse_node(split["above"], f"{where}.above", depth + 1)
    return Split(split["by"], at, below, above)


def _mapping(
    data: Any, where: str, wanted: set[str], allowed: frozenset[str] = frozenset()
) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: must be a mapping")
    if missing := sorted(wanted - data.keys()):
        raise ValueError(f"{where}: {missing[0]} is missing")
    if unknown := sorted(data.keys() - wanted - allowed):
        raise ValueError(f"{where}: unknown key {unknown[0]!r}")
    return data


def _number(value: Any, where: str, *, at_least: float) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not at_least <= value <= _MAX_TOKENS:  # NaN is neither
        raise ValueError(f"{where}: must be a number from {at_least:g} to {_MAX_TOKENS:g}")
    return float(value)
