"""What `quiver broker add` does: one more broker under the supervisor of this machine, or one that waits elsewhere.

Rule: the supervisor, or the manager, does the work. Making DATA/broker-N is what gives a new broker its number: of two
commands at once each gets another one, and the next `quiver up` starts it too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

from quiver.cli.cluster import BROKERS_MAX
from quiver.cli.cluster_file import Cluster, find_running
from quiver.cli.launch import PATIENCE_S
from quiver.cli.lock import is_held
from quiver.cli.options import data_dir_of, find_cluster, not_running, say
from quiver.cli.supervisor import START_FAILED_FILE, numbers_of
from quiver.errors import InvalidRequestError, QuiverError, RequestTimeoutError, UnavailableError

JOIN_TIMEOUT_S: Final = 60.0  # a broker that has not joined by then is still tried, but not waited for
TAKE_IN_TIMEOUT_S: Final = 20.0
_LOOK_S: Final = 0.05
_ASK_TIMEOUT_S: Final = 5.0
_MEMBERS_FILE: Final = "members.json"  # of a broker that has joined once


class Supervised(NamedTuple):
    """A cluster of this machine whose supervisor takes more brokers."""

    data_dir: Path
    pid: int


def start_broker(servers: str | None, data_dir: str | None) -> tuple[int, str]:
    """The number and the address of the new broker, when the cluster lists it."""
    found = _find_supervised(servers, data_dir)
    number = _make_directory(found)
    directory = found.data_dir / f"broker-{number}"
    try:
        try:
            os.kill(found.pid, signal.SIGUSR1)
        except ProcessLookupError as error:
            raise not_running(found.data_dir) from error
        except PermissionError as error:
            raise InvalidRequestError(
                f"process {found.pid} of the cluster on {found.data_dir} is not yours to add to"
            ) from error
        return number, _wait_until_listed(found, number)
    except RequestTimeoutError:
        raise  # it is still being started
    except QuiverError:
        # Without messages and without a place in the cluster it would only be in the way of the next start.
        if _is_unused(directory):
            shutil.rmtree(directory, ignore_errors=True)
        raise


def take_in(address: str, servers: str | None, data_dir: str | None) -> tuple[int, str]:
    """The number and the address of the broker that waited there, when it is part of the cluster."""
    from quiver import Admin
    from quiver.client.cluster import parse_servers
    from quiver.client.http import HttpLink

    if len(where := parse_servers(address)) > 1:
        raise InvalidRequestError("one broker is added at a time: give one HOST:PORT")
    with Admin(find_cluster(servers, data_dir)) as admin:
        managers = [one.http for one in admin.managers() if one.http]
        if not managers:
            raise UnavailableError("no manager of the cluster is known; try again")
        patience = threading.Timer(PATIENCE_S, say, [f"waiting for the broker at {where[0]} to join"])
        patience.daemon = True
        patience.start()
        link = HttpLink(managers, TAKE_IN_TIMEOUT_S)
        try:
            reply = link.post("/brokers", {"endpoint": where[0]})
        finally:
            patience.cancel()
            link.close()
        if reply.status == 400:
            raise InvalidRequestError(reply.message)
        if not reply.is_success:
            raise UnavailableError(reply.message)
        number: int = reply.body["broker_id"]
        return number, next((node.address for node in admin.nodes() if node.id == number), where[0])


def _find_supervised(servers: str | None, data_dir: str | None) -> Supervised:
    path = data_dir_of(data_dir)
    running = find_running(path)
    if data_dir is None:
        named = servers or os.environ.get("QUIVER_SERVERS")
        if named and not _is_one_of(named, running.cluster if running else None):
            raise _by_hand(named)
    if running is None:
        raise not_running(path)
    cluster = running.cluster
    if running.pid is None or cluster is None or cluster.supervisor.pid != running.pid:
        raise UnavailableError(f"the cluster on {path} begins or ends just now; try again")
    if {one.pid for one in cluster.managers} & {one.pid for one in cluster.brokers}:
        raise InvalidRequestError(
            f"the cluster on {path} is one process, which is its own and only broker; "
            f"'quiver down' and 'quiver up --brokers 2' make brokers of their own, and more can be added to those"
        )
    if not cluster.supervisor.takes_brokers:
        raise InvalidRequestError(
            f"the supervisor of the cluster on {path} (pid {running.pid}) is of an older version and cannot add a "
            f"broker; 'quiver down' and 'quiver up' start it anew"
        )
    return Supervised(path, running.pid)


def _is_one_of(servers: str, cluster: Cluster | None) -> bool:
    from quiver.client.cluster import parse_servers

    return cluster is not None and not set(parse_servers(servers)).isdisjoint(cluster.servers)


def _by_hand(servers: str) -> InvalidRequestError:
    """For a cluster that is not supervised here: the command that starts a broker of it."""
    from quiver import Admin

    with Admin(find_cluster(servers, None)) as admin:
        managers = ",".join(one.address for one in admin.managers() if one.address) or servers
        number = max((node.id for node in admin.nodes()), default=0) + 1
    return InvalidRequestError(
        f"the cluster at {servers} is not supervised on this machine; start a broker where it is to run: "
        f"'quiver broker --manager {managers} --id {number}'"
    )


def _make_directory(found: Supervised) -> int:
    members = _members(found.data_dir)
    while True:
        number = max(numbers_of("broker", found.data_dir), default=0) + 1
        if number > BROKERS_MAX:
            raise InvalidRequestError(f"a supervisor runs at most {BROKERS_MAX} brokers; {found.data_dir} has them")
        if number in members:
            # The next `quiver up` would start a second one under its number.
            raise InvalidRequestError(
                f"broker {number} of this cluster runs elsewhere, at {members[number]}; the next one must be started "
                f"by hand too: 'quiver broker --manager HOST:PORT --id {max(members) + 1}'"
            )
        try:
            (found.data_dir / f"broker-{number}").mkdir()
            return number
        except FileExistsError:
            continue  # another command was quicker
        except OSError as error:
            raise InvalidRequestError(
                f"cannot write to the data directory {found.data_dir}: {error.strerror}"
            ) from error


def _members(data_dir: Path) -> dict[int, str]:
    """The addresses of the cluster's brokers. Raises that none of its nodes answers."""
    from quiver import Admin

    running = find_running(data_dir)
    if running is None or running.cluster is None:
        raise not_running(data_dir)
    with Admin(",".join(running.cluster.servers), request_timeout=_ASK_TIMEOUT_S) as admin:
        return {node.id: node.address for node in admin.nodes()}


