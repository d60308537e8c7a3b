# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI 3.1 document, made from the table of calls and the classes of their bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from kvtide import __version__
from kvtide.node.admin.refusal import ErrorAnswer
from kvtide.node.admin.routes import Call

_NAME_IN_PATH = re.compile(r"\{(\w+)\}")
Node = dict[str, object]

_METRICS: Node = {
    "get": {
        "operationId": "metrics",
        "summary": "All series, in the text format of Prometheus",
        "description": "Without a token where admin.is_metrics_open allows it.",
        "security": [{}, {"token": []}],
        "x-kvtide-role": "reader",
        "responses": {"200": {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}},
    }
}
_ITSELF: Node = {
    "get": {
        "operationId": "openapi",
        "summary": "This document",
        "security": [],
        "responses": {"200": {"description": "OK", "content": {"application/json": {"schema": {"type": "object"}}}}},
    }
}


def document(calls: Sequence[Call]) -> bytes:
    """As JSON."""
    types = [call.answer for call in calls] + [call.request for call in calls if call.request] + [ErrorAnswer]
    unique = list(dict.fromkeys(types))
    refs, schemas = msgspec.json.schema_components(unique, ref_template="#/components/schemas/{name}")
    ref_of = dict(zip(unique, refs, strict=True))
    paths: dict[str, Node] = {"/metrics": _METRICS, "/openapi.json": _ITSELF}
    for call in calls:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call, ref_of)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "kvtide admin API", "version": __version__},
            "security": [{"token": []}],
            "paths": paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _operation(call: Call, ref_of: dict[type[msgspec.Struct], Node]) -> Node:
    operation: Node = {
        "operationId": call.verb,
        "summary": call.summary,
        "responses": {
            str(call.success): _response(HTTPStatus(call.success).phrase, ref_of[call.answer]),
            "default": _response("What went wrong, and what to do", ref_of[ErrorAnswer]),
        },
    }
    if call.role is None:
        operation["security"] = []
    else:
        operation["x-kvtide-role"] = call.role
        operation["x-kvtide-for-tenants"] = call.is_for_tenants
    if names := _NAME_IN_PATH.findall(call.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if call.request is not None:
        content = {"application/json": {"schema": ref_of[call.request]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _response(description: str, schema: Node) -> Node:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
