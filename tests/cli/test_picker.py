"""`picker` refuses what it cannot do."""

from __future__ import annotations

from hetero_gateway.cli import main


def test_the_picker_refuses_to_isolate_clients(tmp_path, capsys):
    config = tmp_path / "gateway.yaml"
    config.write_text(
        "scheduler: {isolate_clients: true}\ninstances: [{id: a, base_url: http://127.0.0.1:1}]\n"
    )
    assert main(["picker", "-c", str(config)]) == 2
    told = capsys.readouterr().err
    assert "scheduler.isolate_clients" in told
    assert len(told.splitlines()) == 1
