"""Named settings with their limits, and how flags, environment and quiver.toml become one value.

Rule: a setting has one home here, its unit last in its name, and a stated behaviour when the limit is reached.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from quiver.errors import InvalidRequestError

MIB = 1024 * 1024
PORT_DEFAULT = 9400
HTTP_PORT_DEFAULT = 8002
DATA_DIR_DEFAULT = "quiver-data"

# One message a client may send. Checked by the SDK for each record, by the broker for each batch of one record.
MESSAGE_BYTES_MAX = 1 * MIB
# One Arrow batch. A larger one is refused before anything is stored.
BATCH_BYTES_MAX = 16 * MIB
# One frame on the wire. A longer one closes the connection before its body is read.
FRAME_BYTES_MAX = BATCH_BYTES_MAX + 1 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class LogSettings:
    """How a partition log is cut into files and kept."""

    segment_bytes_max: int = 64 * MIB  # a new segment begins before the frame that would pass this
    segment_age_ms_max: int = 24 * 3600 * 1000  # ... or when the active segment is this old
    room_bytes_max: int = 8 * MIB  # a file that grows is made longer ahead, by its own length up to so much; 0: never
    index_interval_bytes: int = 16 * 1024  # one sparse index entry for so many bytes of log
    checkpoint_bytes: int = 16 * MIB  # recovery scans at most about this much of a log
    retention_ms: int | None = 7 * 24 * 3600 * 1000  # None keeps for ever
    retention_bytes: int | None = None  # for each partition; None is unlimited


@dataclasses.dataclass(frozen=True, slots=True)
class NetSettings:
    """Limits of one listening port."""

    frame_bytes_max: int = FRAME_BYTES_MAX
    frames_in_flight_max: int = 1024  # on one connection; when full, the server stops reading from it
    bytes_in_flight_max: int = 64 * MIB  # of requests on one connection; when full, the server stops reading from it
    connections_max: int = 1024  # when full, a new connection is told so and closed
    node_connections_max: int = 64  # beyond these, for other nodes of the cluster alone: clients cannot lock them out
    handshake_timeout_s: float = 5.0  # a connection that has not said hello by then is closed
    idle_timeout_s: float = 600.0  # no frame and nothing in flight for so long: closed
    write_buffer_bytes_max: int = 4 * MIB  # above this the server stops reading from and serving that connection
    slow_reader_timeout_s: float = 30.0  # ... and after so long without draining it is cut
    peer_ping_s: float = 0.2  # a broker that had nothing to say to another one for so long says that it is there
    peer_silence_s: float = 1.0  # a broker that was not heard for so long counts as lost; its connection is closed
    peer_backoff_s_min: float = 0.05  # before a lost broker is dialled again; doubles ...
    peer_backoff_s_max: float = 1.0  # ... up to this
    peer_packet_bytes_max: int = 1 * MIB  # messages of one turn to one broker share packets up to this size
    peer_buffer_bytes_max: int = 32 * MIB  # waiting to be sent to one broker; when full, a message is dropped


@dataclasses.dataclass(frozen=True, slots=True)
class RaftSettings:
    """How replicas of a partition watch each other and how much they send ahead."""

    heartbeat_ms: int = 100
    election_ms: int = 600  # a leader that was not heard for this long, or up to twice as long, is replaced
    append_bytes_max: int = 1 * MIB  # entries in one message to a follower; a single longer entry travels alone
    appends_in_flight_max: int = 64  # messages to one follower that are not acknowledged; when full, it waits
    quiesce_ms: int = 2000  # a group that had nothing to do for so long goes quiet


@dataclasses.dataclass(frozen=True, slots=True)
class BrokerSettings:
    data_dir: str = DATA_DIR_DEFAULT
    node_id: int = 1
    host: str = "127.0.0.1"
    port: int = PORT_DEFAULT
    insecure: bool = False
    message_bytes_max: int = MESSAGE_BYTES_MAX
    batch_bytes_max: int = BATCH_BYTES_MAX
    fetch_bytes_max: int = 8 * MIB  # a fetch that asks for more gets this
    fetch_wait_ms_max: int = 60_000
    retention_check_s: float = 30.0
    log: LogSettings = dataclasses.field(default_factory=LogSettings)
    net: NetSettings = dataclasses.field(default_factory=NetSettings)
    raft: RaftSettings = dataclasses.field(default_factory=RaftSettings)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeSettings(BrokerSettings):
    """An embedded node: a broker and a manager in one process."""

    http_port: int | None = None  # None: 8002, or a free one when `port` asks for a free one
    metadata_url: str = ""  # of a SQL database; empty: SQLite in the data directory
    http_body_bytes_max: int = 8 * MIB  # a longer body is refused before it is read whole
    http_body_timeout_s: float = 10.0  # a body that has not arrived by then is refused
    heartbeat_s: float = 1.0  # how often a broker reports to the manager, and observations go to the database
    broker_silence_s: float = 5.0  # a broker that was not heard of for so long counts as inactive
    broker_away_s: float = 600.0  # a broker that was not heard of for so long loses its replicas to others
    group_release_s: float = 60.0  # a member that does not let go of a partition for so long loses it
    manager: str = ""  # addresses of the managers that a broker of its own joins, joined by commas
    peers: str = ""  # of a manager: all managers with their addresses, as 1=host:port,2=host:port
    metadata_stale_s: float = 3.0  # a manager that was not in touch with the quorum for so long says so and refuses


def check_listen_address(host: str, insecure: bool) -> None:
    """Loopback is always allowed; anything else is open to the network and must be asked for by name."""
    if insecure or host == "localhost":
        return
    try:
        if ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:
        pass
    raise InvalidRequestError(
        f"listening on {host} would let anyone on that network read and write: there is no TLS and no token yet. "
        "Use a loopback address, or say --insecure if you accept that"
    )


_S = TypeVar("_S")


def layered(
    cls: type[_S], flags: Mapping[str, Any], environ: Mapping[str, str], toml: Mapping[str, Any], prefix: str = "QUIVER"
) -> _S:
    """A settings value from flags, then QUIVER_* variables, then quiver.toml, then the defaults.

    Nested settings are tables in TOML (`[log]`) and joined names elsewhere: `QUIVER_LOG_SEGMENT_BYTES_MAX`.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            nested = field.default_factory()
            table = toml.get(field.name, {})
            if not isinstance(table, Mapping):
                raise InvalidRequestError(f"quiver.toml: [{field.name}] must be a table")
            nested_flags = flags.get(field.name) or {}
            values[field.name] = layered(type(nested), nested_flags, environ, table, f"{prefix}_{field.name.upper()}")
            continue
        variable = f"{prefix}_{field.name.upper()}"
        if flags.get(field.name) is not None:
            values[field.name] = flags[field.name]
        elif variable in environ:
            values[field.name] = _parse(variable, environ[variable], str(field.type), default)
        elif field.name in toml:
            values[field.name] = _parse(f"quiver.toml: {field.name}", toml[field.name], str(field.type), default)
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in toml:
        if name not in known:
            raise InvalidRequestError(f"quiver.toml: unknown setting {name!r}; known: {', '.join(sorted(known))}")
    return cls(**values)


def _parse(where: str, raw: Any, type_name: str, default: Any) -> Any:
    optional = "None" in type_name
    if optional and isinstance(raw, str) and raw.lower() in ("", "none"):
        return None
    try:
        if "bool" in type_name:
            if isinstance(raw, bool):
                return raw
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[str(raw).lower()]
        if "int" in type_name and not isinstance(raw, bool):
            number = int(raw)
            if isinstance(raw, float) and raw != number:
                raise ValueError
            return number
        if "float" in type_name and not isinstance(raw, bool):
            seconds = float(raw)
            if math.isnan(seconds):  # compares false with everything: a time-out that never comes
                raise ValueError
            return seconds
        if "str" in type_name and isinstance(raw, str):
            return raw
    except (KeyError, ValueError, TypeError, OverflowError):
        pass
    raise InvalidRequestError(f"{where}: {raw!r} is not a valid {type_name} (default {default!r})")


def read_toml(path: Path) -> dict[str, Any]:
    """The settings file, or nothing where there is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} is not valid TOML: {error}") from error
