"""Interprets an API server's documents: pages of a list, events of a watch, pods, endpoint slices.

Only the used fields are decoded, and nothing is believed: an invalid document is an error, and an
invalid object is no instance. Nothing here does I/O.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from hetero_gateway.files.discovery_config import SourceConfig
from hetero_gateway.gateway.fleet.sources.base import (
    DEFAULT_PORT,
    MOST_INSTANCES,
    Found,
    SourceError,
    url_of,
)

_MOST_NAME_CHARACTERS = 253
_MOST_CONTINUE_CHARACTERS = 8192
_version = re.compile(r"[!-~]{1,128}").fullmatch
_GONE = 410
_KINDS = {"pods": "Pod", "endpointslices": "EndpointSlice"}


class Gone(Exception):
    """The resource version is too old: list again."""


# Names as Kubernetes has them.


class _Metadata(msgspec.Struct):
    name: str = ""
    resourceVersion: str = ""
    deletionTimestamp: Any = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""


class _PodStatus(msgspec.Struct):
    podIP: str | None = None
    conditions: list[_Condition] | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata
    status: _PodStatus | None = None


class _Port(msgspec.Struct):
    port: int | None = None


class _Ready(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct):
    name: str | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str]
    conditions: _Ready | None = None
    targetRef: _Target | None = None


class _Slice(msgspec.Struct):
    metadata: _Metadata
    ports: list[_Port] | None = None
    endpoints: list[_Endpoint] | None = None


class _Name(msgspec.Struct):
    name: str = ""
    resourceVersion: str = ""


class _Named(msgspec.Struct):
    metadata: _Name
    kind: str | None = None


class _ListMetadata(msgspec.Struct, rename={"more": "continue"}):
    resourceVersion: str
    more: str | None = None


class _List(msgspec.Struct):
    metadata: _ListMetadata
    items: list[msgspec.Raw] | None = None


class _Status(msgspec.Struct):
    code: int | None = None
    message: str | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


_decode_list = msgspec.json.Decoder(_List).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_status = msgspec.json.Decoder(_Status).decode
_decode_named = msgspec.json.Decoder(_Named).decode
_decode_pod = msgspec.json.Decoder(_Pod).decode
_decode_slice = msgspec.json.Decoder(_Slice).decode
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Page(NamedTuple):
    """A page of a list: its instances by object, its version, and where the next page begins."""

    objects: dict[str, tuple[Found, ...]]
    version: str
    more: str


class ObjectChange(NamedTuple):
    """An event. ``name``: of the object that changed, "" for none; ``found``: None if it went."""

    version: str
    name: str
    found: tuple[Found, ...] | None


class ObjectReader:
    """Reads one source's documents.

    Args:
        config: of the source.
    """

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._kind = _KINDS[config.resource]
        read: Callable[[bytes | msgspec.Raw], Iterable[Found]] = self._of_slice
        if config.resource == "pods":
            read = self._of_pod
        self._read = read
        # Annotations may be large, and rules name a few.
        self._labels = frozenset(name for rule in config.profiles for name in rule.labels)

    def page(self, body: bytes | bytearray) -> Page:
        """Read a page. Raises SourceError: invalid."""
        try:
            listed = _decode_list(body)
            objects: dict[str, tuple[Found, ...]] = {}
            for item in listed.items or ():
                if (name := self._name_of(item)[0]) and len(objects) <= MOST_INSTANCES:
                    objects[name] = self._instances(item)
        except _ERRORS as error:
            raise SourceError(f"the API server's list cannot be read: {said(error)}") from error
        more = listed.metadata.more or ""
        if len(more) > _MOST_CONTINUE_CHARACTERS:
            raise SourceError("the API server's list goes on at a place that has no end")
        return Page(objects, _checked(listed.metadata.resourceVersion), more)

    def event(self, line: bytes) -> ObjectChange | None:
        """Read a line of a watch; None: irrelevant. Raises SourceError, Gone."""
        try:
            event = _decode_event(line)
            if event.type == "ERROR":
                status = _decode_status(event.object)
                if status.code == _GONE:
                    raise Gone
                raise SourceError(f"the API server: {said(status.message)}")
            if event.type == "BOOKMARK":
                version = _decode_named(event.object).metadata.resourceVersion
                return ObjectChange(_checked(version), "", None)
            if event.type not in ("ADDED", "MODIFIED", "DELETED"):
                return None
            name, version = self._name_of(event.object)
        except _ERRORS as error:
            raise SourceError(f"the API server's event cannot be read: {said(error)}") from error
        found = None if event.type == "DELETED" else self._instances(event.object)
        return ObjectChange(_checked(version), name, found)

    def _name_of(self, item: msgspec.Raw) -> tuple[str, str]:
        """(name, resource version) of an object; no name: it is of another kind."""
        named = _decode_named(item)
        name = named.metadata.name
        if named.kind not in (None, self._kind) or len(name) > _MOST_NAME_CHARACTERS:
            name = ""
        return name, named.metadata.resourceVersion

    def _instances(self, item: msgspec.Raw) -> tuple[Found, ...]:
        """The instances of an object; none if it is invalid."""
        try:
            return tuple(itertools.islice(self._read(item), MOST_INSTANCES))
        except _ERRORS:
            return ()

    def _wanted(self, metadata: _Metadata) -> dict[str, str]:
        """Labels, and annotations, whose values may have slashes."""
        if not self._labels:
            return {}
        both = {**(metadata.annotations or {}), **(metadata.labels or {})}
        return {name: both[name] for name in self._labels if name in both}

    def _of_pod(self, item: bytes | msgspec.Raw) -> Iterator[Found]:
        pod, config = _decode_pod(item), self._config
        metadata, status = pod.metadata, pod.status or _PodStatus()
        ready = any(c.type == "Ready" and c.status == "True" for c in status.conditions or ())
        if not ready or metadata.deletionTimestamp or not status.podIP:
            return
        url = url_of(config.scheme, status.podIP, config.port or DEFAULT_PORT)
        if url is not None:
            yield Found(metadata.name, url, self._wanted(metadata))

    def _of_slice(self, item: bytes | msgspec.Raw) -> Iterator[Found]:
        listed, config = _decode_slice(item), self._config
        ports = [each.port for each in listed.ports or () if each.port]
        port = config.port or (ports[0] if ports else DEFAULT_PORT)
        if not 0 < port < 1 << 16:
            return
        labels = self._wanted(listed.metadata)
        for endpoint in listed.endpoints or ():
            conditions = endpoint.conditions or _Ready()
            if conditions.ready is False or conditions.terminating or not endpoint.addresses:
                continue
            address = endpoint.addresses[0]
            url = url_of(config.scheme, address, port)
            if url is not None:
                target = endpoint.targetRef or _Target()
                yield Found((target.name or address)[:_MOST_NAME_CHARACTERS], url, labels)


def _checked(version: str) -> str:
    """Raises SourceError: not a resource version."""
    if _version(version) is None:
        raise SourceError("the API server's resource version is none")
    return version


def said(text: object) -> str:
    """A server's text in a form fit for a line of a log."""
    shown = "".join(c if c.isprintable() else "?" for c in str(text)[:200])
    return shown or "without a reason"
