"""An S3 bucket in memory, over HTTP: put, in parts too, get, delete, list."""

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "a secret that nobody may say",
    "AWS_REGION": "us-east-1",
}


class FakeBucket(ThreadingHTTPServer):
    """``objects``: bytes by key; ``down``: every request is answered 500."""

    daemon_threads = True

    def __init__(self, name: str = "bucket") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.objects: dict[str, bytes] = {}
        self.put_at: dict[str, float] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests = 0
        self.down = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeBucket

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _handle(self) -> None:
        bucket = self.server
        bucket.requests += 1
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        _, name, *rest = unquote(parts.path).split("/", 2)
        key, query = "".join(rest), parse_qs(parts.query, keep_blank_values=True)
        if bucket.down:
            self._answer(500)
        elif "AWS4-HMAC-SHA256 Credential=test/" not in self.headers.get("Authorization", ""):
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif name != bucket.name:
            self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        else:
            getattr(self, f"_{self.command.lower()}")(bucket, key, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = _handle

    def _keep(self, bucket: FakeBucket, key: str, body: bytes) -> str:
        bucket.objects[key], bucket.put_at[key] = body, time.time()
        return f'"{hashlib.md5(body).hexdigest()}"'

    def _put(self, bucket: FakeBucket, key: str, query: dict[str, list[str]], body: bytes) -> None:
        if "uploadId" in query:
            bucket.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
            self._answer(200, ETag='"part"')
        else:
            self._answer(200, ETag=self._keep(bucket, key, body))

    def _post(self, bucket: FakeBucket, key: str, query: dict[str, list[str]], body: bytes) -> None:
        if "delete" in query:
            keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for each in keys:
                bucket.objects.pop(unescape(each), None)
            rows = "".join(f"<Deleted><Key>{each}</Key></Deleted>" for each in keys)
            told = f"<DeleteResult>{rows}</DeleteResult>"
        elif "uploads" in query:
            upload = f"u{len(bucket.uploads)}"
            bucket.uploads[upload] = {}
            told = f"<InitiateMultipartUploadResult><Bucket>{bucket.name}</Bucket><Key>{key}</Key>"
            told += f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
        else:
            pieces = bucket.uploads.pop(query["uploadId"][0])
            etag = self._keep(bucket, key, b"".join(pieces[n] for n in sorted(pieces)))
            told = f"<CompleteMultipartUploadResult><ETag>{etag}</ETag>"
            told += "</CompleteMultipartUploadResult>"
        self._answer(200, told.encode())

    def _get(self, bucket: FakeBucket, key: str, query: dict[str, list[str]], _: bytes) -> None:
        if "list-type" in query:
            prefix = query.get("prefix", [""])[0]
            rows = [
                f"<Contents><Key>{escape(each)}</Key><Size>{len(body)}</Size><ETag>e</ETag>"
                f"<LastModified>{_iso(bucket.put_at[each])}</LastModified></Contents>"
                for each, body in sorted(bucket.objects.items())
                if each.startswith(prefix)
            ]
            told = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}"
            self._answer(200, f"{told}</ListBucketResult>".encode())
        elif key not in bucket.objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            at = formatdate(bucket.put_at[key], usegmt=True)
            self._answer(200, bucket.objects[key], ETag='"e"', Last_Modified=at)

    _head = _get


def _iso(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(unix_s))


@contextlib.contextmanager
def fake_bucket() -> Iterator[FakeBucket]:
    with FakeBucket() as bucket:
        thread = threading.Thread(target=bucket.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield bucket
        bucket.shutdown()
        thread.join()
