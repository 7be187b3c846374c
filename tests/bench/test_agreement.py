import pytest
import torch

from hf_granikv.bench.agreement import Agreement, ResultsDiffer, Tolerance, check_agreement

EXPECTED = torch.arange(8.0).repeat(4, 1)


def agreement_of(logits: torch.Tensor) -> Agreement:
    agreement = Agreement()
    agreement.add(logits, EXPECTED)
    return agreement


def test_differences_are_in_standard_deviations_of_each_row() -> None:
    logits = EXPECTED.clone()
    logits[1] += 0.5 * EXPECTED[1].std()
    agreement = agreement_of(logits)
    assert agreement.differences == pytest.approx([0, 0.5, 0, 0])
    assert agreement.num_same_best == 4


def test_rows_with_another_best_token_are_counted() -> None:
    logits = EXPECTED.clone()
    logits[2] = logits[2].flip(0)
    assert agreement_of(logits).num_same_best == 3


@pytest.mark.parametrize(
    ("tolerance", "is_within"),
    [(Tolerance(0.1, 0.6), True), (Tolerance(0.1, 0.4), False)],
    ids=["rounding in one row", "another row"],
)
def test_one_row_may_be_worse_than_the_others_but_not_wrong(
    tolerance: Tolerance, is_within: bool
) -> None:
    logits = EXPECTED.clone()
    logits[1] += 0.5 * EXPECTED[1].std()
    assert agreement_of(logits).is_within(tolerance) == is_within


def test_many_rows_that_are_worse_are_no_rounding() -> None:
    agreement = agreement_of(EXPECTED + 0.2 * EXPECTED[0].std())
    assert not agreement.is_within(Tolerance(0.1, 0.6))
    with pytest.raises(
        ResultsDiffer, match=r"of b differ from those of a by 0\.2 of their standard"
    ):
        check_agreement({"b": agreement}, "a", Tolerance(0.1, 0.6))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_never_within(value: float) -> None:
    logits = EXPECTED.clone()
    logits[3, 2] = value
    assert not agreement_of(logits).is_within(Tolerance(1e9, 1e9))
