"""A queue of the classic design, to compare with: Flask in front, SQLAlchemy in between, PostgreSQL behind.

It speaks the classic calls that the benchmark needs. A message is a row and each produce a transaction of its own; a
consume reads the next row and moves the consumer's offset in one transaction.

Rule: nothing here is slow on purpose. SQLAlchemy Core, not objects; every query meets an index; a pooled connection for
each request; no foreign key on messages; connections are kept open; no request log. Offsets are counted in the topic's
row, whose lock is held until the commit: without it a message could commit behind one with a higher offset, and a
consumer that has read the higher one would never see it.

`python reference_queue.py URL` prints one JSON line with its port, and serves until its standard input closes.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
from typing import Any

import sqlalchemy as sa
from flask import Flask, request
from sqlalchemy.dialects.postgresql import insert
from werkzeug.serving import WSGIRequestHandler, make_server

CONNECTIONS_MAX = 72  # of the pool: the 64 under load and a few more

metadata = sa.MetaData()


def identity() -> sa.Column:
    return sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True)


topics = sa.Table(
    "topics",
    metadata,
    identity(),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("next_offset", sa.BigInteger, nullable=False, server_default="0"),
)
producers = sa.Table("producers", metadata, identity(), sa.Column("topic_id", sa.ForeignKey("topics.id")))
consumers = sa.Table(
    "consumers",
    metadata,
    identity(),
    sa.Column("topic_id", sa.ForeignKey("topics.id")),
    sa.Column("last_offset", sa.BigInteger, nullable=False),
)
messages = sa.Table(
    "messages",
    metadata,
    # The key in this order is the one index that both calls need.
    sa.Column("topic_id", sa.BigInteger, primary_key=True),
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("body", sa.Text, nullable=False),
)


class RefusedError(Exception):
    """The request is wrong: HTTP 400 with this sentence."""


def create_app(engine: sa.Engine) -> Flask:
    app = Flask(__name__)

    @app.errorhandler(RefusedError)
    def refuse(error: RefusedError) -> tuple[dict[str, Any], int]:
        return {"status": "failure", "message": str(error)}, 400

    @app.post("/producer/register")
    def register_producer() -> dict[str, Any]:
        name = request.get_json()["topic"]
        with engine.begin() as db:
            db.execute(insert(topics).values(name=name).on_conflict_do_nothing())
            made = insert(producers).values(topic_id=topic_id(db, name)).returning(producers.c.id)
            return {"status": "success", "producer_id": db.scalar(made)}

    @app.post("/consumer/register")
    def register_consumer() -> dict[str, Any]:
        with engine.begin() as db:
            values = {"topic_id": topic_id(db, request.get_json()["topic"]), "last_offset": -1}
            made = insert(consumers).values(values).returning(consumers.c.id)
            return {"status": "success", "consumer_id": db.scalar(made)}

    @app.post("/producer/produce")
    def produce() -> dict[str, Any]:
        given = request.get_json()
        with engine.begin() as db:
            mine = (producers.c.id == int(given["producer_id"])) & (topics.c.name == given["topic"])
            topic = db.scalar(sa.select(topics.c.id).join(producers).where(mine))
            if topic is None:
                raise RefusedError(f"Producer {given['producer_id']} is not registered to topic {given['topic']}")
            counted = sa.update(topics).where(topics.c.id == topic).values(next_offset=topics.c.next_offset + 1)
            offset = db.scalar(counted.returning(topics.c.next_offset - 1))
            db.execute(insert(messages).values(topic_id=topic, id=offset, body=given["message"]))
        return {"status": "success", "partition_id": 0, "offset": offset}

    @app.get("/consumer/consume")
    def consume() -> dict[str, Any]:
        with engine.begin() as db:
            consumer = find_consumer(db, lock=True)
            waiting = (messages.c.topic_id == consumer.topic_id) & (messages.c.id > consumer.last_offset)
            following = sa.select(messages.c.id, messages.c.body).where(waiting).order_by(messages.c.id).limit(1)
            found = db.execute(following).first()
            if found is None:
                raise RefusedError(f"No new message is published to {request.args['topic']}")
            db.execute(sa.update(consumers).where(consumers.c.id == consumer.id).values(last_offset=found.id))
        return {"status": "success", "message": found.body, "offset": found.id, "partition_id": 0}

    @app.get("/size")
    def size() -> dict[str, Any]:
        with engine.begin() as db:
            consumer = find_consumer(db, lock=False)
            waiting = (messages.c.topic_id == consumer.topic_id) & (messages.c.id > consumer.last_offset)
            return {"status": "success", "size": db.scalar(sa.select(sa.func.count()).where(waiting))}

    return app


def topic_id(db: sa.Connection, name: str) -> int:
    found = db.scalar(sa.select(topics.c.id).where(topics.c.name == name))
    if found is None:
        raise RefusedError(f"Topic {name} does not exist")
    return found


def find_consumer(db: sa.Connection, *, lock: bool) -> sa.Row:
    given = request.args
    mine = (consumers.c.id == int(given["consumer_id"])) & (topics.c.name == given["topic"])
    wanted = sa.select(consumers).join(topics).where(mine)
    found = db.execute(wanted.with_for_update(of=consumers) if lock else wanted).first()
    if found is None:
        raise RefusedError(f"Consumer {given['consumer_id']} is not registered to topic {given['topic']}")
    return found


class KeepAliveHandler(WSGIRequestHandler):
    """Werkzeug's own handler closes the connection after each answer; this one reads the whole body and keeps it."""

    disable_nagle_algorithm = True
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body leave in one piece

    def run_wsgi(self) -> None:
        environ = self.make_environ()
        environ["wsgi.input"] = io.BytesIO(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        answer: list[Any] = []
        parts = self.server.app(environ, lambda status, headers, exc_info=None: answer.extend((status, headers)))
        body = b"".join(parts)
        status, headers = answer
        code, reason = status.split(" ", 1)
        self.send_response(int(code), reason)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    engine = sa.create_engine(sys.argv[1], pool_size=CONNECTIONS_MAX, max_overflow=0)
    metadata.create_all(engine)
    with engine.connect() as db:
        durable = {name: db.scalar(sa.text(f"SHOW {name}")) for name in ("fsync", "synchronous_commit")}
        version = db.scalar(sa.text("SHOW server_version"))
    if set(durable.values()) != {"on"}:
        raise RuntimeError(f"PostgreSQL would answer before a commit is on disk: {durable}")
    server = make_server("127.0.0.1", 0, create_app(engine), threaded=True, request_handler=KeepAliveHandler)
    print(json.dumps({"port": server.port, "postgresql": version}), flush=True)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    server.serve_forever()


def leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
