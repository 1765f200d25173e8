"""Links between brokers, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quiver.config import NetSettings
from quiver.net.peers import Peers
from quiver.net.server import Server
from quiver.raft.messages import AnyMessage, Append, Heartbeat, HeartbeatReply
from quiver.wire.messages import (
    KIND_OF,
    PROTOCOL_VERSION,
    HelloReply,
    encode,
)
from quiver.wire.packet import FLAG_ERROR, encode_prefix
from quiver.wire.peer_messages import PeerHello, PeerMessages, PeerPing
from tests.net.kit import HELLO, Puppet, RawClient, Run, connected, echo, encode_request, until

UID = "0123456789abcdef" * 2
FAST = NetSettings(peer_backoff_s_min=0.005, peer_backoff_s_max=0.02)
BLOB = random.Random(7).randbytes(3_000_000)


def heartbeat(number: int) -> Heartbeat:
    return Heartbeat(1, 2, number, 0)


def append(number: int) -> Append:
    return Append(1, 2, 3, number, 3, number + 1, number)


class Side:
    """One broker as far as its links go: the messages and the links it saw."""

    def __init__(self, me: int, settings: NetSettings, cluster_id: str) -> None:
        self.me = me
        self.peers = Peers(me, settings)
        self.peers.cluster_id = cluster_id
        self.peers.on_message = self._message
        self.peers.on_link = self._link
        hello = HelloReply(PROTOCOL_VERSION, me, cluster_id, 1000, 2000, 3000)
        self.puppet = Puppet()
        self.server = Server(settings, hello, self.puppet, peers=self.peers)
        self.messages: list[tuple[str, AnyMessage, bytes]] = []
        self.links: list[tuple[int, bool]] = []
        self.address = ""

    def _message(self, uid: str, message: AnyMessage, frames: memoryview) -> None:
        assert self.links, "a link is told before its first message"
        self.messages.append((uid, message, bytes(frames)))

    def _link(self, broker: int, up: bool) -> None:
        self.links.append((broker, up))

    async def start(self, port: int = 0) -> None:
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1', port)}"

    async def stop(self) -> None:
        await self.peers.close()
        await self.server.stop(0.0)


@contextlib.asynccontextmanager
async def brokers(*ids: int, settings: NetSettings = FAST, link: bool = True) -> AsyncIterator[list[Side]]:
    """Brokers that know each other, and with `link` are connected."""
    sides = [Side(number, settings, "c") for number in ids]
    try:
        for side in sides:
            await side.start()
        introduce(*sides)
        if link:
            await until(lambda: all(len(side.peers.connected) == len(sides) - 1 for side in sides), "all links")
        yield sides
    finally:
        for side in sides:
            await side.stop()


def introduce(*sides: Side) -> None:
    for side in sides:
        side.peers.set_addresses({other.me: other.address for other in sides})


def test_messages_and_frames_arrive_both_ways_in_order(run: Run) -> None:
    async def main() -> None:
        async with brokers(1, 2) as (one, two):
            for number in range(100):
                assert one.peers.send(2, UID, append(number), [b"frame", memoryview(b"-%d" % number)])
                assert two.peers.send(1, UID, heartbeat(number))
            await until(lambda: len(two.messages) == len(one.messages) == 100)
            assert two.messages == [(UID, append(number), b"frame-%d" % number) for number in range(100)]
            assert one.messages == [(UID, heartbeat(number), b"") for number in range(100)]
            assert (one.links, two.links) == ([(2, True)], [(1, True)])

    run(main())


def test_three_brokers_are_all_linked_and_only_once(run: Run) -> None:
    async def main() -> None:
        async with brokers(1, 2, 3) as sides:
            for side in sides:
                for other in sides:
                    if other is not side:
                        assert side.peers.send(other.me, f"{side.me}", heartbeat(side.me))
            await until(lambda: all(len(side.messages) == 2 for side in sides))
            assert all(len(side.links) == 2 for side in sides)
            assert not sides[0].peers.send(4, UID, heartbeat(1)), "nobody has that id"

    run(main())


def test_messages_of_one_turn_share_a_packet(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        packets: list[int] = []
        async with brokers(1, 2) as (one, two):
            link = two.peers._links[1]
            received = link.received

            def count(packet: Any) -> None:
                if packet.kind == KIND_OF[PeerMessages]:
                    packets.append(len(packet.header))
                received(packet)

            monkeypatch.setattr(link, "received", count)
            for number in range(1000):
                one.peers.send(2, f"{number:032x}", heartbeat(number))
            await until(lambda: len(two.messages) == 1000)
            assert len(packets) == 1

    run(main())


def test_much_at_once_is_split_and_one_large_message_travels_alone(run: Run) -> None:
    async def main() -> None:
        settings = dataclasses.replace(FAST, peer_packet_bytes_max=100_000)
        async with brokers(1, 2, settings=settings) as (one, two):
            for number in range(20):
                assert one.peers.send(2, UID, append(number), [BLOB[number * 30_000 : (number + 1) * 30_000]])
            assert one.peers.send(2, UID, append(20), [BLOB[:1_000_000], BLOB[1_000_000:]])
            assert one.peers.send(2, UID, append(21), [b"last"])
            await until(lambda: len(two.messages) == 22)
            assert b"".join(frames for _, _, frames in two.messages[:20]) == BLOB[:600_000]
            assert two.messages[20][2] == BLOB
            assert two.messages[21] == (UID, append(21), b"last")

    run(main())


def test_message_over_the_frame_limit_is_dropped_alone(run: Run) -> None:
    async def main() -> None:
        async with brokers(1, 2, settings=dataclasses.replace(FAST, frame_bytes_max=100_000)) as (one, two):
            assert not one.peers.send(2, UID, append(1), [BLOB[:100_000]])
            assert one.peers.send(2, UID, append(2), [BLOB[:90_000]])
            await until(lambda: two.messages)
            assert [message for _, message, _ in two.messages] == [append(2)]
            assert one.links == [(2, True)]

    run(main())


def test_full_buffer_drops_messages_and_keeps_the_link(run: Run) -> None:
    async def main() -> None:
        settings = dataclasses.replace(FAST, peer_buffer_bytes_max=1_000_000)
        async with brokers(1, 2, settings=settings) as (one, two):
            sent = [one.peers.send(2, UID, append(number), [BLOB[:200_000]]) for number in range(100)]
            assert 0 < sum(sent) < 100
            await until(lambda: len(two.messages) == sum(sent))
            assert one.peers.send(2, UID, append(100)), "there is room again"
            assert one.links == [(2, True)]

    run(main())


def test_both_sides_full_at_once_do_not_wait_for_each_other(run: Run) -> None:
    async def main() -> None:
        async with brokers(1, 2) as (one, two):
            for number in range(20):
                assert one.peers.send(2, UID, append(number), [BLOB[:1_000_000]])
                assert two.peers.send(1, UID, append(number), [BLOB[:1_000_000]])
            await until(lambda: len(two.messages) == len(one.messages) == 20)

    run(main())


def test_quiet_link_stays(run: Run) -> None:
    async def main() -> None:
        settings = dataclasses.replace(FAST, peer_ping_s=0.02, peer_silence_s=0.1)
        async with brokers(1, 2, settings=settings) as (one, two):
            await asyncio.sleep(0.5)
            assert (one.links, two.links) == ([(2, True)], [(1, True)])

    run(main())


def test_silent_broker_counts_as_lost_on_either_side(run: Run) -> None:
    """As one that was stopped with SIGSTOP: its connection is open and says nothing."""

    async def main() -> None:
        settings = dataclasses.replace(FAST, peer_ping_s=0.02, peer_silence_s=0.1)
        side = Side(5, settings, "c")
        await side.start()
        async with await RawClient.open(side.address) as dialling:
            await dialling.send(encode_request(HELLO, 1) + encode_request(PeerHello(2, "c"), 2))
            await until(lambda: side.links == [(2, True)])
            await until(lambda: side.links == [(2, True), (2, False)])
            assert not side.peers.send(2, UID, heartbeat(1))
        await side.stop()

    run(main())


def test_half_a_large_packet_is_a_sign_of_life(run: Run) -> None:
    async def main() -> None:
        settings = dataclasses.replace(FAST, peer_ping_s=0.02, peer_silence_s=0.2)
        side = Side(5, settings, "c")
        await side.start()
        async with await RawClient.open(side.address) as client:
            await client.send(encode_request(HELLO, 1) + encode_request(PeerHello(2, "c"), 2))
            await until(lambda: side.links == [(2, True)])
            header = encode(PeerMessages([(UID, b"\x00", 100_000)]))
            await client.send(encode_prefix(KIND_OF[PeerMessages], 0, 0, header, 100_000))
            for _ in range(8):
                await asyncio.sleep(0.05)
                await client.send(bytes(1000))
            assert side.links == [(2, True)]
        await side.stop()

    run(main())


def test_lost_broker_is_dialled_again_when_it_is_back(run: Run) -> None:
    async def main() -> None:
        one, two = Side(1, FAST, "c"), Side(2, FAST, "c")
        await one.start()
        await two.start()
        introduce(one, two)
        await until(lambda: one.links and two.links)
        await two.stop()
        await until(lambda: one.links == [(2, True), (2, False)])
        again = Side(2, FAST, "c")
        await again.start(int(two.address.rpartition(":")[2]))
        await until(lambda: one.links[2:] == [(2, True)] and again.links == [(1, True)])
        assert one.peers.send(2, UID, heartbeat(1))
        await until(lambda: again.messages)
        for side in (one, again):
            await side.stop()

    run(main())


def test_broker_that_moved_is_found_at_its_new_address(run: Run) -> None:
    async def main() -> None:
        async with brokers(1, 2) as (one, two):
            moved = Side(2, FAST, "c")
            await moved.start()
            one.peers.set_addresses({1: one.address, 2: moved.address})
            await until(lambda: moved.links == [(1, True)])
            assert two.links[-1] == (1, False)
            assert one.links == [(2, True), (2, False), (2, True)]
            await moved.stop()

    run(main())


def test_broker_that_is_gone_from_the_list_is_dropped(run: Run) -> None:
    async def main() -> None:
        async with brokers(1, 2, 3) as (one, two, three):
            two.peers.set_addresses({2: two.address, 1: one.address})
            await until(lambda: two.links[-1] == (3, False))
            one.peers.set_addresses({1: one.address})
            await until(lambda: not one.peers.connected)
            assert (2, False) in one.links
            await asyncio.sleep(0.05)
            assert not one.peers.connected, "it is not dialled again"
            assert three.me == 3

    run(main())


def test_other_cluster_is_refused_and_said_so(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        one, two = Side(1, FAST, "red"), Side(2, FAST, "blue")
        for side in (one, two):
            await side.start()
        with caplog.at_level(logging.INFO):
            introduce(one, two)
            await until(lambda: "belongs to cluster red, broker 2 to cluster blue" in caplog.text)
            await asyncio.sleep(0.2)
        assert not one.links and not two.links
        told = [record for record in caplog.records if record.getMessage().startswith("peer_not_reached")]
        assert len(told) == 1, "the same reason is said once"
        for side in (one, two):
            await side.stop()

    run(main())


@pytest.mark.parametrize("hello", [PeerHello(5, "c"), PeerHello(9, "c"), PeerHello(1, ""), PeerHello(1, "x")])
def test_stranger_is_told_why_it_gets_no_link(run: Run, hello: PeerHello) -> None:
    async def main() -> None:
        side = Side(5, FAST, "c")
        await side.start()
        async with await RawClient.open(side.address) as client:
            await client.send(encode_request(HELLO, 1) + encode_request(hello, 2))
            assert await client.packet() is not None
            refused = await client.packet()
            assert refused is not None and refused.flags & FLAG_ERROR
            assert await client.packet() is None
        assert not side.links
        await side.stop()

    run(main())


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n" * 3,
    encode_request(HELLO, 3),
    encode_prefix(KIND_OF[PeerMessages], 0, 0, b"\xc1", 0),
    encode_prefix(KIND_OF[PeerMessages], 0, 0, encode(PeerMessages([(UID, b"\xc1", 0)])), 0),
    encode_prefix(KIND_OF[PeerMessages], 0, 0, encode(PeerMessages([(UID, b"\x91\x01", 0)])), 0),
    encode_prefix(KIND_OF[PeerMessages], 0, 0, encode(PeerMessages([(UID, b"", 10)])), 3) + b"abc",
    encode_prefix(KIND_OF[PeerMessages], 0, 0, encode(PeerMessages([])), 3) + b"abc",
    encode_prefix(200, 0, 0, b"\x90", 0),
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_ends_that_link_alone(run: Run, caplog: pytest.LogCaptureFixture, garbage: bytes) -> None:
    async def main() -> None:
        async with brokers(1, 5) as (one, five), connected(five.address) as bystander:
            async with await RawClient.open(five.address) as client:
                await client.send(encode_request(HELLO, 1) + encode_request(PeerHello(2, "c"), 2))
                await until(lambda: (2, True) in five.links)
                with caplog.at_level(logging.INFO):
                    await client.send(garbage)
                    await until(lambda: five.links[-1] == (2, False))
                assert "not our protocol" in caplog.text
            await echo(bystander)
            assert one.peers.send(5, UID, heartbeat(1))
            await until(lambda: five.messages)
            assert one.links == [(5, True)]

    run(main())


@pytest.mark.parametrize("kind", [PeerMessages([]), PeerPing()])
def test_peer_packets_without_a_hello_close_the_connection(run: Run, kind: Any) -> None:
    async def main() -> None:
        side = Side(5, FAST, "c")
        await side.start()
        async with await RawClient.open(side.address) as client:
            await client.send(encode_request(HELLO, 1))
            assert await client.packet() is not None
            await client.send(encode_request(kind, 0))
            assert await client.packet() is None
        await side.stop()

    run(main())


def test_server_without_links_refuses_them(run: Run) -> None:
    async def main() -> None:
        hello = HelloReply(PROTOCOL_VERSION, 2, "c", 1, 1, 1)
        server = Server(NetSettings(), hello, Puppet())
        address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        one = Side(1, FAST, "c")
        one.peers.set_addresses({2: address})
        await asyncio.sleep(0.1)
        assert not one.links
        await one.peers.close()
        await server.stop(0.0)

    run(main())


def test_second_connection_of_a_broker_takes_the_place_of_the_first(run: Run) -> None:
    async def main() -> None:
        side = Side(5, FAST, "c")
        await side.start()
        async with await RawClient.open(side.address) as old, await RawClient.open(side.address) as new:
            for client in (old, new):
                await client.send(encode_request(HELLO, 1) + encode_request(PeerHello(2, "c"), 2))
                await until(lambda: side.links and side.links[-1] == (2, True) and side.peers.connected)
            await until(lambda: side.links == [(2, True), (2, False), (2, True)])
            assert side.peers.connected == [2]
        await side.stop()

    run(main())


def test_mistake_of_the_receiver_keeps_the_link(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with brokers(1, 2) as (one, two):
            good = two.peers.on_message

            def fail(uid: str, message: AnyMessage, frames: memoryview) -> None:
                if uid == "bad":
                    raise ValueError("a bug")
                good(uid, message, frames)

            two.peers.on_message = fail
            one.peers.send(2, "bad", heartbeat(1))
            one.peers.send(2, "good", HeartbeatReply(1, 2, 3))
            await until(lambda: two.messages)
            assert two.messages == [("good", HeartbeatReply(1, 2, 3), b"")]
            assert one.links == [(2, True)]

    run(main())


def test_own_pause_is_not_taken_for_the_silence_of_others(run: Run) -> None:
    async def main() -> None:
        settings = dataclasses.replace(FAST, peer_ping_s=0.02, peer_silence_s=0.2)
        async with brokers(1, 2, settings=settings) as (one, two):
            one.peers._links[2].heard_at_s -= 0.15
            time.sleep(0.3)  # noqa: ASYNC251  # both at once: the whole process was stopped
            await asyncio.sleep(0.1)
            assert (one.links, two.links) == ([(2, True)], [(1, True)])

    run(main())


def test_after_close_nothing_is_sent_and_nobody_dials(run: Run) -> None:
    async def main() -> None:
        async with brokers(1, 2) as (one, two):
            await one.peers.close()
            assert one.links == [(2, True), (2, False)]
            assert not one.peers.send(2, UID, heartbeat(1))
            await until(lambda: two.links == [(1, True), (1, False)])
            one.peers.set_addresses({2: two.address})
            await asyncio.sleep(0.05)
            assert two.links == [(1, True), (1, False)]

    run(main())
