"""Files as clients see them: uploaded whole or in parts, listed, read, deleted; and their quotas.

Everything here runs in the database's thread.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetero_gateway.errors import Refusal
from hetero_gateway.files.batches_config import BatchesConfig
from hetero_gateway.serve.batches.storage import BatchRows, Blobs, BlobSink

_UPLOAD_S = 3600
_COPIED_BYTES = 1 << 18
_LISTED = "SELECT * FROM {} WHERE owner = ?{} ORDER BY seq {} LIMIT ?"

Document = dict[str, Any]


def new_id(prefix: str) -> str:
    return prefix + os.urandom(12).hex()


def not_found(kind: str, wanted: str) -> Refusal:
    return Refusal(404, "not_found", f"There is no {kind} {wanted[:80]!r}.", param="id")


def file_too_large(most_bytes: int) -> Refusal:
    message = f"The file is larger than {most_bytes} bytes."
    return Refusal(413, "file_too_large", message, param="file")


def no_space() -> Refusal:
    """The error for a full disk; nothing was kept."""
    message = "The gateway's disk is full: nothing was stored."
    return Refusal(507, "insufficient_storage", message, kind="server_error", retry_after_s=60)


class Incoming:
    """A file being received: written as it arrives, and listed once it is whole.

    Args:
        file_id: its id, of a file or a part.
        most_bytes: its maximum size.
        too_long: the error text for more.
        check_room: called with the bytes to come; raises Refusal.
    """

    def __init__(
        self,
        blobs: Blobs,
        file_id: str,
        most_bytes: int,
        too_long: Refusal | None = None,
        check_room: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.file_id = file_id
        self.size_bytes = 0
        self._most_bytes = most_bytes
        self._too_long = too_long or file_too_large(most_bytes)
        self._check_room = check_room
        self._known = False
        self._sink: BlobSink = blobs.create(file_id)

    def check(self, more_bytes: int) -> None:
        """Raises Refusal: 413, 429."""
        if self.size_bytes + more_bytes > self._most_bytes:
            raise self._too_long
        self._check_room(more_bytes)

    def write(self, data: bytes) -> None:
        """Raises Refusal, OSError."""
        self.check(len(data))
        self._sink.write(data)
        self.size_bytes += len(data)

    def finish(self) -> None:
        """Make it durable; for any thread. Raises OSError."""
        self._sink.finish()

    def keep(self) -> None:
        """Its row exists."""
        self._known = True

    def drop(self) -> None:
        """Remove it, unless its row exists."""
        if not self._known:
            self._sink.drop()


class Files:
    """The files of all keys; ``owner`` is a key's name, "" without a key.

    Args:
        rows: of all files. blobs: their contents.
        config: quotas.
    """

    def __init__(self, rows: BatchRows, blobs: Blobs, config: BatchesConfig) -> None:
        self._db = rows
        self.blobs = blobs
        self._config = config
        self._coming: dict[Incoming, str] = {}  # with their owners

    # Whole

    def begin(self, owner: str) -> Incoming:
        """Begin to receive a file. Raises Refusal: 429."""
        most_bytes = self._config.max_file_bytes
        return self._incoming(owner, "file-", most_bytes, file_too_large(most_bytes))

    def _incoming(self, owner: str, prefix: str, most_bytes: int, too_long: Refusal) -> Incoming:
        """Raises Refusal: 429."""
        self._check_room(owner, 1)
        left = self._config.max_key_bytes - self._used(owner)
        if left < most_bytes:
            most_bytes, too_long = left, self._no_room()
        incoming = Incoming(
            self.blobs,
            new_id(prefix),
            most_bytes,
            too_long,
            lambda more: self._check_room(owner, more),
        )
        self._coming[incoming] = owner
        return incoming

    def add(self, owner: str, incoming: Incoming, filename: str, keep_s: float | None) -> Document:
        """List a received file under its id. Raises Refusal: 429."""
        incoming.finish()
        self._check_room(owner, 0)
        with self._db.transaction():
            document = self._insert(owner, incoming.file_id, filename, incoming.size_bytes, keep_s)
        self._is_here(incoming)
        return document

    def _is_here(self, incoming: Incoming) -> None:
        incoming.keep()
        self._coming.pop(incoming, None)

    def drop(self, incoming: Incoming) -> None:
        """A file will not arrive."""
        self._coming.pop(incoming, None)
        incoming.drop()

    def _insert(
        self, owner: str, file_id: str, filename: str, size: int, keep_s: float | None
    ) -> Document:
        self._db.run(
            "INSERT INTO files (id, owner, filename, purpose, bytes, created_at, expires_at)"
            " VALUES (?, ?, ?, 'batch', ?, ?, ?)",
            *(file_id, owner, filename, size, int(time.time())),
            int(time.time() + min(keep_s or self._config.keep_s, self._config.keep_s)),
        )
        return self.document(owner, file_id)

    def _used(self, owner: str) -> int:
        """Bytes that the key uses, including unfinished answers and uploads."""
        return (
            sum(each.size_bytes for each, whose in self._coming.items() if whose == owner)
            + self._db.number("SELECT SUM(bytes) FROM files WHERE owner = ?", owner)
            + self._db.number(
                "SELECT SUM(p.bytes) FROM parts p JOIN uploads u ON u.id = p.upload_id"
                " WHERE u.owner = ?",
                owner,
            )
            + self._db.number(
                "SELECT SUM(output_bytes + error_bytes) FROM batches"
                " WHERE owner = ? AND ended_at IS NULL",
                owner,
            )
        )

    def _check_room(self, owner: str, more_bytes: int) -> None:
        if self._used(owner) + more_bytes > self._config.max_key_bytes:
            raise self._no_room()

    def _no_room(self) -> Refusal:
        most = self._config.max_key_bytes
        message = f"The key's files would have more than {most} bytes; delete some first."
        return Refusal(429, "quota_exceeded", message, kind="rate_limit_error")

    # Lookup

    def row(self, owner: str, file_id: str) -> Any:
        """Raises Refusal: 404."""
        row = self._db.row("SELECT * FROM files WHERE id = ? AND owner = ?", file_id, owner)
        if row is None:
            raise not_found("file", file_id)
        return row

    def document(self, owner: str, file_id: str) -> Document:
        return _document(self.row(owner, file_id))

    def listed(
        self, owner: str, after: str | None, limit: int, order: str, purpose: str | None
    ) -> Document:
        """A page of the files. Raises Refusal: 404."""
        where, values = "", list[Any]()
        if purpose is not None:
            where, values = " AND purpose = ?", [purpose]
        if after is not None:
            where += f" AND seq {'>' if order == 'asc' else '<'} ?"
            values.append(self.row(owner, after)["seq"])
        direction = "ASC" if order == "asc" else "DESC"
        sql = _LISTED.format("files", where, direction)
        rows = self._db.rows(sql, owner, *values, limit + 1)
        return page([_document(row) for row in rows[:limit]], more=len(rows) > limit)

    def delete(self, owner: str, file_id: str) -> Document:
        """Raises Refusal: 404, or 409 if a batch reads it."""
        self.row(owner, file_id)
        with self._db.transaction():
            if self._db.row(
                "SELECT 1 FROM batches WHERE input_file_id = ? AND ended_at IS NULL", file_id
            ):
                message = "A batch that is not over reads this file; cancel it first."
                raise Refusal(409, "file_in_use", message, param="id")
            self._db.run("DELETE FROM files WHERE id = ?", file_id)
        self.blobs.unlink(file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    def sweep(self) -> int:
        """Remove contents without a row, and return their size. Only at a start."""
        known = {
            row[0] for row in self._db.rows("SELECT id FROM files UNION ALL SELECT id FROM parts")
        }
        for row in self._db.rows(
            "SELECT output_file_id, error_file_id FROM batches WHERE ended_at IS NULL"
        ):
            known.update(row)
        return self.blobs.sweep(known)

    def forget_old(self, now_s: float) -> None:
        """Expired files and uploads, and batches that ended long ago."""
        old = self._db.rows(
            "SELECT id FROM files WHERE expires_at <= ? AND id NOT IN"
            " (SELECT input_file_id FROM batches WHERE ended_at IS NULL)",
            int(now_s),
        )
        uploads = self._db.rows("SELECT id FROM uploads WHERE expires_at <= ?", int(now_s))
        with self._db.transaction():
            self._db.run_many("DELETE FROM files WHERE id = ?", [tuple(row) for row in old])
            self._db.run(
                "DELETE FROM batches WHERE ended_at <= ?", int(now_s - self._config.keep_s)
            )
        for row in old:
            self.blobs.unlink(row["id"])
        for row in uploads:
            self._drop_parts(row["id"], "expired")
        with self._db.transaction():
            self._db.run(
                "DELETE FROM uploads WHERE expires_at <= ?", int(now_s - self._config.keep_s)
            )

    # In parts

    def begin_upload(self, owner: str, filename: str, size_bytes: int) -> Document:
        """Raises Refusal: 413, 429."""
        if size_bytes > self._config.max_file_bytes:
            raise file_too_large(self._config.max_file_bytes)
        upload_id, now = new_id("upload_"), int(time.time())
        with self._db.transaction():
            self._check_room(owner, size_bytes)
            self._db.run(
                "INSERT INTO uploads VALUES (?, ?, ?, ?, ?, ?, 'pending', NULL)",
                *(upload_id, owner, filename, size_bytes, now, now + _UPLOAD_S),
            )
        return self.upload(owner, upload_id)

    def _upload_row(self, owner: str, upload_id: str, *, pending: bool = False) -> Any:
        row = self._db.row("SELECT * FROM uploads WHERE id = ? AND owner = ?", upload_id, owner)
        if row is None:
            raise not_found("upload", upload_id)
        if pending and row["status"] != "pending":
            raise Refusal(400, "upload_over", f"The upload is {row['status']}.", param="upload_id")
        return row

    def upload(self, owner: str, upload_id: str) -> Document:
        row = self._upload_row(owner, upload_id)
        file = None
        if row["file_id"] is not None:
            file = self.document(owner, row["file_id"])
        return {
            "id": row["id"],
            "object": "upload",
            "bytes": row["bytes"],
            "created_at": row["created_at"],
            "expires_at": row["expires_at"],
            "filename": row["filename"],
            "purpose": "batch",
            "status": row["status"],
            "file": file,
        }

    def begin_part(self, owner: str, upload_id: str) -> Incoming:
        """Raises Refusal: 400, 404, 429."""
        row = self._upload_row(owner, upload_id, pending=True)
        there = self._db.number("SELECT SUM(bytes) FROM parts WHERE upload_id = ?", upload_id)
        left = row["bytes"] - there
        return self._incoming(owner, "part_", left, file_too_large(row["bytes"]))

    def add_part(self, owner: str, upload_id: str, incoming: Incoming) -> Document:
        incoming.finish()
        now = int(time.time())
        with self._db.transaction():
            self._upload_row(owner, upload_id, pending=True)
            self._check_room(owner, 0)
            self._db.run(
                "INSERT INTO parts VALUES (?, ?, ?, ?)",
                *(incoming.file_id, upload_id, incoming.size_bytes, now),
            )
        self._is_here(incoming)
        return {
            "id": incoming.file_id,
            "object": "upload.part",
            "created_at": now,
            "upload_id": upload_id,
        }

    def begin_joining(self, owner: str, upload_id: str, part_ids: Sequence[str]) -> "Joining":
        """Begin to join parts into a file, in this order. Raises Refusal: 400, 404."""
        row = self._upload_row(owner, upload_id, pending=True)
        parts: Mapping[str, int] = {
            each["id"]: each["bytes"]
            for each in self._db.rows("SELECT id, bytes FROM parts WHERE upload_id = ?", upload_id)
        }
        if len(set(part_ids)) < len(part_ids) or not set(part_ids) <= set(parts):
            message = "part_ids must name parts of this upload, each once."
            raise Refusal(400, "invalid_part_ids", message, param="part_ids")
        if sum(parts[each] for each in part_ids) != row["bytes"]:
            message = f"The parts have {sum(parts[p] for p in part_ids)} bytes, not {row['bytes']}."
            raise Refusal(400, "invalid_part_ids", message, param="part_ids")
        return Joining(self.blobs, part_ids, row["bytes"])

    def end_joining(self, owner: str, upload_id: str, joining: "Joining") -> Document:
        """List the joined file. Raises Refusal: 400, 404."""
        whole = joining.whole
        with self._db.transaction():
            row = self._upload_row(owner, upload_id, pending=True)
            self._insert(owner, whole.file_id, row["filename"], row["bytes"], None)
            self._db.run(
                "UPDATE uploads SET status = 'completed', file_id = ? WHERE id = ?",
                *(whole.file_id, upload_id),
            )
        whole.keep()
        self._drop_parts(upload_id, "completed")
        return self.upload(owner, upload_id)

    def cancel_upload(self, owner: str, upload_id: str) -> Document:
        """Raises Refusal: 400, 404."""
        self._upload_row(owner, upload_id, pending=True)
        self._drop_parts(upload_id, "cancelled")
        return self.upload(owner, upload_id)

    def _drop_parts(self, upload_id: str, status: str) -> None:
        parts = self._db.rows("SELECT id FROM parts WHERE upload_id = ?", upload_id)
        with self._db.transaction():
            self._db.run("DELETE FROM parts WHERE upload_id = ?", upload_id)
            self._db.run(
                "UPDATE uploads SET status = ? WHERE id = ? AND status = 'pending'",
                *(status, upload_id),
            )
        for row in parts:
            self.blobs.unlink(row["id"])


class Joining:
    """Joins parts into one file: ``run`` is for any thread. Raises OSError."""

    def __init__(self, blobs: Blobs, part_ids: Sequence[str], size_bytes: int) -> None:
        self._blobs = blobs
        self._part_ids = part_ids
        self.whole = Incoming(blobs, new_id("file-"), size_bytes)

    def run(self) -> None:
        for each in self._part_ids:
            with self._blobs.open(each) as part:
                while data := part.read(_COPIED_BYTES):
                    self.whole.write(data)
        self.whole.finish()


def _document(row: Any) -> Document:
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["bytes"],
        "created_at": row["created_at"],
        "expires_at": row["expires_at"],
        "filename": row["filename"],
        "purpose": row["purpose"],
        "status": "processed",
        "status_details": None,
    }


def page(documents: Sequence[Document], *, more: bool) -> Document:
    """A list in OpenAI's format."""
    return {
        "object": "list",
        "data": documents,
        "first_id": documents[0]["id"] if documents else None,
        "last_id": documents[-1]["id"] if documents else None,
        "has_more": more,
    }
