"""The simulated network, between stand-ins for nodes."""

from __future__ import annotations

import random
from typing import Any

from quiver.raft.messages import Heartbeat, decode_message
from quiver.testing.sim.network import Network
from quiver.testing.sim.world import VirtualLoop, World


class StandIn:
    def __init__(self, number: int, world: World) -> None:
        self.id = number
        self.life = 1
        self.is_alive = True
        self.loop = VirtualLoop(world, f"n{number}")
        self.got: list[Any] = []
        self.links: list[tuple[int, bool]] = []

    def receive(self, sender: int, uid: str, encoded: bytes, frames: bytes) -> None:
        self.got.append((sender, uid, decode_message(encoded), frames))

    def link_changed(self, other: int, up: bool) -> None:
        self.links.append((other, up))


def made(notices: bool = False) -> tuple[World, Network, dict[int, Any]]:
    world = World()
    network = Network(world, random.Random(1), notices)
    nodes: dict[int, Any] = {number: StandIn(number, world) for number in (1, 2, 3)}
    for node in nodes.values():
        network.add(node)
    return world, network, nodes


def beat(number: int) -> Heartbeat:
    return Heartbeat(1, 2, 1, commit=number)


def run(world: World, seconds: float) -> None:
    world.run(world.now_s + seconds, lambda loop: None)


def test_a_message_arrives_as_a_copy_with_its_frames() -> None:
    world, network, nodes = made()
    message = beat(7)
    assert network.send(1, 2, "u", message, [b"ab", memoryview(b"cd")])
    run(world, 1)
    ((sender, uid, found, frames),) = nodes[2].got
    assert (sender, uid, frames) == (1, "u", b"abcd")
    assert found == message and found is not message


def test_messages_are_lost_doubled_and_reordered() -> None:
    world, network, nodes = made()
    network.loss, network.doubling, network.spread_s = 0.2, 0.2, 1.0
    for number in range(200):
        network.send(1, 2, "u", beat(number), ())
    run(world, 5)
    order = [found.commit for _, _, found, _ in nodes[2].got]
    assert len(set(order)) < 200 < len(order) + 100
    assert len(order) > len(set(order))
    assert order != sorted(order)


def test_a_cut_has_a_direction() -> None:
    world, network, nodes = made()
    network.cut(1, 2)
    network.send(1, 2, "u", beat(1), ())
    network.send(2, 1, "u", beat(2), ())
    run(world, 1)
    assert not nodes[2].got and len(nodes[1].got) == 1
    network.heal()
    network.send(1, 2, "u", beat(3), ())
    run(world, 1)
    assert len(nodes[2].got) == 1


def test_both_ends_are_told_of_a_link_before_it_carries_anything() -> None:
    world, network, nodes = made(notices=True)
    assert not network.send(1, 2, "u", beat(1), ())
    network.node_started(nodes[1])
    run(world, 1)
    assert sorted(nodes[1].links) == [(2, True), (3, True)]
    assert nodes[2].links == [(1, True)]
    assert network.send(1, 2, "u", beat(2), ())


def test_a_node_that_comes_back_at_once_is_seen_to_have_been_away() -> None:
    world, network, nodes = made(notices=True)
    network.node_started(nodes[1])
    run(world, 1)
    nodes[2].links.clear()
    nodes[1].is_alive = False
    nodes[1].life = 2
    nodes[1].is_alive = True
    network.node_started(nodes[1])
    run(world, 1)
    assert nodes[2].links == [(1, False), (1, True)]


def test_a_silent_link_is_given_up_after_a_while() -> None:
    world, network, nodes = made(notices=True)
    network.node_started(nodes[1])
    run(world, 1)
    nodes[2].links.clear()
    network.cut(2, 1)
    run(world, 0.9)
    assert not nodes[2].links
    run(world, 0.2)
    assert nodes[2].links == [(1, False)]
