"""A broker in a process of its own: prints its address, serves until its standard input ends.

fuzz_target.py DATA_DIR
"""

import asyncio
import logging
import sys

import uvloop

from quiver.broker.server import Broker
from quiver.config import BrokerSettings


async def main() -> None:
    broker = Broker(BrokerSettings(data_dir=sys.argv[1], port=0))
    await broker.start()
    print(broker.address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    await broker.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    uvloop.run(main())
