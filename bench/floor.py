"""The floor: a durable append over TCP with nothing of Quiver in it; server and client.

A frame is a 4-byte length and that many bytes. The server takes all frames that have arrived, appends them with one
write, makes them durable with one fdatasync, and answers each with 8 bytes. One thread, blocking sockets, one client at
a time: `python floor.py FILE` prints its port and serves until its standard input closes.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time

from measure import MIB, Sample

LENGTH = struct.Struct("<I")
REPLY = struct.Struct("<Q")
BUFFER_BYTES = 16 * MIB  # more than the frames that are in flight at any moment
TIMEOUT_S = 60.0


def whole_frames(data: memoryview) -> tuple[int, int]:
    """(bytes, count) of the complete frames at the beginning."""
    end = count = 0
    while end + LENGTH.size <= len(data):
        after = end + LENGTH.size + LENGTH.unpack_from(data, end)[0]
        if after > len(data):
            break
        end, count = after, count + 1
    return end, count


def serve(path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if listener not in ready:
                return
            client, _ = listener.accept()
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            with client:
                append_frames(client, fd)
            os.close(fd)


def append_frames(client: socket.socket, fd: int) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    filled = written = 0
    while got := client.recv_into(buffer[filled:]):
        filled += got
        filled += receive_the_rest(client, buffer[filled:])
        end, count = whole_frames(buffer[:filled])
        if count:
            start = 0
            while start < end:
                start += os.write(fd, buffer[start:end])
            os.fdatasync(fd)
            written += end
            client.sendall(REPLY.pack(written) * count)
            buffer[: filled - end] = buffer[end:filled]
            filled -= end


def receive_the_rest(client: socket.socket, room: memoryview) -> int:
    """What else has arrived already."""
    filled = 0
    while filled < len(room):
        try:
            got = client.recv_into(room[filled:], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            break
        if not got:
            break
        filled += got
    return filled


def connect(port: int) -> socket.socket:
    """A blocking socket without delays of its own; a server that does not answer raises TimeoutError."""
    connection = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send_frames(port: int, frame_bytes: int, count: int, in_flight_max: int) -> Sample:
    frame = _frame(frame_bytes)
    with connect(port) as server:
        _exchange(server, frame, 1, 1)
        began_s = time.perf_counter()
        _exchange(server, frame, count, in_flight_max)
        return Sample(time.perf_counter() - began_s, count, count * frame_bytes)


def round_trips(port: int, frame_bytes: int, rounds: int) -> list[float]:
    """Seconds of each of `rounds` frames, one in flight."""
    frame = _frame(frame_bytes)
    seconds = []
    with connect(port) as server:
        for _ in range(rounds):
            began_s = time.perf_counter()
            _exchange(server, frame, 1, 1)
            seconds.append(time.perf_counter() - began_s)
    return seconds


def _frame(frame_bytes: int) -> bytes:
    return LENGTH.pack(frame_bytes) + os.urandom(frame_bytes)


def _exchange(server: socket.socket, frame: bytes, count: int, in_flight_max: int) -> None:
    sent = answered_bytes = 0
    while answered_bytes < count * REPLY.size:
        while sent < count and sent - answered_bytes // REPLY.size < in_flight_max:
            server.sendall(frame)
            sent += 1
        answer = server.recv(REPLY.size * in_flight_max)
        if not answer:
            raise ConnectionError("the floor's server closed the connection")
        answered_bytes += len(answer)


if __name__ == "__main__":
    serve(sys.argv[1])
