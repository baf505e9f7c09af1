"""Identifies the client behind a request by its key, and what it may ask for.

A key is looked up by its hash: a client cannot choose what is compared, so timing reveals nothing.
A field that was right once is remembered, since hashing it for each request would cost as much as
everything else done for a client here; it is found by Python's keyed hash (SipHash), which reveals
nothing either. The client is identified before a byte of the body is read
(``Admission.client_of``); its models and classes are checked once the body is read; ``limits`` has
its limits. The one key of ``server.api_key_env`` stands for a client without name and limits.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from hetero_gateway.core.limits.accounts import Account
from hetero_gateway.core.types import DEFAULT_CLASS
from hetero_gateway.errors import Refusal
from hetero_gateway.files.client_keys import MOST_KEY_BYTES, ClientLimits, KeyConfig, KeysFile
from hetero_gateway.gateway.admission.usage import NO_AMOUNTS, Amounts, ClientUsage, added
from hetero_gateway.gateway.turns import in_turns
from hetero_gateway.http.headers import CREDENTIALS, Headers

# Number of hashes in steps of some milliseconds.
_ENTRIES_AT_ONCE, _CLIENTS_AT_ONCE = 4000, 100
_AMOUNTS = ("requests", "input_tokens", "cached_tokens", "output_tokens")
CLASS_HEADER = b"x-hetero-gateway-class"


@dataclass(frozen=True, slots=True)
class Client:
    """A client.

    Args:
        name: a bounded label; "" for all that share the one key, or have none.
        accounts: charged for its requests; none: it has no limits.
        models: that it may use; None: all.
        request_class: of its requests.
        classes: that a request may choose instead, by a header.
        expires_s: since 1970; it is refused from then on. None: never.
        group: whose limits it shares; "" if it has none.
        party: how it counts in fair shares: its group if that has a share, or itself.
        share: the party's weight.
    """

    name: str
    accounts: tuple[Account, ...] = ()
    models: frozenset[str] | None = None
    request_class: str = DEFAULT_CLASS
    classes: frozenset[str] = frozenset()
    expires_s: float | None = None
    group: str = ""
    party: str = ""
    share: float = 1.0

    def check_model(self, model: str) -> None:
        """Raises Refusal: 403 for a model that it may not use."""
        if self.models is not None and model not in self.models:
            message = f"The key has no access to the model `{model[:200]}`."
            raise Refusal(403, "model_not_allowed", message, param="model")

    def class_of(self, headers: Headers) -> str:
        """A request's class. Raises Refusal: 403 for one that it may not choose."""
        if not self.classes:
            return self.request_class
        for name, value in headers:
            if name == CLASS_HEADER:
                wanted = value.decode("latin-1")
                if wanted != self.request_class and wanted not in self.classes:
                    message = f"The key has no access to the class {wanted[:63]!r}."
                    raise Refusal(403, "class_not_allowed", message, param="x-hetero-gateway-class")
                return wanted
        return self.request_class


EVERYBODY = Client("")


