"""/docs: the OpenAPI document as one page. No script, no external resources."""

import json
from html import escape
from typing import Any

_METHODS = ("get", "post", "put", "patch", "delete")


def docs_page(document: dict[str, Any]) -> str:
    info = document["info"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(info['title'])}: HTTP interface</title>",
        '<meta name="viewport" content="width=device-width">',
        '<link rel="stylesheet" href="dashboard/docs.css"></head><body>',
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info.get('summary', ''))}. The paths that engines serve, POST ",
        "<code>/v1/chat/completions</code> and the others, are passed on as they come. ",
        '<a href="openapi.json">openapi.json</a> has all of this for programs.</p>',
    ]
    for path, operations in document["paths"].items():
        for method in _METHODS:
            if method in operations:
                parts += _operation(method, path, operations[method])
    parts.append("</body></html>")
    return "".join(parts)


def _operation(method: str, path: str, operation: dict[str, Any]) -> list[str]:
    text = operation.get("description") or operation.get("summary", "")
    parts = [
        f"<section><h2><span>{method.upper()}</span> <code>{escape(path)}</code></h2>",
        *(f"<p>{escape(paragraph)}</p>" for paragraph in text.split("\n\n")),
    ]
    parameters = operation.get("parameters", [])
    if parameters:
        parts.append("<table><tr><th>parameter</th><th>in</th><th>what it may be</th></tr>")
        for parameter in parameters:
            schema = json.dumps(parameter.get("schema", {}), ensure_ascii=False)
            name = escape(parameter["name"]) + (" *" if parameter.get("required") else "")
            parts.append(
                f"<tr><td><code>{name}</code></td><td>{escape(parameter['in'])}</td>"
                f"<td><code>{escape(schema)}</code></td></tr>"
            )
        parts.append("</table>")
    parts.append("</section>")
    return parts
