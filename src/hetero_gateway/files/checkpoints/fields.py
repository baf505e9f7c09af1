"""The fields of a config.json, under the names that families use, with errors that name one.

``Fields`` reads; it does not know the use of the fields.
"""

from collections.abc import Mapping
from typing import Any

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.checkpoints.families import defaults_of

# Where multimodal files have their decoder.
TEXT = ("text_config", "llm_config", "language_config", "thinker_config")


class Fields:
    """The fields of the decoder in a config.json, including its family's defaults.

    ``config`` is the whole file, ``decoder`` the decoder's part of it and ``text`` the same
    with its defaults, ``family`` its model_type.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        text = config
        levels = [config]
        for key in TEXT * 2:  # a thinker_config has a text_config of its own
            if text.get(key) is not None:
                text = text[key]
                if not isinstance(text, Mapping):
                    raise ConfigError(f"{name}: {key} must be an object")
                levels.append(text)
        self.name = name
        self.decoder = text
        self._levels = levels[::-1]
        self.config = config
        self.family = str(text.get("model_type") or config.get("model_type") or "")
        defaults = defaults_of(self.family, nested=text is not config)
        # Values of the outer file take precedence over the family's default.
        if "tie_word_embeddings" in config:
            defaults["tie_word_embeddings"] = config["tie_word_embeddings"]
        self.text: dict[str, Any] = {**defaults, **text}

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.name}: config.json: {text}")

    def count(self, *keys: str) -> int:
        """The first of these fields that is present; at least 1."""
        for key in keys:
            if self.text.get(key) is not None:
                return self._whole(key)
        raise ConfigError(f"{self.name}: config.json has no {' or '.join(keys)}")

    def optional(self, *keys: str) -> int:
        """The same, or 0."""
        for key in keys:
            if self.text.get(key) is not None:
                return self._whole(key, least=0)
        return 0

    def items(self, *keys: str) -> list[Any]:
        """The first of these fields that is a list; empty without one."""
        for key in keys:
            value = self.text.get(key)
            if isinstance(value, list | tuple) and value:
                return list(value)
        return []

    def first(self, *keys: str) -> int:
        """As ``optional``; of a list, its first (one number a layer, or a kind of expert)."""
        for key in keys:
            listed = self.items(key)
            if listed and isinstance(listed[0], int) and not isinstance(listed[0], bool):
                return listed[0]
            if self.text.get(key) is not None:
                return self._whole(key, least=0)
        return 0

    def said(self, key: str) -> Any:
        """The value in the decoder's part, or in what encloses it, the nearest first; None:
        none."""
        return next((level[key] for level in self._levels if level.get(key) is not None), None)

    def part(self, key: str) -> "Fields | None":
        """An inner object, with the same errors; None if it is absent or empty."""
        value = self.said(key)
        return self.inner(key, value) if isinstance(value, Mapping) and value else None

    def inner(self, key: str, value: Mapping[str, Any]) -> "Fields":
        """The object under ``key``, completed by the caller."""
        return Fields({"model_type": "", **value}, f"{self.name}: {key}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.text.get(key)
        return default if value is None else value

    def _whole(self, key: str, least: int = 1) -> int:
        value = self.text[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(f"{key} is {value!r}, it must be a whole number of at least {least}")
        return value
