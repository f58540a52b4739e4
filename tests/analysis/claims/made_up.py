"""A made-up claim, as files of claims say one."""

from typing import Any

from analysis.claims.computations import Ratio, Selection
from tests.experiments.golden import tables

FIELDS = tables(__file__)
FCDP, FSDP2 = Selection(strategy="fcdp"), Selection(strategy="fsdp2")
FASTER = Ratio(kind="ratio", quantity="tokens_per_s", of=FCDP, over=FSDP2)


def claim(*checks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**FIELDS["claim"], "checks": [*checks], **changes}


def content(*claims: dict[str, Any], **changes: Any) -> dict[str, Any]:
    papers = {"fcdp": {"title": "FCDP", "arxiv": "2602.06499"}}
    return {"papers": papers, "matrices": {"parity": {}}, "claims": [*claims], **changes}
