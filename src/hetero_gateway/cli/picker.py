"""``picker``: the scheduler as Envoy's endpoint picker."""

import argparse
import sys
from contextlib import closing

from hetero_gateway.cli import standard_streams
from hetero_gateway.cli.arguments import settings
from hetero_gateway.cli.log_lines import start_logging
from hetero_gateway.cli.made_key import MadeKey
from hetero_gateway.errors import ConfigError
from hetero_gateway.files.gateway_config import load_gateway_config
from hetero_gateway.files.kv_transfer_config import transfer_warnings
from hetero_gateway.http.clients import raise_descriptor_limit
from hetero_gateway.serve.garbage import freeze_what_start_made


def run(args: argparse.Namespace) -> int:
    standard_streams.tolerate_output()
    flags = settings(args)
    config = load_gateway_config(args.config, flags)
    own_salt = "or have each client send a salt of its own"
    for name, what in (
        ("isolate_clients", f"add a cache_salt to what Envoy sends; use serve, {own_salt}"),
        ("engine_priorities", "write a priority into what Envoy sends; use serve"),
    ):
        if getattr(config.scheduler, name):
            raise ConfigError(f"{args.config}: scheduler.{name}: the picker cannot {what}")
    ranked = ["instances" for each in config.places if each.data_parallel_rank is not None]
    ranked += ["discovery" for each in config.discovery if each.data_parallel_ranks > 1]
    if ranked:
        raise ConfigError(
            f"{args.config}: {ranked[0]}: data_parallel_ranks: the picker chooses addresses, and "
            "not ranks behind one; use serve, or let the engine choose"
        )
    transfers = [(each.id, each.kv_transfer) for each in config.instances]
    for warning in transfer_warnings(
        transfers,
        picks=True,
        splits=config.scheduler.split_requests != "never",
        prefill_header=config.picker.prefill_header,
    ):
        print(f"hetero-gateway: {args.config}: warning: {warning}", file=sys.stderr)
    start_logging(args.log_level, as_json=config.log.format == "json")
    try:
        from hetero_gateway.serve import picker as server
    except ImportError as error:
        raise ConfigError(
            f"the picker needs its extra: pip install 'hetero-gateway[picker]' ({error})"
        ) from error

    def announce(address: str, url: str) -> None:
        freeze_what_start_made()
        print(
            f"hetero-gateway: picking for Envoy on {address}, serving on {url} (policy "
            f"{config.scheduler.policy}, {len(config.instances)} instances, dashboard "
            f"{key.dashboard(url, sys.stderr)})",
            file=sys.stderr,
            flush=True,
        )

    picker = server.PickerServer(config, args.config, announce, flags)
    with closing(MadeKey(picker.made_admin_key)) as key:
        raise_descriptor_limit()
        picker.serve_until_signal()
    return 0
