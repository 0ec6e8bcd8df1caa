"""Arguments that indicator and embedding columns refuse."""

from __future__ import annotations

import pytest

import stratagem as sg

fc = sg.feature_column
AGE = fc.numeric_column("age")
CITY = fc.categorical_column_with_hash_bucket("city", 100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fc.indicator_column(AGE), "indicator_column received NumericColumn"),
        (lambda: fc.embedding_column(CITY, 0), "received dimension=0"),
        (lambda: fc.embedding_column(CITY, 2, combiner="max"), "combiner='max'"),
        (
            lambda: fc.shared_embeddings(
                [CITY, fc.categorical_column_with_hash_bucket("y", 10)], 2
            ),
            r"shared_embeddings received columns with \[100, 10\] ids",
        ),
    ],
)
def test_columns_that_cannot_be_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_embedding_without_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match="'city_embedding' was read without its table"):
        fc.embedding_column(CITY, 2).numbers({})
