"""A made-up claim, as files of claims say one."""

from typing import Any

from analysis.claims.computations import Ratio, Selection

FCDP, FSDP2 = Selection(strategy="fcdp"), Selection(strategy="fsdp2")
FASTER = Ratio(kind="ratio", quantity="tokens_per_s", of=FCDP, over=FSDP2)


def claim(*checks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    fields = {
        "id": "faster",
        "paper": "fcdp",
        "where": "abstract",
        "claim": "It is faster.",
        "label": "text",
        "number": 2,
        "unit": "×",
    }
    return {**fields, "checks": [*checks], **changes}


def content(*claims: dict[str, Any], **changes: Any) -> dict[str, Any]:
    papers = {"fcdp": {"title": "FCDP", "arxiv": "2602.06499"}}
    return {"papers": papers, "matrices": {"parity": {}}, "claims": [*claims], **changes}
