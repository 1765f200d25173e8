"""Turns flags, QUIVER_* variables and quiver.toml into the settings of a node, or one clear error.

Rule: a user's mistake leaves as InvalidRequestError, whichever of the three it came from.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quiver.config import HTTP_PORT_DEFAULT, NodeSettings, layered, read_toml
from quiver.errors import InvalidRequestError

CONFIG_DEFAULT = "quiver.toml"
PORT_MAX = 65_535


def load_settings(
    flags: Mapping[str, Any], config: str | None = None, environ: Mapping[str, str] | None = None
) -> NodeSettings:
    """`config` names a file that must be there; without it quiver.toml of the current directory is used if present."""
    path = Path(config or CONFIG_DEFAULT)
    if config is not None and not path.exists():
        raise InvalidRequestError(f"the settings file {config} does not exist")
    try:
        toml = read_toml(path)
    except OSError as error:
        raise InvalidRequestError(f"cannot read the settings file {path}: {error.strerror}") from error
    settings = layered(NodeSettings, flags, os.environ if environ is None else environ, toml)
    if settings.http_port is None:
        settings = dataclasses.replace(settings, http_port=0 if settings.port == 0 else HTTP_PORT_DEFAULT)
    for port in (settings.port, settings.http_port):
        if port is None or not 0 <= port <= PORT_MAX:
            raise InvalidRequestError(f"port {port} is not a port: use 1 to {PORT_MAX}, or 0 for any free one")
    if settings.node_id < 1:
        raise InvalidRequestError(f"node id {settings.node_id} is not allowed: ids begin at 1")
    if not settings.data_dir:
        raise InvalidRequestError("the data directory must have a name")
    return settings
