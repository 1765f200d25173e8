"""A folder on any file system that Spark can write to: local, HDFS, an object store.

Rule: a file is there whole or not at all. On a local disk it is also synced before it counts.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote, urlsplit

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from quiver.errors import InvalidRequestError
from quiver.spark.jobs.formats import absolute


class Folder:
    def __init__(self, spark: SparkSession, path: str) -> None:
        jvm = getattr(spark, "_jvm", None)
        if jvm is None:
            raise InvalidRequestError("this job keeps files beside its data: it needs a driver, not Spark Connect")
        self._hadoop = jvm.org.apache.hadoop.fs
        configuration = spark._jsc.hadoopConfiguration()
        given = self._hadoop.Path(absolute(path))  # the JVM may have been started in another directory
        try:
            self._fs = given.getFileSystem(configuration)
        except Py4JJavaError as error:
            raise InvalidRequestError(f"{path} cannot be used: {error.java_exception.getMessage()}") from error
        self._context = self._hadoop.FileContext.getFileContext(self._fs.getUri(), configuration)
        self.path: str = self._fs.makeQualified(given).toString()
        kind = self._hadoop.Options.Rename
        self._replacing = spark.sparkContext._gateway.new_array(kind, 1)  # type: ignore[union-attr]
        self._replacing[0] = kind.OVERWRITE

    def _at(self, name: str) -> Any:
        return self._hadoop.Path(f"{self.path}/{name}" if name else self.path)

    def read(self, name: str) -> bytes | None:
        if not self._fs.exists(self._at(name)):
            return None
        stream = self._fs.open(self._at(name))
        try:
            return bytes(stream.readAllBytes())
        finally:
            stream.close()

    def write(self, name: str, content: bytes) -> None:
        """Takes the place of a file of that name."""
        stream = self._fs.create(self._at(f"{name}.tmp"), True)
        try:
            stream.write(bytearray(content))
        finally:
            stream.close()
        self.sync(f"{name}.tmp")
        self.move(f"{name}.tmp", name)

    def files(self, name: str = "") -> dict[str, int]:
        """Bytes of all files below by their names from here, but of those that begin with _ or . and are no data."""
        if not self._fs.exists(self._at(name)):
            return {}
        found, listing = {}, self._fs.listFiles(self._at(name), True)
        while listing.hasNext():
            file = listing.next()
            if not file.getPath().getName().startswith((".", "_")):
                found[file.getPath().toString().removeprefix(f"{self.path}/")] = file.getLen()
        return dict(sorted(found.items()))

    def move(self, source: str, target: str) -> None:
        """Takes the place of what is there. Done again after a crash, it finds the source gone and the target there."""
        here = self._at(target)
        self._fs.mkdirs(here.getParent())
        self._context.rename(self._at(source), here, self._replacing)
        if (local := self.local(target)) is not None:
            _sync(os.path.dirname(local))

    def exists(self, name: str) -> bool:
        return bool(self._fs.exists(self._at(name)))

    def remove(self, name: str) -> None:
        self._fs.delete(self._at(name), True)

    def sync(self, name: str) -> None:
        """Until it would survive a loss of power; other file systems than a local disk see to that themselves."""
        if (local := self.local(name)) is not None:
            _sync(local)

    def local(self, name: str = "") -> str | None:
        parts = urlsplit(self._at(name).toUri().toString())
        return unquote(parts.path) if parts.scheme == "file" else None


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
