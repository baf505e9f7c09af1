"""Keys and passwords, which configurations only name: they are in the environment."""

import os

from hetero_gateway.errors import ConfigError


def secret(env_name: str | None, key: str) -> str | None:
    """The value of the environment variable that holds a key, as ``password``.

    Raises:
        ConfigError: also if it is invalid in a header.
    """
    value = password(env_name, key)
    if value is not None and (not (value.isascii() and value.isprintable()) or " " in value):
        raise ConfigError(
            f"{key}: the environment variable {env_name} holds a space, a line end or another "
            "character that cannot stand in a header"
        )
    return value


def password(env_name: str | None, key: str) -> str | None:
    """The value of the environment variable that holds a password, or None when none is named.

    Raises:
        ConfigError: the variable is named but not set: refusing is safer than running open.
    """
    if env_name is None:
        return None
    value = os.environ.get(env_name)
    if not value:
        raise ConfigError(f"{key}: the environment variable {env_name} is not set")
    return value
