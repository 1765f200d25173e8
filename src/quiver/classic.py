"""The classic clients over HTTP, under the names their users know; they need nothing but a manager's address."""

from __future__ import annotations

from quiver.client.classic import (
    Message,
    MyConsumer,
    MyConsumerError,
    MyProducer,
    MyProducerError,
    NoNewMessageError,
)

__all__ = ["Message", "MyConsumer", "MyConsumerError", "MyProducer", "MyProducerError", "NoNewMessageError"]