def _wait_until_listed(found: Supervised, number: int) -> str:
    """Its address, once cluster.json has it and the cluster knows it."""
    directory = found.data_dir / f"broker-{number}"
    log = found.data_dir / "logs" / f"broker-{number}.log"
    began_s = time.monotonic()
    told = False
    while True:
        running = find_running(found.data_dir)
        if running is None or running.pid not in (found.pid, None):
            raise UnavailableError(f"the cluster on {found.data_dir} ended while broker {number} was being added")
        entries = running.cluster.brokers if running.cluster else ()
        mine = next((entry for entry in entries if entry.id == number), None)
        if mine is not None:
            with contextlib.suppress(UnavailableError):
                if number in _members(found.data_dir):
                    return mine.address
        if (reason := _failure(directory)) is not None:
            raise UnavailableError(f"broker {number} could not be started: {reason}")
        waited_s = time.monotonic() - began_s
        if waited_s > JOIN_TIMEOUT_S:
            raise RequestTimeoutError(f"broker {number} has not joined within {waited_s:.0f} s. Its log: {log}")
        if not told and waited_s > PATIENCE_S:
            told = True
            say(f"waiting for broker {number} to {'be listed' if mine else 'serve'}; its log is {log}")
        time.sleep(_LOOK_S)


def _failure(directory: Path) -> str | None:
    try:
        return (directory / START_FAILED_FILE).read_text() or None
    except OSError:
        return None


def _is_unused(directory: Path) -> bool:
    return not (directory / _MEMBERS_FILE).exists() and not is_held(directory / "lock")
