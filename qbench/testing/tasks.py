"""What every task must do: a suite that a task's tests inherit.

class TestRetrieval(TaskContract):
    def make(self):
        return task, outputs
"""

from __future__ import annotations

import numpy as np
import pytest

from qbench.errors import MeasurementError, ModelError
from qbench.tasks.base import Array, Metric, Scores, Task


class TaskContract:
    """Tests of the ``Task`` protocol; a subclass says which task and plausible outputs of it."""

    def make(self) -> tuple[Task, Array]:
        """Return a task of at least four samples and plausible float32 outputs ``[items, …]``."""
        raise NotImplementedError

    def changed(self, outputs: Array) -> Array:
        """Return outputs of a model that is a little worse; by default with small noise."""
        noise = np.random.default_rng(7).normal(scale=0.05 * outputs.std(), size=outputs.shape)
        return (outputs + noise).astype(outputs.dtype)

    def test_counts_fit(self) -> None:
        """Samples have unique ids, items have texts and encodings."""
        task, outputs = self.make()
        assert isinstance(task, Task)
        assert task.n == len(task.ids) == len(set(task.ids)) > 0
        assert task.items == len(task.texts) == len(task.encoded) == len(outputs)
        assert all(len(item["input_ids"]) > 0 for item in task.encoded)

    def test_metrics_are_described(self) -> None:
        """Metrics have unique names and a range."""
        task, _ = self.make()
        assert len({metric.name for metric in task.metrics}) == len(task.metrics) > 0
        assert all(metric.low < metric.high for metric in task.metrics)

    def test_payloads_and_answers_are_per_sample(self) -> None:
        """Every metric has a finite payload, and its value lies in its range."""
        task, outputs = self.make()
        scores = task.score(self.changed(outputs), outputs)
        assert scores.answers.shape == (task.n,)
        for metric in task.metrics:
            payload = scores.payloads[metric.name]
            assert payload.ndim == 2 and len(payload) == task.n
            assert payload.dtype == np.float64 and np.isfinite(payload).all()
            assert metric.low - 1e-12 <= scores.value(metric) <= metric.high + 1e-12

    def test_statistics_are_vectorised(self) -> None:
        """A statistic of stacked resamples equals the statistic of each."""
        task, outputs = self.make()
        scores = task.score(self.changed(outputs), outputs)
        draws = np.random.default_rng(3).integers(0, task.n, (2, 5, task.n))
        for metric in task.metrics:
            self._check_stack(metric, scores, draws)

    def _check_stack(self, metric: Metric, scores: Scores, draws: Array) -> None:
        payload = scores.payloads[metric.name]
        together = metric.statistic(payload[draws])
        apart = [[float(metric.statistic(payload[draw])) for draw in row] for row in draws]
        assert together.shape == draws.shape[:-1]
        np.testing.assert_allclose(together, apart, rtol=1e-12, atol=1e-12)

    def test_divergence_is_zero_for_equal_outputs_only(self) -> None:
        """Divergence is exactly 0 against itself and positive somewhere for changed outputs."""
        task, outputs = self.make()
        same = task.divergence(outputs, outputs.copy())
        other = task.divergence(outputs, self.changed(outputs))
        assert same.shape == other.shape == (task.n,)
        assert same.dtype == other.dtype == np.float64
        assert (same == 0).all()
        assert (other >= 0).all() and other.max() > 0

    def test_divergence_grows_with_the_change(self) -> None:
        """Ten times the change diverges more on average."""
        task, outputs = self.make()
        near = self.changed(outputs)
        far = outputs + 10 * (near - outputs)
        assert task.divergence(outputs, far).mean() > task.divergence(outputs, near).mean()

    def test_scoring_leaves_outputs_alone_and_repeats(self) -> None:
        """Outputs are not written to, and a second call gives the same numbers."""
        task, outputs = self.make()
        outputs.setflags(write=False)
        first, second = task.score(outputs, outputs), task.score(outputs, outputs)
        for metric in task.metrics:
            np.testing.assert_array_equal(first.payloads[metric.name], second.payloads[metric.name])
        np.testing.assert_array_equal(first.answers, second.answers)

    def test_wrong_number_of_outputs_is_refused(self) -> None:
        """Outputs of too few items are an error of the model."""
        task, outputs = self.make()
        with pytest.raises(ModelError, match=str(task.items)):
            task.score(outputs[:-1], outputs[:-1])

    def test_non_finite_outputs_are_no_number(self) -> None:
        """A NaN is never scored."""
        task, outputs = self.make()
        broken = outputs.copy()
        broken[1] = np.nan
        with pytest.raises(MeasurementError, match="item 1"):
            task.score(broken, outputs)
        with pytest.raises(MeasurementError, match="item 1"):
            task.divergence(outputs, broken)
