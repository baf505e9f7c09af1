"""Certificates as files, by authorities of the tests' own."""

from pathlib import Path

import trustme


def issued(folder: Path, *names: str) -> dict[str, str]:
    """``ca``; and of each name its certificate, for 127.0.0.1, and ``NAME.key``.

    That of ``stranger`` is by somebody else.
    """
    ours, others = trustme.CA(), trustme.CA()
    files = {"ca": str(folder / "ca.pem")}
    ours.cert_pem.write_to_path(files["ca"])
    for name in names:
        authority = others if name == "stranger" else ours
        made = authority.issue_cert("127.0.0.1", common_name=name)
        files[name], files[f"{name}.key"] = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
        made.private_key_pem.write_to_path(files[f"{name}.key"])
        for blob in made.cert_chain_pems:
            blob.write_to_path(files[name], append=True)
    return files


def secured(files: dict[str, str], name: str, *, clients: bool = True) -> dict[str, str]:
    """Of a configuration: the certificate of this name, and whose ``clients`` are taken."""
    section = {"certificate_file": files[name], "key_file": files[f"{name}.key"]}
    return section | ({"client_ca_file": files["ca"]} if clients else {})
