"""The floor of replication: an append that is acknowledged when two of three processes have it on disk.

The followers are floor.py's servers as they are. The leader, `python replicated_floor.py FILE PORT PORT`, forwards each
run of frames to both, writes and syncs it itself meanwhile, and answers when one of them has answered. One thread,
blocking sockets, one client at a time, no elections, no terms: what replication costs at least.
"""

from __future__ import annotations

import os
import select
import socket
import sys

from floor import BUFFER_BYTES, REPLY, connect, receive_the_rest, whole_frames


class Follower:
    def __init__(self, port: int) -> None:
        self.socket = connect(port)
        self.written = 0
        self._rest = b""

    def take_replies(self) -> None:
        data = self._rest + self.socket.recv(65536)
        if not data:
            raise ConnectionError("a follower closed the connection")
        whole = len(data) // REPLY.size * REPLY.size
        if whole:
            self.written = REPLY.unpack_from(data, whole - REPLY.size)[0]
        self._rest = data[whole:]

    def close(self) -> None:
        """After its last reply: a connection closed before that would look like a failure to it."""
        self.socket.shutdown(socket.SHUT_WR)
        while self.socket.recv(65536):
            pass
        self.socket.close()


def serve(path: str, ports: list[int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if listener not in ready:
                return
            client, _ = listener.accept()
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            followers = [Follower(port) for port in ports]
            with client:
                replicate_frames(client, fd, followers)
            for follower in followers:
                follower.close()
            os.close(fd)


def replicate_frames(client: socket.socket, fd: int, followers: list[Follower]) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    filled = written = 0
    while got := client.recv_into(buffer[filled:]):
        filled += got
        filled += receive_the_rest(client, buffer[filled:])
        end, count = whole_frames(buffer[:filled])
        if count:
            for follower in followers:
                follower.socket.sendall(buffer[:end])
            start = 0
            while start < end:
                start += os.write(fd, buffer[start:end])
            os.fdatasync(fd)
            written += end
            while max(follower.written for follower in followers) < written:
                ready, _, _ = select.select([follower.socket for follower in followers], [], [])
                for follower in followers:
                    if follower.socket in ready:
                        follower.take_replies()
            client.sendall(REPLY.pack(written) * count)
            buffer[: filled - end] = buffer[end:filled]
            filled -= end


if __name__ == "__main__":
    serve(sys.argv[1], [int(port) for port in sys.argv[2:]])
