"""A key that was right once is remembered, and no longer than it is right."""

import pytest

from hetero_gateway.engines.vllm import Work
from hetero_gateway.errors import Refusal
from hetero_gateway.files.client_keys import KeysFile, hash_of
from hetero_gateway.gateway.admission.clients import Admission, Client
from hetero_gateway.http.heads import Inbound


def key_of(name: str) -> str:
    return f"hg-{name}-0123456789-0123456789"


def keys_of(*names: str, **more: object) -> KeysFile:
    entries = [{"name": name, "hash": hash_of(key_of(name)), **more} for name in names]
    return KeysFile.model_validate({"keys": entries})


def asks(admission: Admission, field: bytes, value: str) -> Client:
    return admission.client_of([(b"host", b"gateway"), (field, value.encode())])


def refused(admission: Admission, field: bytes, value: str) -> bool:
    with pytest.raises(Refusal) as told:
        asks(admission, field, value)
    return told.value.status == 401


def test_a_key_that_is_taken_away_or_has_expired_is_refused_the_next_time() -> None:
    now_s = 1e9
    admission = Admission(None, keys_of("ann", expires="2033-05-18"), clock=lambda: now_s)
    bearer = f"Bearer {key_of('ann')}"
    for _ in range(2):
        assert asks(admission, b"authorization", bearer).name == "ann"
    now_s = 3e9
    assert refused(admission, b"authorization", bearer)
    admission.set_keys(keys_of("bob"))
    assert refused(admission, b"authorization", bearer)


def test_what_is_right_in_one_field_is_not_remembered_for_another() -> None:
    admission = Admission(None, keys_of("ann"))
    bearer = f"Bearer {key_of('ann')}"
    assert asks(admission, b"authorization", bearer).name == "ann"
    assert refused(admission, b"x-api-key", bearer)
    assert asks(admission, b"x-api-key", key_of("ann")).name == "ann"
    assert refused(admission, b"authorization", key_of("ann"))


@pytest.mark.parametrize("before", ["ann", "bob"])
def test_of_two_keys_the_first_counts_whichever_was_right_before(before: str) -> None:
    admission = Admission(None, keys_of("ann", "bob"))
    fields = [(b"x-api-key", key_of("ann").encode())]
    fields.append((b"authorization", f"Bearer {key_of('bob')}".encode()))
    admission.client_of([fields[before == "bob"]])
    for headers, first in ((fields, "ann"), (fields[::-1], "bob")):
        inbound = Inbound("/v1/completions", b"/v1/completions", Work.GENERATE, headers)
        assert admission.client_of(inbound.headers).name == first


def test_a_changed_key_has_its_new_limits_at_once() -> None:
    admission = Admission(None, keys_of("ann"))
    assert not asks(admission, b"x-api-key", key_of("ann")).accounts
    admission.set_keys(keys_of("ann", concurrency=2))
    assert asks(admission, b"x-api-key", key_of("ann")).accounts


def test_no_more_is_remembered_than_there_are_keys_and_wrong_ones_never() -> None:
    admission = Admission(None, keys_of("ann", "bob"))
    for i in range(64):
        scheme = "".join(c.upper() if i >> n & 1 else c for n, c in enumerate("bearer"))
        assert asks(admission, b"authorization", f"{scheme} {key_of('ann')}").name == "ann"
        assert refused(admission, b"authorization", f"Bearer {key_of(str(i))}")
        assert sum(map(len, admission._shown.values())) <= 5
