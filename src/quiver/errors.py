"""Every error Quiver raises, as one tree. The class tells the caller what to do, the instance carries the facts.

    QuiverError
    ├── RequestError            your request is wrong; sending it again will not help      (HTTP 400)
    │   ├── InvalidRequestError       a field has the wrong type or value
    │   │   └── NodeRemovedError          it was removed from the cluster
    │   │       ├── BrokerRemovedError        this broker was removed from the cluster it wants to join
    │   │       └── ManagerRemovedError       this manager was removed from the quorum
    │   ├── InvalidTopicError         the topic name is not allowed
    │   ├── UnknownTopicError         no such topic
    │   ├── UnknownPartitionError     the topic has no such partition
    │   ├── TopicExistsError          the topic is there already
    │   ├── MessageTooLargeError      over the message or batch limit
    │   ├── OffsetOutOfRangeError     the offset is not in the log; says the valid range
    │   ├── ConflictError             the position moved meanwhile; says where it is
    │   ├── NoConsumersError          the topic takes no messages while nobody reads it
    │   ├── UnknownGroupError         no such consumer group
    │   ├── GroupActiveError          the group has members; it must be at rest for this
    │   ├── UnknownMemberError        not a member of the group, or not any more: join again
    │   ├── MemberFencedError         another member has the partition by now; says since which epoch
    │   ├── NoCommittedPositionError  the group has no position and the start policy forbids guessing
    │   ├── InvalidBatchError         the batch does not match its checksum, count or format
    │   ├── OutOfOrderSequenceError   a gap in a producer's sequence
    │   ├── ProducerFencedError       a newer epoch of this producer has written
    │   └── UnsupportedVersionError   no protocol version in common
    ├── UnavailableError        the cluster cannot do it now; a retry may succeed           (HTTP 503)
    │   ├── ConnectionLostError       the connection ended before the reply: outcome unknown
    │   ├── RequestTimeoutError       no reply in time: outcome unknown
    │   ├── OutcomeUnknownError       the leader changed meanwhile: it may or may not have been done
    │   ├── NotLeaderError            another node leads this partition
    │   ├── DiskFullError             nothing was stored; works again when space returns
    │   ├── LogFailedError            a disk error stopped this partition; reads go on
    │   ├── OverloadedError           a limit of the server is reached
    │   └── ShuttingDownError         the server is stopping
    ├── CorruptLogError         stored bytes are damaged: names the file and position       (HTTP 500)
    ├── ProtocolError           the peer's bytes are not our protocol; the connection is closed
    ├── DeliveryError           a record was given up by the producer
    │   ├── DeliveryTimeoutError      the delivery time-out passed; the record may or may not be stored
    │   └── BufferFullError           the producer's buffer stayed full; the record was not accepted
    └── UsageError              the client object was used in a way it does not allow
        ├── ClosedError               it is closed
        ├── ForkedError               it was made in another process
        └── ConcurrentUseError        two threads used a Consumer at once

Rule: errors cross the wire as (code, message, facts); the code is the class name.
"""

from __future__ import annotations

from typing import Any, ClassVar


class QuiverError(Exception):
    retriable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts: dict[str, Any] = facts

    @property
    def code(self) -> str:
        return type(self).__name__

    @property
    def message(self) -> str:
        return str(self.args[0])


class RequestError(QuiverError):
    http_status = 400


class InvalidRequestError(RequestError):
    pass


class NodeRemovedError(InvalidRequestError):
    pass


class BrokerRemovedError(NodeRemovedError):
    pass


class ManagerRemovedError(NodeRemovedError):
    pass


class InvalidTopicError(RequestError):
    pass


class UnknownTopicError(RequestError):
    pass


class UnknownPartitionError(RequestError):
    pass


class TopicExistsError(RequestError):
    pass


class MessageTooLargeError(RequestError):
    pass


class OffsetOutOfRangeError(RequestError):
    """`facts` has offset, earliest and latest; earliest <= offset <= latest is the valid range."""

    @classmethod
    def of(cls, topic: str, partition: int, offset: int, earliest: int, latest: int) -> OffsetOutOfRangeError:
        return cls(
            f"offset {offset} is out of range for {topic}-{partition}: valid offsets are {earliest} to {latest}",
            topic=topic,
            partition=partition,
            offset=offset,
            earliest=earliest,
            latest=latest,
        )


class ConflictError(RequestError):
    """`facts` has current."""


class NoConsumersError(RequestError):
    pass


class UnknownGroupError(RequestError):
    pass


class GroupActiveError(RequestError):
    pass


class UnknownMemberError(RequestError):
    pass


class MemberFencedError(RequestError):
    """`facts` has epoch: of the member that has the partition now."""


class NoCommittedPositionError(RequestError):
    pass


class InvalidBatchError(RequestError):
    pass


class OutOfOrderSequenceError(RequestError):
    """`facts` has expected and got."""


class ProducerFencedError(RequestError):
    pass


class UnsupportedVersionError(RequestError):
    pass


class UnavailableError(QuiverError):
    retriable = True
    http_status = 503


class ConnectionLostError(UnavailableError):
    pass


class RequestTimeoutError(UnavailableError):
    pass


class OutcomeUnknownError(UnavailableError):
    pass


class NotLeaderError(UnavailableError):
    """Facts: `leader`, 0 where that is not known; `done` is False where nothing of the request was done."""


class DiskFullError(UnavailableError):
    pass


class LogFailedError(UnavailableError):
    pass


class OverloadedError(UnavailableError):
    pass


class ShuttingDownError(UnavailableError):
    pass


class CorruptLogError(QuiverError):
    """`facts` has path and position (bytes from the start of that file)."""

    @classmethod
    def at(cls, path: str, position: int, reason: str) -> CorruptLogError:
        return cls(f"corrupt log: {reason} in {path} at byte {position}", path=path, position=position, reason=reason)


class ProtocolError(QuiverError):
    pass


class DeliveryError(QuiverError):
    pass


class DeliveryTimeoutError(DeliveryError):
    pass


class BufferFullError(DeliveryError):
    """`facts` has accepted: how many records of this call were taken before."""


class UsageError(QuiverError):
    pass


class ClosedError(UsageError):
    pass


class ForkedError(UsageError):
    pass


class ConcurrentUseError(UsageError):
    pass


def _tree(cls: type[QuiverError]) -> dict[str, type[QuiverError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found.update(_tree(child))
    return found


_BY_CODE = _tree(QuiverError)


def error_from_wire(code: str, message: str, facts: dict[str, Any]) -> QuiverError:
    """The typed error for a reply. An unknown code (a newer server) still becomes a QuiverError."""
    error = _BY_CODE.get(code, QuiverError)(message)
    error.facts = facts
    return error
