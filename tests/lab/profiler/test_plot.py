"""The plot has both panels and every sample, and says clearly when it cannot be made."""

import importlib.util
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_gateway.core.costs.fitting import Sample
from hetero_gateway.errors import ConfigError
from hetero_gateway.lab.profiler.plot import check_can_plot, write_plot

from .builders import fit_of, measured

matplotlib = pytest.importorskip("matplotlib")


def comments(svg: str) -> list[str]:
    """matplotlib writes each text as a comment above its glyphs."""
    return [text.strip() for text in re.findall(r"<!--(.*?)-->", svg)]


def test_an_svg_has_both_panels_and_a_point_per_sample(tmp_path: Path) -> None:
    samples = measured()
    write_plot(tmp_path / "fit.svg", samples, fit_of(samples))
    svg = (tmp_path / "fit.svg").read_text("utf-8")
    ET.fromstring(svg)
    texts = comments(svg)
    assert {"prefill", "decode", "measured, s", "fitted, s", "batch size", "±10 %"} <= set(texts)
    # A legend entry per batch size, in each panel, with a point of its own.
    assert all(texts.count(str(size)) >= 2 for size in (1, 4, 16, 64))
    scattered = re.findall(r'<g id="PathCollection_\d+">(.*?)</g>\s*</g>', svg, re.DOTALL)
    assert sum(part.count("<use ") for part in scattered) == 2 * (len(samples) + 4)


def test_a_png_is_a_png(tmp_path: Path) -> None:
    samples = measured()
    write_plot(tmp_path / "fit.PNG", samples, fit_of(samples))
    content = (tmp_path / "fit.PNG").read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
    assert width > height > 400


def test_times_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    samples = measured()
    more = [Sample(3, 64, 9, None, None), Sample(3, 64, 1, 0.0, 0.0)]
    write_plot(tmp_path / "fit.svg", samples + more, fit_of(samples))
    assert "3" not in comments((tmp_path / "fit.svg").read_text("utf-8"))


def test_many_batch_sizes_share_colours(tmp_path: Path) -> None:
    base = measured()
    samples = [replace(s, batch_size=s.batch_size + n / 32) for n, s in enumerate(base)]
    write_plot(tmp_path / "fit.svg", samples, fit_of(base))
    sizes = {t for t in comments((tmp_path / "fit.svg").read_text("utf-8")) if t.isdigit()}
    assert {"1", "4", "16", "64"} <= sizes
    assert not any("." in t for t in sizes)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fit.pdf", r"fit\.pdf must end in \.png or \.svg"),
        ("nowhere/fit.svg", "nowhere: no such folder"),
    ],
)
def test_a_place_where_no_picture_can_be_is_refused(tmp_path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_can_plot(tmp_path / name)


def test_without_matplotlib_one_line_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        write_plot(tmp_path / "fit.svg", measured(), fit_of(measured()))
    assert "pip install hetero-gateway[report]" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "fit.svg").exists()
