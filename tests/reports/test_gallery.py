"""Pictures of audits."""

from verdicts import RECORD

from fedortho.audits.result import AuditResult
from fedortho.reports.gallery import audit_pictures


def test_audits_without_details_give_no_picture_and_foreign_ones_are_left_alone() -> None:
    assert audit_pictures([AuditResult("PASS", ""), AuditResult("PASS", "", details={"stages": [1, 2]})]) == []
    first, second = audit_pictures(RECORD.audits)
    assert (first.name, second.name) == ("probe", "relearning")
    assert second.finding.endswith("after forgetting 12, retrained without it over 60")
    assert not any("treated alike" in picture.about for picture in (first, second))
    digests = {"reference": "a" * 64, "counterfactual": "b" * 64}
    assert all(picture.about.endswith("was treated alike.") for picture in audit_pictures(RECORD.audits, digests))


def test_the_layers_of_the_probe_stand_in_the_order_of_the_network() -> None:
    sorted_by_json = {"fc": 0.9, "features.11": 0.7, "features.4": 0.4}
    depths = ["features.4", "features.11", "fc"]
    audit = AuditResult("PASS", "", details={"stages": {"unlearned": sorted_by_json}, "depths": depths})
    (picture,) = audit_pictures([audit])
    assert picture.finding == "At fc a linear probe finds the forget set in 90.0 % after forgetting"