class Admission:
    """Admits requests.

    Args:
        key: that clients must send; None: open to all, unless there are ``keys``.
        keys: clients by name; None: there are none.
        hash_key: the secret of keyed hashes.
        clock: the time since 1970 in seconds.

    ``usage``: usage of named clients. ``has_key``: clients' credentials are meant for the gateway,
    and do not concern instances.
    """

    def __init__(
        self,
        key: str | None,
        keys: KeysFile | None = None,
        hash_key: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key = key.encode() if key else None
        self._hash_key = hash_key.encode() if hash_key else None
        self._clock = clock
        self._plain: dict[bytes, Client] = {}
        # Valid values of each field: at most two for each key, and one more. (The head's reader
        # remembers fields, too, so this adds no key to memory.)
        self._shown: dict[bytes, dict[bytes, Client]] = {name: {} for name in CREDENTIALS}
        self._authorized = self._shown[b"authorization"]
        self._keyed: dict[bytes, Client] = {}
        self._by_name: dict[str, Client] = {}
        self._accounts: dict[str, Account] = {}
        self.usage = ClientUsage(clock)
        self.chooses_class = False  # any client may name a request's class
        self.keys = keys
        self.has_key = self._key is not None or keys is not None
        if keys is not None:
            self.set_keys(keys)

    @property
    def has_names(self) -> bool:
        """Whether any client has a name."""
        return bool(self._by_name)

    def __iter__(self) -> Iterator[Client]:
        """The named clients."""
        return iter(self._by_name.values())

    def accounts(self) -> Iterator[Account]:
        """All accounts, of keys and of groups."""
        return iter(self._accounts.values())

    def set_keys(self, keys: KeysFile) -> None:
        """Use other keys from now on; clients that stay keep their usage."""
        self.prepare_keys(keys)()

    def prepare_keys(self, keys: KeysFile) -> Callable[[], None]:
        """Do the slow part of a change of keys, in a thread; the returned function applies it.

        Nothing else may be prepared between the two.
        """
        known, accounts = self._accounts, dict[str, Account]()
        limits = {f"group {name}": group.limits for name, group in keys.groups.items()}
        limits |= {f"key {key.name}": key.limits for key in keys.keys}
        for name, each in limits.items():
            if any(limit is not None for limit in each):
                accounts[name] = known.get(name) or Account(name, each)
        plain: dict[bytes, Client] = {}
        keyed: dict[bytes, Client] = {}
        by_name = {}
        for key in keys.keys:
            client = by_name[key.name] = _client(key, keys, accounts)
            (plain if key.scheme == "sha256" else keyed)[key.digest] = client

        def apply() -> None:
            for name, account in accounts.items():
                account.set_limits(limits[name])
            self._accounts, self._by_name = accounts, by_name
            self.keys, self._plain, self._keyed = keys, plain, keyed
            self.has_key = True
            for shown in self._shown.values():
                shown.clear()
            self.chooses_class = any(client.classes for client in by_name.values())

        return apply

    def knows(self, name: str) -> bool:
        """Whether a client has this name."""
        return name in self._by_name

    def named(self, name: str) -> Client:
        """The client of that name; one that is not known (any more) has no privileges."""
        return self._by_name.get(name) or (Client(name) if name else EVERYBODY)

    def client_of(self, headers: Headers, authorization: bytes = b"") -> Client:
        """The sender of these headers: of several keys, the first known one counts.

        Args:
            authorization: the only key among them, if that is known.

        Raises:
            Refusal: 401 if they carry no known key.
        """
        # Nearly always one that was right before. Of several, the first need not be the remembered
        # one.
        client = self._authorized.get(authorization)
        if client is None:
            client = self._search(headers)
        if client.expires_s is not None and client.expires_s <= self._clock():
            raise Refusal(401, "invalid_api_key", "The API key has expired.")
        return client

    def _search(self, headers: Headers) -> Client:
        """The owner of a key in these headers. Raises Refusal: 401, none."""
        if self._key is None and self.keys is None:
            return EVERYBODY
        for name, value in headers:
            if name in CREDENTIALS:
                client = self._find(name, value)
                if client is not None:
                    return client
        raise Refusal(401, "invalid_api_key", "Incorrect or missing API key.")

    def _find(self, name: bytes, value: bytes) -> Client | None:
        """The owner of a key in a field; None: none."""
        shown = self._shown[name]
        client = shown.get(value)
        if client is not None:
            return client
        key = value
        if name == b"authorization":
            key = value[7:] if value[:7].lower() == b"bearer " else b""
        if not key or len(key) > MOST_KEY_BYTES:
            return None
        client = self._plain.get(sha256(key).digest()) if self._plain else None
        if client is None and self._keyed:
            assert self._hash_key is not None
            client = self._keyed.get(hmac.digest(self._hash_key, key, "sha256"))
        if client is None and self._key is not None and hmac.compare_digest(key, self._key):
            client = EVERYBODY
        if client is not None:
            if len(shown) > 2 * len(self._by_name):
                shown.clear()
            shown[value] = client
        return client


def _client(key: KeyConfig, keys: KeysFile, accounts: Mapping[str, Account]) -> Client:
    group = None if key.group is None else keys.groups[key.group]
    named = (f"key {key.name}", f"group {key.group}")
    of_group = ClientLimits() if group is None else group
    models = key.models if key.models is not None else of_group.models
    classes = key.classes if key.classes is not None else of_group.classes
    shared = group is not None and group.share is not None and key.share is None
    return Client(
        key.name,
        tuple(accounts[name] for name in named if name in accounts),
        None if models is None else frozenset(models),
        key.request_class or of_group.request_class or DEFAULT_CLASS,
        frozenset(classes or ()),
        None if key.expires is None else key.expires.timestamp(),
        key.group or "",
        f"group {key.group}" if shared else f"key {key.name}",
        (of_group.share if shared else key.share) or 1.0,
    )


async def describe_clients(admission: Admission, now_s: float) -> AsyncIterator[dict[str, Any]]:
    """The named clients as JSON, in turns of the event loop. ``now_s``: monotonic."""
    used: dict[str, Amounts] = {}
    async for entries in in_turns(admission.usage.entries(), _ENTRIES_AT_ONCE):
        for (name, _), amounts in entries:
            used[name] = added(used.get(name, NO_AMOUNTS), amounts)
    denied: dict[str, dict[str, int]] = {}
    async for refused in in_turns(tuple(admission.usage.denied.items()), _ENTRIES_AT_ONCE):
        for (name, limit), number in refused:
            denied.setdefault(name, {})[limit] = number
    async for clients in in_turns(tuple(admission), _CLIENTS_AT_ONCE):
        for client in clients:
            sums = used.get(client.name, NO_AMOUNTS)
            yield {
                "name": client.name,
                "group": client.group or None,
                "models": None if client.models is None else sorted(client.models),
                "class": client.request_class,
                "classes": sorted(client.classes),
                "share": client.share,
                "expires": client.expires_s,
                "limits": [_describe_account(account, now_s) for account in client.accounts],
                "usage": {
                    **dict(zip(_AMOUNTS, sums, strict=True)),
                    "denied": denied.get(client.name, {}),
                },
            }


def _describe_account(account: Account, now_s: float) -> dict[str, Any]:
    for window in (account.requests, account.tokens):
        window.advance(int(now_s))
    return {
        "account": account.name,
        "requests_per_minute": account.requests.limit,
        "tokens_per_minute": account.tokens.limit,
        "concurrency": account.concurrency,
        "within_a_minute": {"requests": account.requests.used, "tokens": account.tokens.used},
        "in_flight": account.in_flight,
        "elsewhere": {
            "requests": account.requests.others,
            "tokens": account.tokens.others,
            "in_flight": account.others_in_flight,
        },
    }
