"""A fake name server on a loopback port, over UDP."""

import asyncio
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class FakeNameServer(asyncio.DatagramProtocol):
    """``records``: (name, type) to texts; a name without any does not exist."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.ttl_s = 5
        self.silent = False
        self.asked: list[tuple[str, str]] = []
        self.address = ""

    async def __aenter__(self) -> "FakeNameServer":
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        host, port = self._transport.get_extra_info("sockname")
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()

    def datagram_received(self, data: bytes, address: Any) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = str(question.name).rstrip("."), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind))
        if self.silent:
            return
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        if texts := self.records.get((name, kind)):
            answer.answer.append(
                dns.rrset.from_text_list(question.name, self.ttl_s, "IN", kind, texts)
            )
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        # Hundreds of addresses are more than a datagram of DNS's; loopback takes them.
        self._transport.sendto(answer.to_wire(max_size=65535), address)
