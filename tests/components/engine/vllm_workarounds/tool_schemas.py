"""Parameters of tools: ordinary ones, as MCP servers and applications have them, and some that are made to be slow."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]


def tool(required: str = "", /, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def text(most: int | None = None, least: int | None = None, **more: Any) -> Schema:
    limits = {"minLength": least, "maxLength": most}
    return {"type": "string", "description": "as shown to the user", **more} | {
        key: value for key, value in limits.items() if value is not None
    }


def one_of(*values: Any) -> Schema:
    return {"type": "string", "enum": list(values)}


def whole(least: int | None = None, most: int | None = None) -> Schema:
    limits = {"minimum": least, "maximum": most}
    return {"type": "integer"} | {key: value for key, value in limits.items() if value is not None}


def many(items: Schema, most: int | None = None, least: int | None = None) -> Schema:
    limits = {"minItems": least, "maxItems": most}
    return {"type": "array", "items": items} | {key: value for key, value in limits.items() if value is not None}


FLAG: Final[Schema] = {"type": "boolean"}
ADDRESS: Final = tool("street city", street=text(100), city=text(60), zip=text(10, pattern="^[0-9]{4,6}$"))

ORDINARY: Final[dict[str, tuple[Schema, Any]]] = {
    "contact of ten strings": (
        tool("f0 f9", **{f"f{number}": text(100) for number in range(10)}),
        {"f0": "Ada", "f5": "Lovelace", "f9": "London"},
    ),
    "issue": (
        tool(
            "owner repo title",
            owner=text(39),
            repo=text(100),
            title=text(256),
            body=text(65_536),
            labels=many(text(50), 100),
            assignees=many(text(39), 10),
            milestone=whole(1),
        ),
        {"owner": "o", "repo": "r", "title": "It fails", "labels": ["bug", "good first issue"]},
    ),
    "sql": (
        tool("sql", sql=text(10_000, 1), params=many({"type": ["string", "number", "null"]}, 50)),
        {"sql": "SELECT 1"},
    ),
    "calendar event": (
        tool(
            "summary start end",
            summary=text(1024),
            start=text(format="date-time"),
            end=text(format="date-time"),
            attendees=many(tool("email", email=text(format="email"), optional=FLAG), 200),
            visibility=one_of("default", "public", "private"),
        ),
        {"summary": "Lunch", "start": "2026-11-26T12:00:00Z", "end": "2026-11-26T13:00:00Z"},
    ),
    "mail": (
        tool(
            "to subject body",
            to=many(text(format="email"), 50, 1),
            cc=many(text(format="email"), 50),
            subject=text(998),
            body=text(100_000),
            attachments=many(tool("name url", name=text(255), url=text(2048)), 10),
        ),
        {"to": ["a@example.org"], "subject": "Hi", "body": "Text"},
    ),
    "payment": (
        tool(
            "amount currency",
            amount=whole(1, 99_999_999),
            currency=text(pattern="^[a-z]{3}$"),
            description=text(500),
            statement_descriptor=text(22, 5),
            metadata={"type": "object", "additionalProperties": text(500)},
        ),
        {"amount": 1000, "currency": "eur", "description": "Book"},
    ),
    "customer": (
        tool("name email", name=text(256), email=text(512, format="email"), phone=text(20), address=ADDRESS),
        {"name": "Ada", "email": "ada@example.org", "address": {"street": "Main", "city": "Bonn", "zip": "53111"}},
    ),
    "ticket": (
        tool(
            "project summary issuetype",
            project=text(pattern="^[A-Z]{2,10}$"),
            summary=text(255, 1),
            description=text(32_767),
            issuetype=one_of("Bug", "Task", "Story", "Epic"),
            priority=one_of("Highest", "High", "Medium", "Low", "Lowest"),
            labels=many(text(255, pattern=r"^\S+$"), 20),
        ),
        {"project": "ABC", "summary": "Mend", "issuetype": "Bug", "priority": "High"},
    ),
    "hotel": (
        tool("city nights", city=text(80), nights=whole(1, 30), stars={"anyOf": [whole(1, 5), {"type": "null"}]}),
        {"city": "Rome", "nights": 3, "stars": None},
    ),
    "product": (
        tool(
            "sku name price",
            sku=text(pattern="^[A-Z0-9-]{3,32}$"),
            name=text(120, 3),
            price={"type": "number", "minimum": 0, "maximum": 1_000_000},
            tags=many(text(32), 20),
            variants=many(tool("color size", color=text(30), size=one_of("S", "M", "L"), stock=whole(0)), 100),
        ),
        {"sku": "AB-1", "name": "Cup", "price": 9.5, "variants": [{"color": "red", "size": "M", "stock": 3}]},
    ),
    "event with references": (
        tool("event")
        | {"properties": {"event": {"$ref": "#/$defs/event"}}, "$defs": {"event": tool("id", id=text(36))}},
        {"event": {"id": "1"}},
    ),
}


def nested(depth: int, most: int) -> Schema:
    return many(nested(depth - 1, most), most) if depth else {"type": "string"}


HOSTILE: Final[dict[str, Schema]] = {
    "one long string": tool("x", x=text(255)),
    "ten strings": tool("", **{f"f{number}": text(100) for number in range(10)}),
    "a thousand strings": tool("", **{f"f{number}": text(1_000_000) for number in range(1000)}),
    "long shortest length": tool("x", x=text(None, 1_000_000)),
    "different lengths": tool("", **{f"f{number}": text(128 + number, number) for number in range(60)}),
    "three nested arrays": tool("x", x=nested(3, 1000)),
    "six nested arrays": tool("x", x=nested(6, 1000)),
    "array of bounded strings": tool("x", x=many(text(200), 200, 100)),
    "many bounded keys": {
        "type": "object",
        "additionalProperties": text(200),
        "maxProperties": 500,
        "minProperties": 200,
    },
    "wide class": tool("x", x=text(pattern="([\u0080-\uffff]{1,120}x){0,8}")),
    "word class": tool("x", x=text(pattern=r"(\w{1,120} ){0,8}")),
    "nested counts": tool("x", x=text(pattern="((a{0,200}){0,200}){0,200}")),
    "one pattern in many places": tool("", **{f"f{number}": text(pattern="^[a-z]{1,64}$") for number in range(200)}),
    "alternatives of bounded strings": {"anyOf": [tool("x", x=text(most)) for most in range(100, 160)]},
    "recursion": {"$ref": "#/$defs/n", "$defs": {"n": tool("", t=text(255), n=many({"$ref": "#/$defs/n"}, 255))}},
}
