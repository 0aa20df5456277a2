"""What a model says of many rows, a batch at a time."""

from collections.abc import Iterator

from priory.data.rows import Rows
from priory.engine import PersonalModel
from priory.engine.prediction import Prediction

BATCH = 1024  # rows predicted at once: memory does not grow with the file


def predictions(model: PersonalModel, rows: Rows) -> Iterator[Prediction]:
    """What a model says of the rows, a batch at a time."""
    for start in range(0, len(rows.x), BATCH):
        here = slice(start, start + BATCH)
        yield model.predict(rows.x[here], None if rows.scale is None else rows.scale[here], encoded=True)
